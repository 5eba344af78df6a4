#!/usr/bin/env python3
"""Races OpenAI-compatible routers against each other in front of the same mock engines, side by side in one run.

For every cell (prompt size, streaming, connections, corpus) each target gets its turn in each round, in rotating order, so that
noise of the machine falls on all of them. "Added" is the target's figure minus the direct one of the same round; the median over
rounds is shown. CPU is the router's process tree only; engines and load generator are accounted apart. Every answer is checked.

    race.py --bin DIR [--candidate 'bin/kvasir proxy --port {port} --vllm-pd-disaggregation {pd_flags}'] [--out race.json]

With --add and --ratio two builds race each other, and the figures of one are divided by those of the other. Each request is counted at the address
of the engine that had it: the ratios show what the busiest address got, times the mean.

Targets: direct, vllm-router, vllm-router-pd, smg, smg-pd (each also as -rr: round robin instead of the default cache_aware), forward and forward-splice (a bare forwarder in Go: the floor), candidate (P/D), candidate-plain.
"""
import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import peers

SIZES = ["2KiB", "16KiB", "220KiB", "1MiB"]


def stats(e):
    out = {}
    for k, u in (("p", e.prefill[0]), ("d", e.decode[0])):
        s = json.loads(peers.http("GET", u + "/mock/stats")[1])
        out[k] = {x: s[x] for x in ("requests", "prefill", "decode", "aborted", "bad", "bytes_in", "bytes_out")}
        out[k] |= {"at " + address: n for address, n in s["by_address"].items()}
        out[k]["tokenize"] = sum(v for p, v in s["other_paths"].items() if p.endswith(("/tokenize", "/render")))
    return out


def cells(args):
    out = []
    for size in args.sizes:
        for stream in args.stream:
            out += [{"size": size, "stream": stream, "conns": c, "corpus": "distinct"} for c in args.conns]
    if args.shared_conns:
        out += [{"size": s, "stream": True, "conns": args.shared_conns, "corpus": "shared"} for s in args.sizes]
    return out


def label(c):
    return f"{c['size']} {'stream' if c['stream'] else 'json'} c{c['conns']}" + (f" {c['rate']:.0f}/s" if c.get("rate") else "") + (" shared" if c["corpus"] == "shared" else "")


def run_one(args, load, e, target, cell, seed):
    argv = [load, "--conns", str(cell["conns"]), "--size", cell["size"], "--corpus", cell["corpus"], "--duration", f"{args.seconds}s",
            "--warmup", f"{args.warmup}s", "--max-duration", f"{args.max_seconds}s", "--max-tokens", str(args.max_tokens), "--seed", str(seed), "--timeout", f"{args.timeout}s",
            "--pid", f"prefill={e.p.pid}", "--pid", f"decode={e.d.pid}"]
    if cell["stream"]:
        argv.append("--stream")
    if cell.get("rate"):
        argv += ["--rate", f"{cell['rate']:.1f}"]
    if args.chat:
        argv.append("--chat")
    for u in target["urls"]:
        argv += ["--url", u]
    if target["proc"]:
        argv += ["--pid", f"router={target['proc'].pid}"]
    before = stats(e)
    r = subprocess.run(argv, capture_output=True, text=True, timeout=args.max_seconds + 4 * args.timeout + 30, check=False)
    after = stats(e)
    try:
        res = json.loads(r.stdout)
    except ValueError:
        res = {"requests": 0, "failed": -1, "errors": {r.stderr[-300:] or "no output": 1}}
    res["engine_legs"] = {k: {x: after[k][x] - before[k].get(x, 0) for x in after[k]} for k in after}
    return res


def med(v):
    v = [x for x in v if x is not None]
    return statistics.median(v) if v else None


def summarise(runs, names):
    """runs[target] = results by round -> one row per target."""
    out = {}
    direct = runs.get("direct")
    for n in names:
        rs = runs[n]
        row = {"failed": sum(max(0, r.get("failed", 0)) for r in rs), "rounds": len(rs), "errors": {}}
        for r in rs:
            for k, v in (r.get("errors") or {}).items():
                row["errors"][k] = row["errors"].get(k, 0) + v
        good = [(i, r) for i, r in enumerate(rs) if r.get("requests")]
        row["requests"] = sum(r["requests"] for _, r in good)
        row["rps"] = med([r["rps"] for _, r in good])
        for m in ("ttft_ms", "total_ms"):
            for q in ("p50", "p99"):
                row[f"{m}_{q}"] = med([r[m][q] for _, r in good])
                if direct and n != "direct":
                    row[f"added_{m}_{q}"] = med([r[m][q] - direct[i][m][q] for i, r in good if direct[i].get("requests")])
        pr = [r["processes"].get("router") for _, r in good]
        if pr and pr[0]:
            row["cpu_s_per_1000"] = med([p["cpu_s_per_1000"] for p in pr])
            row["router_cores"] = med([p["cores"] for p in pr])
            row["rss_mib"] = max(p["rss_bytes"] for p in pr) / 2**20
            row["peak_rss_mib"] = max(p["peak_rss_bytes"] for p in pr) / 2**20
        if rs:
            # Legs that reached the engines, warm-up and draining included: a P/D target must show as many prefill as decode legs.
            row["prefill_legs"] = sum(r["engine_legs"]["p"]["requests"] for r in rs)
            row["decode_legs"] = sum(r["engine_legs"]["d"]["requests"] for r in rs)
            row["kv_prefill"] = sum(r["engine_legs"]["p"]["prefill"] for r in rs)
            row["tokenize_calls"] = sum(r["engine_legs"][k]["tokenize"] for r in rs for k in "pd")
            row["engine_bytes_in"] = sum(r["engine_legs"][k]["bytes_in"] for r in rs for k in "pd")
            row["kv_decode"] = sum(r["engine_legs"]["d"]["decode"] for r in rs)
            for k, role in (("p", "prefill"), ("d", "decode")):
                at = {}
                for r in rs:
                    for x, more in r["engine_legs"][k].items():
                        if x.startswith("at "):
                            at[x[3:]] = at.get(x[3:], 0) + more
                row[role + "_by_address"] = sorted(x for x in at.values() if x)
        out[n] = row
    return out


def f(x, d=2):
    return "–" if x is None else f"{x:.{d}f}"


def table(results, names):
    out = ["| Cell | Target | rps | TTFT p50 / p99 ms | added TTFT p50 / p99 ms | total p50 / p99 ms | added total p50 / p99 ms | CPU s per 1000 | RSS MiB | failed |",
           "|---|---|---|---|---|---|---|---|---|---|"]
    for r in results:
        for n in names:
            s = r["summary"][n]
            out.append(f"| {label(r['cell'])} | {n} | {f(s['rps'], 0)} | {f(s['ttft_ms_p50'])} / {f(s['ttft_ms_p99'])} | {f(s.get('added_ttft_ms_p50'))} / {f(s.get('added_ttft_ms_p99'))} "
                       f"| {f(s['total_ms_p50'])} / {f(s['total_ms_p99'])} | {f(s.get('added_total_ms_p50'))} / {f(s.get('added_total_ms_p99'))} | {f(s.get('cpu_s_per_1000'), 3)} "
                       f"| {f(s.get('rss_mib'), 0)} | {s['failed']} |")
    return "\n".join(out)


# What --ratio divides, of one round: smaller is better.
RATIOS = {"ms a request": lambda r: 1000 / r["rps"], "first byte, p50": lambda r: r["ttft_ms"]["p50"], "whole answer, p50": lambda r: r["total_ms"]["p50"],
          "CPU": lambda r: r["processes"]["router"]["cpu_s_per_1000"]}


def busiest(s, engines):
    """How much more than the mean the busiest of so many addresses of a role got, by counts of requests."""
    lists = [s[k] for k in ("prefill_by_address", "decode_by_address") if s.get(k)]
    return max((max(n) * engines / sum(n) for n in lists), default=None)


def ratios(results, pairs, engines, limit):
    """The table of ratios, each the median of the rounds' own, since two builds have their turns of a round one after the other; and those above the limit."""
    out = ["| Cell | Pair | " + " | ".join(RATIOS) + " | busiest address, times the mean: before | after |", "|---" * (len(RATIOS) + 4) + "|"]
    bad, whole = [], {}
    for r in results:
        for old, new in pairs:
            rounds = [(a, b) for a, b in zip(r["runs"][old], r["runs"][new]) if a.get("requests") and b.get("requests")]
            failed = sum(x.get("failed", 0) for pair in zip(r["runs"][old], r["runs"][new]) for x in pair)
            if failed or not rounds:
                bad.append(f"{label(r['cell'])} {new}: {failed} requests failed, {len(rounds)} rounds measured")
                continue
            each = {k: [g(b) / g(a) for a, b in rounds] for k, g in RATIOS.items()}
            row = {k: statistics.median(v) for k, v in each.items()}
            for k, v in each.items():
                whole.setdefault((old, new), {}).setdefault(k, []).extend(v)
            bad += [f"{label(r['cell'])} {new}, {k}: {v:.2f}" for k, v in row.items() if v > limit]
            share = [f(busiest(r["summary"][n], engines[n])) for n in (old, new)]
            out.append(f"| {label(r['cell'])} | {new} / {old} | " + " | ".join(f(v) for v in row.values()) + f" | {share[0]} | {share[1]} |")
    for (old, new), each in whole.items():
        out.append(f"| all, {len(each['CPU'])} rounds | {new} / {old} | " + " | ".join(f(statistics.median(v)) for v in each.values()) + " | – | – |")
    return "\n".join(out), bad


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--bin", required=True, help="folder of the peers' commands")
    ap.add_argument("--targets", default="direct,vllm-router,vllm-router-rr,vllm-router-pd,vllm-router-pd-rr,smg,smg-pd")
    ap.add_argument("--candidate", help="command line of our P/D proxy; {port} {prefill} {bootstrap} {decode} {pd_flags} are filled in")
    ap.add_argument("--candidate-plain", help="command line of our proxy in plain mode; {port} {workers}")
    ap.add_argument("--add", nargs=3, metavar=("NAME", "ENGINES", "COMMAND"), action="append", default=[],
                    help="one more target, with so many engines of each role; COMMAND as for --candidate")
    ap.add_argument("--ratio", nargs=2, metavar=("OLD", "NEW"), action="append", default=[], help="divide the figures of one of --add by another's")
    ap.add_argument("--limit", type=float, default=1.1, help="a median of ratios above it is a failure")
    ap.add_argument("--sizes", default=",".join(SIZES))
    ap.add_argument("--conns", default="1,16,64")
    ap.add_argument("--stream", default="on,off")
    ap.add_argument("--shared-conns", type=int, default=16, help="also run the shared-prefix corpus, streaming, at this many connections (0 = no)")
    ap.add_argument("--rate-share", type=float, default=0,
                    help="then, at the most connections, each target gets the same requests per second, evenly: this share of what the slowest did of that size (0 = no)")
    ap.add_argument("--rounds", type=int, default=2)
    ap.add_argument("--seconds", type=float, default=1.2)
    ap.add_argument("--max-seconds", type=float, default=5, help="a slow target is measured this long at most, until each connection had 4 requests")
    ap.add_argument("--warmup", type=float, default=0.2)
    ap.add_argument("--timeout", type=float, default=30)
    ap.add_argument("--max-tokens", type=int, default=16)
    ap.add_argument("--chat", action="store_true")
    ap.add_argument("--engines", type=int, default=2, help="addresses per role (one mock process per role)")
    ap.add_argument("--no-tokenize", action="store_true", help="engines answer 404 on /tokenize and …/render")
    ap.add_argument("--sglang", action="store_true", help="engines are P and D of SGLang; targets: direct, sglang-router, smg-sglang (each also as -rr), candidate")
    ap.add_argument("--ttft-ms", type=float, default=0)
    ap.add_argument("--tpot-ms", type=float, default=0)
    ap.add_argument("--out", help="write everything measured as JSON here")
    args = ap.parse_args()
    args.sizes, args.conns = args.sizes.split(","), [int(c) for c in args.conns.split(",")]
    args.stream = [s == "on" for s in args.stream.split(",")]
    names = args.targets.split(",")
    names += ["candidate"] if args.candidate and "candidate" not in names else []
    names += ["candidate-plain"] if args.candidate_plain and "candidate-plain" not in names else []
    added = {name: (int(n), cmd) for name, n, cmd in args.add}
    names += [n for n in added if n not in names]
    bindir = os.path.abspath(args.bin)
    tmp = tempfile.mkdtemp(prefix="router-race-")
    engine, load, forward = peers.build(tmp)
    delays = ["--ttft", f"{args.ttft_ms}ms", "--tpot", f"{args.tpot_ms}ms"]
    delays += ["--no-tokenize"] if args.no_tokenize else []
    procs, results, load0 = [], [], os.getloadavg()
    t0 = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that finally ends what was started
    of = {role: ["--sglang", role] if args.sglang else [] for role in ("prefill", "decode")}
    e = peers.Engines(engine, tmp, args.engines, delays + of["prefill"], delays + of["decode"])
    try:
        start = {
            "vllm-router": lambda: peers.vllm_router(e, bindir, tmp, False),
            "vllm-router-pd": lambda: peers.vllm_router(e, bindir, tmp, True, name="vllm-router-pd"),
            "vllm-router-rr": lambda: peers.vllm_router(e, bindir, tmp, False, ["--policy", "round_robin"], "vllm-router-rr"),
            "smg-rr": lambda: peers.smg(e, bindir, tmp, False, ["--policy", "round_robin"], "smg-rr"),
            "vllm-router-pd-rr": lambda: peers.vllm_router(e, bindir, tmp, True, ["--policy", "round_robin"], "vllm-router-pd-rr"),
            "smg": lambda: peers.smg(e, bindir, tmp, False),
            "smg-pd": lambda: peers.smg(e, bindir, tmp, True, name="smg-pd"),
            "smg-pd-rr": lambda: peers.smg(e, bindir, tmp, True, ["--policy", "round_robin"], "smg-pd-rr"),
            "sglang-router": lambda: peers.sglang_router(e, bindir, tmp),
            "sglang-router-rr": lambda: peers.sglang_router(e, bindir, tmp, ["--policy", "round_robin"], "sglang-router-rr"),
            "smg-sglang": lambda: peers.smg_sglang(e, bindir, tmp),
            "smg-sglang-rr": lambda: peers.smg_sglang(e, bindir, tmp, ["--policy", "round_robin"], "smg-sglang-rr"),
            "forward": lambda: peers.forward(e, forward, tmp, False, "forward"),
            "forward-splice": lambda: peers.forward(e, forward, tmp, True, "forward-splice"),
            "candidate": lambda: peers.candidate(e, args.candidate, tmp),
            "candidate-plain": lambda: peers.candidate(e, args.candidate_plain, tmp, "candidate-plain"),
        }
        for name, (n, cmd) in added.items():
            start[name] = lambda name=name, n=n, cmd=cmd: peers.candidate(e, cmd, tmp, name, n)
        targets = {}
        for n in names:
            if n == "direct":
                targets[n] = {"urls": e.decode, "proc": None}
                continue
            if n not in start:
                peers.die(f"unknown target {n}; known: direct, {', '.join(start)}")
            p, url = start[n]()
            procs.append(p)
            targets[n] = {"urls": [url], "proc": p}
            sys.stderr.write(f"{n}: ready at {url}\n")
        todo = cells(args)
        if args.rate_share:
            todo += [{"size": size, "stream": stream, "conns": max(args.conns), "corpus": "distinct", "rate": 0} for size in args.sizes for stream in args.stream]
        for k, cell in enumerate(todo):
            if "rate" in cell:
                full = next(r for r in results if r["cell"] == {x: v for x, v in cell.items() if x != "rate"})
                cell["rate"] = args.rate_share * min(s["rps"] for s in full["summary"].values() if s["rps"])
            runs = {n: [] for n in names}
            for r in range(args.rounds):
                order = names[(k + r) % len(names):] + names[:(k + r) % len(names)]
                for n in order:
                    p = targets[n]["proc"]
                    if p and not p.alive():
                        runs[n].append({"requests": 0, "failed": 1, "errors": {"process ended: " + p.tail(3)[-200:]: 1},
                                        "engine_legs": {k: {"requests": 0, "prefill": 0, "decode": 0, "tokenize": 0, "bytes_in": 0} for k in "pd"}})
                        continue
                    runs[n].append(run_one(args, load, e, targets[n], cell, seed=(k * 1000 + r * 100 + names.index(n)) * 7919 + 1))
            s = summarise(runs, names)
            results.append({"cell": cell, "summary": s, "runs": runs})
            sys.stderr.write(f"[{k + 1}/{len(todo)} {time.monotonic() - t0:.0f}s] {label(cell)}: " + "  ".join(
                f"{n} {f(s[n]['rps'], 0)}/s {f(s[n]['ttft_ms_p50'])}ms" + (f" FAILED {s[n]['failed']}" if s[n]["failed"] else "") for n in names) + "\n")
        doc = {"machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version(), "load_average_before": load0, "load_average_after": os.getloadavg()},
               "settings": {k: v for k, v in vars(args).items() if k not in ("bin", "out")}, "wall_s": time.monotonic() - t0,
               "commands": {n: [os.path.basename(t["proc"].argv[0])] + t["proc"].argv[1:] if t["proc"] else None for n, t in targets.items()}, "results": results}
        if args.out:
            with open(args.out, "w") as fh:
                json.dump(doc, fh)
        print(json.dumps([{"cell": r["cell"], "summary": r["summary"]} for r in results]))
        print(table(results, names))
        if args.ratio:
            text, bad = ratios(results, args.ratio, {n: e for n, (e, _) in added.items()}, args.limit)
            print(text)
            print(f"load average {load0[0]:.1f} before, {os.getloadavg()[0]:.1f} after; above {args.limit}: {bad or 'none'}")
            if bad:
                sys.exit(1)
        shutil.rmtree(tmp)  # kept, with the logs, when something went wrong
    finally:
        for p in procs:
            p.stop()
        e.stop()


if __name__ == "__main__":
    main()
