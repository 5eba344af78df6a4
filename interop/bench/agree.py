#!/usr/bin/env python3
"""Compares the figures of two clients: PREFIX.vllm.N.json and PREFIX.kvasir.N.json.

Each figure is the median over a client's rounds. 2 % are allowed; figures of the first token
count where it takes 100 ms or more.
"""
import glob
import json
import statistics
import sys

FIGURES = ["duration", "request_throughput", "output_throughput", "total_token_throughput"] + [
    f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "p90", "p99")]
EXACT = ["completed", "failed", "total_input_tokens", "total_output_tokens", "num_prompts"]


def rounds(prefix, client):
    return [json.load(open(p)) for p in sorted(glob.glob(f"{prefix}.{client}.*.json"))]


def main():
    ours, theirs = rounds(sys.argv[1], "kvasir"), rounds(sys.argv[1], "vllm")
    bad = []
    for key in EXACT:
        values = {r[key] for r in ours + theirs}
        if len(values) != 1:
            bad.append(f"{key}: {values}")
    missing = set(theirs[0]) - set(ours[0])
    if missing:
        bad.append(f"keys that kvasir bench does not write: {sorted(missing)}")
    print(f"{'':24} {'vllm':>12} {'kvasir':>12} {'differs':>8}")
    for key in FIGURES:
        a, b = (statistics.median(r[key] for r in rs) for rs in (theirs, ours))
        off = b / a - 1
        judged = "ttft" not in key or a >= 100
        print(f"{key:24} {a:12.2f} {b:12.2f} {100 * off:7.2f}%{'' if judged else '  (below 100 ms)'}")
        if judged and abs(off) > 0.02:
            bad.append(f"{key} differs by {100 * off:.2f} %")
    if bad:
        sys.exit("\n".join(bad))
    print("agreed")


if __name__ == "__main__":
    main()
