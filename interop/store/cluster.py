#!/usr/bin/env python3
"""A real mooncake_master and real C++ clients over storage nodes of this build.

  cluster.py KVASIR            KVASIR is the binary; run with the Python of a Mooncake wheel

Each side puts what the other gets, 1 byte to 16 MiB, one by one and in batches; a node is killed
(-9), the master is killed (-9) and started again, a node is stopped. Every byte is compared; every wait is
bounded. Prints one line per check, exits 1 on the first that fails.
"""
import os, random, signal, socket, subprocess, sys, time, urllib.request
from importlib.metadata import version

import mooncake
from mooncake.store import MooncakeDistributedStore

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "shared"))
from ports import free_port  # noqa: E402

KVASIR = sys.argv[1]
MASTER = os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master")
running, logs = [], os.environ.get("WORK", "/tmp")


def start(name, cmd):
    log = open(os.path.join(logs, name + ".log"), "a")
    p = subprocess.Popen(cmd, stdout=log, stderr=log, env=dict(os.environ, LD_LIBRARY_PATH=os.path.dirname(MASTER)))
    running.append(p)
    return p


def check(what, ok, *detail):
    print(("ok    " if ok else "FAIL  ") + what, *detail, flush=True)
    if not ok:
        raise SystemExit(1)


def wait(what, f, seconds=180):
    end = time.time() + seconds
    while time.time() < end:
        try:
            if f():
                return
        except OSError:
            pass
        time.sleep(0.1)
    check(what, False, "not within %d s" % seconds)


class Node:
    def __init__(self, name, master):
        self.http = free_port()
        self.p = start(name, [KVASIR, "store-node", "--master", master, "--memory-gb", "256MiB", "--name", name, "--http-port", str(self.http)])
        wait(name + " is mounted", self.mounted)

    def mounted(self):
        return urllib.request.urlopen("http://127.0.0.1:%d/healthz" % self.http, timeout=30).status == 200

    def figure(self, name):
        text = urllib.request.urlopen("http://127.0.0.1:%d/metrics" % self.http, timeout=30).read().decode()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("kvasir_store_node_" + name))


def master_at(port):
    p = start("master", [MASTER, "--rpc_port=%d" % port, "--metrics_port=%d" % free_port()])
    wait("the master listens", lambda: socket.create_connection(("127.0.0.1", port), 10).close() is None)
    return p


def ours(*args, data=None):
    r = subprocess.run([KVASIR, "store", *args, "--master", addr, "--timeout", "30s"], input=data, capture_output=True, timeout=180)
    return r.returncode, r.stdout


def content(seed, n):
    return random.Random(seed).randbytes(n)


port = free_port()
addr = "127.0.0.1:%d" % port
try:
    release = version("mooncake-transfer-engine-non-cuda")
    master = master_at(port)
    a, b = Node("node-a", addr), Node("node-b", addr)
    cpp = MooncakeDistributedStore()
    check("a C++ client of %s joins" % release, cpp.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", addr) == 0)

    # Clients before 0.3.12 call a write done when they have sent it, not when it has arrived.
    arrive = 1 if tuple(map(int, release.split(".")[:3])) < (0, 3, 12) else 0
    sizes = [1, 4095, 65536, 1_000_003, 16 << 20]
    for n in sizes:
        d = content(n, n)
        check("C++ puts %d bytes" % n, cpp.put("cpp-%d" % n, d) == 0)
        time.sleep(arrive)
        check("C++ gets them back", cpp.get("cpp-%d" % n) == d)
        check("we get them", ours("get", "cpp-%d" % n) == (0, d))
        check("we put %d bytes" % n, ours("put", "our-%d" % n, data=d[::-1])[0] == 0)
        check("C++ gets them", cpp.get("our-%d" % n) == d[::-1])
    keys = ["batch-%d" % i for i in range(300)]
    values = [content(i, 5000 + i) for i in range(300)]
    check("C++ puts a batch of 300", cpp.put_batch(keys, values) == 0)
    time.sleep(arrive)
    check("C++ gets it", list(cpp.get_batch(keys)) == values)
    check("the bytes lie with us", a.figure("received_bytes") + b.figure("received_bytes") > 2 * sum(sizes))
    check("no write was refused", a.figure("rejected") + b.figure("rejected") == 0)

    d = content(7, 300_000)
    check("we put two replicas", ours("put", "twice", "--replicas", "2", data=d)[0] == 0)
    check("they are on two nodes", ours("ls", "twice")[1].count(b"300000 bytes") == 2)
    a.p.send_signal(signal.SIGKILL)
    a.p.wait()
    t = time.time()
    check("a node is killed: we read the other replica at once", ours("get", "twice") == (0, d), "%.1f s" % (time.time() - t))
    wait("C++ reads it when the master has given the node up", lambda: cpp.get("twice") == d)
    check("C++ reads it when the master has given the node up", True, "%.1f s" % (time.time() - t))
    lost, kept = 0, 0
    for n in sizes:
        code, got = ours("get", "our-%d" % n)
        check("what was on one node is whole or a miss", code == 1 or got == content(n, n)[::-1])
        lost, kept = lost + (code == 1), kept + (code == 0)
    print("      %d lost, %d kept" % (lost, kept))

    lives = b.figure("lives")
    master.send_signal(signal.SIGKILL)
    master.wait()
    check("without a master we end with an error", ours("get", "twice")[0] == 1)
    master = master_at(port)
    wait("the node comes back by itself", lambda: b.figure("lives") > lives and b.mounted())
    check("nothing of before is served", ours("get", "twice")[0] == 1)
    cpp2 = MooncakeDistributedStore()
    check("a C++ client joins the new master", cpp2.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", addr) == 0)
    check("and puts", cpp2.put("after", d) == 0)
    check("and gets", cpp2.get("after") == d)
    check("so do we", ours("get", "after") == (0, d))
    b.p.send_signal(signal.SIGTERM)
    check("a node that is stopped ends well", b.p.wait(120) == 0)
    check("its objects are gone at once", ours("get", "after")[0] == 1)
    print("store: all well with Mooncake", release)
    sys.stdout.flush()
    for p in running:
        if p.poll() is None:
            p.kill()
            p.wait()
    os._exit(0)  # the C++ clients would look for their master while they end
except BaseException:
    for p in running:
        if p.poll() is None:
            p.kill()
            p.wait()
    sys.stdout.flush()
    import traceback

    traceback.print_exc()
    os._exit(1)
