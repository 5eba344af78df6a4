#!/usr/bin/env python3
"""Memory of kvasir proxy with many streams open at once, and after many requests. Mock engine, loopback.

streams.py --kvasir bin/kvasir --streams 5000 [--requests 100000]
"""
import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time

import peers


def rss(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmRSS"))


async def stream(port, body, opened, end):
    r, w = await asyncio.open_connection("127.0.0.1", port)
    w.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    status = await r.readline()
    while b"data: " not in await r.readline():
        pass
    opened.append(status)
    await end.wait()
    w.close()


async def open_all(port, n, pid):
    body = json.dumps({"model": "mock", "prompt": "x" * 2048, "max_tokens": 100000, "stream": True}).encode()
    end, opened, tasks, bad = asyncio.Event(), [], [], 0
    for i in range(n):
        tasks.append(asyncio.create_task(stream(port, body, opened, end)))
        if i % 50 == 49:
            await asyncio.sleep(0.02)
    limit = time.monotonic() + 120
    while len(opened) < n and time.monotonic() < limit:
        await asyncio.sleep(0.2)
    bad = n - sum(b" 200 " in s for s in opened)
    await asyncio.sleep(3)  # tokens flow in all of them
    used = rss(pid)
    end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    return used, bad


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--streams", type=int, default=5000)
    ap.add_argument("--requests", type=int, default=100000)
    args = ap.parse_args()
    tmp = tempfile.mkdtemp(prefix="proxy-streams-")
    engine, load, _ = peers.build(tmp)
    e = peers.Engines(engine, tmp, 2, ["--tpot", "2s"], ["--tpot", "2s"])
    quick = peers.Engines(engine, tmp, 2)
    ok = True
    procs = []
    try:
        for kind, es in (("streams", e), ("requests", quick)):
            (port,) = peers.free_ports(1)
            argv = [args.kvasir, "--log-level", "warn", "proxy", "--port", str(port), "--policy", "prefix_aware", "--max-per-engine", "10000"]
            for u in es.decode:
                argv += ["--engine", u]
            p = peers.Proc("kvasir-" + kind, argv, tmp)
            procs.append(p)
            url = f"http://127.0.0.1:{port}"
            peers.wait_for("kvasir", lambda url=url: peers.http("GET", url + "/health")[0] == 200, 30, p)
            if kind == "streams":
                before = rss(p.pid)
                used, bad = asyncio.run(open_all(port, args.streams, p.pid))
                each = (used - before) / args.streams / 1024
                print(f"{args.streams} open streams: {each:.1f} KiB each ({used >> 20} MiB), {bad} were not opened; the goal is 64 KiB")
                ok = ok and not bad and each <= 64
                continue
            marks = []
            for _ in range(4):
                subprocess.run([load, "--url", url, "--conns", "16", "--size", "2KiB", "--requests", str(args.requests // 4), "--duration", "600s", "--max-duration", "600s",
                                "--max-tokens", "4"], check=True, capture_output=True)
                marks.append(rss(p.pid) >> 20)
            print(f"{args.requests} requests: {marks} MiB after each quarter")
            ok = ok and marks[-1] <= marks[0] * 1.2 + 8
    finally:
        for p in procs:
            p.stop()
        e.stop()
        quick.stop()
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
