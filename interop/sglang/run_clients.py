#!/usr/bin/env python3
"""SGLang's two clients for LMCache, without an engine, against kvasir server: each byte that is loaded.

  run_clients.py --kvasir bin/kvasir [--only KIND,...]

`unified` is the client of SGLang 0.5.23 (LMCacheUnifiedRadixCache), `old` the one before it. Kinds: MHA with 2, 8 and 16 heads at pages of 16
tokens, MLA, a window beside full attention, DSA's indexers; numbers of 16 and 8 bits. Of the unified client those of one KV group run
engine_driven; lmcache_driven on a CPU lends views, so the server runs with --allow-sglang-cpu-views and the registered tensors are compared.
The lmcache package is the one that Python finds. Prints one JSON line.
"""
import glob
import importlib.metadata
import importlib.util
import os
import types

import torch
from sgl import OFFLINE, C, Server

PAGE, CHUNK, LAYERS, SIZE, SLOTS, TOKENS = 16, 32, 2, 8, 1024, 96
PROMPT = list(range(1000, 1000 + TOKENS))
FROM, TO = torch.arange(64, 64 + TOKENS), torch.arange(640, 640 + TOKENS)
KINDS = {
    **{f"unified MHA {n} heads, {mode}": ("unified", "mha", n, torch.bfloat16, mode) for n in (2, 8, 16) for mode in ("engine_driven", "lmcache_driven")},
    "unified MHA 8 heads of 8 bits, lmcache_driven": ("unified", "mha", 8, torch.uint8, "lmcache_driven"),
    **{f"unified MLA, {mode}": ("unified", "mla", 1, torch.bfloat16, mode) for mode in ("engine_driven", "lmcache_driven")},
    "unified window, lmcache_driven": ("unified", "window", 2, torch.bfloat16, "lmcache_driven"),
    "unified DSA, lmcache_driven": ("unified", "dsa", 1, torch.bfloat16, "lmcache_driven"),
    **{f"old {n} heads of {8 * width} bits": ("old", "mha", n, dtype, "lmcache_driven") for n in (2, 8, 16) for width, dtype in ((2, torch.bfloat16), (1, torch.uint8))},
}


def numbers(seed, dtype, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, shape, generator=g, dtype=torch.uint8) if dtype == torch.uint8 else torch.randn(shape, generator=g).to(dtype)


def pool(kind, heads, dtype, seed=1):
    """What SGLang calls a KV pool, as far as the clients look into it."""
    planes = lambda n: [numbers(seed + i, dtype, SLOTS, heads, SIZE) for i in range(n)]
    if kind in ("mla", "dsa"):
        p = types.SimpleNamespace(kv_buffer=planes(LAYERS))
        if kind == "dsa":
            p.use_dsa, p.index_k_with_scale_buffer = True, [numbers(90 + i, dtype, SLOTS // PAGE, 5 * PAGE) for i in range(LAYERS)]
        return p
    both = planes(2 * LAYERS)
    return types.SimpleNamespace(k_buffer=both[:LAYERS], v_buffer=both[LAYERS:])


FIELDS = ("kv_buffer", "k_buffer", "v_buffer", "index_k_with_scale_buffer")


def content(p, slots):
    """The bytes of slots in all tensors of a pool; some tensors have a row for each page."""
    rows = []
    for name in FIELDS:
        for t in getattr(p, name, ()):
            rows.append(t[slots[::PAGE] // PAGE if name == FIELDS[-1] else slots].clone())
    return rows


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def until(poll):
    got = [None]

    def ready():
        got[0] = poll()
        return got[0] is not None
    C.until("the client's call ends", ready, 30)
    return got[0]


def unified(kind, heads, dtype, mode, server, out, name):
    from lmcache.integration.sglang.unified_lmcache_mp_connector import (
        UnifiedLMCacheMPConnector,
    )
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    window = kind == "window"
    pools = [pool(kind, heads, dtype)] + ([pool(kind, heads, dtype, 50)] if window else [])
    kv = types.SimpleNamespace(full_kv_pool=pools[0], swa_kv_pool=pools[1]) if window else pools[0]
    config = os.path.join(out, "client.yaml")
    with open(config, "w") as f:
        f.write(f"mp_host: 127.0.0.1\nmp_port: {server.port}\nextra_config:\n  lmcache.mp.mp_transfer_mode: {mode}\n  lmcache.mp.mq_timeout: 20\n")
    client = UnifiedLMCacheMPConnector(
        config_file=config, tp_size=1, tp_rank=0, tp_group=None, page_size=PAGE, req_to_token_pool=None, mamba_component=None, sliding_window_size=CHUNK if window else None,
        model_config=types.SimpleNamespace(attention_arch=AttentionArch.MLA if kind in ("mla", "dsa") else AttentionArch.MHA, model_path=name, hf_config=types.SimpleNamespace(architectures=[])),
        token_to_kv_pool_allocator=types.SimpleNamespace(get_kvcache=lambda: kv, translate_kv_indices_for_transfer=lambda x: x, translate_loc_from_full_to_swa=lambda x: x),
        tree_components=(ComponentType.FULL, ComponentType.SWA) if window else (ComponentType.FULL,))
    if mode == "lmcache_driven":  # the tensors that were registered are those in shared memory
        moved = iter(list(client._kv_caches.values()))
        for p in pools:
            for field in FIELDS:
                if hasattr(p, field):
                    setattr(p, field, [next(moved).reshape(t.shape) for t in getattr(p, field)])

    def look(request, salt=""):
        op = client.submit_lookup(request, PROMPT, local_hit_tokens=0, cache_salt=salt)
        return op, until(lambda: None if (hit := client.poll_lookup(op)) is None else (hit,))[0]

    def load(op, first):
        job = client.submit_load(op, [TO[first:]] * len(pools), local_hit_tokens=first)
        until(lambda: job.future.query() or None)
        return client.complete_load(job)

    try:
        hits = [look("cold")[1]]
        job = client.submit_store("cold", PROMPT, [FROM] * len(pools), device_indices_start=0, cache_salt="")
        until(lambda: job.future.query() or None)
        stored = client.complete_store(job)
        client.finish_request("cold")
        want = [content(p, FROM) for p in pools]
        op, hit = look("warm")
        loaded = bool(hit) and load(op, 0)
        client.finish_request("warm")
        last = slice(-CHUNK, None)  # of a window no more is loaded
        same = loaded and equal(content(pools[0], TO), want[0]) and (not window or equal(content(pools[1], TO[last]), content(pools[1], FROM[last])))
        hits += [hit, look("other", client.build_cache_salt("tenant", "lora"))[1]]
        client.finish_request("other")
        op, hit = look("part")
        client.free_lookup_locks("part", start=0, end=CHUNK)
        part = load(op, CHUNK)
        client.finish_request("part")
        return {"hits": hits, "stored": bool(stored), "loaded": bool(loaded), "part": bool(part), "bytes": bool(same)}
    finally:
        client.close()


def old(kind, heads, dtype, mode, server, out, name):
    from lmcache.integration.sglang.multi_process_adapter import LMCacheMPConnector
    from lmcache.integration.sglang.sglang_adapter import LoadMetadata, StoreMetadata

    p = pool(kind, heads, dtype)
    client = LMCacheMPConnector(types.SimpleNamespace(model_path=name), 1, 0, PAGE, "tcp://127.0.0.1", server.port, p.k_buffer, p.v_buffer, mq_timeout=20)
    try:
        hits = [client.lookup_kv(PROMPT, "cold")]
        stored = client.store_kv_async(StoreMetadata(None, PROMPT, FROM, 0, "cold")).result(timeout=20)
        client.end_session("cold")
        want = content(p, FROM)
        hits.append(client.lookup_kv(PROMPT, "warm"))
        loaded = client.retrieve_kv(LoadMetadata(PROMPT, TO, 0, request_id="warm")) if hits[-1] else 0
        same = equal(content(p, TO), want)
        client.end_session("warm")
        return {"hits": [*hits, 0], "stored": bool(stored), "loaded": bool(loaded), "part": True, "bytes": bool(loaded) and same}
    finally:
        client.close()


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--only", help="parts of names of kinds, with commas")
    ap.add_argument("--no-old", action="store_true", help="this lmcache has no older client of SGLang any more, as since 0.5.7rc2")
    a = ap.parse_args()
    os.environ.update(OFFLINE)
    out, R = C.begin(a, "sglang_clients", lmcache=importlib.metadata.version("lmcache"), steps={})
    check = C.Checks(R)
    with C.reported(R):
        if a.no_old:
            check("no older client", importlib.util.find_spec("lmcache.integration.sglang.multi_process_adapter") is None, "")
        server = Server(a.kvasir, out, "--chunk-size", str(CHUNK), "--separate-object-groups", "--allow-sglang-cpu-views")
        for n, (name, (client, *kind)) in enumerate(KINDS.items()):
            if a.only and not any(part in name for part in a.only.split(",")) or a.no_old and client == "old":
                continue
            try:
                got = {"unified": unified, "old": old}[client](*kind, server, out, f"kind/{n}")
            except Exception as e:  # noqa: BLE001 - the other kinds run all the same
                got = {"error": f"{type(e).__name__}: {e}"[:300]}
            check(name, got == {"hits": [0, TOKENS, 0], "stored": True, "loaded": True, "part": True, "bytes": True}, got)
        server.stop()
        for path in glob.glob(f"/dev/shm/lmcache_kv_{os.getpid()}_*"):  # the clients leave their tensors there
            os.unlink(path)
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
