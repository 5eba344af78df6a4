#!/usr/bin/env python3
"""How Kvasir and the C++ transfer engine scale: 1 to 64 connections, 1 to 16 peers.

Writes of packed blocks over loopback. Each connection, and each peer, has a
caller of its own: threads of one process that share one engine with as many
lanes for C++, callers of one process for Kvasir. The two take turns; the table
shows medians over the rounds. Needs the engine's wheel and numpy.

    curves.py --kvasir 'kvasir transfer' --rounds 3
"""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading

from compare import LINE, Cpp, figures, human, repeat, wait_for

COMPARE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare.py")


def drive(peers, callers, size, batch, seconds):
    """The C++ side of one point: prints GB/s and the quantiles of a call in us."""
    cpp = Cpp(callers * size * batch)
    cpp.cell(peers[0], "write", size, 1, "packed", 0)  # the engine connects
    samples, took, errors = [], [], []
    ready = threading.Barrier(callers)

    def caller(i):
        peer, base = peers[i % len(peers)], int(cpp.b.ctypes.data) + i * size * batch
        room = peer["len"] // callers if len(peers) == 1 else 0
        src = [base + k * size for k in range(batch)]
        dst = [peer["base"] + i * room + k * size for k in range(batch)]
        ready.wait()
        lat, t = repeat(lambda: cpp.e.batch_transfer_sync_write(peer["peer"], src, dst, [size] * batch), seconds)
        if not lat:
            errors.append(peer["peer"])
        samples.extend(lat)
        took.append(t)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(callers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        sys.exit(f"transfers failed: {errors}")
    print(json.dumps(figures(size * batch, samples, max(took))))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def cpp_point(files, callers, size, batch, seconds):
    env = dict(os.environ, MC_TCP_LANES_PER_PEER=str(callers if len(files) == 1 else 1))
    out = subprocess.run([sys.executable, os.path.abspath(__file__), "--drive", ",".join(files), "--callers", str(callers),
                          "--cells", f"{size}:{batch}", "--seconds", str(seconds)],
                         env=env, capture_output=True, text=True, timeout=120, check=False)
    if out.returncode:
        sys.exit(f"C++ with {callers} callers failed: {out.stderr.strip()[-400:]}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def go_point(cmd, files, callers, size, batch, seconds):
    args = ["bench", "--ops", "write", "--conns", "1", "--sizes", str(size), "--batches", str(batch), "--seconds", str(seconds)]
    args += [x for f in files for x in ("--peer-file", f)] + ["--callers", str(callers if len(files) == 1 else 1)]
    out = subprocess.run(cmd + args, capture_output=True, text=True, timeout=120, check=False)
    m = LINE.search(out.stdout)
    if not m:
        sys.exit(f"Kvasir with {callers} callers failed: {out.stderr.strip()[-400:]}")
    return float(m[6]) / 1e3, int(m[7]) / 1e3, int(m[8]) / 1e3


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", help="command with the transfer subcommands")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=0.3, help="per point and round")
    ap.add_argument("--cells", default="4k:1,64k:16", help="size:batch, ...")
    ap.add_argument("--conns", default="1,2,4,8,16,32,64")
    ap.add_argument("--peers", default="1,2,4,8,16")
    ap.add_argument("--drive", help=argparse.SUPPRESS)
    ap.add_argument("--callers", type=int, help=argparse.SUPPRESS)
    a = ap.parse_args()
    cells = [tuple(human(x) for x in c.split(":")) for c in a.cells.split(",")]
    if a.drive:
        return drive([json.load(open(f)) for f in a.drive.split(",")], a.callers, *cells[0], a.seconds)
    if not a.kvasir:
        ap.error("--kvasir is needed")
    cmd = shlex.split(a.kvasir)
    conns, peers = ([int(n) for n in x.split(",")] for x in (a.conns, a.peers))
    children = []
    with tempfile.TemporaryDirectory() as tmp:
        try:
            cpp, kv = [], []
            for i in range(max(peers)):
                cpp.append(f"{tmp}/cpp{i}.json")
                children.append(subprocess.Popen([sys.executable, COMPARE, "--serve-cpp", cpp[i], "--mem", str(64 << 20)],
                                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                wait_for(cpp[i], children[-1])
                kv.append(f"{tmp}/kv{i}.json")
                children.append(subprocess.Popen(cmd + ["serve", "--size", str(64 << 20), "--peer-file", kv[i]],
                                                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                wait_for(kv[i], children[-1])
            print("| cell | | C++ GB/s | p50 us | p99 us | Kvasir GB/s | p50 us | p99 us | ratio |\n|" + "---|" * 9)
            for size, batch in cells:
                for n, of, files in [(n, "connection", 1) for n in conns] + [(n, "peer", n) for n in peers]:
                    got = [[], []]
                    turns = [(got[0], cpp_point, (cpp[:files],)), (got[1], go_point, (cmd, kv[:files]))]
                    for r in range(a.rounds):
                        for samples, point, to in turns if r % 2 else turns[::-1]:
                            samples.append(point(*to, n, size, batch, a.seconds))
                    c, k = ([statistics.median(x[i] for x in g) for i in range(3)] for g in got)
                    print(f"| {size} x {batch} | {n} {of + 's' * (n > 1)} | {c[0]:.3f} | {c[1]:.0f} | {c[2]:.0f} | {k[0]:.3f} | {k[1]:.0f} | {k[2]:.0f} | {k[0] / c[0]:.1f} |", flush=True)
        finally:
            for p in children:
                if p.stdin:
                    p.stdin.close()  # ends the C++ targets
                else:
                    p.terminate()
            for p in children:
                p.wait(20)


if __name__ == "__main__":
    main()
