#!/usr/bin/env python3
"""One directory below two servers: kvasir's and LMCache's own, both with the real client.

    tier.py --url tcp://127.0.0.1:5555 --http http://127.0.0.1:8080 --kill 'sh kill.sh' --dir DIR --lmcache PATH/TO/lmcache [--native]

--kill ends our server with SIGKILL and starts it again with an empty pool. The lengths of chunks are no multiples of
4,096 bytes. Each server must load what the other one stored, byte for byte; after a kill everything must come from the
directory; a torn file must be a miss and be replaced; a directory that is gone must cost nobody time. Prints one JSON
line and exits 0 when all checks passed.
"""

import argparse
import glob
import itertools
import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import generations
from generations import Engine

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "shared"))
from ports import free_ports

MODEL, CHUNKS = "interop/tier", 3


def until(what, f, limit=180.0):
    end = time.monotonic() + limit
    while not f():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {limit} s")
        time.sleep(0.02)


def figure(http, name):
    text = urllib.request.urlopen(http + "/metrics", timeout=60).read().decode()
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.MULTILINE))


def start_theirs(args, adapter):
    port, http = free_ports(2)
    command = [args.lmcache, "server", "--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", "0.125",
               "--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven", "--shm-name", f"kvasir_interop_tier_{port}", "--max-workers", "2",
               "--l2-adapter", adapter]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=subprocess.STDOUT, env=dict(os.environ, LMCACHE_TRACK_USAGE="false"))

    def answers():
        if process.poll() is not None:
            raise SystemExit("lmcache server ended")
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck", timeout=10).status == 200
        except OSError:
            return False
    until("lmcache server", answers)
    return process, f"tcp://127.0.0.1:{port}"


def main():
    p = argparse.ArgumentParser()
    for name in ("url", "http", "kill", "dir", "lmcache"):
        p.add_argument("--" + name, required=True)
    p.add_argument("--patience", type=float, default=120.0, help="seconds of the server's --l2-prefetch-load-timeout")
    p.add_argument("--away", type=float, default=5.0, help="seconds for which the directory stays away after a store")
    p.add_argument("--native", action="store_true", help="fs_native with use_odirect, whose files are padded")
    args = p.parse_args()
    generations.LAYERS, generations.HEADS, generations.DIM = 3, 1, 10
    length = 256 * 3 * 2 * 10 * 2  # bytes of a chunk
    padded = (length + 4095) // 4096 * 4096 if args.native else length
    adapter = {"type": "fs_native" if args.native else "fs", "base_path": args.dir} | ({"use_odirect": True} if args.native else {})
    passed, failed = [], []

    def check(name, ok, detail=""):
        (passed if ok else failed).append(name)
        print("PASS" if ok else "FAIL", name, detail, file=sys.stderr, flush=True)

    process, url = start_theirs(args, json.dumps(adapter))
    try:
        ours, theirs = Engine(args.url, MODEL, False), Engine(url, MODEL, False)
        files = lambda: set(glob.glob(os.path.join(args.dir, "*.data")))
        whole = lambda r: r["hit"] == CHUNKS and r["equal"] is True

        def stored(e, seed):
            """Stores a prompt and returns its files."""
            before = files()
            assert e.store(seed, CHUNKS)["done"]
            until(f"the files of prompt {seed}", lambda: len(files() - before) >= CHUNKS)
            return sorted(files() - before)

        mine, other = stored(ours, 1), stored(theirs, 2)
        check("the files have LMCache's names and lengths", all(os.path.getsize(f) == padded and "/interop-SEP-tier@0x01000100@0@" in f for f in mine + other),
              [os.path.getsize(f) for f in mine + other])
        notes = {".kvasir-generations", ".kvasir-generations.room", ".kvasir-generations.room2"}
        check("nothing is left but chunks, the note of clears and room for it", all(f.endswith(".data") or f in notes for f in os.listdir(args.dir)), os.listdir(args.dir))
        r = theirs.load(1, CHUNKS)
        check("theirs loads what ours stored", whole(r), r)
        r = ours.load(2, CHUNKS)
        check("ours loads what theirs stored", whole(r), r)
        check("that has no checksum", figure(args.http, "kvasir_tier_reads_without_checksum_total") == CHUNKS)

        restarts = itertools.count(1)

        def restart():
            """Kills our server. The file of what the engine then stores may come at any time: nothing here counts files."""
            subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
            r = ours.again(100000 * next(restarts), 1)
            check("the engine comes back", r["hit"] == 1 and r["equal"] is True, r)

        restart()
        for seed in (1, 2):
            r = ours.load(seed, CHUNKS)
            check(f"after kill -9 and an empty pool prompt {seed} comes from the directory", whole(r), r)
        restart()
        torn = max(mine, key=os.path.getmtime)
        os.truncate(torn, length // 2)
        r = ours.load(1, CHUNKS)
        check("a torn file ends the hit, and what comes before is right", r["hit"] < CHUNKS and r["equal"] is not False, r)
        ours.store(1, CHUNKS)
        until("a torn file is replaced", lambda: os.path.getsize(torn) == padded)
        r = theirs.load(1, CHUNKS)
        check("then theirs loads all of it", whole(r), r)
        restart()
        os.rename(args.dir, args.dir + ".away")
        began = time.monotonic()
        r = ours.load(2, CHUNKS)
        check("a directory that is gone is a miss at once", r["hit"] == 0 and time.monotonic() - began < args.patience / 2, r)
        assert ours.store(3, CHUNKS)["done"]
        time.sleep(args.away)
        os.rename(args.dir + ".away", args.dir)
        r = ours.load(2, CHUNKS)
        until("the directory is used again", lambda: r["hit"] == CHUNKS or r.update(ours.load(2, CHUNKS)))
        check("when it is back it serves again", whole(r), r)
        r = theirs.load(3, CHUNKS)
        until("what was stored meanwhile is written, and theirs loads it", lambda: whole(r) or r.update(theirs.load(3, CHUNKS)))
        check("theirs loads what ours stored while the directory was gone", whole(r), r)
        print(json.dumps({"passed": len(passed), "failed": failed}))
        sys.stdout.flush()
    finally:
        process.kill()
        process.wait()
        for f in glob.glob(f"/dev/shm/*kvasir_interop_tier_{url.rsplit(':', 1)[1]}*"):
            os.unlink(f)
    os._exit(len(failed) > 0)  # threads of clients may wait for a server that is gone


if __name__ == "__main__":
    main()
