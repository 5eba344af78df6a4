# SPDX-License-Identifier: Apache-2.0
"""Drives kvasir_tier.py without vLLM, against a node that does what a scenario says: python3 shim.py FOLDER-OF-THE-MODULE

Each function whose name begins with test_ is a scenario. A failure is printed, and the exit code is 1.
"""

import array
import dataclasses
import enum
import json
import logging
import mmap
import os
import queue
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
from abc import ABC, abstractmethod

ROW, ROWS, POOL = 4096, 8, 1 << 16
HELLO, WELCOME, REFUSED, LOOKUP, FOUND, RELEASE, STORE, PLACES, COMMIT = range(1, 10)
NOWHERE = (1 << 64) - 1


class LookupResult(enum.Enum):
    MISS, HIT, RETRY = range(3)


@dataclasses.dataclass
class TransferJob:
    job_id: int
    keys: list
    chunk_ids: object
    is_promotion: bool
    req_context: object


class SecondaryTierManager(ABC):
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.view = primary_kv_view

    @abstractmethod
    def lookup(self, key, req_context): ...
    @abstractmethod
    def submit_store(self, job): ...
    @abstractmethod
    def submit_load(self, job): ...
    @abstractmethod
    def get_finished_jobs(self): ...
    @abstractmethod
    def on_new_request(self, req_context): ...
    @abstractmethod
    def drain_jobs(self): ...


class FileMapper:
    rank = 0

    @classmethod
    def from_offloading_spec(cls, *_, **__):
        return cls()

    def get_run_config(self):
        return {"model_name": "m"}


def result_of(*more, **options):
    """The class of results of a release."""
    fields = [("job_id", int), ("success", bool), ("successful_keys", object, None), ("transfer_time", object, None)]
    return dataclasses.make_dataclass("JobResult", fields + [(name, object, None) for name in more], **options)


def load_module(folder, result):
    """Imports the module beside a vLLM of so little."""
    made = {}
    for name in ("vllm", "vllm.logger", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.file_mapper", "vllm.v1.kv_offload.base",
                 "vllm.v1.kv_offload.tiering", "vllm.v1.kv_offload.tiering.base"):  # fmt: skip
        made[name] = sys.modules[name] = types.ModuleType(name)
    made["vllm"].__version__ = "0.32.0"
    made["vllm.logger"].init_logger = logging.getLogger
    made["vllm.v1.kv_offload.file_mapper"].FileMapper = FileMapper
    base, tiering = made["vllm.v1.kv_offload.base"], made["vllm.v1.kv_offload.tiering.base"]
    base.LookupResult, base.Medium, base.RequestOffloadingContext = LookupResult, enum.Enum("Medium", "STORAGE"), type("Context", (), {})
    tiering.JobResult, tiering.SecondaryTierManager, tiering.TransferJob = result, SecondaryTierManager, TransferJob
    sys.path.insert(0, folder)
    sys.modules.pop("kvasir_tier", None)
    import kvasir_tier

    return kvasir_tier


class Ids(list):
    def tolist(self):
        return list(self)


class Context:
    def __init__(self, req_id, params=None):
        self.req_id, self.kv_transfer_params = req_id, params


def eventually(what, true):
    until = time.monotonic() + 10
    while not (got := true()):
        if time.monotonic() > until:
            raise AssertionError(f"never: {what}")
        time.sleep(0.001)
    return got


def expect(what, got, want):
    if got != want:
        raise AssertionError(f"{what}: {got!r}, want {want!r}")


class Node:
    """A node that welcomes, notes frames, and sends what it is told."""

    def __init__(self, greet=None):
        self.path = tempfile.mktemp(prefix="kvasir-shim-")
        self.greet, self.frames, self.conns, self.bytes = greet or self.welcome, queue.Queue(), [], POOL
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.pool = os.memfd_create("kvasir-shim-pool")
        os.ftruncate(self.pool, POOL)
        self.memory = mmap.mmap(self.pool, POOL)
        self.threads = []
        self.accepts = threading.Thread(target=self.accept, daemon=True)
        self.accepts.start()

    def accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            self.conns.append(conn)
            self.threads.append(threading.Thread(target=self.serve, args=(conn,), daemon=True))
            self.threads[-1].start()

    def serve(self, conn):
        try:
            self.read(conn)
            self.greet(conn)
            while True:
                self.frames.put(self.read(conn))
        except OSError:
            conn.close()

    def read(self, conn):
        head = self.all(conn, 5)
        size, kind = struct.unpack("<IB", head)
        return kind, self.all(conn, size - 1)

    def all(self, conn, n):
        out = b""
        while len(out) < n:
            got = conn.recv(n - len(out))
            if not got:
                raise OSError("ended")
            out += got
        return out

    def hello(self):
        body = json.dumps({"protocol": 1, "version": "t", "pool_bytes": self.bytes}).encode()
        return struct.pack("<IB", len(body) + 1, WELCOME) + body

    def welcome(self, conn, data=None):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.pool]))]
        conn.sendmsg([self.hello() if data is None else data], rights)

    def send(self, kind, body, upto=None):
        frame = struct.pack("<IB", len(body) + 1, kind) + body
        self.conns[-1].sendall(frame[:upto])

    def places(self, kind, number, *places):
        self.send(kind, struct.pack("<Q", number) + b"".join(struct.pack("<QI", *p) for p in places))

    def next(self, kind):
        """The next frame, which is of that type: its number and the rest."""
        got, body = self.frames.get(timeout=10)
        expect("type of the frame", got, kind)
        return struct.unpack_from("<Q", body)[0], body[8:]

    def end(self):
        self.listener.shutdown(socket.SHUT_RDWR)  # a close alone leaves the accept, which would serve one more client
        self.accepts.join(10)
        self.listener.close()
        os.unlink(self.path)
        for conn in self.conns:
            try:
                conn.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self.threads:
            thread.join(10)  # none sends the memory once it is closed
        self.memory.close()
        os.close(self.pool)


class Bench:
    """A tier, and a node if it has one."""

    def __init__(self, module, node=None, connected=True, **config):
        self.module, self.node = module, node
        self.memory = mmap.mmap(-1, ROW * ROWS)
        view = memoryview(self.memory).cast("b", (ROWS, ROW))
        group = types.SimpleNamespace(group_id=0, tokens_per_block=16)
        spec = types.SimpleNamespace(blocks_per_chunk=4, config=types.SimpleNamespace(
            engine_id="e", model=types.SimpleNamespace(name="m"), groups=[group]))  # fmt: skip
        self.bugs = []
        module.KvasirTier._bug = lambda _: self.bugs.append(traceback.format_exc())
        self.tier = module.KvasirTier(spec, view, "KvasirTier", socket_path=node.path if node else "/nowhere", **config)
        self.jobs = 0
        if node and connected:
            eventually("connected", self.serving)

    def serving(self):
        self.tier.on_schedule_end()
        return self.tier._serving is not None

    def begin(self, name, *keys, params=None):
        """A request that looks keys up for the first time."""
        context = Context(name, params)
        self.tier.on_new_request(context)
        answers = [self.tier.lookup(k, context) for k in keys]
        self.tier.on_schedule_end()
        return context, answers

    def ends(self, context, *keys):
        """The answers of a request once none is RETRY."""

        def answers():
            self.tier.on_schedule_end()
            got = [self.tier.lookup(k, context) for k in keys]
            return LookupResult.RETRY not in got and got

        return eventually("answers", answers)

    def job(self, context, promotion, *keys):
        self.jobs += 1
        job = TransferJob(self.jobs, list(keys), Ids(range(len(keys))), promotion, context)
        (self.tier.submit_load if promotion else self.tier.submit_store)(job)
        return job

    def result(self):
        return eventually("a result", lambda: list(self.tier.get_finished_jobs()))[0]

    def close(self):
        self.tier.shutdown()
        if self.node:
            self.node.end()
        expect("bugs", self.bugs, [])


def key(i):
    return bytes([i]) * 32 + struct.pack(">I", 0)


def test_tenant_that_is_no_name(module):
    b = Bench(module, Node())
    odd = [{"kvasir.tenant": t} for t in ("a/b", "a@b", "a\\b", "\0", "x" * 129, "\ud800")]
    for i, params in enumerate(odd):
        context, _ = b.begin(f"r{i}", key(1), params=params)
        expect(f"{params}", b.ends(context, key(1)), [LookupResult.MISS])
        b.job(context, False, key(1))
        expect("a store of it", b.result().success, False)
    for params in ([1], "text", {"kvasir.tenant": "ü" * 100}):  # of these the first two name none
        context, _ = b.begin("last", key(1), params=params)
        number, body = b.node.next(LOOKUP)
        expect("tenant", bytes(body[1 : 1 + body[0]]).decode(), "ü" * 100 if isinstance(params, dict) else "")
        b.node.places(FOUND, number, (NOWHERE, 0))
        expect(f"{params}", b.ends(context, key(1)), [LookupResult.MISS])
    b.close()


def test_store_whose_places_cannot_be_written_commits_nothing(module):
    b = Bench(module, Node())
    context, _ = b.begin("r")
    for wrong in ((ROW, ROW - 1), (POOL - ROW + 1, ROW), (NOWHERE, ROW)):
        b.job(context, False, key(1), key(2))
        number, _ = b.node.next(STORE)
        b.node.places(PLACES, number, (0, ROW), wrong)
        expect(f"{wrong}: result", b.result().success, False)
        expect(f"{wrong}: commit", b.node.next(COMMIT), (number, b"\0"))
    b.job(context, False, key(1), key(2))
    number, _ = b.node.next(STORE)
    b.node.places(PLACES, number, (0, ROW), (NOWHERE, 0))
    expect("result", b.result().success, True)
    expect("commit", b.node.next(COMMIT), (number, b"\1"))
    b.close()


def test_found_row_of_another_length_is_a_miss(module):
    b = Bench(module, Node())
    context, _ = b.begin("r", key(1), key(2), key(3))
    number, _ = b.node.next(LOOKUP)
    b.node.places(FOUND, number, (0, ROW), (ROW, ROW - 1), (2 * ROW, ROW + 1))
    expect("answers", b.ends(context, key(1), key(2), key(3)), [LookupResult.HIT, LookupResult.MISS, LookupResult.MISS])
    b.close()


def test_answer_of_another_question_ends_the_connection(module):
    b = Bench(module, Node())
    for kind, places in ((PLACES, [(0, ROW)]), (FOUND, []), (FOUND, [(0, ROW), (0, ROW)])):
        eventually("connected", b.serving)
        context, _ = b.begin("r", key(1))
        number, _ = b.node.next(LOOKUP)
        b.node.places(kind, number, *places)
        expect(f"type {kind}, {places}", b.ends(context, key(1)), [LookupResult.MISS])
    for kind, places in ((FOUND, [(0, ROW)]), (PLACES, [])):
        eventually("connected", lambda: b.tier._link is not None and b.serving())
        context, _ = b.begin("s")
        b.job(context, False, key(1))
        number, _ = b.node.next(STORE)
        b.node.places(kind, number, *places)
        expect(f"a store, type {kind}, {places}", b.result().success, False)
    b.close()


def test_options_that_cannot_be_used_give_misses(module):
    for options in ({"threads": 0}, {"threads": -1}, {"threads": "x"}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": float("inf")},
                    {"timeout": "x"}, {"tenant": "a/b"}, {"surprise": 1}):  # fmt: skip
        node = Node()
        b = Bench(module, node, connected=False, **options)
        context, _ = b.begin("r", key(1))
        expect(f"{options}", b.ends(context, key(1)), [LookupResult.MISS])
        for promotion in (False, True):
            b.job(context, promotion, key(1))
            expect(f"{options}: promotion {promotion}", b.result().success, False)
        expect("connections", len(node.conns), 0)
        b.tier.drain_jobs()
        b.close()


def test_request_that_begins_again_gives_back_what_it_was_lent(module):
    b = Bench(module, Node())
    b.begin("r", key(1))
    first, _ = b.node.next(LOOKUP)
    context, _ = b.begin("r", key(1))  # before the answer came
    second, _ = b.node.next(LOOKUP)
    b.node.places(FOUND, first, (0, ROW))
    b.node.places(FOUND, second, (0, ROW))
    expect("answers", b.ends(context, key(1)), [LookupResult.HIT])
    expect("released", b.node.next(RELEASE), (first, struct.pack("<I", 0)))
    b.begin("r", key(2))  # after it
    expect("released", b.node.next(RELEASE), (second, struct.pack("<I", 0)))
    b.node.next(LOOKUP)
    b.close()


def test_bug_in_one_lookup_leaves_no_key_waiting(module):
    b = Bench(module, Node())
    send, calls = b.tier._send, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("bug")
        return send(*args)

    b.tier._send = fails
    one, two = Context("one"), Context("two")
    for c in (one, two):
        b.tier.on_new_request(c)
        b.tier.lookup(key(1), c)
    b.tier.on_schedule_end()
    number, _ = b.node.next(LOOKUP)
    b.node.places(FOUND, number, (0, ROW))
    expect("the other one", b.ends(two, key(1)), [LookupResult.HIT])
    expect("the first one", b.ends(one, key(1)), [LookupResult.MISS])
    expect("bugs", len(b.bugs), 1)
    b.bugs.clear()
    b.close()


def test_engine_that_is_refused_asks_less_and_less_often(module):
    def refuse(conn):
        text = b"not you"
        conn.sendall(struct.pack("<IB", len(text) + 1, REFUSED) + text)
        raise OSError

    pauses, enough = [], threading.Event()

    class Stop(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            if len(pauses) == 8:
                enough.set()
            return super().wait(0.001)

    event, module.threading = threading.Event, types.SimpleNamespace(**{**vars(threading), "Event": Stop})
    try:
        b = Bench(module, Node(refuse), connected=False)
    finally:
        module.threading = threading
    expect("tries", enough.wait(10), True)
    b.close()
    expect("event", event, threading.Event)
    if not (pauses[0] <= 0.3 and pauses[7] >= 5 and pauses[:8] == sorted(pauses[:8])):
        raise AssertionError(f"pauses of {pauses[:8]}")


def test_node_that_refuses_and_closes_at_once_is_heard(module):
    closed, said = threading.Event(), []

    def refuse(conn):
        text = b"not you"
        conn.sendall(struct.pack("<IB", len(text) + 1, REFUSED) + text)
        conn.close()
        closed.set()
        raise OSError

    def send_fds(*args):
        sent = socket.send_fds(*args)
        closed.wait(10)
        return sent

    warn, module.KvasirTier._warn = module.KvasirTier._warn, lambda _, text, *args, **__: said.append(text % args)
    module.socket = types.SimpleNamespace(**{**vars(socket), "send_fds": send_fds})
    try:
        b = Bench(module, Node(refuse), connected=False)
        eventually("a warning", lambda: said)
        b.close()
    finally:
        module.socket, module.KvasirTier._warn = socket, warn
    if "refuses this engine: not you" not in said[0]:
        raise AssertionError(said[0])


def test_memory_of_a_node_that_ended_is_unmapped(module):
    def mapped():
        with open("/proc/self/maps") as f:
            return f.read().count("kvasir-shim-pool")

    b = Bench(module, Node())
    context, _ = b.begin("r", key(1))
    number, _ = b.node.next(LOOKUP)
    b.node.places(FOUND, number, (0, ROW))
    expect("answers", b.ends(context, key(1)), [LookupResult.HIT])
    expect("mapped", mapped(), 2)
    b.node.end()
    b.node = None
    eventually("only the node has it mapped", lambda: mapped() == 0)  # the scheduler is idle meanwhile
    b.job(context, True, key(1))
    expect("a load of it", b.result().success, False)
    expect("answers", b.ends(context, key(1)), [LookupResult.MISS])
    b.close()


def test_results_of_a_release_without_a_field_of_bytes(_):
    module = load_module(sys.argv[1], result_of(slots=True))
    b = Bench(module, Node())
    context, _ = b.begin("r")
    for _ in range(4):  # more than there are threads
        b.job(context, False, key(1))
        number, _ = b.node.next(STORE)
        b.node.places(PLACES, number, (0, ROW))
        expect("result", b.result().success, True)
        b.node.next(COMMIT)
    b.close()
    module = load_module(sys.argv[1], result_of("transfer_size"))
    b = Bench(module, Node())
    context, _ = b.begin("r")
    b.job(context, False, key(1))
    number, _ = b.node.next(STORE)
    b.node.places(PLACES, number, (0, ROW))
    expect("bytes", b.result().transfer_size, ROW)
    b.close()


def test_frames_that_are_cut_cost_misses(module):
    node = Node()
    b = Bench(module, node)
    found = struct.pack("<Q", 0) + struct.pack("<QI", 0, ROW)
    for upto in range(len(found) + 5):
        eventually("connected", b.serving)
        context, _ = b.begin(f"r{upto}", key(1))
        number, _ = node.next(LOOKUP)
        node.send(FOUND, struct.pack("<Q", number) + found[8:], upto)
        node.conns[-1].shutdown(socket.SHUT_RDWR)
        expect(f"cut after {upto} bytes", b.ends(context, key(1)), [LookupResult.MISS])
    b.close()
    cuts = iter(range(len(node.hello())))
    welcomed = []

    def greet(conn):
        upto = next(cuts, None)
        if upto:
            node.welcome(conn, node.hello()[:upto])
        if upto is not None:
            conn.shutdown(socket.SHUT_RDWR)
            raise OSError
        welcomed.append(conn)  # first: the client goes on at once
        node.welcome(conn)

    node = Node(greet)
    b = Bench(module, node, connected=False)
    eventually("connected after all", b.serving)
    expect("welcomed", len(welcomed), 1)
    b.close()


def test_frozen_node_costs_the_timeout(module):
    b = Bench(module, Node(), timeout=0.05)
    context, _ = b.begin("r", key(1))
    number, _ = b.node.next(LOOKUP)
    expect("answers", b.ends(context, key(1)), [LookupResult.MISS])
    b.job(context, False, key(1))
    expect("a store", b.result().success, False)
    b.node.places(FOUND, number, (0, ROW))  # it goes on
    expect("released", b.node.next(RELEASE), (number, struct.pack("<I", 0)))
    eventually("served again", b.serving)
    b.close()


def test_connection_that_ends_in_drain_jobs_or_shutdown(module):
    b = Bench(module, Node())
    looks = iter([b.tier._link])  # the first look finds it
    ends = type("Ends", (type(b.tier),), {"_link": property(lambda _: next(looks, None))})
    b.tier.__class__, plain = ends, type(b.tier)
    b.tier.drain_jobs()  # with an exception it would not wait for copies
    b.tier.__class__ = plain
    expect("bugs of drain_jobs", b.bugs, [])
    b.node.end()
    b.node = None
    eventually("the connection has ended", lambda: b.tier._link is None)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.close()
    b.tier._link = types.SimpleNamespace(sock=sock, pending={})
    b.close()
    expect("threads", [t.name for t in b.tier._threads if t.is_alive()], [])


def main():
    logging.disable(logging.CRITICAL)
    module = load_module(sys.argv[1], result_of("transfer_bytes"))
    wait = threading.Event.wait
    threading.Event.wait = lambda self, timeout=None: wait(self, min(timeout, 0.002) if timeout in (0.2, 0.4) else timeout)
    failed = 0
    for name, scenario in list(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            scenario(module)
        except Exception:  # noqa: BLE001 - whatever a scenario raises, it has failed and the next one runs
            failed += 1
            print(f"--- {name}\n{traceback.format_exc()}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
