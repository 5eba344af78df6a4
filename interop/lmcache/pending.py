#!/usr/bin/env python3
"""A restart under the real client, whose lookups then are pending: what the server kept is still to be compared.

    pending.py --url tcp://127.0.0.1:5555 --http http://127.0.0.1:8080 --kill 'sh kill.sh' [--prompts 48]

One engine, through the adapters of vLLM's connector, stores prompts of 32 MiB; the server is killed and started again.
Then the engine asks for all prompts at once, in each way in which clients ask: one status request outstanding and
never waited for (lmcache.mp.nonblocking_lookup_status), each waited for, and wait_prefetch_status. Every prompt must
come whole and byte for byte, some answers must have been "not yet", and requests that end in the meantime must leave
nothing pinned. Prints one JSON line and exits 0 when all checks passed.
"""

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import generations
from generations import BLOCK, Engine

CHUNKS = 4


def figures(http):
    text = urllib.request.urlopen(http + "/metrics", timeout=10).read().decode()
    return {k: float(v) for k, v in re.findall(r"^(\w+) ([0-9.e+]+)$", text, re.MULTILINE)}


def until(what, f, limit=300.0):
    end = time.monotonic() + limit
    while not f():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {limit} s")
        time.sleep(0.05)


class Asker(Engine):
    def asker(self, nonblocking):
        """A scheduler of its own that asks in one of the two ways."""
        config = {"lmcache.mp.heartbeat_interval": generations.HEARTBEAT, "lmcache.mp.mq_timeout": 20.0, "lmcache.mp.mp_transfer_mode": "engine_driven",
                  "lmcache.mp.nonblocking_lookup_status": nonblocking}
        return self.adapter.LMCacheMPSchedulerAdapter([self.url], self.context, self.model, BLOCK, self.strategy(), extra_config=config)

    def look(self, scheduler, seeds, ended=()):
        """Asks for all prompts at once; returns their hits and how often the answer was "not yet"."""
        requests = {s: self.request() for s in seeds}
        for s, r in requests.items():
            scheduler.maybe_submit_lookup_request(r, self.tokens(s, CHUNKS), cache_salt="")
        hits, waits, end = {}, 0, time.monotonic() + 300
        for s in ended:  # aborted while pending
            scheduler.check_lookup_result(requests[s])
            scheduler.cleanup_lookup_result(requests[s])
            scheduler.end_session(requests.pop(s))
        while len(hits) < len(requests) and time.monotonic() < end:
            for s, r in requests.items():
                if s not in hits:
                    got = scheduler.check_lookup_result(r)
                    if got is None:
                        waits += 1
                    else:
                        hits[s] = got // self.chunk
        return requests, hits, waits

    def loaded(self, request, seed):
        """Retrieves a prompt that was looked up and compares every byte."""
        tokens, first = self.tokens(seed, CHUNKS), self.blocks // 2
        self.fill(seed, CHUNKS, 0)
        want = self.bytes(CHUNKS, 0)
        self.fill(seed + 1, CHUNKS, first)
        self.worker.submit_retrieve_request(request, self.op(tokens, first, CHUNKS * self.chunk), self.event())
        self.wait(lambda: request in self.worker.retrieve_futures)
        return all(self.torch.equal(a, b) for a, b in zip(want, self.bytes(CHUNKS, first), strict=True))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--url", required=True)
    p.add_argument("--http", required=True)
    p.add_argument("--kill", required=True)
    p.add_argument("--prompts", type=int, default=48)
    args = p.parse_args()
    generations.LAYERS, generations.HEADS, generations.DIM = 8, 8, 128  # 32 KiB per token, 8 MiB per chunk
    e = Asker(args.url, "interop/pending", False)
    e.url, e.model = args.url, "interop/pending"
    passed, failed = [], []

    def check(name, ok, detail=""):
        (passed if ok else failed).append(name)
        print("PASS" if ok else "FAIL", name, detail, file=sys.stderr)

    seeds = list(range(args.prompts))
    for s in seeds:
        if not e.store(s, CHUNKS)["done"]:
            raise SystemExit(f"prompt {s} was not stored")
    until("checksums", lambda: figures(args.http)["kvasir_checksummed_chunks_total"] >= CHUNKS * args.prompts)
    e.scheduler.shutdown()

    for nonblocking in (True, False):
        subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
        time.sleep(3 * generations.HEARTBEAT)  # a ping that the killed server did not answer counts by now
        until("a healthy worker", lambda: e.worker.is_healthy() if callable(e.worker.is_healthy) else e.worker.is_healthy)
        began = time.monotonic()
        scheduler = e.asker(nonblocking)
        ended = seeds[-8:]
        requests, hits, waits = e.look(scheduler, seeds, ended)
        took = time.monotonic() - began
        way = "one outstanding" if nonblocking else "each waited for"
        check(f"{way}: every prompt whole", hits == {s: CHUNKS for s in requests}, f"{len(hits)} after {took:.2f} s, {[s for s in hits if hits[s] != CHUNKS]} are not")
        check(f"{way}: some answers were not yet", waits > 0, f"{waits}")
        check(f"{way}: every byte", all(e.loaded(requests[s], s) for s in list(requests)[:4]))
        for r in requests.values():
            scheduler.cleanup_lookup_result(r)
            scheduler.end_session(r)
        scheduler.shutdown()
        until("nothing is pending", lambda: figures(args.http)["lmcache_mp_active_prefetch_jobs"] == 0 and figures(args.http)["kvasir_sessions"] == 0)
        f = figures(args.http)
        check(f"{way}: pending lookups were counted", f["kvasir_lookups_pending_total"] > 0 and f["kvasir_corrupt_chunks_total"] == 0,
              f"{f['kvasir_lookups_pending_total']:.0f} of {len(seeds)}, {f['kvasir_lookups_late_total']:.0f} late")

    subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    client = RequestClientFactory.create(args.url, context=e.context)
    client.get_chunk_size().result(timeout=120)
    counts, pings, acks = {}, [], []
    waiting = {}
    for s in seeds:
        t = e.tokens(s, CHUNKS)
        fields = {"model_name": "interop/pending", "world_size": 1, "worker_id": None, "token_ids": t, "start": 0, "end": len(t), "request_id": f"wait-{s}",
                      "cache_salt": "", "num_kv_readers": 1}
        key = IPCCacheServerKey(**{k: v for k, v in fields.items() if k in inspect.signature(IPCCacheServerKey).parameters})
        at = time.perf_counter()
        client.lookup(key, 1).result(timeout=120)
        acks.append(time.perf_counter() - at)
        waiting[s] = client.wait_prefetch_status(f"wait-{s}", 180.0)
        at = time.perf_counter()
        client.noop().result(timeout=120)
        pings.append(time.perf_counter() - at)
    for s, w in waiting.items():
        counts[s] = w.result(timeout=240)
        client.end_session(f"wait-{s}").result(timeout=120)
    check("wait_prefetch_status: every prompt whole", counts == {s: CHUNKS for s in seeds}, f"{[s for s in counts if counts[s] != CHUNKS]} are not")
    print(f"acknowledged after {1e3 * max(acks):.1f} ms at most, a noop beside the waits after {1e3 * max(pings):.1f} ms at most", file=sys.stderr)
    until("nothing is pending", lambda: figures(args.http)["lmcache_mp_active_prefetch_jobs"] == 0 and figures(args.http)["kvasir_sessions"] == 0)
    e.worker.shutdown()
    print(json.dumps({"passed": len(passed), "failed": failed}))
    sys.stdout.flush()
    os._exit(bool(failed))


main()
