"""Measures the Kvasir tier of vLLM's tiered offloading on this machine, beside what it is compared with. Prints one JSON line per figure.

lookup: time of the scheduler's thread for 1,000 keys, until they are asked for and until they are answered. submit: median of submit_store
and submit_load. copy: loads against memmove between the same two mappings, in rows of one length, and against another process that has
both mappings and copies when it is told to, as a node would that maps the region of the engine. ready: from the first lookup until all
rows lie in vLLM's region, against vLLM's fs tier over a warm page cache.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import statistics
import struct
import tempfile
import time

import drive_tier as drive
import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

MIB = 1 << 20


def say(what, **figures):
    print(json.dumps({"what": what, **{k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}}), flush=True)


def finished(tier, seconds=20):
    """Waits for the results of one or more jobs."""
    end = time.monotonic() + seconds
    while not (out := list(tier.get_finished_jobs())):
        if time.monotonic() > end:
            raise TimeoutError("a job does not end")
        time.sleep(0.0002)
    return out


def ask(tier, keys, context):
    """Looks keys up until they are answered. It returns the scheduler's time for asking and for the answers."""
    tier.on_new_request(context)
    began = time.perf_counter()
    for k in keys:
        tier.lookup(k, context)
    tier.on_schedule_end(None)
    asked = time.perf_counter() - began
    end = time.monotonic() + 10
    while tier.lookup(keys[-1], context) is LookupResult.RETRY and time.monotonic() < end:
        time.sleep(0.001)
    began = time.perf_counter()
    got = [tier.lookup(k, context) for k in keys]
    return asked, time.perf_counter() - began, got.count(LookupResult.HIT)


def lookups(path, rounds):
    e = drive.Engine(drive.tier(path), 4096, 1024)
    e.connected()
    keys = [drive.key(1_000_000 + i) for i in range(1000)]
    e.store("stored", keys)
    e.settle()
    for name, wanted in (("hits", keys), ("misses", [drive.key(2_000_000 + i) for i in range(1000)])):
        times = []
        for i in range(rounds):
            context = ReqContext(f"{name}-{i}")
            asked, answered, hits = ask(e.tier, wanted, context)
            times.append((asked + answered, asked, answered))
            e.tier.on_request_finished(context)
        total, asked, answered = (1e3 * statistics.median(x) for x in zip(*times, strict=True))
        say("lookup of 1,000 keys, ms", of=name, hits=hits, total=total, ask=asked, answers=answered, want="< 1")
    e.close()


def submits(path, rounds):
    e = drive.Engine(drive.tier(path), 4096, 1024)
    e.connected()
    job = 1 << 40
    for n in (8, 64):
        stores, loads = [], []
        for i in range(rounds):
            context = ReqContext(f"submit-{n}-{i}")
            keys = [drive.key(3_000_000 + n * 100_000 + i * n + j) for j in range(n)]
            chunks = np.arange(n, dtype=np.int32)
            e.tier.on_new_request(context)
            for times, call, promotion in ((stores, e.tier.submit_store, False), (loads, e.tier.submit_load, True)):
                if promotion:
                    ask(e.tier, keys, context)
                job += 1
                task = TransferJob(job, keys, chunks, promotion, context)
                began = time.perf_counter()
                call(task)
                times.append(time.perf_counter() - began)
                if not finished(e.tier)[0].success:
                    raise RuntimeError("a job failed")
            e.tier.on_request_finished(context)
        say("submit, us at the median", keys=n, store=1e6 * statistics.median(stores), load=1e6 * statistics.median(loads), want="< 50")
    e.close()


class Other:
    """A process that copies rows between mappings that it shares with this one."""

    def __init__(self):
        self.ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self.ours.close()
            while head := theirs.recv(4, socket.MSG_WAITALL):
                body = theirs.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
                for to, source, size in struct.iter_unpack("<3Q", body):
                    ctypes.memmove(to, source, size)
                theirs.send(b"d")
            os._exit(0)
        theirs.close()

    def copy(self, rows):
        body = b"".join(struct.pack("<3Q", *r) for r in rows)
        began = time.perf_counter()
        self.ours.sendall(struct.pack("<I", len(body)) + body)
        self.ours.recv(1)
        return time.perf_counter() - began

    def end(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.ours.close()


def copies(path, bytes_, rounds, copy_rows):
    """Loads of rows that lie in order in the region, and of rows that lie anywhere there."""
    for row in (r << 10 for r in copy_rows):
        for order in ("in order", "scattered"):
            copy(path, bytes_, rounds, row, order)


def copy(path, bytes_, rounds, row, order):
    n = bytes_ // row
    e = drive.Engine(drive.tier(path, threads=1), row, n)
    e.connected()
    keys = [drive.key(4_000_000 + row + i) for i in range(n)]
    chunks = np.arange(n, dtype=np.int32)
    if order == "scattered":
        np.random.default_rng(1).shuffle(chunks)
    e.store("stored", keys)
    e.settle(30)
    times, other = {"load": [], "memmove": [], "other": []}, Other()
    for i in range(rounds + 1):
        context = ReqContext(f"copy-{i}")
        _, _, hits = ask(e.tier, keys, context)
        uses = [e.tier._requests[context.req_id].lent[k] for k in keys[:hits]]
        rows = [(e.tier._region + j * row, x.link.base + offset, size) for j, (x, offset, size) in zip(chunks.tolist(), uses)]
        for who in list(times)[:: 1 if i % 2 else -1]:
            if who == "load":
                e.tier.submit_load(TransferJob(5 << 40 | i, keys, chunks, True, context))
                took = finished(e.tier)[0].transfer_time
            elif who == "other":
                took = other.copy(rows)
            else:
                began = time.perf_counter()
                for r in rows:
                    ctypes.memmove(*r)
                took = time.perf_counter() - began
            if i:  # the first round touches the memory
                times[who].append(hits * row / took / 1e9)
        e.tier.on_request_finished(context)
    load, move, another = (statistics.median(times[who]) for who in times)
    best = max(times["load"]) / max(times["memmove"])  # on a machine that others use
    say("copy, GB/s", row=row, order=order, rows=hits, load=load, memmove=move, ratio=load / move, ratio_of_best=best, want=">= 0.9", other_process=another)
    other.end()
    e.close()


def ready(path, row, rounds, folder):
    for tokens in (8192, 32768):
        n = tokens // 16
        keys = [drive.key(6_000_000 + tokens + i) for i in range(n)]
        out = {}
        for name, tiers in (("kvasir", drive.tier(path)), ("fs", [{"type": "fs", "root_dir": folder}])):
            one = drive.Engine([dict(t) for t in tiers], row, n + 1)
            if name == "kvasir":
                one.connected()
            else:
                one.tier._use_o_direct = False  # through the page cache
            one.store("stored", keys)
            one.settle(60)
            one.close()
            times = []
            for i in range(rounds):
                two = drive.Engine([dict(t) for t in tiers], row, n + 1)
                if name == "kvasir":
                    two.connected()
                else:
                    two.tier._use_o_direct = False
                hits, wrong, took = two.load(f"ready-{i}", keys, patience=30)
                if hits != n or wrong:
                    raise RuntimeError(f"{name}: {hits} of {n} rows, {wrong} wrong")
                times.append(took)
                two.close()
            out[name] = 1e3 * statistics.median(times)
        say("time to ready, ms", tokens=tokens, row=row, rows=n, kvasir=out["kvasir"], fs=out["fs"], want="kvasir <= fs")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--socket", required=True)
    p.add_argument("--rounds", type=int, default=50)
    p.add_argument("--copy-mib", type=int, default=128)
    p.add_argument("--copy-kib", type=int, nargs="+", default=[64, 256, 1024, 4096], help="lengths of rows")
    p.add_argument("--row", type=int, default=64 << 10, help="of the time to ready")
    p.add_argument("parts", nargs="*", default=["lookup", "submit", "copy", "ready"])
    a = p.parse_args()
    if "lookup" in a.parts:
        lookups(a.socket, a.rounds)
    if "submit" in a.parts:
        submits(a.socket, 4 * a.rounds)
    if "copy" in a.parts:
        copies(a.socket, a.copy_mib * MIB, max(3, a.rounds // 10), a.copy_kib)
    if "ready" in a.parts:
        folder = tempfile.mkdtemp(prefix="kvasir-fs-")
        try:
            ready(a.socket, a.row, max(3, a.rounds // 10), folder)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
