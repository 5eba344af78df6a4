#!/usr/bin/env python3
"""What one unmodified vLLM engine with LMCacheMPConnector publishes on its own KV-event socket of a server's chunks.

    run_events.py --model DIR --server tcp://127.0.0.1:5555 --http http://127.0.0.1:8080 --kill 'sh kill.sh' [--mode MODE]

A subscriber decodes the engine's socket with vLLM's own classes and keeps what they say of medium CPU; it compares that with
GET /cache/objects of the server, hash by hash, and the tokens with the prompts': after prompts were stored, after one chunk was
deleted, after the pool evicted some (the server's pool is to hold about 16 chunks), after a clear, after the server was killed
and started again by --kill, and after what the engine's replay socket repeats. Prints one JSON line.
"""
import json
import subprocess
import time

import common as C

LIMIT = 120.0  # seconds for what comes soon


class Router:
    """What the engine's socket says is where. Numbers must follow each other."""

    def __init__(self, zmq, decoder, kinds, events):
        self.zmq, self.decoder, self.kinds = zmq, decoder, kinds
        self.sub = zmq.Context.instance().socket(zmq.SUB)
        self.sub.subscribe(b"")
        self.sub.set_hwm(0)
        self.sub.connect(events)
        self.has, self.mediums, self.expected = {}, set(), None
        self.counts = {"stored": 0, "removed": 0}

    def apply(self, payload, has):
        stored, removed, cleared = self.kinds
        for e in self.decoder.decode(payload).events:
            if isinstance(e, cleared):
                continue  # of the engine's own blocks
            self.mediums.add(e.medium)
            if e.medium != "CPU":
                continue
            if isinstance(e, stored):
                self.counts["stored"] += 1
                (h,) = e.block_hashes
                assert h not in has and len(e.token_ids) == e.block_size, e
                has[h] = (e.parent_block_hash, list(e.token_ids))
            elif isinstance(e, removed):
                for h in e.block_hashes:  # one event has all of a tenth of a second
                    self.counts["removed"] += 1
                    del has[h]

    def read(self):
        while self.sub.poll(20):
            _, sequence, payload = self.sub.recv_multipart()
            number = int.from_bytes(sequence, "big")
            assert self.expected is None or number == self.expected, f"message {number} after {self.expected}"
            self.expected = number + 1
            self.apply(payload, self.has)

    def replayed(self, endpoint):
        """What one that comes now knows, by the replay socket alone."""
        s = self.zmq.Context.instance().socket(self.zmq.DEALER)
        s.linger, s.rcvtimeo = 0, int(LIMIT * 1000)
        s.connect(endpoint)
        s.send_multipart([b"", (0).to_bytes(8, "big")])
        has = {}
        while True:
            _, _, sequence, payload = s.recv_multipart()
            if sequence == b"\xff" * 8:
                s.close()
                return has
            self.apply(payload, has)


def request(method, url, body=None):
    return json.loads(C.http(method, url, body, LIMIT)[1])


def main():
    ap = C.parser(__doc__)
    for name in ("--model", "--server", "--http", "--kill"):
        ap.add_argument(name, required=True)
    ap.add_argument("--mode", default="engine_driven")
    ap.add_argument("--chunk", type=int, default=128)
    a = ap.parse_args()
    out, R = C.begin(a, "events", mode=a.mode, checks={})
    with C.reported(R):
        run(a, out, R)
        C.emit(R, all(R["checks"].values()) and len(R["checks"]) == 9)


def run(a, out, R):
    import msgspec
    import zmq
    from vllm.distributed.kv_events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )

    events, replay = (f"tcp://127.0.0.1:{C.free_port()}" for _ in range(2))
    port = C.free_port()
    kvt = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
           "kv_connector_extra_config": {"lmcache.mp.server_urls": a.server, "lmcache.mp.mp_transfer_mode": a.mode}}
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events",
              "endpoint": events.replace("127.0.0.1", "*"), "replay_endpoint": replay.replace("127.0.0.1", "*")}
    env = C.cpu_env(extra={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"})
    engine = C.vllm("vllm", out, a.model, port, kvt, extra=["--kv-events-config", json.dumps(config)], env=env)
    base = f"http://127.0.0.1:{port}"
    R["ready_s"] = C.wait_http(base + "/health", engine, a.timeout)
    router = Router(zmq, msgspec.msgpack.Decoder(KVEventBatch), (BlockStored, BlockRemoved, AllBlocksCleared), events)
    prompts = {}

    def step(seed=1_000_000):
        """A prompt shorter than a chunk, of which nothing is stored: an engine publishes at its steps only."""
        C.complete(base, C.prompt_ids(40, seed), 1)

    def prompt(seed, chunks=2):
        ids = prompts.setdefault(seed, C.prompt_ids(chunks * a.chunk + 20, seed))
        C.complete(base, ids, 1)

    def objects():
        got, token = set(), ""
        while token is not None:
            page = request("GET", f"{a.http}/cache/objects?tier=l1&page_token={token}")
            got |= {bytes.fromhex(e["key"]["chunk_hash_hex"]) for e in page["entries"]}
            token = page["next_page_token"]
        return got

    def settle(what, ok):
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            step()
            router.read()
            if ok():
                break
        R["checks"][what] = bool(ok())
        R.setdefault("at", {})[what] = {"there": len(objects()), "published": len(router.has), **router.counts}

    def right(has=None):
        """Exactly what the server has, each chunk with its prompt's tokens and after the chunk before it."""
        has = router.has if has is None else has
        if set(has) != objects():
            return False
        known = {}
        for ids in prompts.values():
            for i in range(0, len(ids) - a.chunk + 1, a.chunk):
                known[tuple(ids[i:i + a.chunk])] = tuple(ids[i - a.chunk:i])
        for parent, tokens in has.values():
            before = known[tuple(tokens)]
            assert (parent is None) == (before == ()), "a chunk without its parent"
            assert parent not in has or tuple(has[parent][1]) == before, "a chunk after another prompt's"
        return True

    settle("the engine subscribes", lambda: C.figure(a.http, "kvasir_kv_event_streams") == 1 and router.expected is not None)
    for seed in range(3):
        prompt(seed)
    settle("stored chunks are published", lambda: len(router.has) == 6 and right())
    gone = next(h for h, (parent, _) in router.has.items() if parent is not None)
    page = request("GET", f"{a.http}/cache/objects?tier=l1")
    key = next(e["key"] for e in page["entries"] if e["key"]["chunk_hash_hex"] == gone.hex())
    request("DELETE", f"{a.http}/cache/objects", {"tier": "l1", "keys": [key]})
    settle("a deleted chunk is withdrawn", lambda: gone not in router.has and right())
    before = router.counts["removed"]
    for seed in range(3, 15):
        prompt(seed)
    settle("evicted chunks are withdrawn", lambda: router.counts["removed"] >= before + 6 and right())
    request("POST", f"{a.http}/cache/clear", {})
    settle("all of them after a clear", lambda: not router.has and not objects())
    for seed in range(20, 23):
        prompt(seed)
    settle("what came after it is published", lambda: len(router.has) == 6 and right())

    subprocess.run(a.kill, shell=True, check=True, stdout=subprocess.DEVNULL)
    settle("after kill -9 of the server all is withdrawn", lambda: not router.has)

    def again():
        C.reset_prefix_cache(base)
        for seed in range(20, 23):
            prompt(seed)
        return len(router.has) == 6 and right()

    settle("what the pool kept is published again when it is asked for", again)
    R["checks"]["the replay socket tells the same"] = right(router.replayed(replay)) and "GPU" in router.mediums
    R["numbers"] = router.expected
    engine.stop()


if __name__ == "__main__":
    main()
