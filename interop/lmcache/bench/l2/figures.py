"""Rows of latency and throughput of stores to and loads from the L2, of lookups in RAM and of restarts."""
import json
import signal
import statistics
import time
import traceback

from bench.process import CpuMeter, lat_summary, log, rss_tree_mb


def measure(run):
    """All rows, of server A alone."""
    a, args = run.A, run.args
    a.stop()
    run.B.stop()
    a.sick = False
    a.start(direct=True)
    out = {"start_to_first_ping_s": round(a.start_s, 2), "memory_idle": rss_tree_mb(a.proc.pid), "rows": []}
    run.perf = out
    for mib in [float(x) for x in args.mib.split(",")]:
        hd = int(mib * 2**20 / (2 * 8 * a.b.chunk * 2))
        shape = (8, max(1, hd // 128), min(hd, 128))
        for tok in [int(x) for x in args.tokens.split(",")]:
            n, cb = tok // a.b.chunk, run.chunk_bytes(shape)
            row = {"chunk_mib": cb / 2**20, "tokens": tok, "chunks": n, "mb": round(n * cb / 1e6, 1)}
            row.update(figures_or_error(run, stores_and_loads, run, a, shape, n))
            out["rows"].append(row)
            log(json.dumps(row))
    out["lookup_in_ram"] = figures_or_error(run, ram_lookups, run, a)
    log(out["lookup_in_ram"])
    out["memory_after"] = rss_tree_mb(a.proc.pid)
    out["restart"] = figures_or_error(run, perf_restart, run, a)
    log(out["restart"])
    a.stop()


def figures_or_error(run, fn, *args):
    try:
        return fn(*args)
    except Exception as e:  # noqa: BLE001 - a row that cannot be measured says why, and the next one runs
        if run.args.verbose:
            traceback.print_exc()
        return {"error": f"{type(e).__name__}: {e}"}


def stores_and_loads(run, a, shape, n):
    """Prompts of n chunks: stored until they stand in the L2, loaded from there, and stored without a copy."""
    size, rounds = n * run.chunk_bytes(shape), run.args.rounds
    commit, stored, empty, loads, bad, retrieve = [], [], [], [], [], []
    load_cpu = empty_cpu = 0.0
    a.ctx(shape)
    for _ in range(rounds):
        a.clear()
        p = run.prompt(shape, n, light=True)
        t0 = time.perf_counter()
        commit.append(a.store(p))
        stored.append(run.wait_l2(p, t0=t0))
        time.sleep(0.2)
        a.clear()
        run.l2.cool(run.names(p))
        req = run.req()
        with CpuMeter(a.proc.pid, fine=True) as m:
            r = a.look(p, req)
        load_cpu += m.s or 0
        e, s = a.fetch(p, req, r["hit"])
        a.end(req)
        if e:
            bad.append(e)
        loads.append(r)
        retrieve.append(s)
        if run.l2.kind == "private":
            continue
        delete(run, p)
        if run.args.mode == "engine_driven":
            q = run.prompt(shape, n, light=True)
            a.clear()
            time.sleep(0.2)
            with CpuMeter(a.proc.pid, fine=True) as m:
                t0 = time.perf_counter()
                a.store_empty(q)
                empty.append(run.wait_l2(q, t0=t0))
            empty_cpu += m.s or 0
            delete(run, q)
    med = statistics.median
    ready = [r["ready_ms"] for r in loads]
    return {
        "store_commit_s": round(med(commit), 4), "store_to_l2_s": round(med(stored), 4),
        "store_to_l2_gbps": round(size / med(stored) / 1e9, 3),
        "no_copy_store_to_l2_gbps": round(size / med(empty) / 1e9, 3) if empty else None,
        "no_copy_store_cpu_s_per_gb": round(empty_cpu / (rounds * size / 1e9), 3) if empty else None,
        "l2_hit_ready_ms": round(med(ready), 2), "l2_hit_all_ms": ready, "lookup_ack_ms": round(med(r["ack_ms"] for r in loads), 2),
        "load_gbps": round(size / med(ready) / 1e6, 3),
        "load_cpu_s_per_gb": round(load_cpu / (rounds * size / 1e9), 3),
        "running_answers": [r["running_answers"] for r in loads], "op9_worst_ms": max(r["op9_worst_ms"] for r in loads),
        "retrieve_gbps": round(size / med(retrieve) / 1e9, 3) if med(retrieve) else None,
        "hits": [r["hit"] for r in loads], "bad": bad}


def delete(run, p):
    for n in run.names(p):
        run.l2.delete(n)


def ram_lookups(run, a):
    """Everything is in RAM (and in L2): what a client waits for a hit, and for a miss."""
    a.clear()
    out = {}
    for tok in [int(x) for x in run.args.tokens.split(",")]:
        n = tok // a.b.chunk
        p = run.prompt((1, 1, 8), n)
        a.store(p)
        run.wait_l2(p)
        for what in ("hit", "miss"):
            tot, ack = [], []
            m = CpuMeter(a.proc.pid, fine=True)
            for _ in range(run.args.lookups):
                q = p if what == "hit" else run.prompt((1, 1, 8), n, light=True)
                req = run.req()
                with m:
                    r = a.look(q, req, step=0.0005)
                    a.free(q, req, r["hit"])
                    a.end(req)
                if r["hit"] != (n if what == "hit" else 0):
                    raise RuntimeError(f"{what}: {r['hit']}")
                tot.append(r["ready_ms"] / 1e3)
                ack.append(r["ack_ms"] / 1e3)
            out[f"{what}_{tok}"] = {"ready": lat_summary(tot), "ack": lat_summary(ack),
                                    "server_cpu_us": m.per(run.args.lookups)}
    return out


def perf_restart(run, a):
    shape = (8, 1, 128)
    ps = [run.prompt(shape, 16) for _ in range(8)]
    for p in ps:
        a.store(p)
    for p in ps:
        run.wait_l2(p)
    d = {}
    for how, sig in (("clean", None), ("kill9", signal.SIGKILL)):
        a.stop(sig)
        a.start(direct=True)
        found, first, bad = 0, None, []
        for p in ps:
            r = a.load(p)
            first = first or r["ready_ms"]
            found += r["hit"]
            bad += [r["problem"]] if r["problem"] else []
        d[how] = {"start_to_first_ping_s": round(a.start_s, 2), "found": found, "of": 128, "bad": bad,
                  "first_hit_ready_ms": first}
    for p in ps:
        if run.l2.kind != "private":
            delete(run, p)
    return d
