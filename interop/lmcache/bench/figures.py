"""Rows of latency and throughput: lookups, and transfers of whole prompts."""
import statistics
import time

from bench.process import CpuMeter, lat_summary


def prepare_lookup(client, mode, ntok=32768):
    """One stored prompt of ``ntok`` tokens in tiny chunks; returns what the rows below need."""
    torch, C, bs = client.torch, client.chunk, 16
    bpc = C // bs
    ntok = ntok // C * C
    model = client.model(f"lookup-{mode}")
    step = 32 * C
    src = client.kv(1, 1, 8, torch.float16, 32 * bpc, bs)
    w = client.worker(src, model, mode, bs)
    t = client.tokens(ntok)
    for s in range(0, ntok, step):
        e = min(s + step, ntok)
        client.store(w, src, client.key(t, s, e, "pl", model), range((e - s) // bs), bs)
    client.end("pl")
    return {"w": w, "src": src, "t": t, "model": model, "ntok": ntok, "mode": mode, "n": 0}


def one_lookup(client, P, t, want, meter, total, ack):
    """lookup + status + free + end_session under a fresh request id; ``want`` chunks must hit."""
    P["n"] += 1
    req = f"pl-{P['n']}"
    k = client.key(t, 0, len(t), req, P["model"], worker=None)
    with meter:
        a = time.perf_counter()
        client.c.lookup(k, 1).result(timeout=client.T)
        b = time.perf_counter()
        r = client.c.wait_prefetch_status(client.rid(req), 30.0).result(timeout=client.T)
        z = time.perf_counter()
        if r:
            kk = k if r * client.chunk == len(t) else client.key(
                t, 0, r * client.chunk, req, P["model"], worker=None)
            client.c.free_lookup_locks(kk, 1).result(timeout=client.T)
        client.end(req)
    total.append(z - a)
    ack.append(b - a)
    if r != want:
        raise RuntimeError(f"expected {want} chunks, got {r}")


def lookup_row(client, P, kind, n):
    """kind hit: the stored prompt; miss: fresh prompts; chat: conversations that grow by 512 tokens per turn
    up to the full length, every turn under a new request id, the new part stored after the turn (the store is
    not part of the figures; always whole conversations, so that the mix of lengths is the same)."""
    C, bs = client.chunk, 16
    total, ack, done = [], [], 0
    meter = CpuMeter(client.pid, fine=True)
    if kind == "chat":
        inc = max(512 // C, 1) * C
        while done < n:
            full, have = client.tokens(P["ntok"]), 0
            for end in range(inc, P["ntok"] + 1, inc):
                one_lookup(client, P, full[:end], have // C, meter, total, ack)
                req = f"pc-{P['n']}"
                client.store(P["w"], P["src"], client.key(full[:end], have, end, req, P["model"]),
                           range((end - have) // bs), bs)
                client.end(req)
                have = end
                done += 1
    else:
        for _ in range(n):
            t = P["t"] if kind == "hit" else client.tokens(P["ntok"])
            one_lookup(client, P, t, P["ntok"] // C if kind == "hit" else 0, meter, total, ack)
            done += 1
    return {"lookups": done, "lookup_plus_status": lat_summary(total), "lookup_ack": lat_summary(ack),
            "server_cpu_us_per_lookup": meter.per(done)}


def perf_lookup(client, mode, ntok=32768):
    P = prepare_lookup(client, mode, ntok)
    out = {"tokens": P["ntok"], "chunks": P["ntok"] // client.chunk, "lookups": client.args.lookups}
    for kind in ("hit", "miss", "chat"):
        out[kind] = lookup_row(client, P, kind, client.args.lookups)
    client.drop(P["w"])
    return out


def perf_transfer(client, mode, layers=32, heads=8, dim=128, nchunks=8, reps=5):
    torch, C, bs = client.torch, client.chunk, 16
    bpc = C // bs
    cb = 2 * layers * C * heads * dim * 2
    cap = client.args.l1_gb * 2**30 * 0.5
    nchunks = max(1, min(nchunks, int(cap // cb)))
    model = client.model(f"xfer-{mode}")
    blocks = list(range(nchunks * bpc))
    src = client.kv(layers, heads, dim, torch.float16, len(blocks), bs)
    dst = client.kv(layers, heads, dim, torch.float16, len(blocks), bs, fill=False)
    w1, w2 = client.worker(src, model, mode, bs), client.worker(dst, model, mode, bs)
    st, rt, vis = [], [], []
    tot = nchunks * cb
    with CpuMeter(client.pid) as meter:
        for i in range(reps + 1):
            t = client.tokens(nchunks * C)
            k = client.key(t, 0, nchunks * C, f"x{i}", model)
            client.finish_copies()
            a = time.perf_counter()
            ok = client.store_raw(w1, src, k, blocks, bs)
            b = time.perf_counter()
            if not ok:
                raise RuntimeError("store failed")
            vis.append(client.settle(k))
            client.end(f"x{i}")
            h = client.lookup(t, nchunks * C, f"y{i}", model)
            if h != nchunks:
                raise RuntimeError(f"hit {h} of {nchunks}")
            k2 = client.key(t, 0, nchunks * C, f"y{i}", model)
            a2 = time.perf_counter()
            if not client.retrieve(w2, dst, k2, blocks, bs):
                raise RuntimeError("retrieve failed")
            client.finish_copies()
            b2 = time.perf_counter()
            client.end(f"y{i}")
            if i == 0:
                if not client.same(src, blocks, dst, blocks):
                    raise RuntimeError("bytes differ")
            else:
                st.append(b - a)
                rt.append(b2 - a2)
            client.clear(True)
    shm = client.shm_context(w1) is not None
    transport = "server_copies"
    if getattr(w1, "_engine_driven_context", None) is not None:
        transport = "shm" if shm else "inline" if client.packed else "pickle"
    rpcs = perf_rpcs(client, model, w1, w2, nchunks * C) if shm else {}
    out = {
        "mode": mode, "transport": transport, "chunk_tokens": C, "chunk_mib": cb / 2**20,
        "chunks_per_request": nchunks, "bytes_per_request": tot,
        "store_gbps": round(tot / statistics.median(st) / 1e9, 3),
        "retrieve_gbps": round(tot / statistics.median(rt) / 1e9, 3),
        # what one thread can copy here, as the ceiling for the numbers above
        "one_thread_memcpy_gbps": round(memcpy_gbps(torch, min(tot, 256 * 2**20)), 3),
        "server_cpu_s_per_gb_stored_and_retrieved": None if meter.s is None else round(
            meter.s / ((reps + 1) * 2 * tot / 1e9), 4),
        "visible_after_store_reply_ms": [None if v is None else round(v * 1e3, 1) for v in vis],
        **rpcs,
    }
    client.drop(w1)
    client.drop(w2)
    return out


def perf_rpcs(client, model, w1, w2, ntok):
    """The cost of the control plane alone: reserve and commit, lock and release, without a copy."""
    ed, ed2 = client.shm_context(w1), client.shm_context(w2)
    stores, retrieves = [], []
    for i in range(20):
        t = client.tokens(ntok)
        k = client.key(t, 0, ntok, f"q{i}", model)
        a = time.perf_counter()
        places = ed.prepare_store(k, w1._instance_id)[0]
        b = time.perf_counter()
        for place in places:  # not counted; a commit of places that nobody wrote may be declined
            place.view(client.torch.uint8).zero_()
        c = time.perf_counter()
        ed.commit_store(k, w1._instance_id, [])
        stores.append(time.perf_counter() - c + b - a)
        client.end(f"q{i}")
        client.lookup(t, ntok, f"w{i}", model)
        k2 = client.key(t, 0, ntok, f"w{i}", model)
        a = time.perf_counter()
        client.prepare_read(ed2, k2, w2._instance_id)
        ed2.commit_retrieve(k2, w2._instance_id)
        retrieves.append(time.perf_counter() - a)
        client.end(f"w{i}")
        client.clear(True)
    return {"store_rpcs_only": lat_summary(stores), "retrieve_rpcs_only": lat_summary(retrieves)}


def memcpy_gbps(torch, n=256 * 2**20, reps=4):
    """One thread, both sides touched before."""
    x, y = torch.ones(n, dtype=torch.uint8), torch.empty(n, dtype=torch.uint8)
    y.copy_(x)
    t = []
    for _ in range(reps):
        a = time.perf_counter()
        y.copy_(x)
        t.append(time.perf_counter() - a)
    return n / statistics.median(t) / 1e9
