#!/usr/bin/env python3
"""The real lmcache client and a tier that gives 1 MB/s: a Redis behind a proxy that lets no more through.

    slow.py --url tcp://127.0.0.1:5555 --http http://127.0.0.1:8080 --kill 'sh kill.sh' --redis PORT --listen PORT

The server has the tier at --listen and a deadline of 2 s. --kill ends it with SIGKILL and starts it again with an empty
pool. A prompt that takes 8 s to load must be answered at the deadline, and its bytes must be right whenever they have
come; another engine's prompts, which are in memory, must be answered meanwhile as before. Prints one JSON line and exits 0
when all checks passed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import generations
from generations import Engine

from tier import figure, until

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared"))
from throttle import Proxy

CHUNKS, RATE = 4, 1e6


def main():
    p = argparse.ArgumentParser()
    for name in ("url", "http", "kill", "redis", "listen"):
        p.add_argument("--" + name, required=True)
    args = p.parse_args()
    generations.LAYERS, generations.HEADS, generations.DIM = 8, 8, 32
    size = CHUNKS * 256 * 8 * 2 * 8 * 32 * 2
    proxy = Proxy(int(args.listen), int(args.redis), RATE)
    passed, failed, figures = [], [], {}

    def check(name, ok, detail=""):
        (passed if ok else failed).append(name)
        print("PASS" if ok else "FAIL", name, detail, file=sys.stderr, flush=True)

    subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    one, two = Engine(args.url, "interop/slow", False), Engine(args.url, "interop/other", False)
    assert one.store(1, CHUNKS)["done"]
    until("what is stored is below", lambda: figure(args.http, "kvasir_below_written_bytes_total") >= size)
    subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    for e in (one, two):
        r = e.again(100, 1)
        check("the engine comes back", r["hit"] == 1 and r["equal"] is True, r)
    assert two.store(7, CHUNKS)["done"]
    whole = lambda r: r["hit"] == CHUNKS and r["equal"] is True

    def others(stop):
        """The other engine's loads until stop: seconds of each, and whether all were right."""
        took, right = [], True
        while not (stop.is_set() and took):
            began = time.monotonic()
            right = whole(two.load(7, CHUNKS)) and right
            took.append(time.monotonic() - began)
            time.sleep(0.02)
        return took, right

    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    before, right = others(stop)
    check("the other engine's prompt is in memory", right)

    proxy.slow = True
    stop, meanwhile = threading.Event(), []
    other = threading.Thread(target=lambda: meanwhile.append(others(stop)), daemon=True)
    other.start()
    began = time.monotonic()
    request, tokens = one.request(), one.tokens(1, CHUNKS)
    hit = one.lookup(request, tokens, "")
    answered = time.monotonic() - began
    one.scheduler.cleanup_lookup_result(request)
    one.scheduler.end_session(request)
    check("the lookup is answered at the deadline, long before everything has come", hit >= 0 and hit < len(tokens) and answered < 20, [hit, answered])
    check("it counts as late", figure(args.http, "kvasir_lookups_late_total") >= 1)
    r, wrong = {"hit": 0, "equal": None}, []

    def come():
        r.update(one.load(1, CHUNKS))
        if r["equal"] is False:
            wrong.append(dict(r))
        return whole(r)
    until("the whole prompt, of which the late loads stay", come, 90)
    figures["whole_s"] = round(time.monotonic() - began, 1)
    check("whatever was there meanwhile had the right bytes", not wrong, wrong)
    check("the tier was slow", figures["whole_s"] > 0.8 * size / RATE, figures)
    stop.set()
    other.join(60)
    took, right = meanwhile[0]
    figures |= {"answered_s": round(answered, 2), "other_before_ms": round(1e3 * statistics.median(before), 1), "other_meanwhile_ms": round(1e3 * statistics.median(took), 1),
                "other_worst_ms": round(1e3 * max(took), 1), "other_loads": len(took)}
    check("the other engine's prompts are right and at once meanwhile", right and statistics.median(took) < 3 * statistics.median(before) + 2, figures)
    proxy.slow = False
    subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    r = one.again(200, 1)
    check("the engine comes back", r["hit"] == 1 and r["equal"] is True, r)
    until("a tier that is as fast as ever gives everything", lambda: whole(one.load(1, CHUNKS)), 30)
    print(json.dumps({"passed": len(passed), "failed": failed} | figures))
    sys.stdout.flush()
    os._exit(len(failed) > 0)


if __name__ == "__main__":
    main()
