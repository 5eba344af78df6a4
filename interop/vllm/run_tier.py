"""Drives vLLM's tiered offloading over a kvasir server: first what engines share, then faults.

Kills and stops engines and the server of vLLM's tiered offloading at random moments, and checks every loaded byte.

Two engines, each the real TieringOffloadingManager with kvasir_tier.py in a process of its own, play requests of shared prefixes through one
kvasir server with a small pool. --rounds times one of them or the server is killed with SIGKILL or stopped with SIGSTOP. Wrong bytes, an
exception, a bug that the module caught, a load that takes more than two seconds of its engine's running time, or no hits at all end with 1.
So does a server that is started again over its pool, when an idle engine has its hits again later than a second after that.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback

import drive_tier as drive
import kvasir_tier

ROW, ROWS, PROMPTS, LONGEST = 1 << 16, 48, 60, 24


def play(path, name, seed, record):
    """The life of an engine: it notes how each request ended."""
    rng = random.Random(seed)
    bugs = []
    kvasir_tier.KvasirTier._bug = lambda _: bugs.append(traceback.format_exc())
    engine = drive.Engine(drive.tier(path), ROW, ROWS, engine_id=name)
    for number in range(1 << 30):
        prompt, length = rng.randrange(PROMPTS), rng.randrange(1, LONGEST)
        keys = [drive.key(prompt * 1000 + i) for i in range(length)]
        began = time.monotonic()
        hits, wrong, took = engine.load(f"l{number}", keys, patience=30)
        engine.settle(30)
        if hits < length:
            engine.store(f"s{number}", keys[hits:])
        record(hits, wrong, began, took, os.getpid())
        if bugs:
            raise RuntimeError(bugs[0])


def expect(what, got, want):
    if got != want:
        sys.exit(f"{what}: {got}, want {want}")


def shared(path):
    """What engines share, and what keeps them apart."""
    made = []
    try:
        share(path, made)
    finally:
        for e in made:
            e.close()
    expect("regions left", [e.path for e in made if os.path.exists(e.path)], [])
    print(f"{len(made)} engines share and keep apart what they should")


def share(path, made):
    def engine(**options):
        made.append(drive.Engine(drive.tier(path, **options.pop("tier", {})), ROW, ROWS, **options))
        expect("connected", made[-1].connected(), True)
        return made[-1]

    def has(e, keys, params=None, least=0):
        """The rows that an engine finds. What another one has just stored may come a moment later: least are waited for."""
        end = time.monotonic() + 5
        while True:
            hits, wrong, _ = e.load(f"has-{time.monotonic_ns()}", keys, params)
            expect("wrong rows", wrong, 0)
            if hits >= least or time.monotonic() > end:
                return hits
            time.sleep(0.01)

    one, two = engine(), engine()
    mine, other = [drive.key(10_000 + i) for i in range(8)], [drive.key(20_000 + i) for i in range(8)]
    one.store("s1", mine)
    two.store("s2", other)
    expect("settled", (one.settle(), two.settle()), (True, True))
    expect("rows of the other engine", (has(one, other, least=8), has(two, mine, least=8)), (8, 8))
    one.store("s3", [drive.key(30_000 + i) for i in range(ROWS)])  # takes all of vLLM's own region
    one.settle()
    expect("rows that only the pool has", has(one, mine, least=8), 8)
    expect("rows behind a hole", has(two, [drive.key(1), *mine]), 0)

    tenant = {"kvasir.tenant": "team-a"}
    three = engine()
    three.store("s4", [drive.key(40_000)], tenant)
    three.settle()
    four = engine(tier={"tenant": "team-a"})
    expect("a tenant's row by others", has(two, [drive.key(40_000)]), 0)
    expect("a tenant's row", has(two, [drive.key(40_000)], tenant, least=1), 1)
    expect("the row of the tenant of an engine", has(four, [drive.key(40_000)], least=1), 1)
    expect("a tenant that is no name", has(two, mine[:1], {"kvasir.tenant": "x" * 500}), 1)  # its own region has it

    narrow, wide = engine(tp=2, canonical=True), engine(tp=4, canonical=True)
    narrow.store("s5", mine)
    narrow.settle()
    expect("a canonical row of tensor parallel 2, read by 4", has(wide, mine, least=8), 8)
    groups = engine(groups=2)
    groups.store("s6", [drive.key(1), drive.key(1, 1)])
    groups.settle()
    expect("rows of two groups", has(engine(groups=2), [drive.key(1), drive.key(1, 1)], least=2), 2)
    expect("a row of another model", has(engine(model="m/y"), mine), 0)

    foreign = drive.Engine([{**drive.tier(path)[0], "type": "Misses"}], ROW, ROWS)  # as under a release of another interface
    made.append(foreign)
    foreign.store("s7", mine)
    expect("a foreign interface", (foreign.settle(), has(foreign, other)), (True, 0))
    nowhere = drive.Engine(drive.tier(path + ".not-there", surprise=1), ROW, ROWS)
    made.append(nowhere)
    expect("no node", has(nowhere, mine), 0)
    one.m.reset_cache()
    expect("rows after a reset", has(one, mine), 8)


def restarts(server, path, rounds):
    """Seconds from the start of a server over its pool until an engine that was connected before has all of its hits again."""
    engine, keys = drive.Engine(drive.tier(path), ROW, ROWS), [drive.key(70_000 + i) for i in range(16)]
    times = {"SIGTERM": [], "SIGKILL": []}
    try:
        expect("connected", engine.connected(), True)
        engine.store("rows", keys)
        engine.settle()
        time.sleep(2.5)  # what was stored in the last two seconds has no checksum for a next life after kill -9
        for i in range(2 * rounds):
            how = ("SIGTERM", "SIGKILL")[i % 2]
            time.sleep(1.1)  # a connection that ends sooner is not tried again at once
            server.process.send_signal(getattr(signal, how))
            server.process.wait()
            began, hits = time.monotonic(), 0
            server.start()
            while hits < len(keys):
                engine.m.reset_cache()  # vLLM's own region would have them
                hits, wrong, _ = engine.load(f"again-{i}-{time.monotonic_ns()}", keys)
                expect("wrong rows after a restart", wrong, 0)
                if time.monotonic() - began > 10:
                    sys.exit(f"after {how} of the server {hits} of {len(keys)} rows are hits")
                time.sleep(0.002)
            times[how].append(time.monotonic() - began)
    finally:
        engine.close()
    out = {how: {"median_s": round(sorted(x)[len(x) // 2], 3), "worst_s": round(max(x), 3)} for how, x in times.items()}
    print(json.dumps({"what": "hits after a restart of the server with its pool", "restarts": 2 * rounds, **out}))
    if max(max(x) for x in times.values()) > 1:
        sys.exit("hits do not go on within a second of a restart")


class Engines:
    """Engines of this host: processes that were forked from this one, which has imported vLLM."""

    def __init__(self, work, path):
        self.work, self.path, self.count, self.running = work, path, 0, {}

    def start(self, place):
        self.count += 1
        name, log = f"kvasir-tier-{os.getpid()}-{self.count}", f"{self.work}/engine-{self.count}.log"
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with open(log, "w", buffering=1) as out:

                def record(*figures):
                    out.write(json.dumps(figures) + "\n")

                try:
                    play(self.path, name, self.count, record)
                except BaseException:  # noqa: BLE001
                    out.write("EXCEPTION " + traceback.format_exc())
                finally:
                    os._exit(1)
        self.running[place] = pid, name

    def kill(self, place):
        pid, _ = self.running.pop(place)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def results(self):
        for n in range(1, self.count + 1):
            try:
                with open(f"{self.work}/engine-{n}.log") as f:
                    text = f.read()
            except FileNotFoundError:  # it was killed at once
                continue
            if "EXCEPTION" in text:
                sys.exit(f"engine {n}: {text[text.index('EXCEPTION') :]}")
            for line in text.splitlines():
                if line.endswith("]"):
                    yield json.loads(line)


class Server:
    def __init__(self, kvasir, work, path, flags):
        self.command = [kvasir, "server", "--host", "127.0.0.1", "--l1-size-gb", "32MiB", "--vllm-tier", path, *flags]
        self.log = f"{work}/server.log"
        self.start("--cold")

    def start(self, *more):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*self.command, *more], stdout=log, stderr=log)

    def end(self):
        """Ends it, and removes its pool. It returns its exit code."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        code = self.process.wait()
        with open(self.log, "ab") as log:
            subprocess.run([*self.command, "--drop"], stdout=log, stderr=log, check=True)
        return code

    def kill(self):
        self.process.kill()
        self.process.wait()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kvasir", default="bin/kvasir")
    p.add_argument("--work", required=True)
    p.add_argument("--port", default="25555")
    p.add_argument("--http-port", default="28080")
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--restarts", type=int, default=5, help="of each kind")
    p.add_argument("--seed", type=int, default=int(time.time()))
    p.add_argument("flags", nargs="*", help="of the server")
    a = p.parse_args()
    rng, path = random.Random(a.seed), f"{a.work}/tier.sock"
    server = Server(a.kvasir, a.work, path, ["--port", a.port, "--http-port", a.http_port, *a.flags])
    try:
        shared(path)
        restarts(server, path, a.restarts)
    except BaseException:
        server.end()
        raise
    if not a.rounds:
        sys.exit(server.end())
    engines = Engines(a.work, path)
    for place in (0, 1):
        engines.start(place)
    time.sleep(3)
    done, stops = {}, []
    try:
        for _ in range(a.rounds):
            time.sleep(rng.uniform(0.02, 0.6))
            what = rng.choice(["kill server", "stop server", "kill engine", "stop engine", "stop engine, kill server"])
            done[what] = done.get(what, 0) + 1
            place, pause = rng.randrange(2), rng.uniform(0.02, 0.5)
            pid = engines.running[place][0]
            if what == "kill server":
                server.kill()
                time.sleep(rng.choice([0, 0, 0.3]))
                server.start()
            elif what == "stop server":
                server.process.send_signal(signal.SIGSTOP)
                time.sleep(rng.choice([pause, 3]))
                server.process.send_signal(signal.SIGCONT)
            elif what == "kill engine":
                engines.kill(place)
                engines.start(place)
            else:
                stopped = time.monotonic()
                os.kill(pid, signal.SIGSTOP)
                if what != "stop engine":
                    server.kill()
                    server.start()
                    pause += 0.7  # the other engine stores meanwhile
                time.sleep(pause)
                os.kill(pid, signal.SIGCONT)
                stops.append((pid, stopped, time.monotonic()))
        time.sleep(3)  # what was stopped goes on
    finally:
        for place in list(engines.running):
            engines.kill(place)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(2.5)  # the regions of the killed engines go
        code = server.end()
    results = list(engines.results())
    left = [n for n in os.listdir("/dev/shm") if n.startswith(f"vllm_offload_kvasir-tier-{os.getpid()}-")]
    slowest = max((running(r, stops) for r in results), default=0)
    out = {
        "seed": a.seed, "rounds": done, "requests": len(results), "rows_hit": sum(r[0] for r in results), "wrong": sum(r[1] for r in results),
        "slowest_s": round(slowest, 3), "slowest_with_stops_s": round(max((r[3] for r in results), default=0), 3), "regions_left": len(left),
        "server_exit": code,
    }  # fmt: skip
    print(json.dumps(out))
    for name in left:  # of engines that died while no server ran
        os.unlink(f"/dev/shm/{name}")
    if out["wrong"] or not out["rows_hit"] or slowest > 2 or code:
        sys.exit(1)


def running(result, stops):
    """The time of a load in which its engine was not stopped."""
    _, _, began, took, pid = result
    return took - sum(max(0, min(to, began + took) - max(at, began)) for stopped, at, to in stops if stopped == pid)


if __name__ == "__main__":
    main()
