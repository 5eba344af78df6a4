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
import socket
import statistics
import subprocess
import sys
import threading
import time

import generations
from generations import Engine
from tier import figure, until

CHUNKS, RATE = 4, 1e6


class Proxy:
    """Passes connections on. What comes back shares RATE while it is slow."""

    def __init__(self, port, target):
        self.target, self.slow, self.lock, self.free = target, False, threading.Lock(), 0.0
        self.listening = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client = self.listening.accept()[0]
            server = socket.create_connection(("127.0.0.1", self.target))
            for a, b, back in ((client, server, False), (server, client, True)):
                threading.Thread(target=self.pump, args=(a, b, back), daemon=True).start()

    def wait(self, n):
        """Waits until n bytes more may pass: in turn, whatever connection they are of."""
        with self.lock:
            now = time.monotonic()
            self.free = max(self.free, now) + n / RATE
            pause = self.free - now
        time.sleep(pause)

    def pump(self, a, b, back):
        try:
            while data := a.recv(16384):
                if back and self.slow:
                    self.wait(len(data))
                b.sendall(data)
        except OSError:
            pass
        for s in (a, b):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def main():
    p = argparse.ArgumentParser()
    for name in ("url", "http", "kill", "redis", "listen"):
        p.add_argument("--" + name, required=True)
    args = p.parse_args()
    generations.LAYERS, generations.HEADS, generations.DIM = 8, 8, 32
    size = CHUNKS * 256 * 8 * 2 * 8 * 32 * 2
    proxy = Proxy(int(args.listen), int(args.redis))
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
    whole = lambda r: r["hit"] == CHUNKS and r["equal"] is True  # noqa: E731

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
