"""Checks with faults of the L2: values of a wrong length, values that vanish, an L2 that dies, hangs, is full or is gone."""
import os
import shutil
import threading
import time

from bench.l2.backends import Dir, Private, Slow
from bench.l2.node import Node


def after(run, node):
    good, d = run.healthy(node, run.args.fault_limit)
    return {"after": "works" if good else d}


def load_under_fault(run, p, d):
    """Loads a prompt through B while the L2 has its fault, with the details in d: whether the lookup was decided in time and no
    byte was wrong."""
    req = run.req()
    try:
        d.update(run.B.look(p, req, limit=run.args.fault_limit))
        d["problem"], _ = run.B.fetch(p, req, d["hit"])
        run.B.end(req)
        return d["problem"] is None
    except Slow as e:
        d["problem"] = str(e)
        run.B.sick = True
        return False


def hit_in_ram(run, q, d):
    """Whether a prompt of four chunks that B has in RAM is a hit meanwhile."""
    try:
        r = run.B.load(q, limit=run.args.fault_limit)
        d["l1_hit_meanwhile"] = {"hit": r["hit"], "ready_ms": r["ready_ms"], "problem": r["problem"]}
        return r["hit"] == 4 and r["problem"] is None
    except Exception as e:  # noqa: BLE001 - the check fails and says why
        d["l1_hit_meanwhile"] = str(e)
        return False


def used_again(run, n):
    """The seconds until a server works again after the repair, or what it lacks; and whether it did within the limit."""
    t0 = time.monotonic()
    while True:
        n.sick = False
        ok, lacks = run.healthy(n, 5)
        took = time.monotonic() - t0
        if ok or took > run.args.recover:
            return (round(took, 1) if ok else lacks), ok
        time.sleep(0.5)


def resized(run, delta):
    """Chunk 5 of 8 has another length in L2: the hit may only be 5, or more with the right bytes."""
    (p,) = run.in_l2(run.A, 1, 8, run.odd if delta == "pad" else run.small)
    n = run.names(p)[5]
    want = run.chunk_bytes(p.shape)
    to = {"half": want // 2, "zero": 0, "minus1": want - 1, "plus100": want + 100, "plus4096": want + 4096, "double": 2 * want,
          "pad": (want + 4095) // 4096 * 4096}[delta]
    run.l2.resize(n, to)
    d = {"length": to, "logical": want}
    try:
        r = run.B.load(p, limit=run.args.fault_limit)
        d.update(r)
        least = 8 if delta == "pad" and run.l2.kind == "dir" else 5
        good = r["problem"] is None and r["hit"] >= least
    except Slow as e:
        d["problem"], good = str(e), False
        run.B.sick = True
    if delta in ("half", "zero", "minus1"):
        try:
            q = run.B if not run.B.sick else run.A
            if q is run.A:
                q.clear()
            q.store(p, limit=run.args.fault_limit)
            d["replaced_by_next_store_s"] = round(run.wait_l2(p, limit=run.args.heal), 3)
        except Exception as e:  # noqa: BLE001 - the check fails and says why
            d["replaced_by_next_store_s"] = None
            good = False
            d["not_replaced"] = str(e)[:120]
    d.update(after(run, run.B))
    return good and d["after"] == "works", d


def vanish(run):
    """Chunk 5 disappears between the lookup and the load (or right after the acknowledgement)."""
    (p,) = run.in_l2(run.A, 1, 8)
    n = run.names(p)[5]
    run.B.ctx(p.shape)
    if run.l2.kind in ("redis", "s3"):
        run.l2.proxy.on(run.l2.get_patterns, lambda: run.l2.delete(n))
    d = {}
    t = None
    if run.l2.kind == "dir":
        t = threading.Thread(target=lambda: (time.sleep(0.001), run.l2.delete(n)))
        t.start()
    good = load_under_fault(run, p, d) and d["hit"] >= 5
    if t:
        t.join()
    d.update(after(run, run.B))
    return good and d["after"] == "works", d


def killed(run):
    """The L2 process is killed at the first read of a load, and started again empty."""
    (p,), (q,) = run.in_l2(run.A, 1, 8), run.in_l2(run.B, 1, 4)
    run.l2.proxy.on(run.l2.get_patterns, run.l2.kill)
    d = {}
    good = load_under_fault(run, p, d)
    good = hit_in_ram(run, q, d) and good
    if run.l2.proc.poll() is None:
        run.l2.kill()
    d["misses_while_down_ms"] = []
    for _ in range(3):
        try:
            r = run.B.load(run.prompt(run.small, 4), limit=run.args.fault_limit)
            d["misses_while_down_ms"].append(r["ready_ms"])
        except Exception as e:  # noqa: BLE001 - the check fails and says why
            d["misses_while_down_ms"].append(str(e))
            good = False
    run.l2.start()
    d["l2_used_again_after_s"] = {}
    for n in (run.A, run.B):
        d["l2_used_again_after_s"][n.nm], ok = used_again(run, n)
        good = good and ok
    return good, d


def silent(run):
    """The L2 stops answering in the middle of a load (connections stay open), later goes on."""
    (p,), (q,) = run.in_l2(run.A, 1, 8), run.in_l2(run.B, 1, 4)
    run.l2.proxy.on(run.l2.get_patterns, run.l2.proxy.open.clear)
    d = {}
    try:
        good = load_under_fault(run, p, d)
        good = hit_in_ram(run, q, d) and good
        try:
            s = run.prompt(run.small, 4)
            run.B.store(s, limit=run.args.fault_limit)
            d["store_meanwhile"] = True
        except Exception as e:  # noqa: BLE001 - the check fails and says why
            d["store_meanwhile"] = str(e)
            good = False
    finally:
        run.l2.proxy.hook = None
        run.l2.proxy.open.set()
    d["l2_used_again_after_s"], ok = used_again(run, run.B)
    return good and ok, d


def full(run):
    """The L2 is full: the server lives, L1 hits work, nothing wrong is loaded; with room it stores again."""
    shape = run.big
    cb = run.chunk_bytes(shape)
    if run.l2.kind == "redis":
        used = int(next(ln for ln in run.l2.call("INFO", "memory").decode().split("\r\n")
                        if ln.startswith("used_memory:")).split(":")[1])
        run.l2.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        run.l2.call("CONFIG", "SET", "maxmemory", str(used + 6 * cb))
        a, mnt = run.A, None
    else:
        mnt = run.args.full_dir
        a = Node(run, "F", run.args.a)
        old, run.l2 = run.l2, Dir(mnt) if run.l2.kind == "dir" else Private(mnt)
        a.start(extra={"dir": mnt})
        ballast = os.path.join(mnt, "ballast")
        st = os.statvfs(mnt)
        room = st.f_bavail * st.f_frsize - int(6.5 * cb)
        if room > 0:
            with open(ballast, "wb") as f:
                left = room
                while left > 0:
                    f.write(bytes(min(left, 1 << 20)))
                    left -= 1 << 20
    d = {}
    try:
        ps = [run.prompt(shape, 4) for _ in range(4)]
        for p in ps:
            a.store(p, limit=run.args.fault_limit)
        time.sleep(run.args.settle)
        l1 = a.load(ps[-1], limit=run.args.fault_limit)
        d["l1_hit"] = {"hit": l1["hit"], "problem": l1["problem"]}
        a.clear()
        got, bad = 0, []
        for p in ps:
            r = a.load(p, limit=run.args.fault_limit)
            got += r["hit"]
            if r["problem"]:
                bad.append(r["problem"])
        d.update(found_of_16=got, bad=bad, leftovers=run.l2.leftovers()[:4])
        if run.l2.kind != "private":
            left = {}
            for p in ps:
                for n in run.names(p):
                    left[str(run.l2.size(n))] = left.get(str(run.l2.size(n)), 0) + 1
            d["lengths_in_l2"] = left
        if run.l2.kind == "redis":
            run.l2.call("CONFIG", "SET", "maxmemory", "0")
        else:
            if os.path.exists(ballast):
                os.unlink(ballast)
        ok, h = run.healthy(a, run.args.fault_limit)
        d["after"] = "works" if ok else h
        return a.alive() and l1["hit"] == 4 and not l1["problem"] and not bad and ok, d
    finally:
        if mnt:
            a.stop()
            shutil.rmtree(mnt, ignore_errors=True)
            run.l2 = old
        else:
            run.l2.call("CONFIG", "SET", "maxmemory", "0")


def gone_dir(run):
    """The directory disappears (unmounted, renamed) and comes back."""
    (p,) = run.in_l2(run.A, 1, 4)
    away = run.l2.path + ".away"
    os.rename(run.l2.path, away)
    d = {}
    try:
        r = run.B.load(p, limit=run.args.fault_limit)
        d["hit_while_gone"] = r["hit"]
        good = r["problem"] is None
        q = run.prompt(run.small, 4)
        run.B.store(q, limit=run.args.fault_limit)
        r = run.B.load(q, limit=run.args.fault_limit)
        d["l1_hit_while_gone"] = r["hit"]
        good = good and r["hit"] == 4 and r["problem"] is None
        time.sleep(0.5)
    finally:
        made = os.path.exists(run.l2.path)
        if made:
            shutil.rmtree(run.l2.path)
        os.rename(away, run.l2.path)
    d["directory_made_again_by_server"] = made
    d.update(after(run, run.B))
    return good and d["after"] == "works", d
