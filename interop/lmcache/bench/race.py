"""Races two servers: every row is measured A,B,A,B,... and compared by the medians."""
import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
import traceback

from ports import free_ports

from bench.client import Client
from bench.figures import lookup_row, memcpy_gbps, prepare_lookup
from bench.process import (
    CpuMeter,
    cpu_seconds,
    log,
    pct,
    raw_ping_until,
    rss_tree_mb,
    spawn,
    stop_proc,
)
from bench.rates import RateClients, raw_rate
from bench.segments import NewPools, unlink_kv

SUBSCRIBERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "subscribers.py")


class Side:
    """One server of the race."""

    def __init__(self, name, cmd, args):
        self.name, self.cmd, self.args = name, cmd, args
        self.proc = self.bench = self.one = self.w1 = self.w2 = self.readers = None
        self.src, self.dst = {}, {}

    def subscribe(self, port):
        """Starts the subscribers of server B's KV events, before anything is measured."""
        n, endpoint = self.args.subscribers
        self.readers = subprocess.Popen(
            [sys.executable, SUBSCRIBERS, n, endpoint.replace("{port}", str(port))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if self.readers.stdout.readline() != "subscribed\n":
            raise RuntimeError(f"nothing comes from {endpoint}")

    def start(self):
        port, http = free_ports(2)
        self.url = f"tcp://127.0.0.1:{port}"
        cmd = self.cmd.replace("{port}", str(port)).replace("{http}", str(http))
        t0 = time.monotonic()
        self.pools = NewPools()
        logged = self.args.server_log if self.args.server_log == os.devnull else f"{self.args.server_log}.{self.name}"
        self.proc = spawn(cmd, logged, "a")
        if not raw_ping_until(self.url, t0 + self.args.start_timeout, lambda: self.proc.poll() is None):
            raise RuntimeError(f"server {self.name} did not answer a ping")
        dt = time.monotonic() - t0
        self.pools.note(self.proc.pid)
        cpu = cpu_seconds(self.proc.pid)
        if self.name == "B" and self.args.subscribers and int(self.args.subscribers[0]) > 0:
            self.subscribe(port)
        time.sleep(1.0)
        mem = rss_tree_mb(self.proc.pid)
        ns = argparse.Namespace(**vars(self.args))
        ns.url, ns.no_clear = self.url, False
        self.bench = Client(ns)
        self.bench.pid = self.proc.pid
        return {"start_to_first_ping_s": dt, "start_server_cpu_s": cpu, "idle_rss_mb": mem.get("rss_mb"),
                "idle_rss_not_shared_mb": mem.get("rss_minus_shared_mb")}

    def stop(self):
        """Ends the server and removes its pool: each start makes a new one, and a race must not fill /dev/shm."""
        for open_ in (self.one, self.bench and self.bench.c):
            with contextlib.suppress(Exception):  # the server may be gone
                if open_:
                    open_.close()
        for kv in (self.src, self.dst):
            unlink_kv(kv)
        self.one = self.bench = self.w1 = self.w2 = None
        self.src, self.dst = {}, {}
        if self.readers is not None:
            self.readers.terminate()
            log("B", self.readers.communicate(timeout=60)[0].strip())
            self.readers = None
        if self.proc is not None:
            self.pools.note(self.proc.pid)
            stop_proc(self.proc)
            self.pools.remove()

    # -- rows: each returns {figure: value}
    def copy_setup(self):
        b = self.bench
        torch, C, bs = b.torch, b.chunk, 16
        layers, heads, dim = 32, 8, 128
        cb = 2 * layers * C * heads * dim * 2
        n = max(1, min(8, int(self.args.l1_gb * 2**30 * 0.25 // cb)))
        bpc = C // bs
        model = b.model("race-copy")
        self.src = b.kv(layers, heads, dim, torch.float16, n * bpc, bs)
        self.dst = b.kv(layers, heads, dim, torch.float16, n * bpc, bs, fill=False)
        self.w1 = b.worker(self.src, model, "lmcache_driven", bs)
        self.w2 = b.worker(self.dst, model, "lmcache_driven", bs)
        self.cp = (model, n, bs, list(range(n * bpc)), n * cb)

    def copy_store(self):
        b, (model, n, bs, blocks, nbytes) = self.bench, self.cp
        t = b.tokens(n * b.chunk)
        req = f"rc{b.next_id()}"
        k = b.key(t, 0, len(t), req, model)
        a = time.perf_counter()
        ok = b.store_raw(self.w1, self.src, k, blocks, bs)
        dt = time.perf_counter() - a
        vis = b.settle(k) if ok else None
        b.end(req)
        if vis is None:
            raise RuntimeError("store refused or never visible")
        return t, nbytes / dt / 1e9

    def first_pass(self):
        """The first stores (half a pool of them) into a pool nothing has touched yet."""
        self.copy_setup()
        n = max(1, int(self.args.l1_gb * 2**30 * 0.5 // self.cp[4]))
        v = [self.copy_store()[1] for _ in range(n)]
        return {"copy_store_first_pass_gbps": statistics.median(v),
                "copy_memcpy_at_first_pass_gbps": memcpy_gbps(self.bench.torch)}

    def touch_pool(self):
        self.bench.clear(True)
        for _ in range(int(self.args.l1_gb * 2**30 // self.cp[4]) + 1):
            try:
                self.copy_store()
            except RuntimeError:
                time.sleep(1)
        self.bench.clear(True)
        return {}

    def copies(self, reps=3):
        b, (model, n, bs, blocks, nbytes) = self.bench, self.cp
        m = memcpy_gbps(b.torch)
        st, rt = [], []
        for _ in range(reps):
            t, g = self.copy_store()
            st.append(g)
            req = f"rr{b.next_id()}"
            h = b.lookup(t, len(t), req, model)
            if h != n:
                raise RuntimeError(f"hit {h} of {n}")
            k = b.key(t, 0, len(t), req, model)
            a = time.perf_counter()
            ok = b.retrieve(self.w2, self.dst, k, blocks, bs)
            rt.append(nbytes / (time.perf_counter() - a) / 1e9)
            b.end(req)
            if not ok or not b.same(self.src, blocks, self.dst, blocks):
                raise RuntimeError("retrieve failed or bytes differ")
            b.clear(True)
        m = (m + memcpy_gbps(b.torch)) / 2
        s, r = statistics.median(st), statistics.median(rt)
        return {"copy_store_gbps": s, "copy_retrieve_gbps": r, "copy_memcpy_gbps": m,
                "copy_store_by_memcpy": s / m, "copy_retrieve_by_memcpy": r / m}

    def rate(self, op):
        if self.one is None:
            self.one = RateClients(self.url, 1)
        with CpuMeter(self.proc.pid, fine=True) as m:
            r = self.one.run(op, self.args.seconds)
        return {f"{op}_1_server_cpu_us": m.per(r["n"]), f"{op}_1_p50_us": r["p50_us"]}

    def raw(self, op):
        import msgspec

        ops = {"noop": (24, []), "ping": (22, [msgspec.msgpack.encode(None)])}
        with CpuMeter(self.proc.pid, fine=True) as m:
            r = raw_rate(self.url, *ops[op], 64, self.args.seconds)
        return {f"{op}_window64_server_cpu_us": m.per(r["n"]), f"{op}_window64_rps": r["rps"]}

    def look(self, kind):
        b = self.bench
        P = prepare_lookup(b, "engine_driven")
        try:
            n = -(-self.args.lookups // self.args.rounds)
            r = lookup_row(b, P, kind, n)
        finally:
            b.drop(P["w"])
            b.clear(True)
        return {f"lookup_{kind}_server_cpu_us": r["server_cpu_us_per_lookup"],
                f"lookup_{kind}_p50_us": r["lookup_plus_status"]["p50_us"]}

    def control(self, n=50, chunks=8):
        """Engine-driven prepare+commit pairs without the copy: what the server itself costs."""
        b = self.bench
        torch, C, bs = b.torch, b.chunk, 16
        model = b.model("race-control")
        kv = b.kv(2, 2, 64, torch.float16, chunks * (C // bs), bs)
        w = b.worker(kv, model, "engine_driven", bs)
        ed = b.shm_context(w)
        if ed is None:
            raise RuntimeError("no shared-memory pool offered")
        ms, mr = CpuMeter(self.proc.pid, fine=True), CpuMeter(self.proc.pid, fine=True)
        ls, lr = [], []
        for _ in range(n):
            t = b.tokens(chunks * C)
            i = b.next_id()
            k = b.key(t, 0, len(t), f"s{i}", model)
            with ms:
                a = time.perf_counter()
                got = ed.prepare_store(k, w._instance_id)
                ok = ed.commit_store(k, w._instance_id, [])
                ls.append(time.perf_counter() - a)
            del got
            b.end(f"s{i}")
            if not ok or b.lookup(t, len(t), f"r{i}", model) != chunks:
                raise RuntimeError("a committed store is not found")
            k = b.key(t, 0, len(t), f"r{i}", model)
            with mr:
                a = time.perf_counter()
                got = b.prepare_read(ed, k, w._instance_id)
                ed.commit_retrieve(k, w._instance_id)
                lr.append(time.perf_counter() - a)
            del got
            b.end(f"r{i}")
        b.drop(w)
        b.clear(True)
        return {"control_store_pair_server_cpu_us": ms.per(n), "control_store_pair_p50_us": pct(ls, 50) * 1e6,
                "control_retrieve_pair_server_cpu_us": mr.per(n),
                "control_retrieve_pair_p50_us": pct(lr, 50) * 1e6}

    def stores(self, mode, every=0.2, wait=15):
        """Stores of 8 MiB (two chunks) at a steady rate, and the time after them in which their checksums are made:
        what a store and its sum cost the server together. Nothing is evicted, if the pool has room for all."""
        b = self.bench
        C, bs, per = b.chunk, 16, 2
        model = b.model(f"race-stores-{mode}")
        kv = b.kv(8, 8, 64, b.torch.float16, per * (C // bs), bs)
        w = b.worker(kv, model, mode, bs)
        stored = 0
        end = time.monotonic() + self.args.store_seconds
        with CpuMeter(self.proc.pid, fine=True) as m:
            while (now := time.monotonic()) < end:
                t = b.tokens(per * C)
                req = f"st{b.next_id()}"
                if not b.store(w, kv, b.key(t, 0, per * C, req, model), range(per * (C // bs)), bs):
                    raise RuntimeError("store failed")
                b.end(req)
                stored += 1
                time.sleep(max(0.0, now + every - time.monotonic()))
            time.sleep(wait)
        b.drop(w)
        b.clear(True)
        return {f"store_and_sum_{mode}_server_cpu_us": m.per(stored), f"store_and_sum_{mode}_stores": stored}

    def burst(self):
        """1.5 pools of reserve+commit without copying, as fast as the server answers."""
        b = self.bench
        b.clear(True)
        C, bs, per, layers = b.chunk, 16, 4, 8
        cb = 2 * layers * C * 8 * 64 * 2
        model = b.model("race-burst")
        kv = b.kv(layers, 8, 64, b.torch.float16, per * (C // bs), bs)
        w = b.worker(kv, model, "engine_driven", bs)
        ed = b.shm_context(w)
        if ed is None:
            raise RuntimeError("no shared-memory pool offered")
        off = kept = 0
        a = time.perf_counter()
        for _ in range(max(4, int(1.5 * self.args.l1_gb * 2**30 / (per * cb)))):
            t = b.tokens(per * C)
            i = b.next_id()
            k = b.key(t, 0, per * C, f"b{i}", model)
            got = ed.prepare_store(k, w._instance_id)
            if got is not None and got[1] and ed.commit_store(k, w._instance_id, []):
                kept += len(got[1])
            del got
            off += per
            b.end(f"b{i}")
        dt = time.perf_counter() - a
        b.drop(w)
        b.clear(True)
        return {"burst_kept_by_offered": kept / off, "burst_chunks_per_s": off / dt}


def race(args):
    """Both servers, every row measured A,B,A,B,...; ratios B/A of the medians."""
    rows, errors, verbose = {}, [], args.verbose
    sides = [Side("A", args.race[0], args), Side("B", args.race[1], args)]

    def measure(s, what, fn, *args):
        try:
            v = fn(*args)
        except Exception as e:  # noqa: BLE001 - a row that cannot be measured is an error of the race, and the next one runs
            if verbose:
                traceback.print_exc()
            errors.append(f"{s.name} {what}: {type(e).__name__}: {e}")
            log("ERROR", errors[-1])
            return
        for k, x in v.items():
            if x is not None:
                rows.setdefault(k, {"A": [], "B": []})[s.name].append(x)
        log(s.name, what, {k: round(x, 4) for k, x in v.items() if x is not None})

    skip = set(filter(None, args.skip.split(",")))
    try:
        starts = 1 if "start" in skip else args.rounds
        for r in range(starts):
            last = r == starts - 1
            for s in sides:
                measure(s, "start", s.start)
                if s.bench is None:
                    raise RuntimeError(f"server {s.name} cannot be raced")
                if "transfer" not in skip:
                    measure(s, "first_pass", s.first_pass)
                if not last:
                    s.stop()
        plan = []
        if "rate" not in skip:
            plan += [("noop", lambda s: s.rate("noop")), ("ping", lambda s: s.rate("ping")),
                     ("noop window", lambda s: s.raw("noop")), ("ping window", lambda s: s.raw("ping"))]
        if "lookup" not in skip:
            plan += [(f"lookup {k}", lambda s, k=k: s.look(k)) for k in ("hit", "miss", "chat")]
        plan += [("control", lambda s: s.control())]
        if args.store_seconds:
            plan += [(f"stores {m}", lambda s, m=m: s.stores(m)) for m in args.modes.split(",")]
        if "transfer" not in skip:
            for s in sides:
                measure(s, "touch_pool", s.touch_pool)
            plan += [("copies", lambda s: s.copies())]
        if "eviction" not in skip:
            plan += [("burst", lambda s: s.burst())]
        for s in sides:
            if "rate" not in skip:
                s.one = RateClients(s.url, 1)
        for name, fn in plan:
            for _ in range(args.rounds):
                for s in sides:
                    measure(s, name, fn, s)
    except Exception as e:  # noqa: BLE001 - the rows measured before it are printed
        errors.append(f"{type(e).__name__}: {e}")
        log("ERROR", errors[-1])
    finally:
        for s in sides:
            s.stop()
    out = {"label": args.label, "race": args.race, "rounds": args.rounds, "cpus": os.cpu_count(), "errors": errors,
           "rows": {}}
    log(f"{'row':42s} {'A':>12s} {'B':>12s} {'B/A':>8s}")
    for k, v in rows.items():
        a, b = (statistics.median(v[x]) if v[x] else None for x in "AB")
        ratio = round(b / a, 4) if a and b is not None else None
        out["rows"][k] = {"A": a and round(a, 4), "B": b and round(b, 4), "ratio": ratio,
                          "A_all": [round(x, 4) for x in v["A"]], "B_all": [round(x, 4) for x in v["B"]]}
        log(f"{k:42s} {a if a is None else format(a, '12.3f')} {b if b is None else format(b, '12.3f')} "
            f"{'' if ratio is None else format(ratio, '8.3f')}")
    return out, 1 if errors else 0
