"""Two servers over one L2: names, prompts, waits and the results of checks."""
import glob
import importlib.metadata
import os
import shutil
import tempfile
import time
import traceback

from blake3 import blake3

from bench.l2.backends import S3, Dir, Private, Redis, Slow
from bench.l2.node import Node, Prompt
from bench.process import log


class Run:
    # shapes of chunks: (layers, heads, dim)
    small, odd, big = (4, 1, 32), (3, 1, 5), (8, 4, 32)

    def __init__(self, args):
        self.args = args
        self.checks, self.skipped, self.perf = {}, [], {}
        self.nreq = 0
        self.tmp = tempfile.mkdtemp(prefix="l2bench-")
        self.tag = f"{os.getpid():x}-{int.from_bytes(os.urandom(3), 'big'):x}"
        self.only = [x for x in args.only.split(",") if x]
        if args.l2 == "dir":
            self.l2 = Dir(args.dir or os.path.join(self.tmp, "l2"))
        elif args.l2 == "private":
            self.l2 = Private(args.dir or os.path.join(self.tmp, "l2"))
        elif args.l2 == "redis":
            self.l2 = Redis(args.redis)
        else:
            self.l2 = S3(args.s3_cmd)
        self.A, self.B = Node(self, "A", args.a), Node(self, "B", args.b or args.a)

    def req(self):
        self.nreq += 1
        return f"l2-{self.nreq}"

    def model(self, shape):
        return f"bench/l2-{self.tag}-" + "x".join(map(str, shape))

    def chunk_bytes(self, shape):
        return 2 * shape[0] * self.chunk * shape[1] * shape[2] * 2

    def piece(self, shape):
        return max(1, min(16, (64 << 20) // self.chunk_bytes(shape)))

    def prompt(self, shape, chunks, salt="", light=False):
        return Prompt(shape, chunks, self.chunk, salt, light)

    def names(self, p, lo=0, hi=None):
        C = self.chunk
        h = blake3(bytes(12)).digest()
        out = []
        for i in range(p.chunks):
            h = blake3(h + b"".join(t.to_bytes(4, "big") for t in p.tokens[i * C:(i + 1) * C])).digest()
            out.append(self.l2.name(self.model(p.shape), 0x01000100, 0, h, p.salt))
        return out[lo:hi]

    def wait_l2(self, p, lo=0, hi=None, limit=None, t0=None):
        """Seconds from t0 until every chunk is in L2 with an allowed length; Slow when not in time."""
        t0 = t0 or time.perf_counter()
        limit = limit or self.args.limit
        want = self.chunk_bytes(p.shape)
        if self.l2.kind == "private":
            time.sleep(self.args.settle)
            return time.perf_counter() - t0
        left = self.names(p, lo, hi)[::-1]
        sizes = (want, (want + 4095) // 4096 * 4096)
        while left:
            while left and self.l2.size(left[-1]) in sizes:
                left.pop()
            if left and time.perf_counter() - t0 > limit:
                raise Slow(f"up to {len(left)} chunks not in L2 after {limit} s, for example {left[-1]}: "
                           f"{self.l2.size(left[-1])} bytes, wanted {want}")
            if left:
                time.sleep(0.002)
        return time.perf_counter() - t0

    def in_l2(self, node, count, chunks, shape=None):
        """Prompts that a server stored and that stand in the L2."""
        ps = [self.prompt(shape or self.small, chunks) for _ in range(count)]
        for p in ps:
            node.store(p)
        for p in ps:
            self.wait_l2(p)
        return ps

    def need(self, *nodes):
        """A server that a fault left unable to work is replaced by a fresh one."""
        for n in nodes:
            if n.alive() and not n.sick:
                continue
            n.stop()
            n.sick = False
            n.start()

    def check(self, name, fn, *args, nodes=None, **kwargs):
        """Calls fn with the run and notes the result: True or False, or such a value and a detail. nodes must be up: both by default."""
        if self.only and not any(name.startswith(o) for o in self.only):
            return
        t0 = time.perf_counter()
        try:
            self.need(*((self.A, self.B) if nodes is None else nodes))
            r = fn(self, *args, **kwargs)
            good, detail = r if isinstance(r, tuple) else (bool(r), None)
        except Exception as e:  # noqa: BLE001 - whatever a check raises, it has failed and the next one runs
            good, detail = False, f"{type(e).__name__}: {e}"
            if self.args.verbose:
                traceback.print_exc()
        self.checks[name] = {"ok": bool(good), "s": round(time.perf_counter() - t0, 2)}
        if detail is not None:
            self.checks[name]["detail"] = detail
        log(("PASS " if good else "FAIL ") + name, detail if detail is not None else "")

    def healthy(self, n, limit):
        """The server still works: stores, L1 hits, L2-only hits, each within the limit."""
        d = {}
        try:
            for _ in range(3):  # all workers and connections of the tier get something to do
                p = self.prompt(self.small, 16)
                n.store(p, limit=limit)
                r = n.load(p, limit=limit)
                d["l1"] = r["problem"] is None and r["hit"] == 16
                self.wait_l2(p, limit=limit)
                d["l2_store"] = True
                n.clear()
                r = n.load(p, limit=limit)
                d["l2_load"] = r["problem"] is None and r["hit"] == 16
                d["hit"] = r["hit"]
                if not (d["l1"] and d["l2_load"]):
                    break
        except Exception as e:  # noqa: BLE001 - the caller reports it
            d["error"] = f"{type(e).__name__}: {e}"
        good = d.get("l1") and d.get("l2_store") and d.get("l2_load")
        if not good:
            n.sick = True
        return bool(good), d

    def result(self):
        failed = [k for k, v in self.checks.items() if not v["ok"]]
        r = {"label": self.args.label, "l2": self.args.l2, "mode": self.args.mode,
             "lmcache_client": importlib.metadata.version("lmcache"), "cpus": os.cpu_count(),
             "checks": self.checks, "passed": len(self.checks) - len(failed), "failed": failed,
             "skipped": self.skipped}
        if self.perf:
            r["perf"] = self.perf
        return r, 1 if failed else 0

    def close(self):
        for n in (self.A, self.B):
            try:
                n.stop()
            except Exception as e:  # noqa: BLE001 - the rest is closed all the same
                log("stop", n.nm, e)
        self.l2.close()
        if self.args.keep_logs:
            os.makedirs(self.args.keep_logs, exist_ok=True)
            for f in glob.glob(os.path.join(self.tmp, "server-*.log")):
                shutil.copy(f, self.args.keep_logs)
        shutil.rmtree(self.tmp, ignore_errors=True)
