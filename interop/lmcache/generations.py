#!/usr/bin/env python3
"""Engines of several lmcache releases at once against one server.

    generations.py --url tcp://127.0.0.1:5555 --kill 'sh kill.sh' --cold 'sh cold.sh' 0.5.3=DIR 0.5.5=DIR ...

Each release runs in a process of its own, with the package in DIR before the others on Python's path, through the
adapters that its vLLM connector uses: one socket for the scheduler and one for the worker, with heartbeats. All
engines run the same model, so each must find what the others stored, byte for byte. --kill ends the server with
SIGKILL and starts it again; --cold also discards its pool. --record writes what each engine's sockets sent and got to
DIR/RELEASE.json, for golden vectors. Prints one JSON line and exits 0 when all checks passed.
"""

import argparse
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import time

BLOCK, LAYERS, HEADS, DIM = 16, 3, 2, 8
MODEL = "interop/generations"
HEARTBEAT = 3.0  # seconds between pings, and until one that is not answered means that the server is not well


def record(sockets):
    """Keeps the frames of every ZMQ socket of this process, by socket and in order."""
    import zmq

    send, receive = zmq.Socket.send_multipart, zmq.Socket.recv_multipart

    def keep(socket, way, frames):
        if socket.type == zmq.DEALER:
            sockets.setdefault(id(socket), []).append({"way": way, "hex": [bytes(f).hex() for f in frames]})

    def sends(self, frames, *args, **more):
        keep(self, ">", frames)
        return send(self, frames, *args, **more)

    def receives(self, *args, **more):
        frames = receive(self, *args, **more)
        keep(self, "<", frames)
        return frames

    zmq.Socket.send_multipart, zmq.Socket.recv_multipart = sends, receives


class Engine:
    """A scheduler and a worker of one release, in this process, with blocks of so many tokens."""

    def __init__(self, url, model, single_plane, block=BLOCK, device="cpu"):
        self.block, self.device = block, device
        import lmcache.integration.vllm.vllm_multi_process_adapter as adapter
        import torch
        import zmq

        self.torch, self.adapter, self.mla = torch, adapter, single_plane
        self.ranks = 2 if single_plane else 1  # of tensor parallelism; with a single plane all read the same chunks
        torch.set_num_threads(1)
        hints = {"kv_layout": "HND"}  # as vLLM has it on CPU
        adapter.vllm_layout_hints = lambda *a, **k: hints  # it would ask vLLM
        self.context = zmq.Context()
        config = {"lmcache.mp.heartbeat_interval": HEARTBEAT, "lmcache.mp.mq_timeout": 20.0,
                  "lmcache.mp.mp_transfer_mode": "data" if self.before("0.5.0") else "engine_driven"}
        scheduler, worker = adapter.LMCacheMPSchedulerAdapter, adapter.LMCacheMPWorkerAdapter
        urls = [url] if "server_urls" in inspect.signature(scheduler).parameters else url
        # 0.5.7: keys carry the tokens as bytes, and vLLM's connector negotiates the chunk size.
        self.packed = "token_bytes" in inspect.signature(adapter.LoadStoreOp).parameters
        align = {"required_chunk_alignment": block} if self.packed else {}
        self.scheduler = scheduler(urls, self.context, model, block, self.strategy(), extra_config=config, **align)
        self.worker = worker(url, self.context, model, block, self.strategy(), extra_config=config, **align)
        self.chunk = self.scheduler.num_blocks_per_chunk() * block
        self.blocks = 128
        shape = (self.blocks, block, DIM) if self.mla else (2, self.blocks, HEADS, block, DIM)
        self.kv = {f"model.layers.{i}.attn": torch.zeros(shape, dtype=torch.float16, device=device) for i in range(LAYERS)}
        self.worker.register_kv_caches(self.kv)
        # A hit of two readers needs two workers. The second one stores nothing, as in vLLM, and loads what the first one loads.
        self.workers = [self.worker]
        for _ in range(self.ranks - 1):
            self.workers.append(worker(url, self.context, model, block, self.strategy(), extra_config=config, **align))
            if getattr(self.workers[-1], "instance_id", None) == getattr(self.worker, "instance_id", 0):
                self.workers[-1].instance_id += 1 << 32  # before 0.5.0 the id is that of the process; no process has this one
            self.workers[-1].register_kv_caches(self.kv)
        self.requests = 0
        self.ids = f"{os.getpid()}-{time.time_ns()}"
        self.watch_health()

    def before(self, release):
        from importlib.metadata import PackageNotFoundError, version

        import lmcache
        try:
            have = version("lmcache")
        except PackageNotFoundError:
            have = lmcache.__version__
        return [int(re.match("[0-9]+", x)[0]) for x in have.split(".")[:3]] < [int(x) for x in release.split(".")]

    def strategy(self):
        want = {
            "use_mla": self.mla, "mla_only": self.mla, "kv_world_size": 1, "kv_worker_id": 0, "actual_world_size": self.ranks, "actual_worker_id": 0,
            "vllm_world_size": self.ranks, "vllm_worker_id": 0, "tp_size": self.ranks, "pp_size": 1, "n_servers": 1,
        }
        kind = self.adapter.ParallelStrategy
        return kind(**{k: v for k, v in want.items() if k in inspect.signature(kind).parameters})

    def request(self):
        self.requests += 1
        return f"{self.ids}-{self.requests}"

    def tokens(self, seed, chunks):
        return [(seed * 1000003 + i * 7919) % 32000 for i in range(chunks * self.chunk)]

    def fill(self, seed, chunks, first):
        """Writes what a prompt's KV is made of into the blocks from first on."""
        torch = self.torch
        n = chunks * self.chunk // self.block
        for i, layer in enumerate(self.kv.values()):
            g = torch.Generator().manual_seed(seed * 100 + i)
            x = torch.randint(-2000, 2000, (n, self.block, DIM) if self.mla else (2, n, HEADS, self.block, DIM), generator=g).to(torch.float16)
            (layer if self.mla else layer.transpose(0, 1))[first:first + n] = x if self.mla else x.transpose(0, 1)

    def bytes(self, chunks, first):
        n = chunks * self.chunk // self.block
        return [(x if self.mla else x.transpose(0, 1))[first:first + n].clone() for x in self.kv.values()]

    def op(self, tokens, first, end):
        blocks = list(range(first, first + end // self.block))
        flat = self.before("0.4.7")
        return self.adapter.LoadStoreOp(**{"token_bytes" if self.packed else "token_ids": self.pack(tokens)}, block_ids=blocks if flat else [blocks], start=0, end=end)

    def pack(self, tokens):
        return struct.pack(f">{len(tokens)}I", *tokens) if self.packed else tokens

    def event(self):
        make = getattr(self.worker, "create_recorded_event", None)
        if make is not None:
            return make()
        if self.device != "cpu":
            event = self.torch.cuda.Event(interprocess=True)
            event.record()
            return event

        class Event:
            def ipc_handle(self):
                return b"stub_ipc_handle"

            def synchronize(self):
                pass

            def query(self):
                return True
        return Event()

    def watch_health(self):
        """Counts how often the adapters come to hold the server for not well: then they store nothing and find nothing."""
        self.lapses = 0
        for adapter in (self.scheduler, *self.workers):
            several = getattr(adapter, "_health_events", None)
            for event in several.values() if several else [adapter._health_event]:
                def clear(clear=event.clear):
                    self.lapses += 1
                    clear()
                event.clear = clear

    def healthy(self):
        return all(x() if callable(x) else x for x in (a.is_healthy for a in (self.scheduler, *self.workers)))

    def steadily(self, what, operation):
        """Does an operation while the adapters hold the server for well. A ping that was lost when the server was killed, or
        that a busy machine answers late, tells them otherwise for a while, in the middle of an operation too."""
        for _ in range(5):
            end = time.monotonic() + 60
            while not self.healthy() and time.monotonic() < end:
                time.sleep(0.02)
            before = self.lapses
            out = operation()
            if self.lapses == before and self.healthy():
                break
            print(f"{what}: the client held the server for not well, {out}", file=sys.stderr, flush=True)
        return out

    def wait(self, pending, limit=60.0):
        """Drives the workers until the futures of a store or a retrieve are taken."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for worker in self.workers:
                worker.get_finished(set())
            if not pending():
                return True
            time.sleep(0.005)
        return False

    def store(self, seed, chunks):
        return self.steadily("store", lambda: self.store_once(seed, chunks))

    def store_once(self, seed, chunks):
        request, tokens = self.request(), self.tokens(seed, chunks)
        self.fill(seed, chunks, 0)
        self.worker.submit_store_request(request, self.op(tokens, 0, len(tokens)), self.event())
        done = self.wait(lambda: request in self.worker.store_futures)
        self.scheduler.end_session(request)
        return {"done": done}

    def lookup(self, request, tokens, salt):
        self.scheduler.maybe_submit_lookup_request(request, self.pack(tokens), cache_salt=salt)
        end = time.monotonic() + 180
        while time.monotonic() < end:
            hit = self.scheduler.check_lookup_result(request)
            if hit is not None:
                return hit
            time.sleep(0.005)
        return -1

    def load(self, seed, chunks, free=0, more=0, salt=""):
        """Looks a prompt of chunks and more up and loads what is there into other blocks. The first free chunks are given
        back instead."""
        return self.steadily("load", lambda: self.load_once(seed, chunks, free, more, salt))

    def load_once(self, seed, chunks, free, more, salt):
        request, tokens, first = self.request(), self.tokens(seed, chunks + more), self.blocks // 2
        self.fill(seed, chunks, 0)
        want = self.bytes(chunks, 0)
        hit = self.lookup(request, tokens, salt)
        out = {"hit": hit // self.chunk, "equal": None}
        if free:
            self.scheduler.free_lookup_locks(self.pack(tokens), 0, free * self.chunk, request, cache_salt=salt)
        if hit >= self.chunk and hit > free * self.chunk:
            n, out["equal"] = hit // self.chunk, True
            for worker in self.workers:  # a worker sends heartbeats from its first store or load on
                self.fill(seed + 1, chunks, first)
                worker.submit_retrieve_request(request, self.op(tokens, first, n * self.chunk), self.event())
                self.wait(lambda worker=worker: request in worker.retrieve_futures)
                got = self.bytes(n, first)
                out["equal"] = out["equal"] and all(self.torch.equal(a[:len(b)], b) for a, b in zip(want, got, strict=True))
        self.scheduler.cleanup_lookup_result(request)
        self.scheduler.end_session(request)
        return out

    def again(self, seed, chunks, limit=180.0):
        """Stores and loads new prompts until one is loaded: the engine has come back."""
        start = time.monotonic()
        out, tries = {}, 0
        while time.monotonic() - start < limit:
            seed, tries = seed + 10, tries + 1
            self.store(seed, chunks)
            out = self.load(seed, chunks)
            if out["hit"] == chunks or out["equal"] is False:
                break
            time.sleep(0.25)
        return out | {"tries": tries, "seconds": round(time.monotonic() - start, 1)}

    def close(self):
        getattr(self.scheduler, "shutdown", lambda: None)()
        for worker in self.workers:
            worker.shutdown()
        return {}


def engine(args, kind=Engine):
    """The process of one engine: a JSON command a line in, a JSON answer a line out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints goes to standard error
    sockets = {}
    if args.record:
        record(sockets)
    e = kind(args.url, args.model, args.single_plane, args.block, args.device)
    print(json.dumps({"chunk": e.chunk}), file=out, flush=True)
    for line in sys.stdin:
        name, *rest = json.loads(line)
        try:
            answer = getattr(e, name)(*rest)
        except Exception as err:  # noqa: BLE001 - the test that asks gets it as its answer
            answer = {"error": f"{type(err).__name__}: {err}"}
        print(json.dumps(answer), file=out, flush=True)
        if name == "close":
            break
    if args.record and not args.single_plane:
        with open(args.record, "w") as f:
            json.dump({"chunk_tokens": e.chunk, "sockets": list(sockets.values())}, f)
    os._exit(0)


class Remote:
    script = __file__

    def __init__(self, args, release, folder, single_plane, url=None, block=BLOCK, model=MODEL):
        self.release = release + ", one plane and two ranks" * single_plane + f", blocks of {block}" * (block != BLOCK)
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))), LMCACHE_LOG_LEVEL="ERROR", LMCACHE_TRACK_USAGE="false", PYTHONWARNINGS="ignore")
        command = [sys.executable, self.script, "--engine", "--url", url or args.url, "--block", str(block), "--device", getattr(args, "device", "cpu"), "--model", model + "/mla" * single_plane]
        if args.record:
            command += ["--record", os.path.join(args.record, release + ".json")]
        self.log = os.path.join(args.logs, f"{release}{'-mla' * single_plane}-{block}.log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command + ["--single-plane"] * single_plane, env=env, text=True, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log)

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the engine ended: {self.log}"}

    def ask(self, *command):
        print(json.dumps(command), file=self.process.stdin, flush=True)

    def call(self, *command):
        self.ask(*command)
        return self.answer()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--url", required=True)
    p.add_argument("--engine", action="store_true")
    p.add_argument("--model", default=MODEL)
    p.add_argument("--single-plane", action="store_true")
    p.add_argument("--block", type=int, default=BLOCK, help="tokens of a block, of --engine")
    p.add_argument("--device", default="cpu", help="where the engines' KV lies: cpu or cuda (default cpu)")
    p.add_argument("--kill", help="shell command that kills the server and starts it again")
    p.add_argument("--cold", help="the same, and the new one starts empty")
    p.add_argument("--record", metavar="DIR")
    p.add_argument("--logs", default="/tmp")
    p.add_argument("releases", nargs="*")
    args = p.parse_args()
    if args.engine:
        return engine(args)

    failed, passed = [], 0

    def check(name, ok, detail):
        nonlocal passed
        print(("PASS " if ok else "FAIL ") + name, detail, file=sys.stderr, flush=True)
        if ok:
            passed += 1
        else:
            failed.append(name)

    releases = [r.split("=", 1) for r in args.releases]
    engines = [Remote(args, r, d, False) for r, d in releases]
    planes = [Remote(args, r, d, True) for r, d in {releases[0][0]: releases[0], releases[-1][0]: releases[-1]}.values()]
    alike = engines[:]
    engines += planes
    for e in engines:
        got = e.answer()
        check(f"{e.release} starts", "chunk" in got, got)
    if failed:
        engines = [e for e in engines if e.process.poll() is None]
        alike = [e for e in alike if e in engines]

    def all_of(what, command, good):
        for i, e in enumerate(engines):
            e.ask(*command(i))
        for i, e in enumerate(engines):
            got = e.answer()
            check(f"{e.release} {what}", good(i, got), got)

    whole = lambda _, r: r.get("hit") == 3 and r.get("equal") is True
    all_of("stores", lambda i: ("store", 100 + i, 3), lambda _, r: r.get("done"))
    all_of("loads what it stored", lambda i: ("load", 100 + i, 3), whole)
    all_of("loads what is there of a longer prompt", lambda i: ("load", 100 + i, 3, 0, 2), whole)
    all_of("does not see another tenant's", lambda i: ("load", 100 + i, 3, 0, 0, "tenant"), lambda _, r: r.get("hit") == 0)
    all_of("gives locks back", lambda i: ("load", 100 + i, 3, 3), lambda _, r: r.get("hit") == 3 and r.get("equal") is None)
    for i, e in enumerate(alike):
        for j, other in enumerate(alike):
            if i != j:
                got = e.call("load", 100 + j, 3)
                check(f"{e.release} loads what {other.release} stored", whole(0, got), got)
    if args.kill:
        subprocess.run(args.kill, shell=True, check=True)
        all_of("loads after a kill of the server", lambda i: ("again", 1000 + 100 * i, 3), whole)
        all_of("loads what was stored before it", lambda i: ("load", 100 + i, 3), whole)
        all_of("loads at once what it stores", lambda i: ("again", 2000 + 100 * i, 3), lambda _, r: whole(0, r) and r["tries"] == 1)
    if args.cold:
        subprocess.run(args.cold, shell=True, check=True)
        all_of("comes back to a server that knows nothing", lambda i: ("again", 3000 + 100 * i, 3), whole)
        all_of("misses what that one never had", lambda i: ("load", 100 + i, 3), lambda _, r: r.get("hit") == 0)
    for e in engines:
        e.ask("close")
    for e in engines:
        got = e.answer()
        check(f"{e.release} ends", got == {}, got)
        e.process.wait(120)
    print(json.dumps({"passed": passed, "failed": failed}))
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
