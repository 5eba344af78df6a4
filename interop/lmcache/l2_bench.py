#!/usr/bin/env python3
"""Conformance and performance driver for the tiers below the pool of an LMCache multiprocess (MP) server.

Two servers A and B work over one shared L2 (a directory, Redis/Valkey, S3, or a private one). Prompts are stored
through one with the real ``lmcache`` 0.5.6 client, awaited in L2 (the driver computes every name itself), forgotten
in RAM, loaded through the other, and compared byte by byte. Faults are injected into the L2. Every wait is bounded.
One JSON line on standard output with pass/fail per check; progress on standard error.

The server commands are templates: {port} {http} {shm} are chosen by the driver; {dir} is the shared directory,
{l2port} the port of Redis or S3 (a proxy of the driver while faults are tested), {bucket} the bucket.

    python l2_bench.py --l2 dir --a "$S '{\\"type\\":\\"fs\\",\\"base_path\\":\\"{dir}\\"}'" --b "$S ..."
    python l2_bench.py --l2 redis --redis redis-server --a ... --b ...
    python l2_bench.py --l2 s3 --s3-cmd 'moto_server -H 127.0.0.1 -p {s3port}' --a ... --b ...
    python l2_bench.py --l2 private --a ... --b ...        (names not known: only round trips and restarts)

Exit status: 0 all checks passed, 1 some failed, 2 a server did not start, 3 the time limit ended the run.
"""

import argparse
import atexit
import glob
import http.client
import json
import os
import random
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import urllib.parse

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mp_bench as mpb  # noqa: E402
from mp_bench import CpuMeter, free_ports, lat_summary, log, raw_ping_until, rss_tree_mb, stop_proc  # noqa: E402

BS = 16  # tokens per engine block


class Slow(Exception):
    """A bounded wait ran out."""


# ------------------------------------------------------------------ the shared L2


class Dir:
    """A directory of files, names as LMCache's fs adapters use them."""

    kind = "dir"

    def __init__(self, path):
        self.path = path
        os.makedirs(path, exist_ok=True)

    def vars(self, direct=False):
        return {"dir": self.path, "l2port": 0, "bucket": ""}

    def name(self, model, rank, group, h, salt):
        s = f"{model.replace('/', '-SEP-')}@0x{rank:08x}@{group:x}@{h.hex()}" + (f"@{salt}" if salt else "")
        return s + ".data"

    def _p(self, n):
        return os.path.join(self.path, n)

    def size(self, n):
        try:
            return os.stat(self._p(n)).st_size
        except OSError:
            return None

    def read(self, n):
        with open(self._p(n), "rb") as f:
            return f.read()

    def write(self, n, data):
        with open(self._p(n) + ".x", "wb") as f:
            f.write(data)
        os.replace(self._p(n) + ".x", self._p(n))

    def resize(self, n, to):
        d = self.read(n)
        self.write(n, d[:to] + b"\xee" * max(0, to - len(d)))

    def delete(self, n):
        try:
            os.unlink(self._p(n))
        except FileNotFoundError:
            pass

    def cool(self, names):
        for n in names:
            fd = os.open(self._p(n), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def leftovers(self):
        return sorted(f for f in os.listdir(self.path) if not f.endswith(".data"))

    def close(self):
        pass


class Proxy:
    """TCP proxy on 127.0.0.1: ``silent`` stops forwarding (connections stay open), ``hook`` runs once when a
    pattern is seen from the server's side, before these bytes go on. ``delay``: seconds that each answer waits."""

    def __init__(self, target):
        self.target = target
        self.open = threading.Event()
        self.open.set()
        self.hook, self.delay = None, 0.0
        self.lock = threading.Lock()
        self.ls = socket.socket()
        self.ls.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.ls.bind(("127.0.0.1", 0))
        self.ls.listen(256)
        self.port = self.ls.getsockname()[1]
        self.stop = False
        threading.Thread(target=self._accept, daemon=True).start()

    def on(self, patterns, fn):
        with self.lock:
            self.hook = ([p.encode() for p in patterns], fn)

    def _accept(self):
        while not self.stop:
            try:
                c, _ = self.ls.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(c,), daemon=True).start()

    def _serve(self, c):
        try:
            self.open.wait()
            s = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            s.settimeout(None)
        except OSError:
            c.close()
            return
        for x in (c, s):
            x.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._pump, args=(s, c, False), daemon=True).start()
        self._pump(c, s, True)

    def _pump(self, a, b, up):
        tail = b""
        try:
            while True:
                d = a.recv(1 << 18)
                if not d:
                    break
                if up and self.hook:
                    fn = None
                    with self.lock:
                        if self.hook and any(p in tail + d[:4096] for p in self.hook[0]):
                            fn, self.hook = self.hook[1], None
                    if fn:
                        fn()
                    tail = d[-16:]
                if not up and self.delay:
                    time.sleep(self.delay)
                self.open.wait()
                b.sendall(d)
        except OSError:
            pass
        for x in (a, b):
            try:
                x.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.stop = True
        self.open.set()
        self.ls.close()


def wait_port(port, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


class Net:
    """A network L2 of which this driver owns the process, behind a proxy."""

    def __init__(self, cmd, port):
        self.cmd, self.port, self.proc = cmd, port, None
        self.start()
        self.proxy = Proxy(port)

    def start(self):
        self.proc = subprocess.Popen(self.cmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                     start_new_session=True)
        if not wait_port(self.port, 60):
            raise Slow("the L2 process did not open its port")
        self.ready()

    def ready(self):
        pass

    def kill(self):
        self.proc.kill()
        self.proc.wait(10)

    def vars(self, direct=False):
        return {"dir": "", "l2port": self.port if direct else self.proxy.port, "bucket": "kvcache"}

    def name(self, model, rank, group, h, salt):
        return f"{model}@{rank:08x}@{group:x}@{h.hex()}" + (f"@{salt}" if salt else "")

    def resize(self, n, to):
        d = self.read(n)
        self.write(n, d[:to] + b"\xee" * max(0, to - len(d)))

    def cool(self, names):
        pass

    def leftovers(self):
        return []

    def close(self):
        self.proxy.close()
        stop_proc(self.proc)


class Redis(Net):
    kind = "redis"
    get_patterns = ("\r\nGET\r\n", "\r\nget\r\n", "\r\nMGET\r\n", "\r\nGETRANGE\r\n")

    def __init__(self, binary):
        (port,) = free_ports(1)
        self.sock = None
        super().__init__([binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                          "--dir", tempfile.gettempdir()], port)

    def call(self, *args):
        """One command on a connection of our own; the reply as bytes, int, None or an exception."""
        for attempt in (0, 1):
            try:
                if self.sock is None:
                    self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
                    self.buf = self.sock.makefile("rb")
                parts = [a if isinstance(a, bytes) else str(a).encode() for a in args]
                self.sock.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
                line = self.buf.readline()
                if not line:
                    raise OSError("closed")
                t, v = line[:1], line[1:-2]
                if t == b"-":
                    raise RuntimeError(v.decode())
                if t == b":":
                    return int(v)
                if t == b"$":
                    if int(v) < 0:
                        return None
                    return self.buf.read(int(v) + 2)[:-2]
                return v
            except OSError:
                self.sock = None
                if attempt:
                    raise

    def size(self, n):
        return self.call("STRLEN", n) or None

    def read(self, n):
        return self.call("GET", n)

    def write(self, n, data):
        self.call("SET", n, data)

    def delete(self, n):
        self.call("DEL", n)

    def ready(self):
        self.sock = None
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if self.call("PING"):
                    return
            except (OSError, RuntimeError):
                time.sleep(0.05)


class S3(Net):
    kind = "s3"
    get_patterns = ("GET /",)

    def __init__(self, cmd):
        (port,) = free_ports(1)
        super().__init__(shlex.split(cmd.replace("{s3port}", str(port))), port)

    def req(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            c.request(method, path, body=body, headers={
                "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, "
                                 "SignedHeaders=host, Signature=0"})
            r = c.getresponse()
            return r.status, r.read(), r.getheader("content-length")
        finally:
            c.close()

    def ready(self):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if self.req("PUT", "/kvcache")[0] in (200, 409):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise Slow("the bucket could not be made")

    def _p(self, n):
        return "/kvcache/" + urllib.parse.quote(n)

    def size(self, n):
        st, _, ln = self.req("HEAD", self._p(n))
        return int(ln) if st == 200 and ln else None

    def read(self, n):
        return self.req("GET", self._p(n))[1]

    def write(self, n, data):
        self.req("PUT", self._p(n), data)

    def delete(self, n):
        self.req("DELETE", self._p(n))


class Private:
    """The server's own format in {dir}: nothing in it is looked at but its size."""

    kind = "private"

    def __init__(self, path):
        self.path = path
        os.makedirs(path, exist_ok=True)

    def vars(self, direct=False):
        return {"dir": self.path, "l2port": 0, "bucket": ""}

    def name(self, *a):
        return None

    def bytes(self):
        return sum(os.lstat(os.path.join(d, f)).st_blocks * 512 for d, _, fs in os.walk(self.path) for f in fs
                   if os.path.exists(os.path.join(d, f)))

    def leftovers(self):
        return []

    def cool(self, names):
        for d, _, fs in os.walk(self.path):
            for f in fs:
                try:
                    fd = os.open(os.path.join(d, f), os.O_RDONLY)
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
                except OSError:
                    pass

    def close(self):
        pass


# ------------------------------------------------------------------ servers, prompts


class Prompt:
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
        self.proc = subprocess.Popen(shlex.split(cmd), stdout=open(self.logf, "w"), stderr=subprocess.STDOUT,
                                     start_new_session=True)
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
        self.b = mpb.Bench(a)
        self.b.pid = self.proc.pid
        self.run.chunk = self.b.chunk
        self.ctxs, self.rd, self.base, self.dark = {}, {}, {}, {}

    def stop(self, sig=None):
        if self.proc is None:
            return
        if self.b:
            for ctx, kv, dst, c2 in self.ctxs.values():
                mpb.unlink_kv(kv)
                mpb.unlink_kv(dst)
        self.ctxs = {}
        if sig:
            self.proc.send_signal(sig)
            self.proc.wait(20)
        else:
            stop_proc(self.proc, grace=8)
        self.proc = None
        self.b = None
        for f in glob.glob(f"/dev/shm/lmcache_l1_pool_{self.shm}*"):
            try:
                os.unlink(f)
            except OSError:
                pass

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

    def clear(self):
        self.b.clear(True)


# ------------------------------------------------------------------ the run


class Run:
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
        from blake3 import blake3

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

    def need(self, *nodes):
        """A server that a fault left unable to work is replaced by a fresh one."""
        for n in nodes:
            if n.alive() and not n.sick:
                continue
            n.stop()
            n.sick = False
            n.start()

    def check(self, name, fn, nodes=None):
        if self.only and not any(name.startswith(o) for o in self.only):
            return
        t0 = time.perf_counter()
        try:
            self.need(*((self.A, self.B) if nodes is None else nodes))
            r = fn()
            good, detail = r if isinstance(r, tuple) else (bool(r), None)
        except Exception as e:  # noqa: BLE001
            good, detail = False, f"{type(e).__name__}: {e}"
            if self.args.verbose:
                traceback.print_exc()
        self.checks[name] = {"ok": bool(good), "s": round(time.perf_counter() - t0, 2)}
        if detail is not None:
            self.checks[name]["detail"] = detail
        log(("PASS " if good else "FAIL ") + name, detail if detail is not None else "")
        return good

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
        except Exception as e:  # noqa: BLE001
            d["error"] = f"{type(e).__name__}: {e}"
        good = d.get("l1") and d.get("l2_store") and d.get("l2_load")
        if not good:
            n.sick = True
        return bool(good), d

    # -- checks without faults
    def cross(self, src, dst, shape, chunks=8, salt=""):
        p = self.prompt(shape, chunks, salt)
        src.store(p)
        s = self.wait_l2(p)
        r = dst.load(p)
        return r["hit"] == chunks and r["problem"] is None, {"stored_in_l2_s": round(s, 3), **r}

    def content(self, shape):
        """The value in L2 is the plain chunk: [2, layers, slots, hidden], padding (if any) after it."""
        p = self.prompt(shape, 2)
        self.A.store(p)
        self.wait_l2(p)
        _, kv, _, K = self.A.ctx(p.shape)
        t = self.A.b.torch
        C = self.A.b.chunk
        bpc = C // BS
        self.A.stamp(kv, p, 0, 2, K)
        for i, n in enumerate(self.names(p)):
            v = self.l2.read(n)
            want = t.stack([t.stack([kv[m][pl, i * bpc:(i + 1) * bpc].reshape(C, -1) for m in kv])
                            for pl in (0, 1)]).contiguous().view(t.uint8).numpy().tobytes()
            if v[:len(want)] != want:
                return False, f"chunk {i}: other bytes, length {len(v)} wanted {len(want)}"
        return True, {"length": len(v), "logical": len(want), "leftovers": self.l2.leftovers()[:3]}

    def clear_self(self, n):
        p = self.prompt(self.small, 8)
        n.store(p)
        self.wait_l2(p)
        n.clear()
        r = n.load(p)
        return r["hit"] == 8 and r["problem"] is None, r

    def restart_self(self, n, sig):
        ps = [self.prompt(self.small, 4) for _ in range(4)]
        for p in ps:
            n.store(p)
        for p in ps:
            self.wait_l2(p)
        n.stop(sig)
        n.start()
        found, bad = 0, []
        for p in ps:
            r = n.load(p)
            found += r["hit"]
            if r["problem"]:
                bad.append(r["problem"])
        return found == 16 and not bad, {"start_s": round(n.start_s, 2), "found": found, "of": 16, "bad": bad}

    def tail_in_l1(self):
        """The head only in L2, the tail only in L1."""
        p = self.prompt(self.small, 8)
        self.A.store(p, 0, 4)
        self.wait_l2(p, 0, 4)
        self.A.clear()
        self.A.store(p, 4, 8)
        r = self.A.load(p)
        return r["hit"] == 8 and r["problem"] is None, r

    def gap(self):
        """A missing chunk in the middle ends the hit exactly there."""
        p = self.prompt(self.small, 8)
        self.A.store(p)
        self.wait_l2(p)
        self.l2.delete(self.names(p)[5])
        r = self.B.load(p)
        return r["hit"] == 5 and r["problem"] is None, r

    def once(self):
        p = self.prompt(self.small, 4)
        self.A.store(p)
        self.wait_l2(p)
        req = self.req()
        r = self.B.look(p, req)
        again = self.B.b.c.query_prefetch_status(self.B.b.rid(req)).result(timeout=10)
        self.B.free(p, req, r["hit"])
        self.B.end(req)
        return r["hit"] == 4 and again == 0, {"first": r["hit"], "second": again}

    def op9_prompt(self):
        """Operation 9 is answered at once while a large load runs."""
        p = self.prompt(self.big, self.args.op9_chunks)
        self.A.store(p)
        self.wait_l2(p)
        self.l2.cool(self.names(p))
        r = self.B.load(p)
        return (r["hit"] == p.chunks and r["problem"] is None and r["op9_worst_ms"] < 1e3 * self.args.op9_limit), r

    def abandon(self):
        """Twelve lookups whose requests end while they load; then another lookup works."""
        self.B.ctx(self.small)
        ps = [self.prompt(self.small, 8) for _ in range(12)]
        for p in ps:
            self.A.store(p)
        for p in ps:
            self.wait_l2(p)
        for p in ps:
            req = self.req()
            self.B.b.c.lookup(self.B.key(p, 0, p.chunks * self.B.b.chunk, req, worker=None), 1).result(timeout=10)
            self.B.end(req)
        q = self.prompt(self.small, 8)
        self.A.store(q)
        self.wait_l2(q)
        r = self.B.load(q)
        return r["hit"] == 8 and r["problem"] is None, r

    def pins(self, abandoned):
        """After a load (retrieved, or its request ended in the middle) a soft clear drops the chunks: without their
        values in L2 nothing is found."""
        self.B.ctx(self.small)
        ps = [self.prompt(self.small, 8) for _ in range(3)]
        for p in ps:
            self.A.store(p)
        for p in ps:
            self.wait_l2(p)
        for p in ps:
            if abandoned:
                req = self.req()
                self.B.b.c.lookup(self.B.key(p, 0, 8 * self.B.b.chunk, req, worker=None), 1).result(timeout=10)
                self.B.end(req)
            else:
                self.B.load(p)
        time.sleep(2)
        for p in ps:
            for n in self.names(p):
                self.l2.delete(n)
        end, left = time.monotonic() + 8, None
        while time.monotonic() < end and left != 0:
            self.B.b.c.clear(False).result(timeout=10)
            left = 0
            for p in ps:
                req = self.req()
                r = self.B.look(p, req)
                self.B.free(p, req, r["hit"])
                self.B.end(req)
                left += r["hit"]
            time.sleep(0.5)
        if left:
            self.B.sick = True  # pinned for minutes: the next checks get a fresh server
        return left == 0, {"chunks_still_in_ram": left, "of": 24}

    def parallel(self):
        """Eight clients load L2-only prompts at once through B."""
        self.B.ctx(self.small)
        ps = [self.prompt(self.small, 8) for _ in range(8)]
        for p in ps:
            self.A.store(p)
        for p in ps:
            self.wait_l2(p)
        reqs = [self.req() for _ in ps]
        for p, q in zip(ps, reqs):
            self.B.b.c.lookup(self.B.key(p, 0, p.chunks * self.B.b.chunk, q, worker=None), 1).result(timeout=10)
        bad, hits = [], []
        end = time.monotonic() + self.args.limit
        for p, q in zip(ps, reqs):
            while True:
                r = self.B.b.c.query_prefetch_status(self.B.b.rid(q)).result(timeout=10)
                if r is not None:
                    break
                if time.monotonic() > end:
                    raise Slow("still loading")
                time.sleep(0.001)
            hits.append(r)
            e, _ = self.B.fetch(p, q, r)
            self.B.end(q)
            if e:
                bad.append(e)
        return hits == [8] * 8 and not bad, {"hits": hits, "bad": bad}

    # -- faults
    def after(self, node):
        good, d = self.healthy(node, self.args.fault_limit)
        return {"after": "works" if good else d}

    def resized(self, delta):
        """Chunk 5 of 8 has another length in L2: the hit may only be 5, or more with the right bytes."""
        p = self.prompt(self.odd if delta == "pad" else self.small, 8)
        self.A.store(p)
        self.wait_l2(p)
        n = self.names(p)[5]
        want = self.chunk_bytes(p.shape)
        to = {"half": want // 2, "zero": 0, "minus1": want - 1, "plus100": want + 100, "plus4096": want + 4096, "double": 2 * want,
              "pad": (want + 4095) // 4096 * 4096}[delta]
        self.l2.resize(n, to)
        d = {"length": to, "logical": want}
        try:
            r = self.B.load(p, limit=self.args.fault_limit)
            d.update(r)
            least = 8 if delta == "pad" and self.l2.kind == "dir" else 5
            good = r["problem"] is None and r["hit"] >= least
        except Slow as e:
            d["problem"], good = str(e), False
            self.B.sick = True
        if delta in ("half", "zero", "minus1"):
            try:
                q = self.B if not self.B.sick else self.A
                if q is self.A:
                    q.clear()
                q.store(p, limit=self.args.fault_limit)
                d["replaced_by_next_store_s"] = round(self.wait_l2(p, limit=self.args.heal), 3)
            except Exception as e:  # noqa: BLE001
                d["replaced_by_next_store_s"] = None
                good = False
                d["not_replaced"] = str(e)[:120]
        d.update(self.after(self.B))
        return good and d["after"] == "works", d

    def vanish(self):
        """Chunk 5 disappears between the lookup and the load (or right after the acknowledgement)."""
        p = self.prompt(self.small, 8)
        self.A.store(p)
        self.wait_l2(p)
        n = self.names(p)[5]
        req = self.req()
        self.B.ctx(p.shape)
        if self.l2.kind in ("redis", "s3"):
            self.l2.proxy.on(self.l2.get_patterns, lambda: self.l2.delete(n))
        d = {}
        t = None
        if self.l2.kind == "dir":
            t = threading.Thread(target=lambda: (time.sleep(0.001), self.l2.delete(n)))
            t.start()
        try:
            d.update(self.B.look(p, req, limit=self.args.fault_limit))
            d["problem"], _ = self.B.fetch(p, req, d["hit"])
            self.B.end(req)
            good = d["problem"] is None and d["hit"] >= 5
        except Slow as e:
            d["problem"], good = str(e), False
            self.B.sick = True
        if t:
            t.join()
        d.update(self.after(self.B))
        return good and d["after"] == "works", d

    def killed(self):
        """The L2 process is killed at the first read of a load, and started again empty."""
        p, q = self.prompt(self.small, 8), self.prompt(self.small, 4)
        self.A.store(p)
        self.wait_l2(p)
        self.B.store(q)
        self.wait_l2(q)
        self.l2.proxy.on(self.l2.get_patterns, self.l2.kill)
        req = self.req()
        d = {}
        good = True
        try:
            d.update(self.B.look(p, req, limit=self.args.fault_limit))
            d["problem"], _ = self.B.fetch(p, req, d["hit"])
            self.B.end(req)
            good = d["problem"] is None
        except Slow as e:
            d["problem"], good = str(e), False
            self.B.sick = True
        try:
            r = self.B.load(q, limit=self.args.fault_limit)
            d["l1_hit_meanwhile"] = {"hit": r["hit"], "ready_ms": r["ready_ms"], "problem": r["problem"]}
            good = good and r["hit"] == 4 and r["problem"] is None
        except Exception as e:  # noqa: BLE001
            d["l1_hit_meanwhile"] = str(e)
            good = False
        if self.l2.proc.poll() is None:
            self.l2.kill()
        d["misses_while_down_ms"] = []
        for _ in range(3):
            try:
                r = self.B.load(self.prompt(self.small, 4), limit=self.args.fault_limit)
                d["misses_while_down_ms"].append(r["ready_ms"])
            except Exception as e:  # noqa: BLE001
                d["misses_while_down_ms"].append(str(e))
                good = False
        self.l2.start()
        out = []
        for n in (self.A, self.B):
            t0 = time.monotonic()
            ok, h = False, None
            while time.monotonic() - t0 < self.args.recover and not ok:
                n.sick = False
                ok, h = self.healthy(n, 5)
                if not ok:
                    time.sleep(0.5)
            out.append(round(time.monotonic() - t0, 1) if ok else h)
            good = good and ok
        d["l2_used_again_after_s"] = {"A": out[0], "B": out[1]}
        return good, d

    def silent(self):
        """The L2 stops answering in the middle of a load (connections stay open), later goes on."""
        p, q = self.prompt(self.small, 8), self.prompt(self.small, 4)
        self.A.store(p)
        self.wait_l2(p)
        self.B.store(q)
        self.wait_l2(q)
        self.l2.proxy.on(self.l2.get_patterns, self.l2.proxy.open.clear)
        req = self.req()
        d = {}
        good = True
        try:
            try:
                d.update(self.B.look(p, req, limit=self.args.fault_limit))
                d["problem"], _ = self.B.fetch(p, req, d["hit"])
                self.B.end(req)
                good = d["problem"] is None
            except Slow as e:
                d["problem"], good = str(e), False
            try:
                r = self.B.load(q, limit=self.args.fault_limit)
                d["l1_hit_meanwhile"] = {"hit": r["hit"], "ready_ms": r["ready_ms"], "problem": r["problem"]}
                good = good and r["hit"] == 4 and r["problem"] is None
            except Exception as e:  # noqa: BLE001
                d["l1_hit_meanwhile"] = str(e)
                good = False
            try:
                s = self.prompt(self.small, 4)
                self.B.store(s, limit=self.args.fault_limit)
                d["store_meanwhile"] = True
            except Exception as e:  # noqa: BLE001
                d["store_meanwhile"] = str(e)
                good = False
        finally:
            self.l2.proxy.hook = None
            self.l2.proxy.open.set()
        ok, t0, h = False, time.monotonic(), None
        while time.monotonic() - t0 < self.args.recover and not ok:
            self.B.sick = False
            ok, h = self.healthy(self.B, 5)
        d["l2_used_again_after_s"] = round(time.monotonic() - t0, 1) if ok else h
        return good and ok, d

    def full(self):
        """The L2 is full: the server lives, L1 hits work, nothing wrong is loaded; with room it stores again."""
        shape = self.big
        cb = self.chunk_bytes(shape)
        if self.l2.kind == "redis":
            used = int([ln for ln in self.l2.call("INFO", "memory").decode().split("\r\n")
                        if ln.startswith("used_memory:")][0].split(":")[1])
            self.l2.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
            self.l2.call("CONFIG", "SET", "maxmemory", str(used + 6 * cb))
            a, mnt = self.A, None
        else:
            mnt = self.args.full_dir
            a = Node(self, "F", self.args.a)
            old, self.l2 = self.l2, Dir(mnt) if self.l2.kind == "dir" else Private(mnt)
            a.start(extra={"dir": mnt})
            ballast = os.path.join(mnt, "ballast")
            st = os.statvfs(mnt)
            room = st.f_bavail * st.f_frsize - int(6.5 * cb)
            if room > 0:
                with open(ballast, "wb") as f:
                    left = room
                    while left > 0:
                        f.write(bytes(min(left, 1 << 20)))
                        left -= 1 << 20
        d = {}
        try:
            ps = [self.prompt(shape, 4) for _ in range(4)]
            for p in ps:
                a.store(p, limit=self.args.fault_limit)
            time.sleep(self.args.settle)
            l1 = a.load(ps[-1], limit=self.args.fault_limit)
            d["l1_hit"] = {"hit": l1["hit"], "problem": l1["problem"]}
            a.clear()
            got, bad = 0, []
            for p in ps:
                r = a.load(p, limit=self.args.fault_limit)
                got += r["hit"]
                if r["problem"]:
                    bad.append(r["problem"])
            d.update(found_of_16=got, bad=bad, leftovers=self.l2.leftovers()[:4])
            if self.l2.kind != "private":
                left = {}
                for p in ps:
                    for n in self.names(p):
                        left[str(self.l2.size(n))] = left.get(str(self.l2.size(n)), 0) + 1
                d["lengths_in_l2"] = left
            if self.l2.kind == "redis":
                self.l2.call("CONFIG", "SET", "maxmemory", "0")
            else:
                os.path.exists(ballast) and os.unlink(ballast)
            ok, h = self.healthy(a, self.args.fault_limit)
            d["after"] = "works" if ok else h
            return a.alive() and l1["hit"] == 4 and not l1["problem"] and not bad and ok, d
        finally:
            if mnt:
                a.stop()
                shutil.rmtree(mnt, ignore_errors=True)
                self.l2 = old
            else:
                self.l2.call("CONFIG", "SET", "maxmemory", "0")

    def gone_dir(self):
        """The directory disappears (unmounted, renamed) and comes back."""
        p = self.prompt(self.small, 4)
        self.A.store(p)
        self.wait_l2(p)
        away = self.l2.path + ".away"
        os.rename(self.l2.path, away)
        d = {}
        try:
            r = self.B.load(p, limit=self.args.fault_limit)
            d["hit_while_gone"] = r["hit"]
            good = r["problem"] is None
            q = self.prompt(self.small, 4)
            self.B.store(q, limit=self.args.fault_limit)
            r = self.B.load(q, limit=self.args.fault_limit)
            d["l1_hit_while_gone"] = r["hit"]
            good = good and r["hit"] == 4 and r["problem"] is None
            time.sleep(0.5)
        finally:
            made = os.path.exists(self.l2.path)
            if made:
                shutil.rmtree(self.l2.path)
            os.rename(away, self.l2.path)
        d["directory_made_again_by_server"] = made
        d.update(self.after(self.B))
        return good and d["after"] == "works", d

    # -- figures
    def measure(self):
        a, args = self.A, self.args
        a.stop()
        self.B.stop()
        a.sick = False
        a.start(direct=True)
        out = {"start_to_first_ping_s": round(a.start_s, 2), "memory_idle": rss_tree_mb(a.proc.pid), "rows": []}
        self.perf = out
        for mib in [float(x) for x in args.mib.split(",")]:
            hd = int(mib * 2**20 / (2 * 8 * a.b.chunk * 2))
            shape = (8, max(1, hd // 128), min(hd, 128))
            cb = self.chunk_bytes(shape)
            for tok in [int(x) for x in args.tokens.split(",")]:
                n = tok // a.b.chunk
                row = {"chunk_mib": cb / 2**20, "tokens": tok, "chunks": n, "mb": round(n * cb / 1e6, 1)}
                st, commit, ready, ack, pol, w9, ret, hits, cs, cl, bad = [], [], [], [], [], [], [], [], 0.0, 0.0, []
                raw = []
                a.ctx(shape)
                try:
                    for _ in range(args.rounds):
                        a.clear()
                        p = self.prompt(shape, n, light=True)
                        m = CpuMeter(a.proc.pid, fine=True)
                        with m:
                            t0 = time.perf_counter()
                            commit.append(a.store(p))
                            st.append(self.wait_l2(p, t0=t0))
                        time.sleep(0.2)
                        a.clear()
                        self.l2.cool(self.names(p))
                        m = CpuMeter(a.proc.pid, fine=True)
                        req = self.req()
                        with m:
                            r = a.look(p, req)
                        cl += m.s or 0
                        e, s = a.fetch(p, req, r["hit"])
                        a.end(req)
                        if e:
                            bad.append(e)
                        hits.append(r["hit"])
                        ready.append(r["ready_ms"])
                        ack.append(r["ack_ms"])
                        pol.append(r["running_answers"])
                        w9.append(r["op9_worst_ms"])
                        ret.append(s)
                        q = self.prompt(shape, n, light=True)
                        if self.l2.kind != "private":
                            for nm in self.names(p):
                                self.l2.delete(nm)
                            if args.mode == "engine_driven":
                                a.clear()
                                time.sleep(0.2)
                                m = CpuMeter(a.proc.pid, fine=True)
                                with m:
                                    t0 = time.perf_counter()
                                    a.store_empty(q)
                                    raw.append(self.wait_l2(q, t0=t0))
                                cs += m.s or 0
                                for nm in self.names(q):
                                    self.l2.delete(nm)
                    med = statistics.median
                    row.update(
                        store_commit_s=round(med(commit), 4), store_to_l2_s=round(med(st), 4),
                        store_to_l2_gbps=round(n * cb / med(st) / 1e9, 3),
                        no_copy_store_to_l2_gbps=round(n * cb / med(raw) / 1e9, 3) if raw else None,
                        no_copy_store_cpu_s_per_gb=round(cs / (args.rounds * n * cb / 1e9), 3) if raw else None,
                        l2_hit_ready_ms=round(med(ready), 2), l2_hit_all_ms=ready, lookup_ack_ms=round(med(ack), 2),
                        load_gbps=round(n * cb / med(ready) / 1e6, 3),
                        load_cpu_s_per_gb=round(cl / (args.rounds * n * cb / 1e9), 3),
                        running_answers=pol, op9_worst_ms=max(w9),
                        retrieve_gbps=round(n * cb / med(ret) / 1e9, 3) if med(ret) else None,
                        hits=hits, bad=bad)
                except Exception as e:  # noqa: BLE001
                    row["error"] = f"{type(e).__name__}: {e}"
                    if self.args.verbose:
                        traceback.print_exc()
                out["rows"].append(row)
                log(json.dumps(row))
        try:
            out["lookup_in_ram"] = self.ram_lookups(a)
        except Exception as e:  # noqa: BLE001
            out["lookup_in_ram"] = {"error": f"{type(e).__name__}: {e}"}
        log(out["lookup_in_ram"])
        out["memory_after"] = rss_tree_mb(a.proc.pid)
        try:
            out["restart"] = self.perf_restart(a)
        except Exception as e:  # noqa: BLE001
            out["restart"] = {"error": f"{type(e).__name__}: {e}"}
        log(out["restart"])
        a.stop()

    def ram_lookups(self, a):
        """Everything is in RAM (and in L2): what a client waits for a hit, and for a miss."""
        a.clear()
        out = {}
        for tok in [int(x) for x in self.args.tokens.split(",")]:
            n = tok // a.b.chunk
            p = self.prompt((1, 1, 8), n)
            a.store(p)
            self.wait_l2(p)
            for what in ("hit", "miss"):
                tot, ack = [], []
                m = CpuMeter(a.proc.pid, fine=True)
                for _ in range(self.args.lookups):
                    q = p if what == "hit" else self.prompt((1, 1, 8), n, light=True)
                    req = self.req()
                    with m:
                        r = a.look(q, req, step=0.0005)
                        a.free(q, req, r["hit"])
                        a.end(req)
                    if r["hit"] != (n if what == "hit" else 0):
                        raise RuntimeError(f"{what}: {r['hit']}")
                    tot.append(r["ready_ms"] / 1e3)
                    ack.append(r["ack_ms"] / 1e3)
                out[f"{what}_{tok}"] = {"ready": lat_summary(tot), "ack": lat_summary(ack),
                                        "server_cpu_us": m.per(self.args.lookups)}
        return out

    def perf_restart(self, a):
        shape = (8, 1, 128)
        ps = [self.prompt(shape, 16) for _ in range(8)]
        for p in ps:
            a.store(p)
        for p in ps:
            self.wait_l2(p)
        d = {}
        for how, sig in (("clean", None), ("kill9", signal.SIGKILL)):
            a.stop(sig)
            a.start(direct=True)
            found, first, bad = 0, None, []
            for p in ps:
                r = a.load(p)
                first = first or r["ready_ms"]
                found += r["hit"]
                bad += [r["problem"]] if r["problem"] else []
            d[how] = {"start_to_first_ping_s": round(a.start_s, 2), "found": found, "of": 128, "bad": bad,
                      "first_hit_ready_ms": first}
        for p in ps:
            if self.l2.kind != "private":
                for n in self.names(p):
                    self.l2.delete(n)
        return d

    # -- all
    def go(self):
        args = self.args
        phases = args.phases.split(",")
        self.small, self.odd, self.big = (4, 1, 32), (3, 1, 5), (8, 4, 32)
        A, B = self.A, self.B
        if "basic" in phases or "fault" in phases:
            A.start()
            B.start()
        if "basic" in phases:
            self.check("a_to_b", lambda: self.cross(A, B, self.small))
            if self.l2.kind != "private" or args.shared_private:
                self.check("b_to_a", lambda: self.cross(B, A, self.small))
                self.check("odd_length_a_to_b", lambda: self.cross(A, B, self.odd))
                self.check("odd_length_b_to_a", lambda: self.cross(B, A, self.odd))
                self.check("salt_a_to_b", lambda: self.cross(A, B, self.odd, salt="tenantA"))
                self.check("long_a_to_b", lambda: self.cross(A, B, self.odd, chunks=100))
                self.check("parallel_loads", self.parallel)
                self.check("status_once", self.once)
                self.check("abandoned_loads", self.abandon)
                self.check("op9_answered_while_loading", self.op9_prompt)
            if self.l2.kind != "private":
                self.check("value_is_the_plain_chunk", lambda: self.content(self.odd), (A,))
                self.check("gap_ends_the_hit", self.gap)
                if self.l2.kind != "s3":  # the reference keeps positive answers: it would try to load
                    self.check("no_pins_after_load", lambda: self.pins(False))
                    self.check("no_pins_after_abandoned_load", lambda: self.pins(True))
            self.check("head_l2_tail_l1", self.tail_in_l1, (A,))
            self.check("a_clear_a", lambda: self.clear_self(A), (A,))
            self.check("b_clear_b", lambda: self.clear_self(B), (B,))
            self.check("a_restart_a", lambda: self.restart_self(A, None), (A,))
            self.check("a_kill9_a", lambda: self.restart_self(A, signal.SIGKILL), (A,))
        if "fault" in phases and self.l2.kind != "private":
            for how in ("half", "zero", "minus1", "plus100", "plus4096", "double") + (("pad",) if self.l2.kind == "dir" else ()):
                self.check(f"length_{how}", lambda: self.resized(how))
            self.check("deleted_between_lookup_and_load", self.vanish)
            if self.l2.kind == "dir":
                self.check("directory_gone", self.gone_dir)
                self.skipped += ["backend_killed", "backend_silent"]
            else:
                self.check("backend_silent", self.silent)
                for n in (A, B):
                    if n.alive() and not n.sick:
                        self.healthy(n, 5)
                self.check("backend_killed", self.killed)
        if "fault" in phases:
            if self.l2.kind == "redis":
                self.check("l2_full", self.full)
            elif args.full_dir and self.l2.kind in ("dir", "private"):
                A.stop()
                B.stop()
                self.check("l2_full", self.full, ())
            else:
                self.skipped.append("l2_full")
        if "perf" in phases:
            self.measure()

    def result(self):
        failed = [k for k, v in self.checks.items() if not v["ok"]]
        r = {"label": self.args.label, "l2": self.args.l2, "mode": self.args.mode,
             "lmcache_client": __import__("importlib.metadata").metadata.version("lmcache"), "cpus": os.cpu_count(),
             "checks": self.checks, "passed": len(self.checks) - len(failed), "failed": failed,
             "skipped": self.skipped}
        if self.perf:
            r["perf"] = self.perf
        return r, 1 if failed else 0

    def close(self):
        for n in (self.A, self.B):
            try:
                n.stop()
            except Exception as e:  # noqa: BLE001
                log("stop", n.nm, e)
        self.l2.close()
        if self.args.keep_logs:
            os.makedirs(self.args.keep_logs, exist_ok=True)
            for f in glob.glob(os.path.join(self.tmp, "server-*.log")):
                shutil.copy(f, self.args.keep_logs)
        shutil.rmtree(self.tmp, ignore_errors=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--a", required=True, help="command template of server A")
    ap.add_argument("--b", default="", help="command template of server B (default: as A)")
    ap.add_argument("--l2", choices=("dir", "redis", "s3", "private"), required=True)
    ap.add_argument("--dir", default="", help="directory for --l2 dir or private (default: a temporary one)")
    ap.add_argument("--redis", default="redis-server", help="program for --l2 redis, started without persistence")
    ap.add_argument("--s3-cmd", default="", help="command for --l2 s3; {s3port}; must accept unsigned requests of the driver")
    ap.add_argument("--full-dir", default="", help="an empty directory on a small filesystem (64 MB or less) for the "
                    "check l2_full; its content is removed")
    ap.add_argument("--shared-private", action="store_true", help="a private L2 that A and B share")
    ap.add_argument("--mode", default="engine_driven", choices=("engine_driven", "lmcache_driven"))
    ap.add_argument("--phases", default="basic,fault", help="comma list of basic, fault, perf (perf uses A only)")
    ap.add_argument("--only", default="", help="comma list of check names (prefixes)")
    ap.add_argument("--limit", type=float, default=60.0, help="seconds for any wait without a fault")
    ap.add_argument("--fault-limit", type=float, default=15.0, help="seconds until a lookup under a fault must be decided")
    ap.add_argument("--recover", type=float, default=40.0, help="seconds until a repaired L2 must be in use again")
    ap.add_argument("--heal", type=float, default=5.0, help="seconds until a bad value must be replaced after a new store")
    ap.add_argument("--settle", type=float, default=2.0, help="wait where names in L2 are not known")
    ap.add_argument("--op9-limit", type=float, default=0.5, help="seconds an answer of operation 9 may take")
    ap.add_argument("--op9-chunks", type=int, default=48)
    ap.add_argument("--start-timeout", type=float, default=300.0)
    ap.add_argument("--max-seconds", type=float, default=1800.0, help="the whole run; ends with status 3")
    ap.add_argument("--mib", default="1,4", help="perf: chunk sizes in MiB")
    ap.add_argument("--tokens", default="8192,32768", help="perf: prompt lengths")
    ap.add_argument("--rounds", type=int, default=3, help="perf: rounds per row")
    ap.add_argument("--lookups", type=int, default=100, help="perf: lookups per row in RAM")
    ap.add_argument("--label", default="")
    ap.add_argument("--out", default="")
    ap.add_argument("--keep-logs", default="", help="directory for the servers' logs")
    ap.add_argument("--verbose", action="store_true")
    args = ap.parse_args()
    atexit.register(mpb.remove_own_segments)
    run = Run(args)

    def finish(rc=None, note=None):
        res, r = run.result()
        if note:
            res["ended"] = note
        line = json.dumps(res)
        print(line, flush=True)
        if args.out:
            with open(args.out, "w") as f:
                f.write(line + "\n")
        return r if rc is None else rc

    def too_long():
        finish(note=f"stopped after {args.max_seconds} s")
        try:
            run.close()
        finally:
            mpb.remove_own_segments()
            os._exit(3)

    dog = threading.Timer(args.max_seconds, too_long)
    dog.daemon = True
    dog.start()
    rc = None
    try:
        run.go()
    except Slow as e:
        log(e)
        rc = 2
    finally:
        dog.cancel()
        rc = finish(rc)
        run.close()
    sys.stdout.flush()
    mpb.remove_own_segments()
    os._exit(rc)  # client threads that wait for a dead server must not keep us


if __name__ == "__main__":
    main()
