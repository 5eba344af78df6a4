#!/usr/bin/env python3
"""The C++ client of Mooncake Store against this module's, and memory of a C++ client against kvasir store-node's.

  race.py KVASIR GO_CLIENT MOONCAKE_PYTHON [--rounds 5] [--seconds 0.5] [--only exist]

One real master and both memories are up; the clients take turns in every cell of every round. A ratio is that of the
medians over the rounds. In every round each client reads what the other one put, and compares it. Prints a table and
one JSON line; exits 1 when bytes differ.
"""
import argparse
import ctypes
import hashlib
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "shared"))
from ports import free_ports

SIZES = [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("4 MiB", 4 << 20), ("16 MiB", 16 << 20)]


def cpp_client(master):
    """The C++ client, in the words of the Go one."""
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master):
        raise SystemExit("setup failed")
    memory = ctypes.create_string_buffer((128 << 20) + 4096)
    base = (ctypes.addressof(memory) + 4095) // 4096 * 4096
    view = memoryview(memory).cast("B")[base - ctypes.addressof(memory):]
    for at in range(0, 128 << 20, 1 << 20):
        view[at:at + (1 << 20)] = os.urandom(1 << 20)
    if store.register_buffer(base, 128 << 20):
        raise SystemExit("register_buffer failed")
    serial = 0

    def names(c):
        nonlocal serial
        out = []
        for _ in range(c["N"]):
            serial += 1
            out.append((f"cpp-{c['Tag']}-{serial}@model/some-longer-name-7b@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{serial:064x}").ljust(150))
        return out

    def put(keys, c, config):
        n = c["Bytes"]
        if len(keys) == 1:
            return [store.put_from(keys[0], base, n, config)]
        return store.batch_put_from(keys, [base + i * n for i in range(len(keys))], [n] * len(keys), config)

    def get(keys, c):
        n = c["Bytes"]
        if len(keys) == 1:
            return [store.get_into(keys[0], base, n)]
        return store.batch_get_into(keys, [base + i * n for i in range(len(keys))], [n] * len(keys))

    def figures(took, cpu, size=0):
        took.sort()
        n = len(took)
        return {"P50": took[n // 2] * 1e6, "P99": took[n * 99 // 100] * 1e6, "CPU": cpu / n * 1e6, "Calls": n, "GBps": size * n / sum(took) / 1e9}

    def timed(c, f, good):
        took, cpu, end = [], 0.0, time.perf_counter() + c["Seconds"]
        while len(took) < 3 or time.perf_counter() < end:
            prepared = f(None)
            u, t = time.process_time(), time.perf_counter()
            result = f(prepared)
            took.append(time.perf_counter() - t)
            cpu += time.process_time() - u
            if any(x != good for x in result):
                raise SystemExit(f"a call failed: {result}")
        return figures(took, cpu, c["Bytes"] * c["N"])

    for line in sys.stdin:
        c = json.loads(line)
        config = ReplicateConfig()
        config.replica_num, config.preferred_segment = 1, c.get("Segment", "")
        if c["Do"] == "exist":
            took, keys, u = [], c["Keys"], time.process_time()
            for i in range(c["Calls"]):
                t = time.perf_counter()
                r = store.batch_is_exist(keys) if c["Batch"] else store.is_exist(keys[i % len(keys)])
                took.append(time.perf_counter() - t)
            a = figures(took, time.process_time() - u)
            a["Present"] = sum(x == 1 for x in r) if c["Batch"] else r
        elif c["Do"] == "put":
            stored = []

            def once(keys, c=c, config=config, stored=stored):
                if keys is None:
                    if stored:
                        store.batch_remove(stored, True)
                    stored[:] = names(c)
                    return list(stored)
                return put(keys, c, config)

            a = timed(c, once, 0)
            keep = stored if c.get("Keep") else []
            if not keep:
                store.batch_remove(stored, True)
            a["Keys"], a["Sum"] = keep, hashlib.sha256(view[:c["Bytes"]]).hexdigest() if keep else ""
        elif c["Do"] == "get":
            keys = names(c)
            if any(put(keys, c, config)):
                raise SystemExit("put before get failed")
            a = timed(c, lambda prepared, keys=keys, c=c: True if prepared is None else get(keys, c), c["Bytes"])
            store.batch_remove(keys, True)
        else:  # sum
            ctypes.memset(base, 0, c["Bytes"])
            if get(c["Keys"], c) != [c["Bytes"]]:
                raise SystemExit("get failed")
            a = {"Sum": hashlib.sha256(view[:c["Bytes"]]).hexdigest()}
            view[:1 << 16] = os.urandom(1 << 16)
            store.batch_remove(c["Keys"], True)
        print(json.dumps(a), flush=True)
    os._exit(0)


if sys.argv[1] == "--cpp":
    cpp_client(sys.argv[2])

parser = argparse.ArgumentParser()
for name in ("kvasir", "go", "python"):
    parser.add_argument(name)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--seconds", type=float, default=0.5)
parser.add_argument("--only", choices=["exist"], help="leave puts and gets out")
args = parser.parse_args()
running, work = [], tempfile.mkdtemp()


def start(name, cmd, **more):
    with open(os.path.join(work, name + ".log"), "a") as log:
        p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=more.pop("stdout", log), stderr=log, env=dict(os.environ, GLOG_minloglevel="2", MC_LOG_LEVEL="ERROR", **more), text=True)
    running.append(p)
    return p


def until(what, f, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        try:
            if f():
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{what}: not within {seconds} s")


def fetch(url):
    return urllib.request.urlopen(url, timeout=10).read().decode()


class Client:
    def __init__(self, name, cmd):
        self.name, self.p = name, start(name, cmd, stdout=subprocess.PIPE)

    def __call__(self, **c):
        self.p.stdin.write(json.dumps(c) + "\n")
        self.p.stdin.flush()
        for line in self.p.stdout:
            try:
                return json.loads(line)
            except ValueError:
                pass  # the C++ library prints, too
        with open(os.path.join(work, self.name + ".log")) as f:
            raise SystemExit(f"{self.name} ended: {f.read()[-500:]}")


def socket_copy():
    """GB/s of one plain stream between two processes."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        c, b = listener.accept()[0], bytearray(1 << 20)
        while c.recv_into(b):
            pass
        os._exit(0)
    c, b = socket.create_connection(listener.getsockname()), bytes(1 << 20)
    n, t = 0, time.perf_counter()
    while time.perf_counter() - t < 0.5:
        c.sendall(b)
        n += len(b)
    took = time.perf_counter() - t
    c.close()
    os.waitpid(pid, 0)
    return n / took / 1e9


def median(v):
    return sorted(v)[len(v) // 2]


try:
    binary = subprocess.run([args.python, os.path.join(HERE, "cpp.py"), "--path"], capture_output=True, text=True, check=True).stdout.strip()
    rpc, pages, http = free_ports(3)
    master = f"127.0.0.1:{rpc}"
    start("master", [binary, f"--rpc_port={rpc}", f"--metrics_port={pages}"], LD_LIBRARY_PATH=os.path.dirname(binary) + ":" + os.environ.get("LD_LIBRARY_PATH", ""))
    until("the master", lambda: socket.create_connection(("127.0.0.1", rpc), 1).close() is None)
    start("memory", [args.python, os.path.join(HERE, "cpp.py"), master, str(512 << 20)])
    segments = lambda: set(fetch(f"http://127.0.0.1:{pages}/get_all_segments").split())
    until("the C++ memory", segments)
    theirs = segments().pop()
    start("node", [args.kvasir, "store-node", "--master", master, "--memory-gb", "512MiB", "--name", "ours", "--http-port", str(http)])
    until("our memory", lambda: fetch(f"http://127.0.0.1:{http}/healthz"))
    time.sleep(1)
    clients = [Client("cpp", [args.python, os.path.abspath(__file__), "--cpp", master]), Client("go", [args.go, master])]
    cells, copies, differ = {}, [], 0

    def note(cell, client, a):
        cells.setdefault(cell, {}).setdefault(client.name, []).append(a)

    made = clients[1](Do="put", Tag="exist", Bytes=64, N=256, Seconds=0, Segment="ours", Keep=True)["Keys"]
    keys = [x for k in made for x in (k, "no-" + k[3:])]
    first = made[:1]
    tag = f"{random.getrandbits(32):x}"
    for rnd in range(args.rounds):
        copies.append(socket_copy())
        order = clients if rnd % 2 == 0 else clients[::-1]
        for cell, more in (("exist, hit", {"Keys": first, "Batch": False, "Calls": 2000}), ("exist, miss", {"Keys": ["none"], "Batch": False, "Calls": 2000}),
                           ("exist, 512", {"Keys": keys, "Batch": True, "Calls": 200})):
            for client in order:
                a = client(Do="exist", **more)
                differ += a["Present"] != {"exist, hit": 1, "exist, miss": 0, "exist, 512": 256}[cell]
                note(cell, client, a)
        for memory, segment in (("C++ memory", theirs), ("our memory", "ours")) if not args.only else ():
            for label, size in SIZES:
                for n in (1, 8):
                    for do in ("put", "get"):
                        for client in order:
                            note((memory, label, n, do), client, client(Do=do, Tag=tag, Bytes=size, N=n, Seconds=args.seconds, Segment=segment))
            for a, b in (clients, clients[::-1]):
                put = a(Do="put", Tag=tag + "v", Bytes=3_000_001, N=1, Seconds=0, Segment=segment, Keep=True)
                differ += b(Do="sum", Keys=put["Keys"], Bytes=3_000_001, N=1, Tag="")["Sum"] != put["Sum"]
        print("round", rnd + 1, file=sys.stderr, flush=True)

    def mid(cell, client, what):
        return median([a[what] for a in cells[cell][client]])

    ratios = {}
    print("p50 us and processor us of a call: C++, Go, ratio")
    for cell in ("exist, hit", "exist, miss", "exist, 512"):
        ratios[cell] = mid(cell, "go", "P50") / mid(cell, "cpp", "P50")
        print(f"  {cell:<12} {mid(cell, 'cpp', 'P50'):8.1f} {mid(cell, 'go', 'P50'):8.1f}  {ratios[cell]:5.2f}    processor {mid(cell, 'cpp', 'CPU'):7.1f} {mid(cell, 'go', 'CPU'):7.1f}  {mid(cell, 'go', 'CPU') / mid(cell, 'cpp', 'CPU'):5.2f}")
    if args.only:
        print(json.dumps({"ratios": {k: round(v, 3) for k, v in ratios.items()}}))
        raise SystemExit(differ > 0)
    copy = median(copies)
    print(f"GB/s: C++, Go, ratio; client's processor seconds a GB; a plain socket copies {copy:.2f} GB/s")
    large, cpu, shares = [], [], []
    for cell in cells:
        if isinstance(cell, str):
            continue
        memory, label, n, do = cell
        x, y = mid(cell, "cpp", "GBps"), mid(cell, "go", "GBps")
        size = dict(SIZES)[label] * n
        p, q = mid(cell, "cpp", "CPU") / size * 1e3, mid(cell, "go", "CPU") / size * 1e3
        ratios[f"{memory}, {label} x {n}, {do}"] = y / x
        if label != "64 KiB":
            large.append(y / x)
            cpu.append(q / p)
            shares.append(y / copy)
        print(f"  {memory:<10} {label:<6} x {n} {do}  {x:5.2f} {y:5.2f}  {y / x:5.2f}    processor {p:5.2f} {q:5.2f}  {q / p:5.2f}")
    mean = lambda v: math.exp(sum(map(math.log, v)) / len(v))
    summary = {"large_ratio": round(mean(large), 2), "large_of_socket": round(mean(shares), 2), "large_cpu_ratio": round(mean(cpu), 2), "socket_GBps": round(copy, 2), "differ": differ}
    memories = [mid(("our memory",) + c[1:], client, "GBps") / mid(("C++ memory",) + c[1:], client, "GBps") for c in cells if not isinstance(c, str) and c[0] == "our memory" for client in ("cpp", "go")]
    summary["our_memory_by_theirs"] = round(mean(memories), 2)
    print(f"1 to 16 MiB: Go by C++ {summary['large_ratio']:.2f}, of a socket's copy {summary['large_of_socket']:.2f}, processor {summary['large_cpu_ratio']:.2f}; "
          f"our memory by theirs {summary['our_memory_by_theirs']:.2f}; {differ} objects differ")
    print(json.dumps({"summary": summary, "ratios": {k: round(v, 3) for k, v in ratios.items()}}))
    code = int(differ > 0)
except SystemExit as e:
    code = e.code if isinstance(e.code, int) else 1
    if code:
        print(e.code, file=sys.stderr)
except BaseException:  # noqa: BLE001 - it is printed, and what was started is killed
    traceback.print_exc()
    code = 1
for p in running:
    if p.poll() is None:
        p.kill()
        p.wait()
shutil.rmtree(work, ignore_errors=True)
sys.stdout.flush()
os._exit(code)
