#!/usr/bin/env python3
"""Runs vLLM's own group_concurrent_contiguous on the shapes of BenchmarkContiguous.

    python interop/mooncake/bench_original.py > original.txt
    go test -run - -bench Contiguous ./mooncake > kvasir.txt
    go tool benchstat original.txt kvasir.txt

Prints Go benchmark lines under the names of BenchmarkContiguous in
mooncake/contiguous_test.go: 100,000 ids, each the one before plus 1 with
probability `next`. With --go DIR it alternates with the Go benchmark, round by
round, and prints the ratio of medians instead. Needs vLLM 0.16 or later; no GPU.
"""

import argparse
import functools
import os
import random
import re
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True

IDS = 100_000
SHAPES = ["0", "0.5", "0.9", "0.99", "1"]
WANT = 50  # times the original's speed


def load():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (
        mooncake_connector,
    )

    return mooncake_connector.group_concurrent_contiguous


def ids(nxt, seed):
    r = random.Random(seed)
    out = [0]
    while len(out) < IDS:
        out.append(out[-1] + 1 if r.random() < nxt else r.randrange(1 << 30))
    return out


def time_once(call, seconds):
    """Nanoseconds per call and the number of calls in at least so many seconds."""
    n, start = 0, time.perf_counter_ns()
    while True:
        call()
        n += 1
        spent = time.perf_counter_ns() - start
        if spent >= seconds * 1e9:
            return spent / n, n


def build_go(root):
    """The benchmark as a program, so that no round waits for the compiler."""
    path = os.path.join(root, "bin", "mooncake.test")
    subprocess.run(["go", "test", "-c", "-o", path, "./mooncake"], cwd=root, check=True)
    return path


def time_go(program, nxt):
    out = subprocess.run(
        [program, "-test.run", "-", "-test.bench", f"^BenchmarkContiguous$/^ids={IDS}$/^next={nxt}$", "-test.benchtime", "100ms"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return float(re.search(r"\s([\d.]+) ns/op", out)[1])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--seconds", type=float, default=0.3, help="per line; one call at least")
    ap.add_argument("--count", type=int, default=5, help="lines, or rounds, per shape")
    ap.add_argument("--go", metavar="DIR", help="the repository: print ratios")
    a = ap.parse_args()
    original = load()
    program = a.go and build_go(a.go)
    if not a.go:
        print("goos: linux\npkg: github.com/kvasir-kv/kvasir/mooncake")
    low = []
    for nxt in SHAPES:
        src, dst = ids(float(nxt), 1), ids(float(nxt), 2)
        theirs, ours = [], []
        for _ in range(a.count):
            ns, n = time_once(functools.partial(original, src, dst), a.seconds)
            theirs.append(ns)
            if a.go:
                ours.append(time_go(program, nxt))
            else:
                print(f"BenchmarkContiguous/ids={IDS}/next={nxt}-1\t{n}\t{ns:.1f} ns/op", flush=True)
        if a.go:
            t, o = statistics.median(theirs), statistics.median(ours)
            print(f"Contiguous/ids={IDS}/next={nxt:5s} original {t:12.0f} ns  kvasir {o:10.0f} ns  ratio {t / o:8.1f}  (at least {WANT})", flush=True)
            if t / o < WANT:
                low.append(nxt)
    if low:
        sys.exit(f"below {WANT} times the original at next={', '.join(low)}")


if __name__ == "__main__":
    main()
