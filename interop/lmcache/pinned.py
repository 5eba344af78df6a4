#!/usr/bin/env python3
"""Engines that pin the server's pool, over its resizes and kills: every byte.

    pinned.py --url tcp://127.0.0.1:5555 --restart 'sh restart.sh --l1-size-gb' --gb 1 --device cuda

A worker with KV on a GPU pins the pool (cudaHostRegister): the GPU then copies to and from those pages, whatever the file
has at that offset later. A server that gave pages back and took others there would see other bytes than the GPU. Two
engines of one model stay up while the server is killed and started again with half of the pool, the whole and a quarter.
After each start they store prompts beyond the pool's size, and load their own and each other's. --device cpu checks the
driver itself. Prints one JSON line and exits 0 when all checks passed.
"""

import argparse
import json
import math
import subprocess
import sys
import time

import generations


class Engine(generations.Engine):
    """An engine with chunks of 8 MiB, so that a pool of 1 GiB has 128 of them. Each prompt is 4 chunks."""

    CHUNKS = 4

    def fill(self, seed, chunks, first):
        """What generations.Engine does, computed where the KV lies."""
        n = chunks * self.chunk // self.block
        for i, layer in enumerate(self.kv.values()):
            shape = (2, n, *layer.shape[2:])
            at = self.torch.arange(math.prod(shape), device=layer.device)
            layer[:, first:first + n] = ((at * 7919 + seed * 104729 + i * 1299709) % 4001 - 2000).to(layer.dtype).view(shape)

    def store_many(self, first, prompts):
        """Stores prompts of the seeds from first on; how many were taken."""
        return sum(self.store(seed, self.CHUNKS)["done"] for seed in range(first, first + prompts))

    def load_many(self, first, prompts):
        """Loads what the pool has of them: chunks found, and prompts whose bytes differ."""
        found = wrong = 0
        for seed in range(first, first + prompts):
            got = self.load(seed, self.CHUNKS)
            found += max(0, got["hit"])
            wrong += got["equal"] is False
        return {"found": found, "wrong": wrong}


class Remote(generations.Remote):
    script = __file__


def serve(args):
    generations.LAYERS, generations.HEADS, generations.DIM = 8, 16, 64
    return generations.engine(args, Engine)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", required=True)
    p.add_argument("--restart", help="shell command that kills the server and starts it with the pool's size in GiB that follows it")
    p.add_argument("--gb", type=float, default=1.0, help="size of the pool at the start, in GiB (default 1)")
    p.add_argument("--device", default="cuda", help="where the engines' KV lies: cuda or cpu (default cuda)")
    p.add_argument("--logs", default="/tmp")
    p.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--model", default="interop/pinned", help=argparse.SUPPRESS)
    p.add_argument("--block", type=int, default=generations.BLOCK, help=argparse.SUPPRESS)
    args = p.parse_args()
    args.record, args.single_plane = None, False
    if args.engine:
        return serve(args)

    failed, figures = [], []
    engines = [Remote(args, f"engine {i}", "", False, model=args.model) for i in range(2)]
    for e in engines:
        got = e.answer()
        if "chunk" not in got:
            sys.exit(f"{e.release} did not start: {got}")

    def each(name, *command):
        """Asks both engines at once."""
        for e in engines:
            e.ask(name, *command)
        answers = [e.answer() for e in engines]
        failed.extend(f"{e.release} {name}: {a}" for e, a in zip(engines, answers, strict=True) if isinstance(a, dict) and "error" in a)
        return answers

    seed = 1000
    for step, gb in enumerate((1, 0.5, 1, 0.25, 1)):
        if step:
            subprocess.run(f"{args.restart} {args.gb * gb}", shell=True, check=True)
            back = each("again", 100 * step, Engine.CHUNKS)
            if any(b.get("equal") is not True for b in back):
                failed.append(f"step {step}: an engine did not come back: {back}")
        prompts = int(args.gb * gb * 1024 / 8 / Engine.CHUNKS)
        start = time.monotonic()
        # Each engine stores three quarters of what the pool holds, so that chunks also lie at its end and some are evicted.
        firsts = [seed, seed + 10000]
        for e, first in zip(engines, firsts, strict=True):
            e.ask("store_many", first, prompts * 3 // 4)
        stored = [e.answer() for e in engines]
        found = wrong = 0
        for own in (True, False):
            for e, first in zip(engines, firsts if own else firsts[::-1], strict=True):
                e.ask("load_many", first, prompts * 3 // 4)
            for e in engines:
                got = e.answer()
                found, wrong = found + got.get("found", 0), wrong + got.get("wrong", 1)
        # An engine that is new maps the pool as it is: what the others' GPU wrote elsewhere it would not see.
        new = Remote(args, f"new engine {step}", "", False, model=args.model)
        if "chunk" not in new.answer():
            failed.append(f"step {step}: a new engine did not start")
        else:
            for first in firsts:
                got = new.call("load_many", first, prompts * 3 // 4)
                found, wrong = found + got.get("found", 0), wrong + got.get("wrong", 1)
            new.call("close")
        new.process.wait(120)
        row = {"pool_gib": args.gb * gb, "prompts_stored": stored, "chunks_loaded": found, "wrong": wrong, "seconds": round(time.monotonic() - start, 1)}
        figures.append(row)
        print(row, file=sys.stderr, flush=True)
        if wrong:
            failed.append(f"step {step}: wrong bytes in {wrong} prompts")
        if found < 2 * prompts * Engine.CHUNKS:
            failed.append(f"step {step}: only {found} chunks were found")
        seed += 1000
    each("close")
    for e in engines:
        e.process.wait(120)
    print(json.dumps({"device": args.device, "steps": figures, "failed": failed}))
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
