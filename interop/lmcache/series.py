#!/usr/bin/env python3
"""Which series a server shows on /metrics: a line for each, its name, type and labels, without values.

    series.py --http http://127.0.0.1:8080 [--against FILE]

--against says which lines of FILE, made of another server, this one lacks, and exits 1 when there are some that are
not among the exceptions: lines of FILE that begin with "except ". Both servers are played with by mp_bench.py before.
"""

import argparse
import re
import sys
import urllib.request

GIVEN = {"le", "quantile"}  # of histograms and summaries themselves


def series(text):
    kinds, labels = {}, {}
    for line in text.splitlines():
        if m := re.match(r"# TYPE (lmcache_mp_\w+) (\w+)$", line):
            kinds[m[1]] = m[2]
            labels.setdefault(m[1], set())
        elif m := re.match(r"(lmcache_mp_\w+?)(?:{(.*)})? \S+$", line):
            name = m[1] if m[1] in kinds else re.sub(r"_(bucket|sum|count)$", "", m[1])
            found = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', m[2] or "")
            labels.setdefault(name, set()).update(k for k in found if k not in GIVEN and not k.startswith("otel_"))
    return [" ".join([name, kinds[name], *sorted(labels[name])]) for name in sorted(kinds) if not name.endswith("_created")]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--http", required=True)
    p.add_argument("--against")
    args = p.parse_args()
    mine = series(urllib.request.urlopen(args.http + "/metrics", timeout=60).read().decode())
    if not args.against:
        print("\n".join(mine))
        return 0
    with open(args.against) as f:
        want = [line.strip() for line in f if line.strip() and not line.startswith("#")]
    excepted = {line.split()[1] for line in want if line.startswith("except ")}
    lacks = [line for line in want if not line.startswith("except ") and line.split()[0] not in excepted and line not in mine]
    for line in lacks:
        print("lacks", line)
    print(f"{len(want) - len(excepted) - len(lacks)} series as there, {len(excepted)} exceptions, {len(lacks)} missing")
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
