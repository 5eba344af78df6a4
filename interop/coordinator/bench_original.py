#!/usr/bin/env python3
"""Runs vLLM's own MooncakeStoreCoordinator on the inputs of the Go benchmarks.

    python interop/coordinator/bench_original.py > original.txt
    go test -run - -bench 'Find|Decide' ./coordinator/ > kvasir.txt
    go tool benchstat original.txt kvasir.txt

Prints Go benchmark lines under the names of BenchmarkFind and BenchmarkDecide in
coordinator/bench_test.go: full attention and a window of 1,024 tokens, blocks of
16. With --go DIR it alternates with the Go benchmark in one run and prints the
ratio of medians instead. Needs vLLM 0.24 or later; no GPU.
"""

import argparse
import functools
import inspect
import os
import re
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True

BLOCK = 16
WINDOW = 1024
TAIL = WINDOW // BLOCK
SIZES = [1 << 10, 8 << 10, 128 << 10, 1 << 20]
SHAPES = {
    "all": lambda g, i, n: True,
    "tail": lambda g, i, n: g == 0 or i >= n - TAIL,
    "half": lambda g, i, n: i < n // 2,
    "holes": lambda g, i, n: g == 0 or i < n // 2 or i % 32 != 0,
    "evicted": lambda g, i, n: g == 0,
    "none": lambda g, i, n: False,
}


class Original:
    """The coordinator under test, and what one request asks of it."""

    def __init__(self):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import torch
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
            coordinator,
        )
        from vllm.v1 import kv_cache_interface as kvi

        attention = {
            "block_size": BLOCK, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16
        }
        specs = [
            kvi.FullAttentionSpec(**attention),
            kvi.SlidingWindowSpec(sliding_window=WINDOW, **attention),
        ]
        groups = [
            kvi.KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)
        ]
        self.coordinator = coordinator.MooncakeStoreCoordinator(groups, BLOCK, BLOCK)
        pool = coordinator.ExternalCachedBlockPool
        sized = "hash_block_size" in inspect.signature(pool).parameters
        self.pool = (lambda held: pool(BLOCK, held)) if sized else pool

    def find(self, hashes, held, tokens):
        return self.coordinator.find_longest_cache_hit(hashes, tokens, self.pool(held))

    def decide(self, hashes, held, tokens):
        _, hit = self.find(hashes, held, tokens)
        self.coordinator.load_mask(hashes, hit)
        self.coordinator.store_mask(tokens, num_prompt_tokens=tokens)
        self.coordinator.lookup_mask(tokens)


def inputs(shape, tokens):
    n = tokens // BLOCK
    hashes = [(i + 1).to_bytes(32, "big") for i in range(n)]
    has = SHAPES[shape]
    return hashes, {(g, h) for g in range(2) for i, h in enumerate(hashes) if has(g, i, n)}


def time_once(call, seconds):
    """Nanoseconds per call and the number of calls in about so many seconds."""
    n = 1
    while True:
        start = time.perf_counter_ns()
        for _ in range(n):
            call()
        spent = time.perf_counter_ns() - start
        if spent >= seconds * 1e9 or n >= 1 << 30:
            return spent / n, n
        n = max(n * 2, int(n * seconds * 1e9 / max(spent, 1)))


def go_medians(root, pattern, count):
    out = subprocess.run(
        ["go", "test", "-run", "-", "-bench", pattern, "-benchtime", "50ms",
         "-count", str(count), "./coordinator/"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = {}
    for name, ns in re.findall(r"^Benchmark(\S+?)(?:-\d+)?\s+\d+\s+([\d.]+) ns/op", out, re.MULTILINE):
        found.setdefault(name, []).append(float(ns))
    return {name: statistics.median(v) for name, v in found.items()}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--seconds", type=float, default=0.1, help="per line; one call at least")
    ap.add_argument("--count", type=int, default=1, help="lines per benchmark")
    ap.add_argument("--sizes", default=",".join(map(str, SIZES)), help="prompt tokens")
    ap.add_argument("--shapes", default=",".join(SHAPES))
    ap.add_argument("--go", metavar="DIR", help="the repository: print ratios")
    a = ap.parse_args()
    original = Original()
    if not a.go:
        print("goos: linux\npkg: github.com/kvasir-kv/kvasir/kv/coordinator")
    for tokens in map(int, a.sizes.split(",")):
        for shape in a.shapes.split(","):
            hashes, held = inputs(shape, tokens)
            for kind, fn in (("Find", original.find), ("Decide", original.decide)):
                name = f"{kind}/shape={shape}/tokens={tokens}"
                times = []
                for _ in range(a.count):
                    ns, n = time_once(functools.partial(fn, hashes, held, tokens), a.seconds)
                    times.append(ns)
                    if not a.go:
                        print(f"Benchmark{name}-1\t{n}\t{ns:.1f} ns/op", flush=True)
                if a.go:
                    ours = go_medians(a.go, f"^Benchmark{kind}$/^shape={shape}$/^tokens={tokens}$", a.count)[name]
                    theirs = statistics.median(times)
                    print(f"{name:36s} original {theirs:14.0f} ns  kvasir {ours:9.1f} ns  ratio {theirs / ours:11.1f}", flush=True)


if __name__ == "__main__":
    main()
