"""Measures what kvasir keeper promises under vLLM's real fs offloading tier, and prints a table of it.

The directory is a tmpfs that is mounted for the run, which needs root. Parts: million (start with a million files), rows64 and rows576 (a
trace into a tenth of its size), latency (stores and loads with and without a keeper, in turns), kills (kill -9 of the keeper while the
tier writes)."""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
rows = []


def say(what, wanted, got, ok):
    rows.append((what, wanted, got, "OK" if ok else "NO"))
    print(f"{what}: {got} (wanted {wanted}) {rows[-1][-1]}", file=sys.stderr, flush=True)


def used(root):
    s = os.statvfs(root)
    return (s.f_blocks - s.f_bfree) * s.f_frsize


class Keeper:
    """A keeper of a directory, and its log."""

    def __init__(self, o, root, limit):
        self.command = [o.kvasir, "keeper", root, "--max-gb", f"{limit}B", "--state-dir", f"{o.work}/state"]
        self.log = tempfile.NamedTemporaryFile("w+", dir=o.work, suffix=".log", delete=False)  # noqa: SIM115 - open as long as the keeper runs
        self.process = subprocess.Popen(self.command, stderr=self.log, stdout=subprocess.DEVNULL)

    def line(self, text, seconds=60):
        """Waits for a line of the log."""
        end = time.monotonic() + seconds
        while True:
            with open(self.log.name) as f:
                for line in f:
                    if text in line:
                        return line
            if self.process.poll() is not None or time.monotonic() > end:
                with open(self.log.name) as f:
                    raise SystemExit(f"no {text!r} in the keeper's log:\n{f.read()[-2000:]}")
            time.sleep(0.01)

    def memory(self, field):
        with open(f"/proc/{self.process.pid}/status") as f:
            return int(re.search(rf"{field}:\s+(\d+)", f.read())[1]) << 10

    def processor(self):
        """Seconds of processor time."""
        with open(f"/proc/{self.process.pid}/stat") as f:
            user, system = f.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.process.wait()
        self.log.close()


def play(root, *args):
    command = [sys.executable, f"{HERE}/play_trace.py", "--root", root, *map(str, args)]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(out.stderr[-2000:])
    return json.loads(out.stdout.splitlines()[-1])


def fresh(o):
    """An empty directory in the tmpfs."""
    shutil.rmtree(f"{o.mount}/kv", ignore_errors=True)
    os.mkdir(f"{o.mount}/kv")
    return f"{o.mount}/kv"


def blocks(o, requests):
    """The blocks of the first requests of the trace that are not equal."""
    seen = set()
    with open(o.trace) as f:
        for i, line in enumerate(f):
            if requests and i == requests:
                break
            seen.update(json.loads(line)["hash_ids"][:256])
    return len(seen)


def simulated(o, requests, capacity):
    """The hit rate of LRU, of the blocks that the player asks for."""
    path = f"{o.work}/trace.jsonl"
    with open(o.trace) as f, open(path, "w") as out:
        for line in f:
            r = json.loads(line)
            ids = r["hash_ids"][:256]
            out.write(json.dumps({"timestamp": r["timestamp"], "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}) + "\n")
    command = [o.kvasir, "sim", "evict", "--trace", path, "--capacity-blocks", str(capacity), "--policies", "lru", "--json", "-"]
    out = subprocess.run([*command, "--requests", str(requests)], capture_output=True, text=True, check=True)
    (row,) = (r for r in json.loads(out.stdout)["rows"] if r["policy"] == "lru")
    return row["block_hit"]


def trace(o, row, requests):
    total = blocks(o, requests)
    capacity = total // 10
    root, limit = fresh(o), capacity * row
    keeper = Keeper(o, root, limit)
    keeper.line("the keeper watches")
    r = play(root, "--trace", o.trace, "--row", row, "--requests", requests)
    r["keeper_processor_seconds"] = keeper.processor()
    keeper.end()
    name = f"{total:,} rows of {row >> 10} KiB into a tenth"
    print(json.dumps({"row": row, "limit": limit, **r}), file=sys.stderr)
    say(f"{name}: most bytes, each 10 ms", f"≤ {limit:,}", f"{r['most_bytes']:,} ({r['samples']} samples, {r['seconds']} s)", r["most_bytes"] <= limit)
    say(f"{name}: wrong rows", "0", f"{r['wrong']} of {r['loaded']:,} loaded", r["wrong"] == 0)
    lru = simulated(o, requests, capacity)
    say(f"{name}: hit rate", f"≥ {100 * lru - 2:.1f} % (LRU {100 * lru:.1f} %)", f"{100 * r['hit_rate']:.1f} %", r["hit_rate"] >= lru - 0.02)
    share = 100 * r["failed_loads"] / max(1, r["loaded"])
    say(f"{name}: failed loads", "≤ 0.1 %, each explained", f"{share:.3f} %, {r['unexplained']} unexplained", share <= 0.1 and not r["unexplained"])


def barely(o, root, limit):
    """A process that unlinks the oldest files and does nothing else, and the pipe that it reads their names from."""
    pipe = f"{o.work}/names"
    if not os.path.exists(pipe):
        os.mkfifo(pipe)
    command = [sys.executable, f"{HERE}/bare.py", root, str(limit + used(o.mount)), pipe]
    return subprocess.Popen(command), pipe


def latency(o):
    turns = {"alone": [], "bare": [], "kept": []}
    limit = blocks(o, o.latency) // 10 * 65536
    for turn in range(len(turns) * o.turns):
        how = list(turns)[(turn + turn // 3) % 3]
        root = fresh(o)
        args = ["--trace", o.trace, "--requests", o.latency]
        if how == "kept":
            keeper = Keeper(o, root, limit)
            keeper.line("the keeper watches")
        elif how == "bare":
            bare, pipe = barely(o, root, limit)
            args += ["--names", pipe]
        turns[how].append(play(root, *args))
        if how == "kept":
            keeper.end()
        elif how == "bare":
            bare.kill()
            bare.wait()
    for figure, what in (("store_p99", "store job"), ("load_p99", "load job"), ("store_row_p99", "store, a row"), ("load_row_p99", "load, a row")):
        alone, bare, kept = (statistics.median(r[figure] or 0 for r in turns[how]) for how in turns)
        measured = f"{1e3 * kept:.2f} and {1e3 * alone:.2f} ms, {kept / alone:.2f} ×; beside a loop that only unlinks {1e3 * bare:.2f} ms, {kept / bare:.2f} × that"
        say(f"p99 of a {what}, with and without a keeper", "≤ 1.1 ×", measured, kept <= 1.1 * alone)


def million(o):
    root, base = fresh(o), "m_x_0123456789ab"
    os.mkdir(f"{root}/{base}")
    with open(f"{root}/{base}/config.json", "w") as f:
        json.dump({"model_name": "m/x", "blocks_per_file": 1}, f)
    rnd = random.Random(1)
    made = set()
    for _ in range(o.files):
        digits = f"{rnd.getrandbits(256):064x}"
        top, leaf = f"{root}/{base}_r0/{digits[:3]}", f"{root}/{base}_r0/{digits[:3]}/{digits[3:5]}_g0"
        if leaf not in made:
            os.makedirs(top, exist_ok=True)
            os.mkdir(leaf)
            made.add(leaf)
        fd = os.open(f"{leaf}/{digits}.bin", os.O_CREAT | os.O_WRONLY)
        os.ftruncate(fd, 65536)  # without pages
        os.close(fd)
    seconds, memory, processor = [], [], []
    for _ in range(3):  # the first look warms the caches
        keeper = Keeper(o, root, 1 << 50)
        began = time.monotonic()
        line = keeper.line("the keeper knows all files", 300)
        seconds.append(time.monotonic() - began)
        processor.append(keeper.processor())
        if f"files={o.files}" not in line:
            raise SystemExit(line)
        time.sleep(2)  # what the first look needed is given back
        memory.append((keeper.memory("VmRSS"), keeper.memory("VmHWM")))
        keeper.end(signal.SIGKILL)
    say(f"{o.files:,} files in {len(made):,} directories: start, warm", "< 10 s", f"{min(seconds[1:]):.1f} s, {min(processor[1:]):.1f} s of processor time", min(seconds[1:]) < 10)
    now, most = max(memory)
    say(f"{o.files:,} files: memory", "< 200 MB", f"{now / 1e6:.0f} MB, at most {most / 1e6:.0f} MB", now < 200e6)


def kills(o):
    root, rnd = fresh(o), random.Random(o.seed)
    limit = 256 << 20
    keeper = Keeper(o, root, limit)
    keeper.line("the keeper watches")
    empty = used(o.mount)
    command = [sys.executable, f"{HERE}/play_trace.py", "--root", root, "--requests", "100000000"]
    player = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while used(o.mount) - empty < limit // 2:  # it writes
        if player.poll() is not None:
            raise SystemExit(player.stderr.read()[-2000:])
        time.sleep(0.05)
    worst, above = 0.0, 0
    for _ in range(o.kills):
        time.sleep(rnd.uniform(0.05, 2))
        keeper.end(signal.SIGKILL)
        time.sleep(rnd.uniform(0, 0.5))
        above = max(above, used(o.mount) - empty)
        keeper = Keeper(o, root, limit)
        began = time.monotonic()
        while used(o.mount) - empty > limit:
            if time.monotonic() - began > 60:
                break
            time.sleep(0.005)
        worst = max(worst, time.monotonic() - began)
        keeper.line("the keeper watches")
    player.kill()
    player.wait()
    os.unlink(f"/dev/shm/vllm_offload_kvasir-keeper-{player.pid}.mmap")  # vLLM leaves it when it is killed
    verify = subprocess.run([o.kvasir, "keeper", "verify", root, "--state-dir", f"{o.work}/state", "--json"], capture_output=True, text=True, check=False)
    faults = len(json.loads(verify.stdout)["faults"] or ())
    keeper.end()
    say(f"kill -9 of the keeper, {o.kills} times, {above / limit:.1f} × the limit written meanwhile: limit held again", "≤ 60 s", f"{worst:.1f} s", worst <= 60)
    say("files with other bytes afterwards", "0", str(faults), faults == 0)


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--kvasir", default="bin/kvasir")
    a.add_argument("--trace", required=True)
    a.add_argument("--files", type=int, default=1_000_000)
    a.add_argument("--requests", type=int, default=0, help="of the trace with rows of 64 KiB; 0: all")
    a.add_argument("--requests-576", type=int, default=3000)
    a.add_argument("--latency", type=int, default=1000, help="requests of a turn")
    a.add_argument("--turns", type=int, default=3)
    a.add_argument("--kills", type=int, default=10)
    a.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    a.add_argument("--gib", type=int, default=9, help="of the tmpfs")
    a.add_argument("parts", nargs="*", default=["million", "rows64", "rows576", "latency", "kills"])
    o = a.parse_args()
    o.kvasir, o.trace = os.path.abspath(o.kvasir), os.path.abspath(o.trace)
    o.work = tempfile.mkdtemp(prefix="kvasir-keeper-")
    o.mount = f"{o.work}/mount"
    os.mkdir(o.mount)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={o.gib}g,nr_inodes=0", "none", o.mount], check=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the mount goes
    began = time.monotonic()
    try:
        for part in o.parts:
            {"million": million, "latency": latency, "kills": kills, "rows64": lambda o: trace(o, 65536, o.requests),
             "rows576": lambda o: trace(o, 589824, o.requests_576)}[part](o)  # fmt: skip
    finally:
        for _ in range(50):
            if subprocess.run(["umount", o.mount], stderr=subprocess.DEVNULL, check=False).returncode == 0:
                break
            time.sleep(0.1)
        shutil.rmtree(o.work, ignore_errors=True)
    print("| what | wanted | measured | |\n| --- | --- | --- | --- |")
    for r in rows:
        print("| " + " | ".join(r) + " |")
    print(f"\n{time.monotonic() - began:.0f} s, seed {o.seed}, load {os.getloadavg()[0]:.1f}")
    if any(r[-1] != "OK" for r in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
