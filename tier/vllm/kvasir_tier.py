# SPDX-License-Identifier: Apache-2.0
"""Kvasir as a secondary tier of vLLM's tiered offloading.

`kvasir vllm-tier > kvasir_tier.py` writes this file; `kvasir server --vllm-tier SOCKET` serves it. In kv_connector_extra_config:
"secondary_tiers": [{"type": "KvasirTier", "module_path": "kvasir_tier", "socket_path": "SOCKET"}]

The scheduler's thread owns the books and never waits. One thread reads the node's answers, one writes, and copy threads move rows
between vLLM's region and the node's memory. What a lookup found is lent to this engine until it releases it or the connection
ends: so a loaded row counts only if the connection stands after the copy. A node that does not answer costs misses. No method
raises.
"""
# ruff: noqa: BLE001

import ctypes
import functools
import inspect
import itertools
import json
import mmap
import os
import queue
import select
import socket
import struct
import threading
import time
from collections import deque

import vllm
from vllm.logger import init_logger
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

try:
    from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import TransferJob
except ImportError:  # of an earlier release
    LookupResult = Medium = RequestOffloadingContext = TransferJob = None

logger = init_logger("vllm.kvasir_tier")
PROTOCOL = 1
HELLO, WELCOME, REFUSED, LOOKUP, FOUND, RELEASE, STORE, PLACES, COMMIT = range(1, 10)
MAX_KEYS = 1 << 14
HIT, MISS, RETRY = (getattr(LookupResult, name, False) for name in ("HIT", "MISS", "RETRY"))
RESULT_FIELDS = getattr(JobResult, "__dataclass_fields__", {})
BYTES_FIELD = next((name for name in ("transfer_bytes", "transfer_size") if name in RESULT_FIELDS), None)
METHODS = {"drain_jobs", "get_finished_jobs", "lookup", "on_new_request", "submit_load", "submit_store"}
FIELDS = {TransferJob: {"job_id", "keys", "chunk_ids", "is_promotion", "req_context"}, JobResult: {"successful_keys", "transfer_time"}}


def differs():
    """What of vLLM's interface is not as this module knows it; empty where nothing is."""
    unknown = SecondaryTierManager.__abstractmethods__ ^ METHODS
    found = [f"methods {sorted(unknown)}"] if unknown else []
    for cls, known in FIELDS.items():
        if missing := known - set(getattr(cls, "__dataclass_fields__", ())):
            found.append(f"no {sorted(missing)} of {cls and cls.__name__}")
    return ", ".join(found)


class Misses(SecondaryTierManager):
    """The tier under a release of vLLM whose interface is another one."""

    def __init__(self, **kwargs):
        takes = inspect.signature(SecondaryTierManager.__init__).parameters
        super().__init__(**{k: v for k, v in kwargs.items() if k in takes})
        self._failed = []
        logger.warning("The Kvasir tier does not know the interface of vLLM %s (%s): misses.", vllm.__version__, differs())

    def lookup(self, *_):
        return MISS

    def submit_store(self, job):
        self._failed.append(JobResult(job.job_id, False))

    submit_load = submit_store

    def get_finished_jobs(self):
        failed, self._failed = self._failed, []
        return failed

    get_finished = get_finished_jobs  # its name in 0.22

    def on_new_request(self, *_):
        return RequestOffloadingContext and RequestOffloadingContext()

    def drain_jobs(self):
        pass


def is_name(tenant):
    """Whether a tenant is a name as the node takes it: the keys of any other get no answer."""
    try:
        text = tenant.decode()
    except UnicodeDecodeError:
        return False
    return len(text) <= 128 and len(tenant) <= 255 and not set(text) & set("@/\\\0")


def move(rows):
    """Copies rows: addresses to and from, and bytes. Rows that lie one behind the other on both sides are one call."""
    to = source = size = 0
    for t, s, n in rows:
        if t == to + size and s == source + size:
            size += n
            continue
        if size:
            ctypes.memmove(to, source, size)
        to, source, size = t, s, n
    if size:
        ctypes.memmove(to, source, size)


def safe(default):
    """Has a method return default() where it would raise."""

    def wrap(method):
        @functools.wraps(method)
        def call(self, *args):
            try:
                return method(self, *args)
            except Exception:
                self._bug()
                return default()

        return call

    return wrap


class Refused(Exception):
    """The node does not serve this engine."""


class Link:
    """One connection, and the node's memory as it is known by it. Who copies holds it, so that the memory stays mapped."""

    def __init__(self, sock, fd):
        self.sock, self.size, self.ended = sock, os.fstat(fd).st_size, False
        self.memory = mmap.mmap(fd, self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.outbox = queue.SimpleQueue()
        self.pending = {}  # id -> Ask without an answer, the oldest first; under the tier's lock

    def stands(self):
        """Whether the node has not ended the connection: it does so before it reuses anything that it lent."""
        if not self.ended:
            poll = select.poll()
            poll.register(self.sock, select.POLLRDHUP)
            return not poll.poll(0)
        return False

    def send(self, kind, body):
        self.outbox.put(struct.pack("<IB", len(body) + 1, kind) + body)


class Request:
    """What is known of the keys of one request. The scheduler's thread owns it."""

    def __init__(self, context):
        params = getattr(context, "kv_transfer_params", None)
        tenant = params.get("kvasir.tenant") if isinstance(params, dict) else None
        self.tenant = tenant.encode(errors="surrogatepass") if isinstance(tenant, str) else None
        self.id = str(context.req_id).encode()[:512]
        self.answers, self.lent, self.ask, self.over = {}, {}, [], False  # lent: key -> (Ask, offset, size)


class Ask:
    """A lookup of one request in one step, and then what it lent; with a job, a store."""

    def __init__(self, link, number, request, keys, deadline, job=None):
        self.link, self.id, self.request, self.keys, self.deadline, self.job = link, number, request, keys, deadline, job
        self.left = self.loaded = 0

    def done(self, rows, loaded):
        """Ends the use of rows that are lent."""
        self.left, self.loaded = self.left - rows, self.loaded + loaded
        if self.left == 0:
            self.link.send(RELEASE, struct.pack("<QI", self.id, self.loaded))


class KvasirTier(SecondaryTierManager):
    medium = Medium and Medium.STORAGE

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None, socket_path="/run/kvasir.sock",
                 tenant="", threads=2, timeout=1.8, **config):  # fmt: skip
        """socket_path is the node's. tenant is whose the rows of a request are that names none ("kvasir.tenant" in its
        kv_transfer_params). threads copy loads, as many copy stores. timeout is the node's time for an answer, in seconds."""
        given = (offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        super().__init__(*given[: len(inspect.signature(SecondaryTierManager.__init__).parameters) - 1])
        self._path, self._timeout, self._tenant = socket_path, timeout, str(tenant).encode(errors="surrogatepass")
        self._rows, self._row = primary_kv_view.shape[0], primary_kv_view.strides[0]
        self._region = ctypes.addressof(ctypes.c_char.from_buffer(primary_kv_view))
        self._link = None  # of the thread that reads
        self._serving = None  # the link that the scheduler uses; None: misses
        self._canonical = False
        self._stalled, self._stop, self._warned = False, threading.Event(), {}
        self._lock = threading.Lock()
        self._copying = 0  # jobs that copy threads have; under _lock
        self._open = 0  # jobs whose results were not taken
        self._ids, self._requests, self._asking = itertools.count(1), {}, []
        self._inbox, self._finished = deque(), deque()
        self._loads, self._stores, self._threads = queue.SimpleQueue(), queue.SimpleQueue(), []
        why = config and f"unknown options {sorted(config)}"
        if not isinstance(socket_path, str) or not socket_path:
            why = why or f"socket_path {socket_path!r} is no path"
        if not isinstance(threads, int) or not 1 <= threads <= 64:
            why = why or f"threads {threads!r} is no number from 1 to 64"
        if not isinstance(timeout, (int, float)) or not 0 < timeout <= 60:
            why = why or f"timeout {timeout!r} is no number of seconds above 0 and up to 60"
        if not is_name(self._tenant):
            why = why or f"tenant {tenant!r} is no name of at most 128 characters without @ / \\ and NUL"
        try:
            hello = self._describe(offloading_spec)
            self._hello, self._canonical = json.dumps(hello).encode(), hello["canonical"]
            # By the descriptor the node learns which file a killed engine leaves.
            self._fd = getattr(getattr(offloading_spec, "_scheduler_mmap", None), "fd", None)
        except Exception as e:
            why = why or f"its configuration is not understood: {e!r}"
        if why:
            logger.warning("vLLM %s: %s. The Kvasir tier gives misses.", vllm.__version__, why)
            return
        self._spawn(self._connect)
        for jobs in (self._loads, self._stores) * threads:
            self._spawn(self._copy, jobs)

    def _describe(self, spec):
        cfg, per_row = spec.config, spec.blocks_per_chunk
        mapper = FileMapper.from_offloading_spec("", spec, blocks_per_file=per_row, parallel_agnostic=True)
        fields = {**mapper.get_run_config(), "rank": mapper.rank}
        return {
            "protocol": PROTOCOL, "vllm": vllm.__version__, "engine_id": cfg.engine_id, "model": cfg.model.name,
            "namespace": json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str),
            "canonical": fields.get("canonical_format") is not None, "row_bytes": self._row, "rows": self._rows,
            "groups": max(g.group_id for g in cfg.groups) + 1, "chunk_tokens": cfg.groups[0].tokens_per_block * per_row,
        }  # fmt: skip

    def _spawn(self, run, *args):
        self._threads.append(threading.Thread(target=run, args=args, daemon=True, name="kvasir" + run.__name__))
        self._threads[-1].start()

    def _warn(self, text, *args, **kwargs):
        """Logs a text at most once a minute."""
        now = time.monotonic()
        if now - self._warned.get(text, -60.0) >= 60:
            self._warned[text] = now
            logger.warning("Kvasir tier: " + text, *args, **kwargs)

    def _bug(self):
        self._warn("a bug costs misses", exc_info=True)

    # The connection.

    def _connect(self):
        refused, away = 0.1, 0.1
        while not self._stop.is_set():
            self._since = float("inf")  # when the connection began
            try:
                self._serve()
            except Refused as e:
                pause = refused = min(5.0, 2 * refused)
                self._warn("the node at %s refuses this engine: %s. Lookups are misses.", self._path, e)
            except (OSError, ValueError, KeyError, IndexError, struct.error) as e:
                refused = 0.1
                # A node that starts again is back soon; one that ends each connection at once is not asked all the time.
                pause = away = 0.02 if time.monotonic() - self._since > 1 else min(0.2, 2 * away)
                if not self._stop.is_set():
                    self._warn("no node at %s: %s. Lookups are misses meanwhile.", self._path, e)
            except Exception:
                pause = 0.2
                self._bug()
            else:
                pause = 0.2
            self._stop.wait(pause)

    def _serve(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            sock.connect(self._path)
            frame = struct.pack("<IB", len(self._hello) + 1, HELLO) + self._hello
            sent = socket.send_fds(sock, [frame], [self._fd] if self._fd is not None else [])
            if sent < len(frame):  # with nothing left a node that has refused and closed already would be a broken pipe
                sock.sendall(frame[sent:])
            head, fds, _, _ = socket.recv_fds(sock, 5, 1)
            try:
                kind, body = self._frame(sock, head)
                if kind != WELCOME or json.loads(body)["protocol"] != PROTOCOL:
                    raise Refused(bytes(body[:400]).decode(errors="replace"))
                link = Link(sock, fds[0])
            finally:
                for fd in fds:
                    os.close(fd)
            sock.settimeout(None)
            self._stalled, self._since, self._link = False, time.monotonic(), link
            logger.info("Kvasir tier: connected to %s", self._path)
            threading.Thread(target=self._write, args=(link,), daemon=True).start()
            try:
                while not self._stop.is_set():
                    self._answered(link, *self._frame(sock, b""))
            finally:
                self._link, link.ended = None, True
                link.outbox.put(None)
                with self._lock:
                    lost = [link.pending.pop(n) for n in list(link.pending)]
                for x in lost:
                    self._give_up(x)
                while self._copying:  # the end of the connection says that nothing is copied any more
                    time.sleep(0.001)
                link.memory.close()  # an idle scheduler may know the link for long; nobody copies once it has ended

    def _frame(self, sock, head):
        """Reads a frame of which head was read."""
        size, kind = struct.unpack("<IB", head + self._bytes(sock, 5 - len(head)))
        if not 1 <= size <= 1 << 20:
            raise ValueError(f"a frame of {size} bytes")
        return kind, self._bytes(sock, size - 1)

    def _bytes(self, sock, n):
        out = bytearray(n)
        view = memoryview(out)
        while view:
            if not (got := sock.recv_into(view)):
                raise OSError("the node has ended the connection")
            view = view[got:]
        return out

    def _write(self, link):
        try:
            while (frame := link.outbox.get()) is not None:
                link.sock.sendall(frame)
        except OSError:
            pass  # who reads sees the end, too

    def _answered(self, link, kind, body):
        (number,), places = struct.unpack_from("<Q", body), list(struct.iter_unpack("<QI", memoryview(body)[8:]))
        with self._lock:
            x = link.pending.get(number)
            if x is not None and (kind, len(places)) != (PLACES if x.job is not None else FOUND, len(x.keys)):
                raise ValueError(f"an answer of type {kind} with {len(places)} places for {len(x.keys)} keys")
            link.pending.pop(number, None)
            self._copying += x is not None and x.job is not None
        self._stalled = False
        if x is None:  # it was given up
            late = struct.pack("<QI", number, 0) if kind == FOUND else struct.pack("<QB", number, 0)
            link.send(RELEASE if kind == FOUND else COMMIT, late)
        elif x.job is not None:
            self._stores.put((x.job, x, places))
        else:
            hits = {k: (x, off, size) for k, (off, size) in zip(x.keys, places) if self._fits(size) and off + size <= link.size}
            x.left = len(hits)
            self._inbox.append((x, {k: HIT if k in hits else MISS for k in x.keys}, hits))

    def _fits(self, size):
        """Whether a row of the node may be loaded. Rows of a canonical layout may have other lengths."""
        return size == self._row or size > 0 and self._canonical

    def _give_up(self, x):
        """Ends what gets no answer."""
        if x.job is not None:
            self._finish(x.job, False)
        else:
            self._inbox.append((x, dict.fromkeys(x.keys, MISS), {}))

    def _finish(self, job, ok, good=(), uses=(), began=None, rows=0):
        more = {} if began is None else {"transfer_time": time.monotonic() - began}
        if BYTES_FIELD is not None:
            more[BYTES_FIELD] = rows * self._row
        self._finished.append((JobResult(job_id=job.job_id, success=ok, successful_keys=tuple(good) or None, **more), job, uses))

    # The copy threads.

    def _copy(self, jobs):
        while (task := jobs.get()) is not None:
            try:
                self._load(*task) if jobs is self._loads else self._store(*task)
            except Exception:
                self._bug()
                self._finish(task[0], False, uses=task[2] if jobs is self._loads else ())
            finally:
                with self._lock:
                    self._copying -= 1

    def _load(self, job, keys, uses):
        began, row, region = time.monotonic(), self._row, self._region
        links = {x.link: not x.link.ended for x, _, _ in uses}  # the memory of one that ended may be gone; later it stays for this copy
        move(
            (region + chunk * row, x.link.base + offset, min(size, row))
            for (x, offset, size), chunk in zip(uses, job.chunk_ids.tolist()) if links[x.link]
        )  # fmt: skip
        stands = {link: alive and link.stands() for link, alive in links.items()}
        good = [k for k, _ in itertools.takewhile(lambda use: stands[use[1][0].link], zip(keys, uses))]
        self._finish(job, len(good) == len(keys), good, uses, began, len(good))

    def _store(self, job, x, places):
        began, link, row = time.monotonic(), x.link, self._row
        chunks = job.chunk_ids.tolist()
        lent = [(offset, size, chunk) for (offset, size), chunk in zip(places, chunks) if size]
        # A commit makes all places visible: none is, where one cannot be written.
        whole = len(places) == len(chunks) and all(size == row and offset + size <= link.size for offset, size, _ in lent)
        if whole:
            move((link.base + offset, self._region + chunk * row, row) for offset, _, chunk in lent)
        if lent:
            link.send(COMMIT, struct.pack("<QB", x.id, whole))
        self._finish(job, whole, began=began, rows=len(lent) if whole else 0)

    # The scheduler's thread.

    def lookup(self, key, req_context):
        try:
            if self._inbox:
                self._drain()
            request = self._requests.get(req_context.req_id)
            if request is None:
                request = self._requests[req_context.req_id] = Request(req_context)
            answer = request.answers.get(key)
            if answer is not None:
                return answer
            if self._serving is None:
                return MISS
            if not request.ask:
                self._asking.append(request)
            request.ask.append(key)
            request.answers[key] = RETRY
            return RETRY
        except Exception:
            self._bug()
            return MISS

    def _drain(self):
        """Applies answers."""
        while self._inbox:
            x, answers, hits = self._inbox.popleft()
            if hits and (x.request.over or x.link is not self._link):
                x.done(x.left, 0)
                answers, hits = dict.fromkeys(x.keys, MISS), {}
            if not x.request.over:
                x.request.answers.update(answers)
                x.request.lent.update(hits)

    def _step(self):
        """Follows the connection, and gives up what waits for too long."""
        link, now = self._link, time.monotonic()
        while link is not None and link.pending:
            with self._lock:
                number = next(iter(link.pending), None)
                if number is None or link.pending[number].deadline > now:
                    break
                x = link.pending.pop(number)
            self._stalled = True
            self._warn("the node does not answer: lookups are misses until it does")
            self._give_up(x)
        self._drain()
        if link is not None and link is not self._serving:  # what another connection lent is gone
            for request in self._requests.values():
                for key in [k for k, use in request.lent.items() if use[0].link is not link]:
                    del request.lent[key], request.answers[key]
        self._serving = None if self._stalled else link

    @safe(lambda: None)
    def on_schedule_end(self, context=None):
        self._step()
        asking, self._asking = self._asking, []
        for request in asking:
            keys, request.ask = request.ask, []
            try:
                if self._serving is None:
                    request.answers.update(dict.fromkeys(keys, MISS))
                elif not request.over:
                    for at in range(0, len(keys), MAX_KEYS):
                        self._send(LOOKUP, request, keys[at : at + MAX_KEYS])
            except Exception:  # no key waits for ever
                self._bug()
                request.answers.update(dict.fromkeys(keys, MISS))

    def _send(self, kind, request, keys, job=None):
        """Asks the node. Keys of unlike lengths, and tenants that are no names, get no answer."""
        link, number = self._serving, next(self._ids)
        x = Ask(link, number, request, keys, time.monotonic() + self._timeout, job)
        tenant = self._tenant if request.tenant is None else request.tenant
        body, size = b"".join(keys), len(keys[0])
        if len(body) != size * len(keys) or size > 36 or len(keys) > MAX_KEYS or not is_name(tenant):
            return self._give_up(x)
        with self._lock:
            link.pending[number] = x
        head = struct.pack("<QB", number, len(tenant)) + tenant + struct.pack("<H", len(request.id)) + request.id
        link.send(kind, head + bytes((size,)) + body)
        if link is not self._link:  # it ended meanwhile, and may have missed this one
            with self._lock:
                x = link.pending.pop(number, None)
            if x is not None:
                self._give_up(x)

    def submit_store(self, job_metadata):
        self._open += 1
        try:
            keys, context = list(job_metadata.keys), job_metadata.req_context
            if self._serving is not None and keys:
                return self._send(STORE, self._requests.get(context.req_id) or Request(context), keys, job_metadata)
        except Exception:
            self._bug()
        self._finish(job_metadata, False)

    def submit_load(self, job_metadata):
        self._open += 1
        uses = []
        try:
            keys, request = list(job_metadata.keys), self._requests[job_metadata.req_context.req_id]
            for key in keys:
                if (use := request.lent.pop(key, None)) is None:
                    break
                request.answers.pop(key, None)
                uses.append(use)
            if uses:
                with self._lock:
                    self._copying += 1
                return self._loads.put((job_metadata, keys, uses))
        except Exception:
            self._bug()
        self._finish(job_metadata, False, uses=uses)

    @safe(tuple)
    def get_finished_jobs(self):
        self._step()
        out = []
        while self._finished:
            result, job, uses = self._finished.popleft()
            out.append(result)
            self._open -= 1
            good = len(result.successful_keys or ())
            for i, (x, _, _) in enumerate(uses):
                x.done(1, i < good)
            if job.is_promotion and not result.success and (request := self._requests.get(job.req_context.req_id)):
                request.answers.update(dict.fromkeys(list(job.keys)[good:], MISS))
        return out

    @safe(bool)
    def has_pending_work(self):
        link = self._link
        return bool(self._open or self._inbox or link is not None and link.pending)

    @safe(RequestOffloadingContext)
    def on_new_request(self, req_context):
        self._end(req_context)  # of the same id: what it was lent goes back
        self._requests[req_context.req_id] = Request(req_context)
        return RequestOffloadingContext()

    @safe(lambda: None)
    def on_request_finished(self, req_context):
        self._end(req_context)

    def _end(self, req_context):
        if (request := self._requests.pop(req_context.req_id, None)) is not None:
            request.over = True
            for x, _, _ in request.lent.values():
                x.done(1, 0)

    @safe(lambda: None)
    def drain_jobs(self):
        """Gives up stores that wait for the node, and waits for copies, which do not."""
        link = self._link  # the thread that reads may end it
        with self._lock:
            pending = link.pending if link is not None else {}
            lost = [pending.pop(n) for n in [n for n, x in pending.items() if x.job is not None]]
        for x in lost:
            self._give_up(x)
        while self._copying:
            time.sleep(0.0005)

    @safe(lambda: None)
    def shutdown(self):
        self._stop.set()
        self._serving = None
        self.drain_jobs()
        if (link := self._link) is not None:
            try:
                link.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it ended meanwhile
        for _ in self._threads:
            self._loads.put(None)
            self._stores.put(None)
        for thread in self._threads:
            thread.join(2)


Misses.__abstractmethods__ = KvasirTier.__abstractmethods__ = frozenset()  # unknown methods are those of vLLM's class
if differs():
    KvasirTier = Misses
