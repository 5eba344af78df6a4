#!/usr/bin/env python3
"""Pulls of real prompts between two network namespaces, as P and D on two hosts.

    pulls.py --kvasir 'kvasir transfer' --rounds 5

P and D are processes in network namespaces of their own, joined by a veth pair that
this script makes and removes; it needs root and ip. Four pairs share each cell of each
round: C++ to C++, Kvasir to Kvasir, Kvasir to C++ (the initiator first), C++ to Kvasir.
The order rotates. iperf3, where there is one, sends with as many streams and the same
congestion control as Kvasir: the yardstick. The table has medians over the rounds:
GB/s, and processor seconds of both ends per GB. Needs the engine's wheel and numpy.

A pull is one batch of writes, P's blocks to D's, as vLLM's MooncakeConnector makes it:
for each layer a region of K and one of V, in each region one write per run of blocks that
follow each other on both sides. Blocks of a fresh engine are one run; those of an engine
that has been in use come in short ones.

The engine takes some 2,000 writes at a time from stock settings; here it takes any number, as its
environment variables allow.

--kvasir may be given several times, NAME=COMMAND: variants take turns.
"""
import argparse
import ctypes
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from compare import engine, human, registered, repeat, wait_for

BLOCK = 16  # tokens
P_ADDR, D_ADDR = "10.77.0.1", "10.77.0.2"
LINE = re.compile(r"op=write/size=(\d+)/batch=(\d+) (\d+) (\d+) ns/op ([\d.]+) MB/s (\d+) p50-ns/op (\d+) p99-ns/op (\d+) cpu-ns/op")

# layers, KV heads of one rank, bytes per token and head (head size 128, bfloat16)
SHAPES = {
    "Qwen2.5-7B": (28, 4, 256),        # TP 1: blocks of 16 KiB
    "Llama-70B, TP 8": (80, 1, 256),   # one rank of eight: blocks of 4 KiB
}


def runs(blocks, use):
    """Runs of blocks, [P's first block, D's first block, blocks], in the order of the prompt."""
    if use == "fresh":
        return [(0, 0, blocks)]
    rng, sizes, left = random.Random(blocks), [], blocks
    while left:
        sizes.append(min(left, rng.randint(1, 8)))
        left -= sizes[-1]

    def place():
        order = list(range(len(sizes)))
        rng.shuffle(order)
        at, pos = [0] * len(sizes), 0
        for i in order:
            at[i] = pos
            pos += sizes[i] + 1  # a block of somebody else: no two runs adjoin
        return at
    return list(zip(place(), place(), sizes))


def pieces(model, tokens, use, limit):
    """The batch: [P's offset, D's offset, bytes]. Regions lie one after the other; where they take more
    than limit bytes, later ones share the memory of earlier ones."""
    layers, heads, token = SHAPES[model]
    block = BLOCK * heads * token
    list_, region = runs(tokens // BLOCK, use), 0
    region = max(max(p, d) + n for p, d, n in list_) * block
    fit = max(1, limit // region)
    return [[(r % fit) * region + p * block, (r % fit) * region + d * block, n * block] for r in range(2 * layers) for p, d, n in list_]


def cpu_of(pid):
    with open(f"/proc/{pid}/stat") as f:
        f = f.read().rsplit(")", 1)[1].split()
    return (int(f[11]) + int(f[12])) / os.sysconf("SC_CLK_TCK")


class Cpp:
    def __init__(self, n):
        self.e = engine(P_ADDR)
        self.b = registered(self.e, n)

    def pull(self, peer, list_, seconds):
        la, base = int(self.b.ctypes.data), peer["base"]
        src, dst, ln = [la + x[0] for x in list_], [base + x[1] for x in list_], [x[2] for x in list_]
        call = lambda: self.e.batch_transfer_sync_write(peer["peer"], src, dst, ln)
        if call():
            return None
        before = resource.getrusage(resource.RUSAGE_SELF)
        lat, took = repeat(call, seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        if not lat:
            return None
        return len(lat), took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def go_pull(cmd, peer_file, list_file, seconds):
    out = subprocess.run(cmd + ["bench", "--peer-file", peer_file, "--pieces", list_file, "--seconds", str(seconds)], capture_output=True, text=True, check=False)
    m = LINE.search(out.stdout)
    if not m:
        print(out.stdout, out.stderr.strip(), file=sys.stderr)
        return None
    return int(m[3]), int(m[3]) * int(m[4]) / 1e9, int(m[3]) * int(m[8]) / 1e9


def iperf(server_pid, streams, seconds, algorithm):
    before = cpu_of(server_pid)
    out = subprocess.run(["iperf3", "-c", D_ADDR, "-P", str(streams), "-t", str(seconds), "-C", algorithm, "-J"], capture_output=True, text=True, check=False)
    end = json.loads(out.stdout)["end"]
    gb = end["sum_received"]["bytes"] / 1e9
    return end["sum_received"]["bits_per_second"] / 8e9, (cpu_of(server_pid) - before) / gb


def dies_with_us():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def in_namespace(namespace, cmd, **kw):
    return subprocess.Popen(["ip", "netns", "exec", namespace] + cmd, preexec_fn=dies_with_us, **kw)  # noqa: PLW1509 - the engine's threads start later


def inside(a):
    for name in ("QUEUED_TRANSFERS", "PENDING_ADMISSIONS"):
        os.environ.setdefault(f"MC_TCP_MAX_{name}_PER_PEER", "65535")
    variants = dict(v.split("=", 1) if "=" in v.split(" ")[0] else ("kv", v) for v in a.kvasir)
    variants = {k: shlex.split(v) for k, v in variants.items()}
    limit, tmp = a.mem, a.tmp
    room = str(limit + (64 << 20))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    children, peers = {}, {}
    pairs = a.pairs.split(",") if a.pairs else ["cpp-cpp"] + [x for k in variants for x in (k + "-" + k, k + "-cpp", "cpp-" + k)]
    want = {side for p in pairs for side in p.split("-")}
    with open("/proc/sys/net/ipv4/tcp_congestion_control") as f:
        algorithm = f.read().strip()
    try:
        if "cpp" in want:
            children["cpp"] = in_namespace(a.namespace, [sys.executable, os.path.abspath(__file__), "--serve-cpp", tmp + "/cpp.json", "--mem", room], stdin=subprocess.PIPE, **quiet)
        for k, cmd in variants.items():
            if k in want:
                children[k] = in_namespace(a.namespace, cmd + ["serve", "--size", room, "--host", D_ADDR, "--allow-from", f"{P_ADDR},{D_ADDR},127.0.0.1", "--peer-file", f"{tmp}/{k}.json"], **quiet)
        for k, child in children.items():
            peers[k] = wait_for(f"{tmp}/{k}.json", child)
        if not a.streams:
            pass
        elif shutil.which("iperf3"):
            children["iperf3"] = in_namespace(a.namespace, ["iperf3", "-s"], **quiet)
            time.sleep(0.5)
        else:
            print("iperf3 is not installed: no yardstick")
        cpp = Cpp(int(room)) if any(p.startswith("cpp-") for p in pairs) else None
        rows = []
        cells = [(m, human(t), u) for m in SHAPES for t in a.tokens.split(",") for u in a.use.split(",")]
        if a.only:
            cells = [c for c in cells if a.only in " ".join(map(str, c))]
        print(f"congestion control {algorithm}, {a.streams} streams\n")
        for model, tokens, use in cells:
            list_ = pieces(model, tokens, use, limit)
            total = sum(x[2] for x in list_)
            list_file = tmp + "/pieces.json"
            with open(list_file, "w") as f:
                json.dump(list_, f)
            got = {p: [] for p in pairs}
            yard = []
            for r in range(a.rounds):
                for p in pairs[r % len(pairs):] + pairs[:r % len(pairs)]:
                    src, dst = p.split("-")
                    before = cpu_of(children[dst].pid)
                    res = (cpp.pull(peers[dst], list_, a.seconds) if src == "cpp" else
                           go_pull(variants[src], f"{tmp}/{dst}.json", list_file, a.seconds))
                    if res is None:
                        sys.exit(f"{p} failed: {model} {tokens} {use}")
                    calls, took, cpu = res
                    far = (cpu_of(children[dst].pid) - before) * calls / (calls + 1)  # less the call that warms up
                    got[p].append((total * calls / took / 1e9, (cpu + far) / (total * calls / 1e9)))
                if "iperf3" in children:
                    yard.append(iperf(children["iperf3"].pid, a.streams, max(1, round(a.seconds)), algorithm))
            rows.append({"model": model, "tokens": tokens, "use": use, "pieces": len(list_), "bytes": total, "samples": got, "iperf": yard})
            show(rows[-1], pairs, len(rows) == 1)
        summary(rows, pairs, variants)
        if a.json:
            with open(a.json, "w") as f:
                json.dump(rows, f)
    finally:
        for k, child in children.items():
            if k == "cpp":
                child.stdin.close()
            else:
                child.terminate()
            child.wait(20)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def med(row, pair, i):
    return statistics.median(s[i] for s in row["samples"][pair])


def show(row, pairs, first):
    if first:
        print("| model | tokens | blocks | writes | MiB |" + "".join(f" {p} GB/s | s/GB |" for p in pairs) + " iperf3 |" + "".join(f" {p} |" for p in pairs[1:]))
        print("|" + "---|" * (5 + 2 * len(pairs) + 1 + len(pairs) - 1))
    yard = f"{statistics.median(x[0] for x in row['iperf']):.2f}" if row["iperf"] else "-"
    print(f"| {row['model']} | {row['tokens']} | {row['use']} | {row['pieces']} | {row['bytes'] >> 20} |"
          + "".join(f" {med(row, p, 0):.2f} | {med(row, p, 1):.2f} |" for p in pairs) + f" {yard} |"
          + "".join(f" {med(row, p, 0) / med(row, pairs[0], 0):.2f} |" for p in pairs[1:]), flush=True)


def summary(rows, pairs, variants):
    def geo(x):
        return math.exp(statistics.fmean(map(math.log, x)))
    print()
    for p in pairs[1:]:
        q = [med(r, p, 0) / med(r, pairs[0], 0) for r in rows]
        c = [med(r, p, 1) / med(r, pairs[0], 1) for r in rows]
        print(f"{p} against {pairs[0]}: geometric mean {geo(q):.2f}, least {min(q):.2f}; processor time per GB {geo(c):.2f}, most {max(c):.2f}")
    for k in variants:
        p = k + "-" + k
        q = [med(r, p, 0) / statistics.median(x[0] for x in r["iperf"]) for r in rows if r["iperf"] and p in pairs and r["tokens"] >= 4096]
        if q:
            print(f"{p} against iperf3, from 4k tokens on: geometric mean {geo(q):.2f}, least {min(q):.2f}")


def namespaces(a):
    """Makes the namespaces, runs itself in P's, removes them."""
    p, d = f"kvasir-p-{os.getpid()}", f"kvasir-d-{os.getpid()}"
    veth = (f"kvp{os.getpid()}", f"kvd{os.getpid()}")

    def ip(*args, check=True):
        subprocess.run(("ip",) + args, check=check, stderr=None if check else subprocess.DEVNULL)
    try:
        for ns in (p, d):
            ip("netns", "add", ns)
        ip("link", "add", veth[0], "netns", p, "type", "veth", "peer", "name", veth[1], "netns", d)
        for ns, dev, addr in ((p, veth[0], P_ADDR), (d, veth[1], D_ADDR)):
            ip("-n", ns, "addr", "add", addr + "/24", "dev", dev)
            ip("-n", ns, "link", "set", dev, "up")
            ip("-n", ns, "link", "set", "lo", "up")
        os.environ["GLOG_minloglevel"] = "2"
        with tempfile.TemporaryDirectory() as tmp:
            return in_namespace(p, [sys.executable, os.path.abspath(__file__), "--namespace", d, "--tmp", tmp] + sys.argv[1:]).wait()
    finally:
        for ns in (p, d):
            ip("netns", "del", ns, check=False)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", action="append", help="command with the transfer subcommands, or NAME=COMMAND")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--seconds", type=float, default=1, help="per cell and round, at least three pulls")
    ap.add_argument("--tokens", default="512,4k,32k")
    ap.add_argument("--use", default="fresh,used")
    ap.add_argument("--only", help="cells whose name has this, for example 'Qwen2.5-7B 512'")
    ap.add_argument("--mem", type=human, default=human("1g"), help="of each process, for KV")
    ap.add_argument("--streams", type=int, default=4, help="of iperf3; 0: none")
    ap.add_argument("--pairs", help="for example cpp-cpp,kv-kv")
    ap.add_argument("--json", metavar="FILE", help="write all samples")
    for hidden in ("--serve-cpp", "--namespace", "--tmp"):
        ap.add_argument(hidden, help=argparse.SUPPRESS)
    a = ap.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if a.serve_cpp:
        from compare import serve_cpp
        return serve_cpp(a.serve_cpp, a.mem, D_ADDR)
    if not a.kvasir:
        ap.error("--kvasir is needed")
    sys.exit(inside(a) if a.namespace else namespaces(a))


if __name__ == "__main__":
    main()
