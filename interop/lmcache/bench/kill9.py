"""Kills the server with SIGKILL under load, restarts it and verifies every byte that was confirmed before."""
import argparse
import contextlib
import os
import random
import signal
import threading
import time

from bench.client import Client
from bench.process import log, pid_alive, raw_ping_until, spawn
from bench.segments import unlink_kv


class Kill9:
    """Client threads store, look up and retrieve deterministic content while the server is killed and restarted.

    Threads: one per mode that stores fresh prompts and re-reads old ones, checking every byte; a slow writer and a
    slow reader (engine-driven shared memory) that wait between prepare and copy, every second time until after the
    next restart, so that they touch the pool with slots of the killed server."""

    PER = 4  # chunks per prompt

    def __init__(self, args):
        self.args = args
        ns = argparse.Namespace(**vars(args))
        ns.timeout, ns.no_clear = args.kill_timeout, False
        self.ns = ns
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.go = threading.Event()  # set: the server is up and the threads may start operations
        self.gen = 0
        self.committed = {}  # prompt id -> (chunks, mode), in the order of confirmation
        self.next_q = 0
        self.n = {k: 0 for k in (
            "stores", "reads", "chunks_verified", "wrong_chunks", "wrong_chunks_held_over_restart", "held_writes",
            "held_reads", "failed_operations", "kills", "recent_chunks_at_kill", "recent_chunks_lost")}
        self.errors, self.rounds = [], []
        # about 300 chunks fill the pool
        self.heads, self.dim, self.bs = 8, 64, 16
        self.child = None

    def add(self, k, v=1):
        with self.lock:
            self.n[k] += v

    # -- server
    def up(self, seconds):
        return raw_ping_until(self.args.url, time.monotonic() + seconds,
                              lambda: self.child is None or self.child.poll() in (None, 0))

    def start(self):
        self.child = spawn(self.args.restart_cmd, self.args.server_log, "a", shell=True)
        a = time.monotonic()
        if not self.up(self.args.start_timeout):
            raise RuntimeError("the server did not answer after --restart-cmd")
        return time.monotonic() - a

    def server_pid(self):
        """The pid of the file, when that process (or a child of it) really listens on the url's port."""
        import psutil

        with open(self.args.pid_file) as f:
            pid = int(f.read().split()[0])
        p = psutil.Process(pid)
        port = int(self.args.url.rsplit(":", 1)[1])
        for x in [p] + p.children(recursive=True):
            for c in psutil.net_connections("tcp"):
                if c.pid == x.pid and c.status == psutil.CONN_LISTEN and c.laddr.port == port:
                    return pid
        raise RuntimeError(f"pid {pid} of --pid-file does not listen on port {port}")

    # -- content
    def tokens_of(self, b, q):
        return b.np.random.default_rng([self.base, q]).integers(0, 1 << 17, self.PER * b.chunk).tolist()

    def pattern(self, b, q, j, layer):
        x = (q * 0x9E3779B97F4A7C15 + j * 0xC2B2AE3D27D4EB4F + layer * 0x165667B19E3779F9 + self.base) % (1 << 62)
        return b.ramp + x

    def fill(self, b, kv, q):
        bpc = b.chunk // self.bs
        for li, x in enumerate(kv.values()):
            for j in range(self.PER):
                part = x[:, j * bpc:(j + 1) * bpc]
                part.copy_(self.pattern(b, q, j, li).view(b.torch.float16).view(part.shape))

    def wrong(self, b, kv, q, h):
        bpc = b.chunk // self.bs
        bad = 0
        for j in range(h):
            for li, x in enumerate(kv.values()):
                part = x[:, j * bpc:(j + 1) * bpc].contiguous().view(b.torch.int64).flatten()
                if not b.torch.equal(part, self.pattern(b, q, j, li)):
                    bad += 1
                    break
        return bad

    def session(self, mode, timeout=None):
        """A client of its own with one registered worker, as a restarted engine would come."""
        b = Client(argparse.Namespace(**{**vars(self.ns), "timeout": timeout or self.ns.timeout}))
        b.scope = f"k{os.urandom(4).hex()}"
        C = b.chunk
        layers = max(1, min(64, round(self.args.l1_gb * 2**30 / 300 / (2 * C * self.heads * self.dim * 2))))
        b.ramp = b.torch.arange(2 * C * self.heads * self.dim * 2 // 8, dtype=b.torch.int64, device=b.device) * 0x2545F4914F6CDD1D
        b.layers, b.chunk_bytes = layers, layers * 2 * C * self.heads * self.dim * 2
        kv = b.kv(layers, self.heads, self.dim, b.torch.float16, self.PER * (C // self.bs), self.bs, fill=False)
        b.kvt, b.mode = kv, mode
        b.km = f"bench/kill9-{self.args.run_tag}-{self.base}-{mode}"
        b.w = b.worker(kv, b.km, mode, self.bs)
        return b

    def leave(self, b):
        for f in (b.w.unregister, b.w.close, b.c.close):
            with contextlib.suppress(Exception):  # the server may be gone
                f()
        unlink_kv(b.kvt)

    def blocks(self, b, h):
        return range(h * (b.chunk // self.bs))

    def read(self, b, q, limit=None):
        """(chunks found, chunks retrieved, wrong chunks)."""
        t = self.tokens_of(b, q)
        req = f"r{b.next_id()}"
        h = b.lookup(t, self.PER * b.chunk, req, b.km) or 0
        got = bad = 0
        gen = self.gen
        if h:
            for x in b.kvt.values():
                x.zero_()
            if b.retrieve(b.w, b.kvt, b.key(t, 0, h * b.chunk, req, b.km), self.blocks(b, h), self.bs):
                got, bad = h, self.wrong(b, b.kvt, q, h)
        if gen == self.gen:
            b.end(req)
        held = gen != self.gen
        self.add("reads")
        self.add("chunks_verified", got)
        if bad:
            self.add("wrong_chunks_held_over_restart" if held else "wrong_chunks", bad)
            self.note(f"prompt {q} ({b.mode}): {bad} of {h} chunks wrong" + (" (held over a restart)" if held else ""))
        return h, got, bad

    def store(self, b, settle):
        """Stores a fresh prompt: its number, whether the server said yes, and the life of the server in which it began."""
        with self.lock:
            q = self.next_q
            self.next_q += 1
        t = self.tokens_of(b, q)
        self.fill(b, b.kvt, q)
        req = f"w{b.next_id()}"
        gen = self.gen
        k = b.key(t, 0, self.PER * b.chunk, req, b.km)
        ok = b.store_raw(b.w, b.kvt, k, self.blocks(b, self.PER), self.bs)
        self.add("stores")
        if settle and ok and gen == self.gen and b.mode == "lmcache_driven":
            b.settle(k, self.args.kill_timeout)
        if gen == self.gen:
            b.end(req)
        return q, ok, gen

    def write(self, b):
        """Stores a prompt; one that is then read back counts as confirmed."""
        q, ok, gen = self.store(b, settle=True)
        if ok and gen == self.gen:
            h, _, bad = self.read(b, q)
            if h and not bad and gen == self.gen and self.go.is_set():
                with self.lock:
                    self.committed[q] = (h, b.mode)

    def write_only(self, b):
        """Stores and does not look: what becomes visible of it is read by the others' verification."""
        q, ok, _ = self.store(b, settle=False)
        with self.lock:
            self.slow_written.append((q, bool(ok)))

    def note(self, e):
        with self.lock:
            if len(self.errors) < 40:
                self.errors.append(e)
        log(e)

    # -- threads
    def hold(self, rnd, what):
        """Sleep between prepare and copy; every second time until the next restart is over."""
        gen = self.gen
        if rnd.random() < 0.5:
            end = time.monotonic() + rnd.uniform(0.1, 1.0)
        else:
            end = time.monotonic() + self.args.start_timeout
        while time.monotonic() < end and not self.stop.is_set():
            if self.gen != gen:
                self.add(what)
                time.sleep(rnd.uniform(0.0, 1.5))
                return
            time.sleep(0.02)

    def thread(self, mode, slow, seed):
        rnd = random.Random(seed)
        while not self.stop.is_set():
            if not self.go.wait(0.2):
                continue
            gen, b = self.gen, None
            try:
                b = self.session(mode)
                if slow:
                    ed = b.shm_context(b.w)
                    if ed is None:
                        self.note(f"no shared-memory pool: no slow {slow}")
                        return
                    name = "prepare_store" if slow == "writer" else "prepare_retrieve"
                    orig = getattr(ed, name)

                    def held(key, iid, *more, orig=orig):
                        r = orig(key, iid, *more)
                        self.hold(rnd, "held_writes" if slow == "writer" else "held_reads")
                        return r

                    setattr(ed, name, held)
                while not self.stop.is_set() and gen == self.gen:
                    if not self.go.is_set():
                        time.sleep(0.02)
                        continue
                    try:
                        if slow == "reader":
                            q = self.pick(rnd, mode)
                            if q is None:
                                time.sleep(0.05)
                            else:
                                self.read(b, q)
                        elif slow == "writer":
                            self.write_only(b)
                        else:
                            self.write(b)
                            q = self.pick(rnd, mode)
                            if q is not None:
                                self.read(b, q)
                    except Exception as e:  # noqa: BLE001 - operations fail while the server is down
                        self.add("failed_operations")
                        if self.go.is_set() and gen == self.gen:
                            self.note(f"{mode} {slow or ''}: {type(e).__name__}: {str(e)[:200]}")
                            time.sleep(0.2)
            except Exception as e:  # noqa: BLE001 - sessions fail while the server is down
                self.add("failed_operations")
                log("session:", type(e).__name__, str(e)[:200])
                time.sleep(0.2)
            finally:
                if b is not None:
                    self.leave(b)

    def pick(self, rnd, mode):
        with self.lock:
            qs = [q for q, (_, m) in self.committed.items() if m == mode][-200:]
        return rnd.choice(qs) if qs else None

    # -- main
    def verify(self, only_recent):
        """Reads back what was confirmed before the kill; (chunks expected, found) of the newest quarter pool."""
        sess = {m: self.session(m, 120) for m in self.modes}
        try:
            with self.lock:
                items = list(self.committed.items())
                slow = list(self.slow_written[-20:])
            quarter = int(self.args.l1_gb * 2**30 / 4 / (sess[self.modes[0]].chunk_bytes * self.PER))
            recent = items[-max(1, quarter):]
            want = found = 0
            for q, (h, m) in recent:
                _, got, _ = self.read(sess[m], q)
                want += h
                found += min(got, h)
            if "engine_driven" in sess:
                for q, _ in slow:
                    self.read(sess["engine_driven"], q)
            if not only_recent:
                for q, (h, m) in items[:-max(1, quarter)][-400:]:
                    self.read(sess[m], q)
            return want, found
        finally:
            for b in sess.values():
                self.leave(b)

    def run(self):
        rnd = random.Random(self.args.run_tag or None)
        self.base = int.from_bytes(os.urandom(4), "big")
        self.modes = [m for m in self.args.modes.split(",") if m]
        self.slow_written = []
        if not self.up(30.0):
            self.start()
        self.server_pid()
        specs = [(m, "") for m in self.modes]
        if "engine_driven" in self.modes:
            specs += [("engine_driven", "writer"), ("engine_driven", "reader")]
        ths = [threading.Thread(target=self.thread, args=(m, s, rnd.random()), daemon=True) for m, s in specs]
        self.go.set()
        for t in ths:
            t.start()
        probe = self.session(self.modes[0])
        pool_chunks = int(self.args.l1_gb * 2**30 / probe.chunk_bytes)
        self.leave(probe)
        # the pool must be full before the first kill, so that eviction is active
        end = time.monotonic() + self.args.fill_timeout
        while time.monotonic() < end and self.next_q * self.PER < 1.2 * pool_chunks:
            time.sleep(0.1)
        full = self.next_q * self.PER >= 1.2 * pool_chunks
        log("pool", "full" if full else "not full", self.next_q * self.PER, "chunks offered, pool", pool_chunks)
        problem = None
        for i in range(self.args.kill9):
            time.sleep(rnd.uniform(*self.args.kill_after))
            try:
                pid = self.server_pid()
                # from here on nothing counts as confirmed
                with self.lock:
                    before = len(self.committed)
                os.kill(pid, signal.SIGKILL)
                self.go.clear()
                self.add("kills")
                t0 = time.monotonic()
                while time.monotonic() - t0 < 60 and pid_alive(pid):
                    time.sleep(0.005)
                took = self.start()
                self.gen += 1
                want, found = self.verify(only_recent=True)
            except Exception as e:  # noqa: BLE001 - the run ends and reports it
                problem = f"kill {i}: {type(e).__name__}: {e}"
                break
            self.add("recent_chunks_at_kill", want)
            self.add("recent_chunks_lost", want - found)
            self.rounds.append({"confirmed_prompts": before, "restart_s": round(took, 3), "recent_chunks": want,
                                "lost": want - found})
            log("kill", i, self.rounds[-1])
            with self.lock:  # what was lost is not asked for again
                if found == 0:
                    self.committed.clear()
            self.go.set()
        if problem is None:
            time.sleep(2.0)
            try:
                self.verify(only_recent=False)
            except Exception as e:  # noqa: BLE001 - the run ends and reports it
                problem = f"last verification: {type(e).__name__}: {e}"
        self.stop.set()
        for t in ths:
            t.join(self.args.kill_timeout * 3 + 5)
        out = {"label": self.args.label, "url": self.args.url, "kill9": self.args.kill9, "pool_full": full,
               "modes": self.modes, **self.n, "rounds": self.rounds, "problem": problem, "notes": self.errors}
        bad = self.n["wrong_chunks"] + self.n["wrong_chunks_held_over_restart"]
        lost = self.n["recent_chunks_lost"] / max(1, self.n["recent_chunks_at_kill"])
        out["lost_fraction"] = round(lost, 4)
        return out, 0 if not bad and problem is None and full and lost <= self.args.max_lost else 1
