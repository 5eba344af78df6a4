#!/usr/bin/env python3
"""The reset of an engine's caches reaches every tier: what was stored before it is a hit nowhere, and what is stored after it is.

One engine with the LMCacheMPConnector for each server; the servers share one tier, or there is one server. Sequence:
  1. prompts are stored by the first engine; the others load one of them: the tier is shared
  2. POST /reset_prefix_cache?reset_external=true at the first engine, repeated until it succeeds
  3. each engine asks for a prompt of before: no external hit, the output is that of the first time
  4. --kill: all servers are killed with SIGKILL and started again; each engine asks for another prompt of before: no hit
  5. prompts that were stored after the reset are hits
     --lose: a shell command removes the generation from the tier; each engine asks for another prompt of before: no hit
  6. --command: a shell command clears the model, as after a weight update; prompts of after the reset are no hits any more
Prints one JSON line.
"""
import argparse
import json
import os
import subprocess
import tempfile
import time

import common as C


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--servers", nargs="+", required=True, help="tcp://host:port of each")
    ap.add_argument("--kill", help="a shell command that kills the servers with SIGKILL and starts them again")
    ap.add_argument("--command", help="a shell command that clears the model's chunks everywhere")
    ap.add_argument("--lose", help="a shell command after which the shared tier has lost its generation")
    ap.add_argument("--wait", type=float, default=0.2, help="seconds in which other servers may still serve older chunks")
    ap.add_argument("--chunk", type=int, default=128)
    ap.add_argument("--out")
    ap.add_argument("--timeout", type=float, default=600)
    a = ap.parse_args()
    out = a.out or tempfile.mkdtemp(prefix="reset.")
    os.makedirs(out, exist_ok=True)
    report = {"scenario": "reset", "logs": out, "steps": {}}
    with C.reported(report):
        engines = [C.lmcache_engine(f"vllm-{i}", a.model, s, out, a.timeout) for i, s in enumerate(a.servers)]
        bases = [base for _, base in engines]
        tokens = 5 * a.chunk + 17
        prompts = {n: C.prompt_ids(tokens, 100 + i) for i, n in enumerate(("shared", *(f"{k}{i}" for k in ("reset", "kill", "lose") for i in range(len(bases)))))}
        first = {}

        def ask(step, i, name):
            """One prompt at engine i, whose own prefix cache is empty: its external hit."""
            C.reset_prefix_cache(bases[i])
            before = C.metrics(bases[i])
            r = C.complete(bases[i], prompts[name], 8)
            time.sleep(1.0)
            hit = C.delta(before, C.metrics(bases[i])).get("vllm:external_prefix_cache_hits_total", 0)
            same = name not in first or first[name]["token_ids"] == r["token_ids"]
            first.setdefault(name, r)
            report["steps"][f"{step}: {name} at {i}"] = {"hit": hit, "same": same}
            return hit, same

        def command(step, text):
            r = subprocess.run(text, shell=True, capture_output=True, text=True, timeout=300, check=False)
            report["steps"][step] = {"rc": r.returncode, "out": (r.stdout + r.stderr)[-500:]}
            return r.returncode == 0

        whole = tokens // a.chunk * a.chunk
        ok = True
        for name in prompts:
            hit, _ = ask("store", 0, name)
            ok = ok and hit == 0
        for i in range(len(bases)):
            hit, same = ask("before", i, "shared")
            ok = ok and same and hit >= whole - 1

        t0, tries = time.time(), 0
        while time.time() - t0 < 60:
            tries += 1
            body = C.http("POST", bases[0] + "/reset_prefix_cache?reset_running_requests=false&reset_external=true", timeout=60)[1]
            if json.loads(body or b"{}").get("success", True):
                break
            time.sleep(0.5)
        report["steps"]["reset"] = {"tries": tries, "seconds": round(time.time() - t0, 1), "answer": body.decode()[:100]}
        time.sleep(a.wait)
        for i in range(len(bases)):
            hit, same = ask("after the reset", i, f"reset{i}")
            ok = ok and same and hit == 0
        if a.kill:
            ok = command("kill", a.kill) and ok
            time.sleep(25)  # until the engines have noticed
            for i in range(len(bases)):
                hit, same = ask("after the kill", i, f"kill{i}")
                ok = ok and same and hit == 0
        for i in range(len(bases)):
            hit, same = ask("stored again", i, f"reset{i}")
            ok = ok and same and hit >= whole - 1
        if a.lose:
            ok = command("lose", a.lose) and ok
            for i in range(len(bases)):
                hit, same = ask("after the loss", i, f"lose{i}")
                ok = ok and same and hit == 0
        if a.command:
            ok = command("command", a.command) and ok
            time.sleep(a.wait)
            for i in range(len(bases)):
                hit, same = ask("after the command", i, f"reset{i}")
                ok = ok and same and hit == 0
        for p, _ in engines:
            p.stop()
        C.emit(report, ok)


if __name__ == "__main__":
    main()
