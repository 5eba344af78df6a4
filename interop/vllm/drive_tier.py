"""Drives the real TieringOffloadingManager of vLLM with the Kvasir tier, without a GPU or an engine: what vLLM's connector calls, by
hand. Engine is one of them; its rows are known by their keys, so that every loaded byte is checked."""

import hashlib
import os
import time

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


def key(i, group=0):
    return make_offload_key(hashlib.sha256(b"%d" % i).digest(), group)


class Engine:
    def __init__(self, tiers, row=1 << 20, rows=16, engine_id=None, tp=1, groups=1, model="m/x", canonical=False):
        parallel = OffloadingParallelConfig(0, tp, tp, 1, 1, 1, 0, 1, None, True)
        config = OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(16, (f"l{g}",), g) for g in range(groups)),
            worker_kv_bytes_per_block=row // tp,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": row * rows, "secondary_tiers": tiers},
            engine_id=engine_id or f"kvasir-drive-{os.getpid()}-{time.monotonic_ns()}",
            model=OffloadingModelConfig(model, "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
            canonical_layout=canonical,
            kv_cache_layout="LBNHC" if canonical else None,
        )
        self.row, self.spec = row, TieringOffloadingSpec(config)
        self.m = self.spec.get_manager()
        self.view = self.m.primary_tier.get_kv_memoryview()
        self.tier = self.m.secondary_tiers[0]
        self.path = self.spec._scheduler_mmap.mmap_path

    def step(self, new=()):
        self.m.on_schedule_end(ScheduleEndContext(new_req_ids=tuple(new), preempted_req_ids=()))

    def body(self, k):
        return (hashlib.sha256(k).digest() * (self.row // 32 + 1))[: self.row]

    def slot(self, chunk):
        return self.view[int(chunk) : int(chunk) + 1].cast("B")

    def settle(self, seconds=5):
        """Steps until nothing is on its way; false when that takes too long."""
        end = time.monotonic() + seconds
        while self.m.has_pending_work():
            if time.monotonic() > end:
                return False
            self.step()
            time.sleep(0.0005)
        return True

    def connected(self, seconds=10):
        end = time.monotonic() + seconds
        while self.tier._serving is None:
            if time.monotonic() > end:
                return False
            self.step()
            time.sleep(0.01)
        return True

    def store(self, name, keys, params=None):
        """Computes rows and stores them. It returns how many were new to the primary tier."""
        context = ReqContext(name, params)
        self.m.on_new_request(context)
        self.step([name])
        out = self.m.prepare_store(keys, context)
        fresh = []
        if out is not None:
            fresh = list(out.keys_to_store)
            for k, c in zip(fresh, out.store_spec.chunk_ids):
                self.slot(c)[:] = self.body(k)
            if fresh:
                self.m.complete_store(fresh, context, True)
        self.m.on_request_finished(context)
        self.step()
        return len(fresh)

    def load(self, name, keys, params=None, patience=10, pause=0.0005):
        """Looks keys up as a prefix and loads what is found. It returns the hits, how many of them have wrong bytes, and the
        seconds until nothing was pending."""
        context, began, new = ReqContext(name, params), time.monotonic(), [name]
        self.m.on_new_request(context)
        while True:
            got = []
            for k in keys:
                got.append(self.m.lookup(k, context))
                if got[-1] is LookupResult.MISS:
                    break
            self.step(new)
            new = ()
            took = time.monotonic() - began
            if all(r in (LookupResult.HIT, LookupResult.MISS) for r in got) or took > patience:
                break
            time.sleep(pause)
        hits, wrong = 0, 0
        for r in got:
            if r is not LookupResult.HIT:
                break
            hits += 1
        if hits:
            spec = self.m.prepare_load(keys[:hits], context)
            for k, c in zip(keys, spec.chunk_ids):
                wrong += bytes(self.slot(c)) != self.body(k)
            self.m.complete_load(keys[:hits], context)
        self.m.on_request_finished(context)
        self.step()
        return hits, wrong, took

    def close(self):
        self.m.shutdown()


def tier(path, **options):
    return [{"type": "KvasirTier", "module_path": "kvasir_tier", "socket_path": path, **options}]
