#!/usr/bin/env python3
"""Prints results of l2_bench.py side by side: tiers_table.py NAME=FILE ..."""

import json
import sys


def main():
    runs, names_known = {}, {}
    for name, path in (a.split("=", 1) for a in sys.argv[1:]):
        with open(path) as f:
            result = json.load(f)
        runs[name], names_known[name] = result["perf"], result["l2"] != "private"
    print("| tier | chunk MiB | tokens | store GB/s | without copy | CPU s/GB | ready ms (min-max) | load GB/s | CPU s/GB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, perf in runs.items():
        for r in perf["rows"] if name != "none" else ():
            if "error" in r or r["bad"] or set(r["hits"]) != {r["chunks"]}:
                sys.exit(f"{name}: {r}")
            show = lambda v: "-" if v is None else f"{v:.2f}"
            print(f"| {name} | {r['chunk_mib']:g} | {r['tokens']} | {show(r['store_to_l2_gbps'] if names_known[name] else None)} | {show(r['no_copy_store_to_l2_gbps'])} | {show(r['no_copy_store_cpu_s_per_gb'])} | "
                  f"{r['l2_hit_ready_ms']:.0f} ({min(r['l2_hit_all_ms']):.0f}-{max(r['l2_hit_all_ms']):.0f}) | {show(r['load_gbps'])} | {show(r['load_cpu_s_per_gb'])} |")
    print("\n| everything in memory | lookup | p50 ms | p99 ms | CPU ms |")
    print("|---|---|--:|--:|--:|")
    for name, perf in runs.items():
        for what, r in perf["lookup_in_ram"].items():
            if what == "error":
                sys.exit(f"{name}: {r}")
            print(f"| {name} | {what} | {r['ready']['p50_us'] / 1e3:.2f} | {r['ready']['p99_us'] / 1e3:.2f} | {r['server_cpu_us'] / 1e3:.2f} |")


if __name__ == "__main__":
    main()
