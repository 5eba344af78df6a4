#!/usr/bin/env python3
"""One bucket below two nodes of this build, both with the real LMCache client.

    bucket.py --urls tcp://127.0.0.1:5555 tcp://127.0.0.1:5556 --https http://127.0.0.1:8080 http://127.0.0.1:8081 --kill 'sh kill.sh'

The servers keep chunks in one bucket; --kill ends the first one with SIGKILL and starts it again with an empty pool.
What one node stored the other one must load, byte for byte, and so must the first one after it was killed; nothing is
written twice; requests are counted. Prints one JSON line and exits 0 when all checks passed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import generations
from generations import Engine

MODEL, CHUNKS = "interop/bucket", 3


def figure(http, name, label=""):
    text = urllib.request.urlopen(http + "/metrics", timeout=60).read().decode()
    return sum(float(v) for v in re.findall(rf"^{name}{{[^}}]*{label}[^}}]*}} ([0-9.e+]+)$", text, re.MULTILINE))


def until(what, f, limit=120.0):
    end = time.monotonic() + limit
    while not f():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {limit} s")
        time.sleep(0.05)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--urls", nargs=2, required=True)
    p.add_argument("--https", nargs=2, required=True)
    p.add_argument("--kill", required=True)
    args = p.parse_args()
    generations.LAYERS, generations.HEADS, generations.DIM = 3, 1, 10
    passed, failed = [], []

    def check(name, ok, detail=""):
        (passed if ok else failed).append(name)
        print("PASS" if ok else "FAIL", name, detail, file=sys.stderr, flush=True)

    def whole(r):
        return r["hit"] == CHUNKS and r["equal"] is True

    a, b = (Engine(url, MODEL, False) for url in args.urls)
    assert a.store(1, CHUNKS)["done"]
    until("the first node has written", lambda: figure(args.https[0], "kvasir_tier_writes_total") == CHUNKS)
    puts = figure(args.https[0], "kvasir_tier_requests_total", 'kind="PUT"')
    check("each chunk is one PUT, and the note of clears may be one", CHUNKS <= puts <= CHUNKS + 1, puts)
    before, t0 = figure(args.https[1], "kvasir_tier_requests_total", 'kind="GET"'), time.monotonic()
    r = b.load(1, CHUNKS)
    check("the second node loads what the first one stored", whole(r), r)
    check("its bytes have a checksum", figure(args.https[1], "kvasir_tier_reads_without_checksum_total") == 0)
    notes = int(time.monotonic() - t0) + 1  # the note is read once a second
    gets = figure(args.https[1], "kvasir_tier_requests_total", 'kind="GET"') - before
    check("each chunk is one GET, and one may ask for the bucket", CHUNKS <= gets <= CHUNKS + 1 + notes, gets)
    assert b.store(2, CHUNKS)["done"]
    until("the second node has written", lambda: figure(args.https[1], "kvasir_tier_writes_total") >= CHUNKS)
    puts = figure(args.https[1], "kvasir_tier_requests_total", 'kind="PUT"')
    check("what was there is not written again", puts == CHUNKS, puts)
    subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    r = a.again(1000 + int(time.time()) % 100000 * 10, 1)
    check("the engine comes back", r["hit"] == 1 and r["equal"] is True, r)
    for seed in (1, 2):
        r = a.load(seed, CHUNKS)
        check(f"after kill -9 and an empty pool prompt {seed} comes from the bucket", whole(r), r)
    print(json.dumps({"passed": len(passed), "failed": failed}))
    sys.stdout.flush()
    os._exit(len(failed) > 0)  # threads of clients may wait for a server that is gone


if __name__ == "__main__":
    main()
