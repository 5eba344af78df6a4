"""One server over the L2, and the real client's connection to it: stores, lookups and loads of whole prompts."""
import glob
import json
import os
import random
import time
import types
import urllib.request

from ports import free_ports

from bench.client import Client
from bench.l2.backends import Slow
from bench.process import log, raw_ping_until, spawn, stop_proc
from bench.segments import POOLS, remove, unlink_kv

BS = 16  # tokens of an engine block


class Prompt:
    """Random tokens. The number of a prompt follows in each of its blocks."""

    n_made = 0

    def __init__(self, shape, chunks, size, salt="", light=False):
        Prompt.n_made += 1
        self.id = Prompt.n_made
        self.shape, self.chunks, self.salt = shape, chunks, salt
        self.light = light  # only two values per block differ from other prompts: cheap, for the figures
        g = random.Random(os.urandom(8))
        self.tokens = [g.randrange(1 << 17) for _ in range(chunks * size)]


class Node:
    """One server process and the real client's connection to it."""

    def __init__(self, run, name, template):
        self.run, self.nm, self.template = run, name, template
        self.proc = self.b = None
        self.restarts = 0
        self.sick = False

    def start(self, direct=False, extra=None):
        port, hp = free_ports(2)
        v = {"port": port, "http": hp, "shm": f"l2b{os.getpid()}{self.nm.lower()}", **self.run.l2.vars(direct)}
        v.update(extra or {})
        cmd = self.template
        for k, x in v.items():
            cmd = cmd.replace("{" + k + "}", str(x))
        self.url = f"tcp://127.0.0.1:{port}"
        self.http = hp
        self.shm = v["shm"]
        self.logf = os.path.join(self.run.tmp, f"server-{self.nm}-{self.restarts}.log")
        self.restarts += 1
        t0 = time.monotonic()
        self.proc = spawn(cmd, self.logf)
        if not raw_ping_until(self.url, t0 + self.run.args.start_timeout, lambda: self.proc.poll() is None):
            with open(self.logf, errors="replace") as f:
                log(f.read()[-2000:])
            raise Slow(f"server {self.nm} did not answer")
        self.start_s = time.monotonic() - t0
        self.connect()
        log(f"server {self.nm} up after {self.start_s:.1f} s")
        return self

    def connect(self):
        a = types.SimpleNamespace(url=self.url, modes=self.run.args.mode, timeout=self.run.args.limit,
                                  run_tag=f"l2{self.nm}", no_clear=False, verbose=False)
        self.b = Client(a)
        self.b.pid = self.proc.pid
        self.run.chunk = self.b.chunk
        self.ctxs, self.rd, self.base, self.dark = {}, {}, {}, {}

    def stop(self, sig=None):
        if self.proc is None:
            return
        if self.b:
            for _, kv, dst, _ in self.ctxs.values():
                unlink_kv(kv)
                unlink_kv(dst)
        self.ctxs = {}
        if sig:
            self.proc.send_signal(sig)
            self.proc.wait(20)
        else:
            stop_proc(self.proc, grace=8)
        self.proc = None
        self.b = None
        remove(glob.glob(f"{POOLS}{self.shm}*"))

    def alive(self):
        return self.proc is not None and self.proc.poll() is None

    # shapes: (layers, heads, dim)
    def ctx(self, shape):
        """(worker, source tensors, target tensors, chunks they hold) for one chunk shape."""
        if shape not in self.ctxs:
            b = self.b
            K = self.run.piece(shape)
            bpc = b.chunk // BS
            kv = b.kv(*shape, b.torch.float16, K * bpc, BS)
            dst = b.kv(*shape, b.torch.float16, K * bpc, BS, fill=False)
            g = b.torch.Generator().manual_seed(sum(shape))
            base = {}
            for n, x in kv.items():  # the same base pattern on every node
                v = x.view(b.torch.int16)
                v.copy_(b.torch.randint(-32768, 32767, v.shape, generator=g, dtype=b.torch.int16))
                base[n] = v.clone()
            self.base[shape] = base
            w = b.worker(kv, self.run.model(shape), self.run.args.mode, BS)
            w2 = w
            if self.run.args.mode == "lmcache_driven":
                w2 = b.worker(dst, self.run.model(shape), self.run.args.mode, BS)
            self.ctxs[shape] = (w, kv, dst, K)
            self.rd[shape] = w2
        return self.ctxs[shape]

    def stamp(self, kv, p, c, n, K):
        """Chunks c..c+n in their blocks (chunk c mod K): each block carries the prompt's number and its own place,
        and every value is the base pattern changed by the prompt's number."""
        t = self.b.torch
        bpc = self.b.chunk // BS
        lo, k = c % K * bpc, n * bpc
        place = t.arange(c * bpc, c * bpc + k, dtype=t.int32).to(t.int16)
        mask = 0 if p.light else (p.id * 0x9E37 & 0x7FFF)
        for nm, x in kv.items():
            v = x.view(t.int16)
            if not p.light or self.dark.get(p.shape):
                v[:, lo:lo + k] = self.base[p.shape][nm][:, lo:lo + k] ^ mask
            v[:, lo:lo + k, 0, 0, 0] = p.id & 0x7FFF
            v[:, lo:lo + k, 1, 0, 0] = place
        self.dark[p.shape] = self.dark.get(p.shape) or not p.light
        return range(lo, lo + k)

    def key(self, p, start, end, req, worker=0):
        return self.b.key(p.tokens, start, end, req, self.run.model(p.shape), worker=worker, salt=p.salt)

    def store(self, p, lo=0, hi=None, limit=None):
        """Stores chunks lo..hi of the prompt; seconds until the last commit was answered."""
        w, kv, _, K = self.ctx(p.shape)
        b, C = self.b, self.b.chunk
        bpc = C // BS
        hi = p.chunks if hi is None else hi
        req = self.run.req()
        t0 = time.perf_counter()
        c = lo
        while c < hi:
            n = min(K - c % K, hi - c)
            blocks = self.stamp(kv, p, c, n, K)
            k = self.key(p, c * C, (c + n) * C, req)
            r = w.submit_store(k.request_id, k, kv, [list(blocks)], w.create_recorded_event(), bpc)
            if not b.ok(r.result(timeout=limit or self.run.args.limit)):
                raise RuntimeError("store answered false")
            c += n
        if self.run.args.mode == "lmcache_driven":
            b.settle(self.key(p, 0, hi * C, req))
        s = time.perf_counter() - t0
        self.end(req)
        return s

    def store_empty(self, p):
        """Reserve and commit without copying (engine_driven only): the server's own speed towards L2."""
        w, _, _, K = self.ctx(p.shape)
        C, req = self.b.chunk, self.run.req()
        ed = w._engine_driven_context
        for c in range(0, p.chunks, K):
            k = self.key(p, c * C, min(p.chunks, c + K) * C, req)
            got = ed.prepare_store(k, w._instance_id)
            if got is None or not got[1]:
                raise RuntimeError("nothing reserved")
            ed.commit_store(k, w._instance_id, [])
        self.end(req)

    def end(self, req):
        self.b.end(req)

    def look(self, p, req, limit=None, chunks=None, step=0.001):
        """Lookup by polling operation 9. Raises Slow when no count came within the limit."""
        b, C = self.b, self.b.chunk
        self.ctx(p.shape)
        limit = limit or self.run.args.limit
        k = self.key(p, 0, (chunks or p.chunks) * C, req, worker=None)
        t0 = time.perf_counter()
        try:
            b.c.lookup(k, 1).result(timeout=limit)
        except TimeoutError:
            raise Slow(f"lookup was not acknowledged in {limit} s")
        ack = time.perf_counter() - t0
        nones, worst = 0, 0.0
        while True:
            t1 = time.perf_counter()
            try:
                r = b.c.query_prefetch_status(b.rid(req)).result(timeout=max(0.5, limit - (t1 - t0)))
            except TimeoutError:
                raise Slow(f"operation 9 was not answered in {limit} s")
            t2 = time.perf_counter()
            worst = max(worst, t2 - t1)
            if r is not None:
                return {"hit": r, "ack_ms": round(ack * 1e3, 2), "ready_ms": round((t2 - t0) * 1e3, 2),
                        "running_answers": nones, "op9_worst_ms": round(worst * 1e3, 2)}
            nones += 1
            if t2 - t0 > limit:
                raise Slow(f"still loading after {limit} s ({nones} answers without a result)")
            time.sleep(step)

    def fetch(self, p, req, hit):
        """Retrieves ``hit`` chunks and compares every byte; None when right, else a text. Also the seconds."""
        _, kv, dst, K = self.ctx(p.shape)
        w = self.rd[p.shape]
        b, C = self.b, self.b.chunk
        bpc = C // BS
        took = 0.0
        for c in range(0, hit, K):
            n = min(K, hit - c)
            for x in dst.values():
                x.zero_()
            k = self.key(p, c * C, (c + n) * C, req)
            t0 = time.perf_counter()
            ok = b.retrieve(w, dst, k, range(n * bpc), BS)
            took += time.perf_counter() - t0
            if not ok:
                return f"retrieve of chunks {c}..{c + n} failed after a hit of {hit}", took
            self.stamp(kv, p, c, n, K)
            for nm in kv:
                x, y = kv[nm][:, : n * bpc], dst[nm][:, : n * bpc]
                if not b.torch.equal(x.contiguous().view(b.torch.uint8), y.contiguous().view(b.torch.uint8)):
                    bad = [i + c for i in range(n) if not b.torch.equal(
                        x[:, i * bpc:(i + 1) * bpc].contiguous().view(b.torch.uint8),
                        y[:, i * bpc:(i + 1) * bpc].contiguous().view(b.torch.uint8))]
                    return f"WRONG BYTES in chunks {bad}", took
        return None, took

    def free(self, p, req, hit):
        if hit:
            self.b.c.free_lookup_locks(self.key(p, 0, hit * self.b.chunk, req, worker=None), 1).result(
                timeout=self.run.args.limit)

    def load(self, p, limit=None, chunks=None):
        """look + fetch + end; returns the look dictionary with ``problem`` and ``retrieve_s``."""
        req = self.run.req()
        r = self.look(p, req, limit, chunks)
        r["problem"], s = self.fetch(p, req, r["hit"])
        r["retrieve_s"] = round(s, 4)
        self.end(req)
        return r

    def clear(self, force=True):
        """Forgets what is in RAM and leaves the L2. The clear of LMCache's protocol does that at LMCache; at Kvasir it reaches
        the tiers, and the HTTP route can leave them."""
        body = json.dumps({"tier": "l1", "force": force}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/cache/clear", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.run.args.limit) as answer:
                cleared = json.load(answer).get("cleared")
        except (OSError, ValueError):
            cleared = None
        if not isinstance(cleared, dict) or cleared.get("tier") != "l1":
            self.b.c.clear(force).result(timeout=self.run.args.limit)
