#!/usr/bin/env python3
"""KV events under the real 0.5.6 client, and as vLLM's routers read them.

    events.py --url tcp://127.0.0.1:5555 --http http://127.0.0.1:8080 --kill 'sh kill.sh' --events ENDPOINT --replay ENDPOINT

The adapter of vLLM's connector, with KV events on, subscribes by itself; a subscriber beside it decodes the server's own
socket with classes as vLLM 0.32 declares them. Both must come to know exactly the chunks that were stored, with their tokens,
see them go when the cache is cleared, and find them again after the server was killed and started again. Prints one JSON line and
exits 0 when all checks passed.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import urllib.request

import msgspec
import zmq
from generations import Engine

LIMIT = 60.0  # seconds for what comes soon
CHUNKS = 2


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Router:
    """Reads the server's own socket; asks for a snapshot at each gap and in each new life."""

    def __init__(self, context, events, replay):
        self.context, self.replay = context, replay
        self.sub = context.socket(zmq.SUB)
        self.sub.subscribe(b"kv@")
        self.sub.connect(events)
        self.decoder = msgspec.msgpack.Decoder(Batch)
        self.has, self.expected, self.epoch, self.snapshots = {}, None, None, 0

    def apply(self, payload):
        for e in self.decoder.decode(payload).events:
            if isinstance(e, AllBlocksCleared):
                self.has.clear()
            elif isinstance(e, BlockRemoved):
                for h in e.block_hashes:
                    del self.has[h]
            else:
                (h,) = e.block_hashes
                assert h not in self.has and len(e.token_ids) == e.block_size and e.medium == "CPU", e
                self.has[h] = list(e.token_ids)

    def snapshot(self):
        self.snapshots += 1
        s = self.context.socket(zmq.DEALER)
        s.linger, s.rcvtimeo = 0, int(LIMIT * 1000)
        s.connect(self.replay)
        s.send_multipart([b"", b"snapshot"])
        while True:
            _, _, sequence, payload = s.recv_multipart()
            if sequence == b"\xff" * 8:
                break
            self.expected = int.from_bytes(sequence, "big")
            self.apply(payload)
        s.close()

    def read(self):
        while self.sub.poll(20):
            _, sequence, payload = self.sub.recv_multipart()
            number, epoch = int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)[3]
            if self.expected is None or number > self.expected or epoch != self.epoch:
                self.epoch = epoch
                self.snapshot()
            if number == self.expected:
                self.apply(payload)
                self.expected += 1


def main():
    p = argparse.ArgumentParser()
    for name in ("--url", "--http", "--kill", "--events", "--replay"):
        p.add_argument(name, required=True)
    args = p.parse_args()
    import lmcache.integration.vllm.vllm_multi_process_adapter as adapter

    adapter.LMCacheMPWorkerAdapter = functools.partial(adapter.LMCacheMPWorkerAdapter, enable_kv_events=True)
    e = Engine(args.url, "interop/events", False)
    router = Router(e.context, args.events, args.replay)
    seen, passed, failed = {}, [], []
    counts = {"stored": 0, "removed": 0}

    def drain():
        for event in e.worker.get_kv_events():
            if hasattr(event, "token_ids"):
                counts["stored"] += 1
                for h in event.block_hashes:
                    seen[bytes(h)] = list(event.token_ids)
            else:
                counts["removed"] += 1
                for h in event.block_hashes:
                    seen.pop(bytes(h), None)

    def settle(what, ok):
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            drain()
            router.read()
            if ok():
                break
            time.sleep(0.02)
        (passed if ok() else failed).append(what)
        print("PASS" if ok() else "FAIL", what, len(seen), len(router.has), counts, router.snapshots, file=sys.stderr, flush=True)

    def both(want):
        return sorted(seen.values()) == sorted(want) and seen == router.has

    def chunks(seeds):
        return [e.tokens(s, CHUNKS)[i * e.chunk:(i + 1) * e.chunk] for s in seeds for i in range(CHUNKS)]

    drain()  # begins the subscription
    settle("the router has found the server", lambda: router.expected is not None)
    for s in range(4):
        if not e.store(s, CHUNKS)["done"]:
            raise SystemExit(f"prompt {s} was not stored")
    settle("both know what was stored", lambda: both(chunks(range(4))))
    urllib.request.urlopen(urllib.request.Request(args.http + "/cache/clear", data=b"{}", headers={"Content-Type": "application/json"}), timeout=LIMIT).read()
    settle("both see it go", lambda: both([]) and counts["removed"] > 0)
    for s in range(4, 7):
        if not e.store(s, CHUNKS)["done"]:
            raise SystemExit(f"prompt {s} was not stored")
    settle("both know what came after", lambda: both(chunks(range(4, 7))))

    subprocess.run(args.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    settle("the client withdraws what it announced of the life before", lambda: not seen)
    end = time.monotonic() + LIMIT
    while len(seen) < 3 * CHUNKS and time.monotonic() < end:  # the first lookups find no registered worker, or an unhealthy client
        for s in range(4, 7):
            e.load(s, CHUNKS)
        drain()
    settle("both know what the pool kept, once it was looked up", lambda: both(chunks(range(4, 7))))
    if not e.store(9, CHUNKS)["done"]:
        raise SystemExit("not stored after the restart")
    settle("both know what came after the restart", lambda: both(chunks([4, 5, 6, 9])))
    print(json.dumps({"passed": len(passed), "failed": failed}))
    sys.stdout.flush()
    os._exit(bool(failed))


main()
