#!/usr/bin/env python3
"""A real mooncake_master and real C++ clients over storage nodes of this build.

  cluster.py KVASIR            KVASIR is the binary; run with the Python of a Mooncake wheel

Each side puts what the other gets, 1 byte to 16 MiB, one by one and in batches, on 1, 2 and 3 nodes; the cluster gets full, by what
may be evicted and by what is leased; a node is killed (-9), the master is killed (-9) and started again, a node is stopped. Every byte is
compared; every wait is bounded. Prints one line per check, exits 1 on the first that fails.
"""
import hashlib, os, random, signal, subprocess, sys, time, urllib.request
from importlib.metadata import distributions

import mooncake
from mooncake.store import MooncakeDistributedStore

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "shared"))
from asking import figure, listens, until  # noqa: E402
from ports import free_port  # noqa: E402

KVASIR = sys.argv[1]
MASTER = os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master")
LIBRARIES = os.path.dirname(MASTER) + ":" + os.environ.get("LD_LIBRARY_PATH", "")
running, logs = [], os.environ.get("WORK", "/tmp")


def start(name, cmd):
    log = open(os.path.join(logs, name + ".log"), "a")
    p = subprocess.Popen(cmd, stdout=log, stderr=log, env=dict(os.environ, LD_LIBRARY_PATH=LIBRARIES))
    running.append(p)
    return p


def check(what, ok, *detail):
    print(("ok    " if ok else "FAIL  ") + what, *detail, flush=True)
    if not ok:
        raise SystemExit(1)


class Node:
    def __init__(self, name, master):
        self.http = free_port()
        self.p = start(name, [KVASIR, "store-node", "--master", master, "--memory-gb", "256MiB", "--name", name, "--http-port", str(self.http)])
        until(name + " is mounted", self.mounted)

    def mounted(self):
        return urllib.request.urlopen("http://127.0.0.1:%d/healthz" % self.http, timeout=30).status == 200

    def figure(self, name):
        return figure("http://127.0.0.1:%d" % self.http, "kvasir_store_node_%s_total" % name)


def master_at(port, *flags):
    p = start("master", [MASTER, "--rpc_port=%d" % port, "--metrics_port=%d" % free_port(), *flags])
    until("the master listens", lambda: listens(port))
    return p


def ours(*args, data=None):
    r = subprocess.run([KVASIR, "store", *args, "--master", addr, "--timeout", "30s"], input=data, capture_output=True, timeout=180)
    return r.returncode, r.stdout


def content(seed, n):
    return random.Random(seed).randbytes(n)


port = free_port()
addr = "127.0.0.1:%d" % port
try:
    release = next(d.version for d in distributions() if (d.name or "").startswith("mooncake-transfer-engine"))
    master = master_at(port)
    a = Node("node-a", addr)
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
        if n == 65536:
            b = Node("node-b", addr)  # the rest goes to two of them
    check("a segment that is not there is no fault", ours("put", "elsewhere", "--segment", "nosuch", data=b"x" * 1000)[0] == 0)
    check("C++ gets what preferred it", cpp.get("elsewhere") == b"x" * 1000)
    keys = ["batch-%d" % i for i in range(300)]
    values = [content(i, 5000 + i) for i in range(300)]
    check("C++ puts a batch of 300", cpp.put_batch(keys, values) == 0)
    time.sleep(arrive)
    check("C++ gets it", list(cpp.get_batch(keys)) == values)
    check("the bytes lie with us", a.figure("received_bytes") + b.figure("received_bytes") > 2 * sum(sizes))
    check("no write was refused", a.figure("rejected") + b.figure("rejected") == 0)

    # 800 MiB into 512: what nobody holds goes. Both sides find the same, whole or not at all.
    n, large = 4 << 20, {}
    began, kept = time.time(), 0
    for i in range(200):
        name, half = "large-%d" % i, i % 2
        large[name] = hashlib.sha256(d := content(i, 4096) * (n // 4096)).digest()
        for _ in range(600):  # evictions run behind
            if (cpp.put(name, d) if half else ours("put", name, data=d)[0]) == 0:
                break
            time.sleep(0.1)
        else:
            check("there is room again while the cluster evicts", False, name)
    time.sleep(arrive)
    for name in list(large)[::3]:
        code, got = ours("get", name)
        other = cpp.get(name)
        if code not in (0, 1) or any(x and (len(x) != n or hashlib.sha256(x).digest() != large[name]) for x in (got, other)):
            check("what is left is whole", False, name)
        kept += code == 0
    check("a full cluster evicts, and what is left is whole", 0 < kept < 67, "%d of 67 looked at, %.1f s" % (kept, time.time() - began))

    # What is there is leased: an object larger than the rest finds no room, which ends in time; when the leases have ended it does.
    names, big = ["our-%d" % n for n in sizes] + ["cpp-%d" % n for n in sizes] + keys + list(large), content(9, 4096) * (128 << 8)
    for _ in range(20):
        ours("ls", *names)
        began = time.time()
        r = subprocess.run([KVASIR, "store", "put", "big", "--master", addr], input=big, capture_output=True, timeout=180)
        if r.returncode:
            break
        ours("rm", "big", "--force")  # a machine so slow that the leases ended first
    check("among leased objects there is no room", b"no room" in r.stderr, "%.1f s" % (time.time() - began), r.stderr)
    until("space comes back when the leases have ended", lambda: ours("put", "big", data=big)[0] == 0)
    check("space comes back when the leases have ended", ours("get", "big") == (0, big), "%.1f s" % (time.time() - began))
    d = content(10, 16 << 20)
    until("C++ has room", lambda: cpp.put("next", d) == 0)
    time.sleep(arrive)
    check("and so has C++", ours("get", "next") == (0, d))

    c, d = Node("node-c", addr), content(7, 300_000)
    check("we put three replicas", ours("put", "thrice", "--replicas", "3", data=d)[0] == 0)
    check("they are on three nodes", ours("ls", "thrice")[1].count(b"300000 bytes") == 3)
    check("C++ gets one", cpp.get("thrice") == d)
    c.p.send_signal(signal.SIGTERM)
    check("the third node leaves", c.p.wait(120) == 0)
    check("the other two have it", ours("get", "thrice") == (0, d))
    for n in sizes:  # evicted meanwhile, or not
        until("we put %d bytes again" % n, lambda: ours("put", "our-%d" % n, data=content(n, n)[::-1])[0] == 0)
    check("we put two replicas", ours("put", "twice", "--replicas", "2", data=d)[0] == 0)
    check("they are on two nodes", ours("ls", "twice")[1].count(b"300000 bytes") == 2)
    a.p.send_signal(signal.SIGKILL)
    a.p.wait()
    t = time.time()
    check("a node is killed: we read the other replica at once", ours("get", "twice") == (0, d), "%.1f s" % (time.time() - t))
    until("C++ reads it when the master has given the node up", lambda: cpp.get("twice") == d)
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
    until("the node comes back by itself", lambda: b.figure("lives") > lives and b.mounted())
    check("nothing of before is served", ours("get", "twice")[0] == 1)
    cpp2 = MooncakeDistributedStore()
    check("a C++ client joins the new master", cpp2.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", addr) == 0)
    check("and puts", cpp2.put("after", d) == 0)
    time.sleep(arrive)
    check("and gets", cpp2.get("after") == d)
    check("so do we", ours("get", "after") == (0, d))
    b.p.send_signal(signal.SIGTERM)
    check("a node that is stopped ends well", b.p.wait(120) == 0)
    check("its objects are gone at once", ours("get", "after")[0] == 1)

    addr, d = "127.0.0.1:%d" % free_port(), content(11, 4096) * (64 << 8)
    master_at(int(addr.rsplit(":")[-1]), "--default_kv_lease_ttl=1")
    Node("node-d", addr)
    check("we put 64 MiB where leases last 1 ms", ours("put", "late", data=d)[0] == 0)
    r = subprocess.run([KVASIR, "store", "get", "late", "--master", addr], capture_output=True, timeout=180)
    check("bytes that come after the lease are not believed", r.returncode == 1 and not r.stdout and b"lease expired" in r.stderr, r.stderr)
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
