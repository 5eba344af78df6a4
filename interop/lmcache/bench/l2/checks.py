"""Checks without faults: what one server stored, the other one and itself load from the L2."""
import time

from bench.l2.backends import Slow
from bench.l2.node import BS


def cross(run, src, dst, shape, chunks=8, salt=""):
    p = run.prompt(shape, chunks, salt)
    src.store(p)
    s = run.wait_l2(p)
    r = dst.load(p)
    return r["hit"] == chunks and r["problem"] is None, {"stored_in_l2_s": round(s, 3), **r}


def content(run, shape):
    """The value in L2 is the plain chunk: [2, layers, slots, hidden], padding (if any) after it."""
    (p,) = run.in_l2(run.A, 1, 2, shape)
    _, kv, _, K = run.A.ctx(p.shape)
    t = run.A.b.torch
    C = run.A.b.chunk
    bpc = C // BS
    run.A.stamp(kv, p, 0, 2, K)
    for i, n in enumerate(run.names(p)):
        v = run.l2.read(n)
        want = t.stack([t.stack([kv[m][pl, i * bpc:(i + 1) * bpc].reshape(C, -1) for m in kv])
                        for pl in (0, 1)]).contiguous().view(t.uint8).numpy().tobytes()
        if v[:len(want)] != want:
            return False, f"chunk {i}: other bytes, length {len(v)} wanted {len(want)}"
    return True, {"length": len(v), "logical": len(want), "leftovers": run.l2.leftovers()[:3]}


def clear_self(run, n):
    (p,) = run.in_l2(n, 1, 8)
    n.clear()
    r = n.load(p)
    return r["hit"] == 8 and r["problem"] is None, r


def restart_self(run, n, sig):
    ps = run.in_l2(n, 4, 4)
    n.stop(sig)
    n.start()
    found, bad = 0, []
    for p in ps:
        r = n.load(p)
        found += r["hit"]
        if r["problem"]:
            bad.append(r["problem"])
    return found == 16 and not bad, {"start_s": round(n.start_s, 2), "found": found, "of": 16, "bad": bad}


def tail_in_l1(run):
    """The head only in L2, the tail only in L1."""
    p = run.prompt(run.small, 8)
    run.A.store(p, 0, 4)
    run.wait_l2(p, 0, 4)
    run.A.clear()
    run.A.store(p, 4, 8)
    r = run.A.load(p)
    return r["hit"] == 8 and r["problem"] is None, r


def gap(run):
    """A missing chunk in the middle ends the hit exactly there."""
    (p,) = run.in_l2(run.A, 1, 8)
    run.l2.delete(run.names(p)[5])
    r = run.B.load(p)
    return r["hit"] == 5 and r["problem"] is None, r


def once(run):
    (p,) = run.in_l2(run.A, 1, 4)
    req = run.req()
    r = run.B.look(p, req)
    again = run.B.b.c.query_prefetch_status(run.B.b.rid(req)).result(timeout=10)
    run.B.free(p, req, r["hit"])
    run.B.end(req)
    return r["hit"] == 4 and again == 0, {"first": r["hit"], "second": again}


def op9_prompt(run):
    """Operation 9 is answered at once while a large load runs."""
    (p,) = run.in_l2(run.A, 1, run.args.op9_chunks, run.big)
    run.l2.cool(run.names(p))
    r = run.B.load(p)
    return (r["hit"] == p.chunks and r["problem"] is None and r["op9_worst_ms"] < 1e3 * run.args.op9_limit), r


def abandon(run):
    """Twelve lookups whose requests end while they load; then another lookup works."""
    run.B.ctx(run.small)
    ps = run.in_l2(run.A, 12, 8)
    for p in ps:
        req = run.req()
        run.B.b.c.lookup(run.B.key(p, 0, p.chunks * run.B.b.chunk, req, worker=None), 1).result(timeout=10)
        run.B.end(req)
    (q,) = run.in_l2(run.A, 1, 8)
    r = run.B.load(q)
    return r["hit"] == 8 and r["problem"] is None, r


def pins(run, abandoned):
    """After a load (retrieved, or its request ended in the middle) a soft clear drops the chunks: without their
    values in L2 nothing is found."""
    run.B.ctx(run.small)
    ps = run.in_l2(run.A, 3, 8)
    for p in ps:
        if abandoned:
            req = run.req()
            run.B.b.c.lookup(run.B.key(p, 0, 8 * run.B.b.chunk, req, worker=None), 1).result(timeout=10)
            run.B.end(req)
        else:
            run.B.load(p)
    time.sleep(2)
    for p in ps:
        for n in run.names(p):
            run.l2.delete(n)
    end, left = time.monotonic() + 8, None
    while time.monotonic() < end and left != 0:
        run.B.clear(force=False)
        left = 0
        for p in ps:
            req = run.req()
            r = run.B.look(p, req)
            run.B.free(p, req, r["hit"])
            run.B.end(req)
            left += r["hit"]
        time.sleep(0.5)
    if left:
        run.B.sick = True  # pinned for minutes: the next checks get a fresh server
    return left == 0, {"chunks_still_in_ram": left, "of": 24}


def parallel(run):
    """Eight clients load L2-only prompts at once through B."""
    run.B.ctx(run.small)
    ps = run.in_l2(run.A, 8, 8)
    reqs = [run.req() for _ in ps]
    for p, q in zip(ps, reqs):
        run.B.b.c.lookup(run.B.key(p, 0, p.chunks * run.B.b.chunk, q, worker=None), 1).result(timeout=10)
    bad, hits = [], []
    end = time.monotonic() + run.args.limit
    for p, q in zip(ps, reqs):
        while True:
            r = run.B.b.c.query_prefetch_status(run.B.b.rid(q)).result(timeout=10)
            if r is not None:
                break
            if time.monotonic() > end:
                raise Slow("still loading")
            time.sleep(0.001)
        hits.append(r)
        e, _ = run.B.fetch(p, q, r)
        run.B.end(q)
        if e:
            bad.append(e)
    return hits == [8] * 8 and not bad, {"hits": hits, "bad": bad}
