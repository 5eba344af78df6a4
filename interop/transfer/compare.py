#!/usr/bin/env python3
"""Measure Kvasir and the C++ transfer engine in turns, cell by cell.

Four pairs share each cell of each round: C++ to C++, Kvasir to Kvasir, Kvasir
to C++, C++ to Kvasir; a plain Go socket copy of the same bytes is the fifth.
The order rotates from round to round. The table shows medians over the rounds,
and ratios of these medians. Needs the engine's wheel and numpy.

    compare.py --kvasir 'kvasir transfer' --rounds 5

The command must understand `serve --size N --peer-file F` and
`bench --peer-file F --ops O --sizes N --batches N --layout L --seconds S`, and
print Go benchmark lines.
"""
import argparse
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

LINE = re.compile(r"op=(\w+)/size=(\d+)/batch=(\d+) (\d+) (\d+) ns/op ([\d.]+) MB/s (\d+) p50-ns/op (\d+) p99-ns/op")


def engine(host="127.0.0.1"):
    from mooncake.engine import TransferEngine
    e = TransferEngine()
    if e.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        sys.exit("the engine does not start")
    return e


def registered(e, n):
    import numpy as np
    raw = np.zeros(n + 4096, dtype=np.uint8)
    b = raw[-raw.ctypes.data % 4096:][:n]
    b[:] = 1  # touch the pages
    if e.register_memory(b.ctypes.data, n):
        sys.exit("the engine does not register memory")
    return b


def serve_cpp(path, n, host="127.0.0.1"):
    e = engine(host)
    b = registered(e, n)
    with open(path + ".tmp", "w") as f:
        json.dump({"peer": f"{host}:{e.get_rpc_port()}", "base": int(b.ctypes.data), "len": n}, f)
    os.replace(path + ".tmp", path)
    sys.stdin.read()
    os._exit(0)


def wait_for(path, child):
    for _ in range(600):
        if os.path.exists(path):
            return json.load(open(path))
        if child.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit("no target came up for " + path)


def places(layout, n):
    if layout == "packed":
        return list(range(n))
    if layout == "reversed":
        return list(range(n - 1, -1, -1))
    p = [2 * i for i in range(n)]  # gaps: no two adjoin
    random.Random(n).shuffle(p)
    return p


class Cpp:
    def __init__(self, n):
        self.e, self.n = engine(), n
        self.b = registered(self.e, n)

    def cell(self, peer, op, size, batch, layout, seconds):
        call = self.e.batch_transfer_sync_write if op == "write" else self.e.batch_transfer_sync_read
        la = int(self.b.ctypes.data)
        src = [la + i * size for i in range(batch)]
        dst = [peer["base"] + p * size for p in places(layout, batch)]
        ln = [size] * batch
        if call(peer["peer"], src, dst, ln):
            return None
        lat, took = repeat(lambda: call(peer["peer"], src, dst, ln), seconds)
        return figures(size * batch, lat, took) if lat else None


def repeat(call, seconds):
    """Calls until the time is over: latencies and time in seconds; no latencies if a call failed."""
    lat, start = [], time.perf_counter()
    last = start
    while last - start < seconds or len(lat) < 3:
        if call():
            return [], 0
        now = time.perf_counter()
        lat.append(now - last)
        last = now
    return lat, last - start


def figures(n, lat, took):
    """GB/s of calls of n bytes, and their p50 and p99 in us."""
    lat = sorted(lat)
    return n * len(lat) / took / 1e9, lat[(len(lat) - 1) // 2] * 1e6, lat[(len(lat) - 1) * 99 // 100] * 1e6


def go_cell(cmd, peer_file, op, size, batch, layout, seconds):
    out = subprocess.run(cmd + ["bench", "--peer-file", peer_file, "--ops", op, "--sizes", str(size), "--batches", str(batch),
                                "--layout", layout, "--seconds", str(seconds)], capture_output=True, text=True, check=False)
    m = LINE.search(out.stdout)
    if not m:
        print(out.stderr.strip(), file=sys.stderr)
        return None
    return float(m[6]) / 1e3, int(m[7]) / 1e3, int(m[8]) / 1e3


def human(s):
    m = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(s[-1].lower(), 1)
    return int(s[:-1]) * m if m > 1 else int(s)


PAIRS = ["cpp-cpp", "kv-kv", "kv-cpp", "cpp-kv", "socket"]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", help="command with the transfer subcommands")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--seconds", type=float, default=0.3, help="per cell and round")
    ap.add_argument("--mem", type=human, default=human("256m"))
    ap.add_argument("--cell-bytes", type=human, default=human("64m"))
    ap.add_argument("--ops", default="write,read")
    ap.add_argument("--grid", default="4k:1,4k:64,4k:1024,64k:1,64k:64,64k:1024,256k:1,256k:64,1m:1,1m:8,1m:64,4m:1,4m:8,16m:1,16m:4",
                    help="size:batch, ...")
    ap.add_argument("--layouts", default="packed,scattered")
    ap.add_argument("--pairs", default=",".join(PAIRS))
    ap.add_argument("--json", metavar="FILE", help="write all samples")
    ap.add_argument("--serve-cpp", metavar="FILE", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.serve_cpp:
        return serve_cpp(a.serve_cpp, a.mem)
    if not a.kvasir:
        ap.error("--kvasir is needed")
    cmd, pairs = shlex.split(a.kvasir), a.pairs.split(",")
    with tempfile.TemporaryDirectory() as tmp:
        cpp_file, kv_file = tmp + "/cpp.json", tmp + "/kv.json"
        cpp_child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--serve-cpp", cpp_file, "--mem", str(a.mem)],
                                     stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        kv_child = subprocess.Popen(cmd + ["serve", "--size", str(a.mem), "--peer-file", kv_file], stdout=subprocess.DEVNULL)
        try:
            run(a, cmd, pairs, wait_for(cpp_file, cpp_child), wait_for(kv_file, kv_child), cpp_file, kv_file)
        finally:
            kv_child.terminate()
            cpp_child.stdin.close()
            kv_child.wait(10)
            cpp_child.wait(10)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def run(a, cmd, pairs, cpp_peer, kv_peer, cpp_file, kv_file):
    cpp, rows = Cpp(a.mem), []
    cells = [(op, layout, human(g.split(":")[0]), int(g.split(":")[1]))
             for op in a.ops.split(",") for layout in a.layouts.split(",") for g in a.grid.split(",")]
    for op, layout, size, batch in cells:
        if size * batch * (2 if layout == "scattered" else 1) > min(a.mem, a.cell_bytes * 2) or size * batch > a.cell_bytes:
            continue
        if layout == "scattered" and (batch == 1 or size > 1 << 20):
            continue
        got = {p: [] for p in pairs}
        for r in range(a.rounds):
            for p in pairs[r % len(pairs):] + pairs[:r % len(pairs)]:
                side, *to = {"cpp-cpp": (cpp.cell, cpp_peer), "cpp-kv": (cpp.cell, kv_peer), "kv-kv": (go_cell, cmd, kv_file),
                             "kv-cpp": (go_cell, cmd, cpp_file), "socket": (go_cell, cmd, kv_file)}[p]
                s = side(*to, *(("socket", size, batch, "packed") if p == "socket" else (op, size, batch, layout)), a.seconds)
                if s is None:
                    sys.exit(f"{p} failed: {op} {layout} {batch} x {size}")
                got[p].append(s)
        rows.append({"op": op, "layout": layout, "size": size, "batch": batch, "samples": got})
        show(rows[-1], pairs, len(rows) == 1)
    summary(rows, pairs)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(rows, f)


def med(row, pair, i):
    return statistics.median(s[i] for s in row["samples"][pair])


def show(row, pairs, first):
    if first:
        print("| op | layout | size | batch |" + "".join(f" {p} GB/s | p50 us | p99 us |" for p in pairs) + " kv/cpp | p50 | p99 | kv/socket | kv-cpp | cpp-kv |")
        print("|" + "---|" * (4 + 3 * len(pairs) + 6))
    cols = "".join(f" {med(row, p, 0):.3f} | {med(row, p, 1):.0f} | {med(row, p, 2):.0f} |" for p in pairs)

    def ratio(x, y, i, inverse=False):
        if x not in pairs or y not in pairs:
            return " - |"
        q = med(row, x, i) / med(row, y, i)
        return f" {1 / q if inverse else q:.2f} |"
    print(f"| {row['op']} | {row['layout']} | {row['size']} | {row['batch']} |{cols}"
          + ratio("kv-kv", "cpp-cpp", 0) + ratio("kv-kv", "cpp-cpp", 1, True) + ratio("kv-kv", "cpp-cpp", 2, True)
          + ratio("kv-kv", "socket", 0) + ratio("kv-cpp", "cpp-cpp", 0) + ratio("cpp-kv", "cpp-cpp", 0), flush=True)


def summary(rows, pairs):
    if "kv-kv" not in pairs or "cpp-cpp" not in pairs:
        return
    large = [med(r, "kv-kv", 0) / med(r, "cpp-cpp", 0) for r in rows if r["size"] >= 1 << 16]
    if large:
        print(f"\n64 KiB and above: geometric mean {math.exp(statistics.fmean(map(math.log, large))):.2f}, least {min(large):.2f}, of {len(large)} cells")
    for p in ("kv-cpp", "cpp-kv"):
        if p in pairs:
            q = [(med(r, p, 0) / med(r, "cpp-cpp", 0), r["op"], r["layout"], r["size"], r["batch"]) for r in rows]
            print(f"{p} against cpp-cpp: geometric mean {math.exp(statistics.fmean(math.log(x[0]) for x in q)):.2f}, least {' '.join(map(str, (round(min(q)[0], 2),) + min(q)[1:]))}")


if __name__ == "__main__":
    main()
