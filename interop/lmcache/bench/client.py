"""The engine's side of an LMCache server, through the real lmcache client: workers, stores, lookups, retrieves, and the results of checks."""
import os
import time
import traceback
import zlib

from bench.process import log


class Client:
    """One connection to a server. Request ids and models get the run's tag, so that runs do not meet."""

    def __init__(self, args):
        import numpy as np
        import torch
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.torch, self.zmq, self.np = torch, zmq, np
        self.device = getattr(args, "device", "cpu")
        torch.set_num_threads(1)
        self.Key, self.EGI, self.ET = IPCCacheServerKey, EngineGroupInfo, EngineType
        self.packed = "token_bytes" in IPCCacheServerKey.__dataclass_fields__  # 0.5.7
        self.create_ctx, self.Factory = create_transfer_context, RequestClientFactory
        self.args = args
        self.modes = [m for m in args.modes.split(",") if m]
        self.T = args.timeout
        self.zctx = zmq.Context()
        self.c = self.Factory.create(args.url, context=self.zctx)
        self.chunk = self.c.get_chunk_size().result(timeout=self.T)
        # instance ids, token ids, request ids and model names differ between any two runs
        self.tag = args.run_tag
        self.iid = (int.from_bytes(os.urandom(5), "big") << 16) + 1
        self.seed = [zlib.crc32(self.tag.encode()), time.time_ns() & 0xFFFFFFFF, os.getpid()]
        self.rng = np.random.default_rng(self.seed)
        self.pid = None
        self.checks = {}
        self.skipped = []
        self.run_tag = f"{self.tag}-{self.seed[1]:x}-{os.getpid():x}".lstrip("-")
        self.scope = "0"
        self.n_checks = 0
        self.open_ctx = []

    # -- helpers
    def next_id(self):
        self.iid += 1
        return self.iid

    def tokens(self, n):
        return self.rng.integers(0, 1 << 17, n).tolist()

    def model(self, name):
        return f"bench/{name}" + (f"-{self.tag}" if self.tag else "")

    def clear(self, force):
        """Drops what the whole server holds: never with --no-clear."""
        if self.args.no_clear:
            raise RuntimeError("clear() with --no-clear")
        self.c.clear(force).result(timeout=self.T)

    def rid(self, req):
        """Request ids are unique per check: the reference server caches a session's
        hashes by request id and does not drop them when the tokens change."""
        return f"{self.run_tag}-{self.scope}-{req}"

    def key(self, t, start, end, req, model, worker=0, ws=1, salt="", readers=1):
        return self.Key(
            model_name=model,
            world_size=ws,
            worker_id=worker,
            **({"token_bytes": self.np.asarray(t, dtype=">u4").tobytes()} if self.packed else {"token_ids": tuple(t)}),
            start=start,
            end=end,
            request_id=self.rid(req),
            cache_salt=salt,
            num_kv_readers=readers,
        )

    def kv(self, layers, heads, dim, dtype, nblocks, bs, fill=True, mla=False):
        torch = self.torch
        shape = (nblocks, bs, dim) if mla else (2, nblocks, bs, heads, dim)
        out = {}
        for i in range(layers):
            if fill:
                raw = torch.randint(
                    0, 255, (int(torch.tensor(shape).prod()) * dtype.itemsize,),
                    dtype=torch.uint8, device=self.device,
                )
                x = raw.view(dtype).view(shape)
            else:
                x = torch.zeros(shape, dtype=dtype, device=self.device)
            out[f"model.layers.{i}.self_attn.attn"] = x
        return out

    def finish_copies(self):
        """Waits until the device has done what was asked of it: a copy to a GPU is only queued when retrieve returns."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def same(self, a, ab, b, bb, mla=False):
        """Byte compare blocks ``ab`` of kv ``a`` with blocks ``bb`` of kv ``b``."""
        torch = self.torch
        for n in a:
            x = a[n][ab] if mla else a[n][:, ab]
            y = b[n][bb] if mla else b[n][:, bb]
            if not torch.equal(
                x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
            ):
                return False
        return True

    def worker(self, kv, model, mode, bs, ws=1, client=None):
        ctx = self.create_ctx(
            kv, instance_id=self.next_id(), req_client=client or self.c, mode=mode
        )
        ctx.register(
            kv, model, ws, self.chunk // bs, self.T,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[
                self.EGI(
                    engine_group_id=0,
                    layer_indices=tuple(range(len(kv))),
                    tokens_per_block=bs,
                )
            ],
            engine_type=self.ET.VLLM,
        )
        self.open_ctx.append(ctx)
        return ctx

    def drop(self, ctx):
        f = ctx.unregister()
        if f is not None:
            f.result(timeout=self.T)
        ctx.close()
        if ctx in self.open_ctx:
            self.open_ctx.remove(ctx)

    def tokens_in(self, key):
        """The token ids of a key, whatever the library keeps in it."""
        return self.np.frombuffer(key.token_bytes, dtype=">u4").tolist() if self.packed else list(key.token_ids)

    def prepare_read(self, ed, key, iid):
        """prepare_retrieve; 0.5.7 wants to know how many chunks must come back."""
        n = ((key.end - key.start) // self.chunk,) if self.packed else ()
        return ed.prepare_retrieve(key, iid, *n)

    def settle(self, key, limit=60.0):
        """In lmcache_driven mode the reference server answers STORE before the
        chunks become visible, so wait until a lookup sees the whole range."""
        t0 = time.perf_counter()
        n = 0
        while time.perf_counter() - t0 < limit:
            n += 1
            req = f"settle{n}-{key.request_id}"
            h = self.lookup(self.tokens_in(key), key.end, req, key.model_name,
                            salt=key.cache_salt, ws=key.world_size) or 0
            if h:
                self.c.free_lookup_locks(
                    self.key(self.tokens_in(key), 0, h * self.chunk, req, key.model_name,
                             worker=None, ws=key.world_size, salt=key.cache_salt), 1
                ).result(timeout=self.T)
            self.end(req)
            if h * self.chunk >= key.end:
                return time.perf_counter() - t0
            time.sleep(0.002)
        return None

    def store(self, ctx, kv, key, blocks, bs):
        ok = self.store_raw(ctx, kv, key, blocks, bs)
        if ok and not hasattr(ctx, "_engine_driven_context"):
            self.settle(key)
        return ok

    def store_raw(self, ctx, kv, key, blocks, bs):
        return self.ok(ctx.submit_store(
            key.request_id, key, kv, [list(blocks)], ctx.create_recorded_event(),
            self.chunk // bs,
        ).result(timeout=self.T))

    def retrieve(self, ctx, kv, key, blocks, bs, skip=0):
        return self.ok(ctx.submit_retrieve(
            key.request_id, key, kv, [list(blocks)], ctx.create_recorded_event(),
            self.chunk // bs, skip_first_n_tokens=skip,
        ).result(timeout=self.T))

    @staticmethod
    def shm_context(worker):
        """What an engine-driven worker reserves and commits with, if the server offers a shared-memory pool."""
        ed = getattr(worker, "_engine_driven_context", None)
        return ed if ed is not None and type(ed).__name__.endswith("Shm") else None

    @staticmethod
    def ok(r):
        return bool(r[1]) if isinstance(r, tuple) else bool(r)

    def lookup(self, t, end, req, model, salt="", ws=1, readers=1, client=None):
        c = client or self.c
        k = self.key(t, 0, end, req, model, worker=None, salt=salt, ws=ws, readers=readers)
        c.lookup(k, 1).result(timeout=self.T)
        r = c.wait_prefetch_status(self.rid(req), float(self.T)).result(timeout=self.T + 5)
        return r

    def end(self, req, client=None):
        (client or self.c).end_session(self.rid(req)).result(timeout=self.T)

    def check(self, name, fn, *args, **kwargs):
        """Calls fn and notes the result: True or False, or such a value and a detail."""
        self.n_checks += 1
        self.scope = str(self.n_checks)
        t0 = time.perf_counter()
        try:
            r = fn(*args, **kwargs)
            good, detail = (r if isinstance(r, tuple) else (bool(r), None))
        except Exception as e:  # noqa: BLE001 - whatever a check raises, it has failed and the next one runs
            good, detail = False, f"{type(e).__name__}: {e}"
            if self.args.verbose:
                traceback.print_exc()
        self.checks[name] = {"ok": bool(good), "s": round(time.perf_counter() - t0, 3)}
        if detail is not None:
            self.checks[name]["detail"] = detail
        log(("PASS " if good else "FAIL ") + name, detail if detail is not None else "")
