"""Rows of latency and throughput of stores to and loads from the L2, of lookups in RAM and of restarts."""
import json
import signal
import statistics
import time
import traceback

from bench.process import CpuMeter, lat_summary, log, rss_tree_mb


def measure(run):
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
        cb = run.chunk_bytes(shape)
        for tok in [int(x) for x in args.tokens.split(",")]:
            n = tok // a.b.chunk
            row = {"chunk_mib": cb / 2**20, "tokens": tok, "chunks": n, "mb": round(n * cb / 1e6, 1)}
            st, commit, ready, ack, pol, w9, ret, hits, cs, cl, bad = [], [], [], [], [], [], [], [], 0.0, 0.0, []
            raw = []
            a.ctx(shape)
            try:
                for _ in range(args.rounds):
                    a.clear()
                    p = run.prompt(shape, n, light=True)
                    m = CpuMeter(a.proc.pid, fine=True)
                    with m:
                        t0 = time.perf_counter()
                        commit.append(a.store(p))
                        st.append(run.wait_l2(p, t0=t0))
                    time.sleep(0.2)
                    a.clear()
                    run.l2.cool(run.names(p))
                    m = CpuMeter(a.proc.pid, fine=True)
                    req = run.req()
                    with m:
                        r = a.look(p, req)
                    cl += m.s or 0
                    e, s = a.fetch(p, req, r["hit"])
                    a.end(req)
                    if e:
                        bad.append(e)
                    hits.append(r["hit"])
                    ready.append(r["ready_ms"])
                    ack.append(r["ack_ms"])
                    pol.append(r["running_answers"])
                    w9.append(r["op9_worst_ms"])
                    ret.append(s)
                    q = run.prompt(shape, n, light=True)
                    if run.l2.kind != "private":
                        for nm in run.names(p):
                            run.l2.delete(nm)
                        if args.mode == "engine_driven":
                            a.clear()
                            time.sleep(0.2)
                            m = CpuMeter(a.proc.pid, fine=True)
                            with m:
                                t0 = time.perf_counter()
                                a.store_empty(q)
                                raw.append(run.wait_l2(q, t0=t0))
                            cs += m.s or 0
                            for nm in run.names(q):
                                run.l2.delete(nm)
                med = statistics.median
                row.update(
                    store_commit_s=round(med(commit), 4), store_to_l2_s=round(med(st), 4),
                    store_to_l2_gbps=round(n * cb / med(st) / 1e9, 3),
                    no_copy_store_to_l2_gbps=round(n * cb / med(raw) / 1e9, 3) if raw else None,
                    no_copy_store_cpu_s_per_gb=round(cs / (args.rounds * n * cb / 1e9), 3) if raw else None,
                    l2_hit_ready_ms=round(med(ready), 2), l2_hit_all_ms=ready, lookup_ack_ms=round(med(ack), 2),
                    load_gbps=round(n * cb / med(ready) / 1e6, 3),
                    load_cpu_s_per_gb=round(cl / (args.rounds * n * cb / 1e9), 3),
                    running_answers=pol, op9_worst_ms=max(w9),
                    retrieve_gbps=round(n * cb / med(ret) / 1e9, 3) if med(ret) else None,
                    hits=hits, bad=bad)
            except Exception as e:  # noqa: BLE001 - a row that cannot be measured says why, and the next one runs
                row["error"] = f"{type(e).__name__}: {e}"
                if run.args.verbose:
                    traceback.print_exc()
            out["rows"].append(row)
            log(json.dumps(row))
    try:
        out["lookup_in_ram"] = ram_lookups(run, a)
    except Exception as e:  # noqa: BLE001 - a row that cannot be measured says why, and the next one runs
        out["lookup_in_ram"] = {"error": f"{type(e).__name__}: {e}"}
    log(out["lookup_in_ram"])
    out["memory_after"] = rss_tree_mb(a.proc.pid)
    try:
        out["restart"] = perf_restart(run, a)
    except Exception as e:  # noqa: BLE001 - a row that cannot be measured says why, and the next one runs
        out["restart"] = {"error": f"{type(e).__name__}: {e}"}
    log(out["restart"])
    a.stop()


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
            for n in run.names(p):
                run.l2.delete(n)
    return d
