#!/usr/bin/env python3
"""Engines with several chunk sizes on one server, all at once, through the real adapters of two releases.

    sizes.py --url tcp://127.0.0.1:5555 --listen 5556:144 5557:544 --http http://127.0.0.1:8080 --kill 'sh kill.sh' --newer DIR

The engines have blocks of 16, 48 and 544 tokens. Those of 0.5.7 (--newer) negotiate their chunks; those of 0.5.6 get the chunks of the
port that they use. Each size has a model of its own, as hybrid models have. Each engine stores and loads prompts of its own, and those
of the engines of its size; all goes on while the pool evicts, and after SIGKILL of the server. Prints one JSON line and exits 0 when all checks passed.
"""
import argparse
import json
import os
import subprocess
import sys

import generations as G

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared"))
from asking import fetch, figure


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", required=True)
    p.add_argument("--listen", nargs="+", required=True, help="PORT:CHUNK of further ports, for blocks of 48 and 544")
    p.add_argument("--http", required=True)
    p.add_argument("--kill", required=True)
    p.add_argument("--newer", required=True, help="folder of lmcache 0.5.7")
    p.add_argument("--logs", default="/tmp")
    a = p.parse_args()
    a.record, a.model = None, "interop/sizes"
    host = a.url.rsplit(":", 1)[0]
    ports = dict(zip((48, 544), (x.split(":")[0] for x in a.listen), strict=True))
    want = {("0.5.7", 16): 256, ("0.5.7", 48): 288, ("0.5.7", 544): 544, ("0.5.6", 16): 256}
    want |= {("0.5.6", b): int(x.split(":")[1]) for b, x in zip((48, 544), a.listen, strict=True)}
    failed, passed = [], 0

    def check(name, ok, detail):
        nonlocal passed
        print(("PASS " if ok else "FAIL ") + name, detail, file=sys.stderr, flush=True)
        if ok:
            passed += 1
        else:
            failed.append(name)

    engines = {}
    for release, block in want:
        url = f"{host}:{ports[block]}" if release == "0.5.6" and block in ports else a.url
        engines[release, block] = G.Remote(a, release, a.newer if release == "0.5.7" else "", False, url=url, block=block, model=f"interop/sizes-{want[release, block]}")
    for k, e in engines.items():
        got = e.answer()
        check(f"{e.release} has chunks of {want[k]}", got.get("chunk") == want[k], got)
    if failed:
        for e in engines.values():
            e.process.kill()
        print(json.dumps({"passed": passed, "failed": failed}))
        return True
    whole = lambda r: r.get("hit") == 3 and r.get("equal") is True

    def all_of(what, command, good):
        """One command of each engine, all at once."""
        for i, e in enumerate(engines.values()):
            e.ask(*command(i))
        for e in engines.values():
            got = e.answer()
            check(f"{e.release} {what}", good(got), got)

    all_of("stores", lambda i: ("store", 100 + i, 3), lambda r: r.get("done"))
    all_of("loads what it stored", lambda i: ("load", 100 + i, 3), whole)
    for i, (k, e) in enumerate(engines.items()):
        for j, (other, o) in enumerate(engines.items()):
            if i != j and want[k] == want[other]:
                got = e.call("load", 100 + j, 3)
                check(f"{e.release} loads what {o.release} stored", whole(got), got)
    for n in range(6):  # more than the pool holds
        all_of(f"stores more, {n}", lambda i, n=n: ("store", 1000 + 10 * n + i, 3), lambda r: r.get("done"))
    all_of("loads the last that it stored", lambda i: ("load", 1050 + i, 3), whole)
    evicted = figure(a.http, "lmcache_mp_l1_evicted_chunks_total")
    check("the pool evicts", evicted > 0, evicted)
    subprocess.run(a.kill, shell=True, check=True)
    all_of("loads after a kill of the server", lambda i: ("again", 2000 + 100 * i, 3), whole)
    all_of("loads what was stored before it", lambda i: ("load", 1050 + i, 3), whole)
    status = json.loads(fetch(a.http + "/status"))
    sizes = sorted({w.get("chunk_tokens") for w in status.get("workers", [])})
    check("the status has each worker's size", sizes == sorted(set(want.values())), sizes)
    for e in engines.values():
        e.ask("close")
    for e in engines.values():
        got = e.answer()
        check(f"{e.release} ends", got == {}, got)
        e.process.wait(120)
    print(json.dumps({"passed": passed, "failed": failed}))
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
