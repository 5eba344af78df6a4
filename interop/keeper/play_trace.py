"""Plays a trace into vLLM's real fs offloading tier, as fast as it goes, while kvasir keeper holds the tier's directory.

The real TieringOffloadingManager runs with a small primary tier; each block of the trace is a row of --row bytes. Printed as JSON:
hit rate, wrong bytes, failed loads, times of stores and loads, and, when ROOT is a file system of its own, the most that it held
(its own figure, sampled every 10 ms; files that are being written count too)."""

import argparse
import hashlib
import json
import logging
import os
import random
import threading
import time

logging.disable(logging.INFO)

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def manager(root, row, chunks, events=False):
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("l0",), 0),),
        worker_kv_bytes_per_block=row,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": row * chunks,
            "secondary_tiers": [
                {"type": "fs", "root_dir": root, "n_write_threads": 16, "enable_kv_events": events}
            ],
        },
        engine_id=f"kvasir-keeper-{os.getpid()}",
        model=OffloadingModelConfig("m/x", "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    return TieringOffloadingSpec(config).get_manager()


def used(root):
    s = os.statvfs(root)
    return (s.f_blocks - s.f_bfree) * s.f_frsize


class Sampler(threading.Thread):
    """The most that a file system held, above what it held at the start."""

    def __init__(self, root):
        super().__init__(daemon=True)
        self.root, self.most, self.samples, self.stop = root, 0, 0, threading.Event()
        self.empty = used(root)

    def run(self):
        while not self.stop.wait(0.01):
            self.most = max(self.most, used(self.root) - self.empty)
            self.samples += 1


class Player:
    def __init__(self, root, row, chunks, names=None):
        self.row, self.names = row, names
        self.m = manager(root, row, chunks)
        self.view = self.m.primary_tier.get_kv_memoryview()
        self.tier = self.m.secondary_tiers[0]
        self.asked = self.hits = self.wrong = self.loads = self.failed = self.unexplained = 0
        self.times = {"store": [], "load": []}
        self.row_times = {"store": [], "load": []}
        self.kinds = {}
        self.watch()

    def watch(self):
        """Counts jobs of the tier, and the keys that loads did not get."""
        store, load, finished = (
            self.tier.submit_store,
            self.tier.submit_load,
            self.tier.get_finished_jobs,
        )

        def submit(kind, call):
            def f(job):
                self.kinds[job.job_id] = kind, list(job.keys)
                call(job)

            return f

        def get():
            out = list(finished())
            for r in out:
                kind, keys = self.kinds.pop(r.job_id)
                if self.names and kind == "store" and r.success:
                    self.names.write("".join(self.tier.file_mapper.get_file_name(k) + "\n" for k in keys))
                if r.transfer_time:
                    self.times[kind].append(r.transfer_time)
                    self.row_times[kind].append(r.transfer_time / len(keys))
                if kind == "load":
                    self.loads += len(keys)
                    if not r.success:
                        good = len(r.successful_keys or ())
                        self.failed += len(keys) - good
                        # Explained is a file that was there for the lookup and is gone; the tier gives up the rows behind it.
                        self.unexplained += os.path.exists(self.tier.file_mapper.get_file_name(keys[good]))
            return out

        self.tier.submit_store, self.tier.submit_load = (
            submit("store", store),
            submit("load", load),
        )
        self.tier.get_finished_jobs = get

    def step(self, new=()):
        self.m.on_schedule_end(
            ScheduleEndContext(new_req_ids=tuple(new), preempted_req_ids=())
        )

    def body(self, key):
        return (hashlib.sha256(key).digest() * (self.row // 32 + 1))[: self.row]

    def request(self, name, blocks):
        keys = [make_offload_key(hashlib.sha256(b"%d" % b).digest(), 0) for b in blocks]
        context = ReqContext(name)
        self.m.on_new_request(context)
        new = [name]
        while True:
            got = []
            for k in keys:
                got.append(self.m.lookup(k, context))
                if got[-1] is LookupResult.MISS:
                    break
            self.step(new)
            new = ()
            if all(x in (LookupResult.HIT, LookupResult.MISS) for x in got):
                break
            time.sleep(0.0002)
        hits = [k for k, x in zip(keys, got, strict=False) if x is LookupResult.HIT]
        self.asked += len(keys)
        self.hits += len(hits)
        if hits:
            s = self.m.prepare_load(hits, context)
            for k, c in zip(hits, s.chunk_ids, strict=True):
                row = self.view[int(c) : int(c) + 1].cast("B")
                self.wrong += bytes(row) != self.body(k)
            self.m.complete_load(hits, context)
        rest = keys[len(hits) :]
        while rest:
            o = self.m.prepare_store(rest, context)
            if o is not None:
                break
            self.step()
            time.sleep(0.001)
        if rest:
            for k, c in zip(o.keys_to_store, o.store_spec.chunk_ids, strict=True):
                self.view[int(c) : int(c) + 1].cast("B")[:] = self.body(k)
            if o.keys_to_store:
                self.m.complete_store(o.keys_to_store, context, True)
        self.m.on_request_finished(context)
        self.step()


def p99(values):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * 0.99))] if values else None


def prompts(trace):
    """The blocks of each request: of a trace, or of conversations that go on for some turns."""
    if trace:
        with open(trace) as f:
            for line in f:
                yield json.loads(line)["hash_ids"]
        return
    draw = random.Random(7)
    open_ones, block = [], 0
    while True:
        if len(open_ones) < 40 or draw.random() < 0.3:
            open_ones.append([])
        c = draw.choice(open_ones[-60:])
        more = draw.randrange(2, 30)
        c.extend(range(block, block + more))
        block += more
        if len(c) > 200:
            open_ones.remove(c)
        yield list(c)


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--root", required=True)
    a.add_argument(
        "--trace",
        help="JSON lines with hash_ids; default: prompts that share beginnings",
    )
    a.add_argument("--row", type=int, default=65536)
    a.add_argument("--chunks", type=int, default=512, help="rows of the primary tier")
    a.add_argument("--requests", type=int, default=0)
    a.add_argument(
        "--limit",
        type=int,
        default=0,
        help="fail when the file system held more, or bytes were wrong, or 0.1 %% of the loads failed",
    )
    a.add_argument("--names", help="write the names of files that were stored to this pipe")
    o = a.parse_args()
    sampler = Sampler(o.root)
    p = Player(o.root, o.row, o.chunks, open(o.names, "w", buffering=1) if o.names else None)  # noqa: SIM115 - open to the end
    sampler.start()
    began = time.monotonic()
    requests = 0
    for blocks in prompts(o.trace):
        if o.requests and requests == o.requests:
            break
        p.request(f"r{requests}", blocks[: o.chunks // 2])
        requests += 1
    while p.m.has_pending_work():
        p.step()
        time.sleep(0.001)
    seconds = time.monotonic() - began
    sampler.stop.set()
    sampler.join()
    p.m.shutdown()
    result = {
        "requests": requests,
        "seconds": round(seconds, 1),
        "asked": p.asked,
        "hit_rate": p.hits / p.asked,
        "wrong": p.wrong,
        "loaded": p.loads,
        "failed_loads": p.failed,
        "unexplained": p.unexplained,
        "store_p99": p99(p.times["store"]),
        "load_p99": p99(p.times["load"]),
        "store_row_p99": p99(p.row_times["store"]),
        "load_row_p99": p99(p.row_times["load"]),
        "most_bytes": sampler.most,
        "samples": sampler.samples,
    }
    print(json.dumps(result))
    if o.limit and (
        p.wrong or p.unexplained or p.failed > p.loads / 1000 or sampler.most > o.limit or not p.hits
    ):
        raise SystemExit("the keeper does not hold what it promises")


if __name__ == "__main__":
    main()
