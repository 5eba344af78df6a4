#!/usr/bin/env python3
"""kvasir server over a real Mooncake Store: a real master, memory of a C++ client, the real lmcache client.

  tier.py --url tcp://… --http http://… --kill 'sh kill.sh' --master PORT --mooncake PYTHON

--kill ends our server with SIGKILL and starts it again with an empty pool; PYTHON has a Mooncake wheel. What our
server stored the C++ client must find by LMCache's names, byte for byte, and what that put our server must serve. An object of
another length, a node and a master that are killed must be misses in time, and never wrong bytes. Prints one JSON line
and exits 0 when all checks passed.
"""
import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lmcache"))
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared"))
import asking
import generations
from asking import fetch, listens, until
from generations import Engine
from ports import free_port

MODEL, CHUNKS = "interop/store", 3
passed, failed, running = [], [], []


def check(name, ok, detail=""):
    (passed if ok else failed).append(name)
    print("PASS" if ok else "FAIL", name, detail, file=sys.stderr, flush=True)


def start(cmd, **more):
    p = subprocess.Popen(cmd, **more)
    running.append(p)
    return p


class Cpp:
    def __init__(self, python, master, segment):
        script = os.path.join(os.path.dirname(__file__), "cpp.py")
        self.p = start([python, script, master, str(segment)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
        self.answer()

    def answer(self):
        for line in self.p.stdout:  # the library prints lines of its own
            try:
                return json.loads(line)
            except ValueError:
                pass
        raise SystemExit("the C++ client ended")

    def __call__(self, do, keys):
        self.p.stdin.write(json.dumps({"do": do, "keys": keys}) + "\n")
        self.p.stdin.flush()
        return self.answer()


def main():
    p = argparse.ArgumentParser()
    for name in ("url", "http", "kill", "master", "mooncake"):
        p.add_argument("--" + name, required=True)
    args = p.parse_args()
    generations.LAYERS, generations.HEADS, generations.DIM = 3, 1, 10
    length = 256 * 3 * 2 * 10 * 2  # bytes of a chunk
    binary = subprocess.run([args.mooncake, os.path.join(os.path.dirname(__file__), "cpp.py"), "--path"], capture_output=True, text=True, check=True).stdout.strip()
    address, pages = "127.0.0.1:" + args.master, free_port()

    def start_master():
        m = start([binary, "--rpc_port=" + args.master, f"--metrics_port={pages}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                  env=dict(os.environ, LD_LIBRARY_PATH=os.path.dirname(binary) + ":" + os.environ.get("LD_LIBRARY_PATH", "")))
        until("the master", lambda: listens(int(args.master)))
        return m

    def figure(name):
        return asking.figure(args.http, name)

    def names():
        return set(fetch(f"http://127.0.0.1:{pages}/get_all_keys").split())

    whole = lambda r: r["hit"] == CHUNKS and r["equal"] is True
    engine = Engine(args.url, MODEL, False)
    assert engine.store(1, CHUNKS)["done"]
    r = engine.load(1, CHUNKS)
    check("without a master the server serves what it has in memory", whole(r), r)
    master = start_master()
    cpp = Cpp(args.mooncake, address, 256 << 20)

    def written(what, seed):
        """Stores prompts until the objects of one are in the cluster, and returns its seed. The server drops objects where it did
        not know the store's generation when they were stored, since a clear may have come between, and where the master refused
        them for lack of room, before the C++ client had registered its memory."""
        for more in range(60):
            before = {n for n in names() if "@" in n} if more else set()
            if more:
                assert engine.store(seed + 1000 * more, CHUNKS)["done"]
            end = time.monotonic() + 5
            while time.monotonic() < end:
                if len({n for n in names() if "@" in n} - before) >= CHUNKS:
                    return seed + 1000 * more
                time.sleep(0.1)
        raise RuntimeError(what + ": not within 300 s")

    def stored(seed):
        """Stores a prompt and returns the names of its objects."""
        until("what was stored before is written", lambda: figure("kvasir_below_waiting_bytes") == 0 and
              (figure("kvasir_tier_write_bytes_total") >= figure("kvasir_stored_bytes_total") or figure("kvasir_mooncake_store_no_room_total") > 0
               or figure("kvasir_below_not_kept_total") > 0))
        before = names()
        assert engine.store(seed, CHUNKS)["done"]
        until(f"prompt {seed} is in the store", lambda: len(names() - before) == CHUNKS)
        keys = sorted(names() - before)
        until(f"prompt {seed} can be read", lambda: all(cpp("exist", keys)))
        return keys

    written("what was stored without a master is written", 1)
    keys = stored(2)
    form = re.compile(r"interop/store@01000100@0@[0-9a-f]{64}")
    check("the objects have LMCache's names", all(form.fullmatch(k) for k in keys), keys)
    got = cpp("get", keys)
    check("the C++ client reads chunks of our server", [n for n, _ in got] == [length] * CHUNKS and len({h for _, h in got}) == CHUNKS, got)

    restarts = itertools.count(1)

    def restart():
        subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
        r = engine.again(100000 * next(restarts), 1)
        check("the engine comes back", r["hit"] == 1 and r["equal"] is True, r)

    def loaded(seed):
        """Loads a prompt until it is there: a tier that failed rests for some seconds."""
        out = engine.load(seed, CHUNKS)
        end = time.monotonic() + 180
        while out["hit"] < CHUNKS and out["equal"] is not False and time.monotonic() < end:
            time.sleep(0.5)
            out = engine.load(seed, CHUNKS)
        return out

    restart()
    r = loaded(2)
    check("after kill -9 and an empty pool it comes from the store", whole(r), r)
    check("it has no checksum", figure("kvasir_tier_reads_without_checksum_total") >= CHUNKS)
    check("the cluster's figures are there", figure("kvasir_mooncake_store_got_total") >= CHUNKS)
    removed, put = cpp("again", keys)
    check("the C++ client puts the same objects", put == [0] * CHUNKS, [removed, put])
    restart()
    r = loaded(2)
    check("our server serves what the C++ client put", whole(r), r)

    other = stored(3)
    removed, put = cpp("shorten", other[:1])
    check("the C++ client puts an object of half the length", put == [0], [removed, put])
    restart()
    r = engine.load(3, CHUNKS)
    check("an object of another length is a miss", r["hit"] < CHUNKS and r["equal"] is not False, r)
    r = loaded(2)
    check("others are served", whole(r), r)

    restart()
    cpp.p.kill()
    cpp.p.wait()
    began = time.monotonic()
    r = engine.load(2, CHUNKS)
    check("a node that is killed is a miss in time", r["hit"] < CHUNKS and r["equal"] is not False and time.monotonic() - began < 90, r)
    master.send_signal(signal.SIGKILL)
    master.wait()
    began = time.monotonic()
    r = engine.load(3, CHUNKS)
    check("without a master it is a miss in time", r["hit"] < CHUNKS and r["equal"] is not False and time.monotonic() - began < 90, r)
    assert engine.store(4, CHUNKS)["done"]
    r = engine.load(4, CHUNKS)
    check("what is in memory is served meanwhile", whole(r), r)
    master = start_master()
    cpp = Cpp(args.mooncake, address, 256 << 20)
    seed = written("what was stored meanwhile is written", 4)
    restart()
    r = loaded(seed)
    check("a new master is used by itself", whole(r), r)
    print(json.dumps({"passed": len(passed), "failed": failed}))
    sys.stdout.flush()


code = 1
try:
    main()
    code = int(len(failed) > 0)
except BaseException:  # noqa: BLE001 - it is printed, and what was started is killed
    traceback.print_exc()
finally:
    for p in running:
        if p.poll() is None:
            p.kill()
            p.wait()
os._exit(code)  # threads of clients may wait for a server that is gone
