#!/usr/bin/env python3
"""One Redis or one bucket below two servers and beside a plain loop, in turns in one run.

    l2_race.py --l2 redis --plain bin/plain --a "lmcache server ... {l2port}" --b "kvasir server ... {l2port}"
    l2_race.py --l2 s3 --s3-cmd 'store -addr 127.0.0.1:{s3port}' --plain bin/plain --b "kvasir server ... {l2port} {bucket}"

In each round, and for each size of chunk and length of prompt, every one of them stores values of its own (servers: from
the reservation until the last value stands in the L2), and loads one and the same prompt that stands in the L2 alone (servers: from the
lookup until its result; the bytes are compared). The order changes from round to round. Then lookups of what is all in RAM are timed
while the L2 answers, is slow, and says nothing, and other lookups ask it all the time. Medians, ratios, and whether the limits are
kept: load and store at least the smaller of 1.1 times --a and 0.95 times the loop (a bucket: 0.8 times the loop, loads alone), a
hit of 8k tokens ready in 0.8 of --a's time with 0.6 of its processor time, p99 of lookups in RAM at most 1.2 times.
"""

import argparse
import atexit
import json
import os
import signal
import statistics
import subprocess
import sys
import time

from bench.l2.run import Run
from bench.process import CpuMeter, lat_summary, log
from bench.segments import remove_own_segments

WIDTH = {"redis": 8, "s3": 16}  # connections of the loop: as many as the servers have, or reads at once


class Race(Run):
    def __init__(self, args):
        super().__init__(args)
        self.nodes = {n: x for n, x in (("lmcache", self.A if args.a else None), ("kvasir", self.B)) if x}
        self.rows, self.verdicts = [], []

    def loop(self, verb, names, size):
        """The seconds of the plain loop, and of its processor time."""
        where = f"127.0.0.1:{self.l2.port}" if self.l2.kind == "redis" else f"http://127.0.0.1:{self.l2.port}/kvcache"
        out = subprocess.run([self.args.plain, self.l2.kind, where, verb, str(WIDTH[self.l2.kind]), str(size)], input="\n".join(names),
                             capture_output=True, text=True, timeout=120, check=False)
        if out.returncode:
            raise RuntimeError(out.stderr)
        return [float(x) for x in out.stdout.split()]

    def note(self, of, what, took):
        of[f"{what}_s"].append(took[0])
        of[f"{what}_cpu_s"].append(took[1])

    def drop(self, names):
        for n in names:
            self.l2.delete(n)

    def cell(self, mib, tokens):
        size = next(iter(self.nodes.values())).b.chunk
        hd = int(mib * 2**20 / (2 * 8 * size * 2))
        shape, n = (8, max(1, hd // 128), min(hd, 128)), tokens // size
        cb = self.chunk_bytes(shape)
        who = [*self.nodes, "loop"]
        got = {w: {"store_s": [], "load_s": [], "store_cpu_s": [], "load_cpu_s": []} for w in who}
        for x in self.nodes.values():
            x.ctx(shape)
        for i in range(self.args.rounds):
            turn = who[i % len(who):] + who[:i % len(who)]
            for w in turn if self.l2.kind == "redis" else ():
                p = self.prompt(shape, n, light=True)
                names = self.names(p)
                if w == "loop":
                    self.note(got[w], "store", self.loop("set", names, cb))
                else:
                    x = self.nodes[w]
                    x.clear()
                    time.sleep(0.3)
                    m = CpuMeter(x.proc.pid, fine=True)
                    with m:
                        t0 = time.perf_counter()
                        x.store_empty(p)
                        got[w]["store_s"].append(self.wait_l2(p, t0=t0))
                    got[w]["store_cpu_s"].append(m.s or 0)
                self.drop(names)
            p = self.prompt(shape, n, light=True)
            one = next(iter(self.nodes.values()))
            one.clear()
            one.store(p)
            self.wait_l2(p)
            for w in turn:
                time.sleep(0.3)
                if w == "loop":
                    self.note(got[w], "load", self.loop("get", self.names(p), cb))
                    continue
                x = self.nodes[w]
                x.clear()
                req = self.req()
                m = CpuMeter(x.proc.pid, fine=True)
                with m:
                    r = x.look(p, req)
                problem, _ = x.fetch(p, req, r["hit"])
                x.end(req)
                if problem or r["hit"] != n:
                    raise RuntimeError(f"{w}: {r}, {problem}")
                got[w]["load_s"].append(r["ready_ms"] / 1e3)
                got[w]["load_cpu_s"].append(m.s or 0)
            self.drop(self.names(p))
        row = {"mib": cb / 2**20, "tokens": tokens, "mb": n * cb / 1e6}
        for w in who:
            row[w] = {k: statistics.median(v) for k, v in got[w].items() if v}
            row[w]["load_all_s"] = got[w]["load_s"]
        self.rows.append(row)
        log(json.dumps(row))

    def judge(self, what, ok, detail):
        self.verdicts.append((bool(ok), f"{what}: {detail}"))

    def verdict(self):
        for r in self.rows:
            name = f"{r['mib']:g} MiB, {r['tokens']} tokens"
            k, peer = r["kvasir"], r.get("lmcache")
            for what in ("load", "store"):
                if what + "_s" not in k:
                    continue
                rate = {w: r["mb"] / 1e3 / r[w][what + "_s"] for w in (*self.nodes, "loop")}
                want = min(1.1 * rate["lmcache"], 0.95 * rate["loop"]) if peer else 0.8 * rate["loop"]
                self.judge(f"{name}, {what}", rate["kvasir"] >= want, ", ".join(f"{w} {v:.2f}" for w, v in rate.items()) + f" GB/s; at least {want:.2f}")
            if peer and r["tokens"] == 8192:
                ratio = {x: k[f"load{x}_s"] / max(1e-9, peer[f"load{x}_s"]) for x in ("", "_cpu")}
                self.judge(f"{name}, ready", ratio[""] <= 0.8, f"{1e3 * k['load_s']:.1f} of {1e3 * peer['load_s']:.1f} ms, {ratio['']:.2f}; at most 0.8")
                self.judge(f"{name}, processor time of the load", ratio["_cpu"] <= 0.6, f"{1e3 * k['load_cpu_s']:.1f} of {1e3 * peer['load_cpu_s']:.1f} ms, {ratio['_cpu']:.2f}; at most 0.6")

    def in_ram(self, x, states):
        """Lookups of 128 chunks that are all in RAM, in each state of the L2 in turn, while others ask the L2."""
        proxy, shape = self.l2.proxy, (1, 1, 8)
        p = self.prompt(shape, 128)
        x.store(p)
        self.wait_l2(p)
        took, waiting = {s: [] for s in states}, []
        others = [self.prompt(shape, 4, light=True) for _ in range(64)]
        for _ in range(self.args.ram_rounds):
            for s in states:
                proxy.delay = 0.05 if s == "slow" else 0.0
                (proxy.open.clear if s == "silent" else proxy.open.set)()
                for i in range(self.args.lookups):
                    if i % 8 == 0:
                        q, req = others[len(waiting) % len(others)], self.req()
                        x.b.c.lookup(x.key(q, 0, q.chunks * x.b.chunk, req, worker=None), 1).result(timeout=10)
                        waiting.append(req)
                        if len(waiting) > 32:
                            x.end(waiting[len(waiting) - 33])
                    req = self.req()
                    r = x.look(p, req, limit=5, step=0.0005)
                    if r["hit"] != p.chunks:
                        raise RuntimeError(f"{s}: {r['hit']} of {p.chunks} chunks that are all in RAM")
                    took[s].append(r["ready_ms"] / 1e3)
                    x.free(p, req, r["hit"])
                    x.end(req)
                proxy.delay = 0.0
                proxy.open.set()
        return {s: lat_summary(v) for s, v in took.items()}

    def ram(self):
        states = ("answers", "slow", "silent")
        for w, x in self.nodes.items():
            x.stop()
            x.start(direct=False)
            x.ctx((1, 1, 8))
            if w == "kvasir":
                r = self.in_ram(x, states)
                self.ram_rows = r
                for s in states[1:]:
                    ratio = {q: r[s][q] / r["answers"][q] for q in ("p50_us", "p99_us")}
                    self.judge(f"lookups in RAM, {self.l2.kind} {s}", ratio["p99_us"] <= 1.2, f"p50 {r[s]['p50_us']:.0f} us ({ratio['p50_us']:.2f} of one that answers), p99 {r[s]['p99_us']:.0f} us ({ratio['p99_us']:.2f}; at most 1.2)")
                continue
            try:
                self.args.lookups, keep = 5, self.args.lookups
                r = self.in_ram(x, ("silent",))
                log(f"{w}, silent: p50 {r['silent']['p50_us']:.0f} us")
                self.peer_silent = f"p50 {r['silent']['p50_us']:.0f} us"
            except Exception as e:  # noqa: BLE001 - the peer may fail in any way, which is then its result
                self.peer_silent = f"{type(e).__name__}: {e}"
            finally:
                self.args.lookups = keep
                self.l2.proxy.open.set()
                x.stop(9)

    def go(self):
        for x in self.nodes.values():
            x.start(direct=True)
        for mib in self.args.mib.split(","):
            for tokens in self.args.tokens.split(","):
                self.cell(float(mib), int(tokens))
        self.verdict()
        if self.args.ram_rounds:
            self.ram()

    def show(self):
        print(f"| {self.l2.kind}: chunk MiB | tokens | | store GB/s | CPU s/GB | ready ms (min-max) | load GB/s | CPU s/GB |\n|--:|--:|---|--:|--:|--:|--:|--:|")
        for r in self.rows:
            for w in (*self.nodes, "loop"):
                v, gb = r[w], r["mb"] / 1e3
                rate = {k: f"{gb / v[k]:.2f}" if k in v else "-" for k in ("store_s", "load_s")}
                cost = {k: f"{v[k] / gb:.2f}" if k in v else "-" for k in ("store_cpu_s", "load_cpu_s")}
                print(f"| {r['mib']:g} | {r['tokens']} | {w} | {rate['store_s']} | {cost['store_cpu_s']} | {1e3 * v['load_s']:.0f} "
                      f"({1e3 * min(v['load_all_s']):.0f}-{1e3 * max(v['load_all_s']):.0f}) | {rate['load_s']} | {cost['load_cpu_s']} |")
        if hasattr(self, "peer_silent"):
            print(f"lmcache, lookups in RAM over a silent {self.l2.kind}: {self.peer_silent}")
        for ok, text in self.verdicts:
            print("holds:         " if ok else "DOES NOT HOLD: ", text)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--a", default="", help="command template of lmcache server; without it there is none")
    ap.add_argument("--b", required=True, help="command template of this build")
    ap.add_argument("--l2", choices=("redis", "s3"), required=True)
    ap.add_argument("--plain", required=True, help="the loop: go build ./interop/bench/plain")
    ap.add_argument("--redis", default="redis-server")
    ap.add_argument("--s3-cmd", default="")
    ap.add_argument("--mib", default="1,4")
    ap.add_argument("--tokens", default="8192,32768")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--lookups", type=int, default=500, help="in RAM, of each round and state")
    ap.add_argument("--ram-rounds", type=int, default=4, help="0: lookups in RAM are left out")
    ap.add_argument("--out", default="")
    ap.add_argument("--max-seconds", type=float, default=900)
    args = ap.parse_args()
    vars(args).update(dir="", only="", mode="engine_driven", limit=60.0, start_timeout=120.0, settle=2.0, keep_logs="", verbose=False)
    atexit.register(remove_own_segments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped and pools removed
    race, code = Race(args), 0
    try:
        race.go()
    except (Exception, SystemExit) as e:  # noqa: BLE001 - the rows measured before it are printed
        log(f"{type(e).__name__}: {e}")
        code = 1
    race.show()
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"rows": race.rows, "ram": getattr(race, "ram_rows", None), "verdicts": race.verdicts}, f)
    race.close()
    remove_own_segments()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
