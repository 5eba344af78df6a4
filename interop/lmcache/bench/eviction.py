"""The check that a full pool evicts without wrong bytes and goes on accepting stores."""
import time

BS, PER = 16, 4  # tokens of an engine block, chunks of a prompt
LAYERS, HEADS, DIM = 8, 8, 64


def eviction(client, mode):
    """Store twice the pool; never corrupt, keep accepting, keep the newest."""
    torch, C = client.torch, client.chunk
    blocks = PER * (C // BS)
    model = client.model(f"evict-{mode}")
    src = client.kv(LAYERS, HEADS, DIM, torch.float16, blocks, BS)
    dst = client.kv(LAYERS, HEADS, DIM, torch.float16, blocks, BS, fill=False)
    w1, w2 = client.worker(src, model, mode, BS), client.worker(dst, model, mode, BS)
    try:
        pools = client.args.l1_gb * 2**30 / (PER * 2 * LAYERS * C * HEADS * DIM * 2)  # prompts that fill the pool
        n = max(8, int(2 * pools))
        stored, corrupt, t0 = 0, 0, time.perf_counter()
        for i in range(n):
            for x in src.values():
                x[:, :, 0, 0, 0] = float(i % 2000)
            kept, wrong = store_and_read(client, model, (w1, src), (w2, dst), i)
            stored += kept
            corrupt += wrong
        seconds = time.perf_counter() - t0
        again = full_store_after(client, model, w1, src)
        burst = burst_without_copy(client, model, w1, max(4, int(1.5 * pools)))
        d = {
            "burst_without_copy": burst,
            "requests": n, "chunks_offered": n * PER, "chunks_kept_on_arrival": stored,
            "kept_fraction": round(stored / (n * PER), 3), "corrupt": corrupt,
            "full_store_after_s": again, "seconds": round(seconds, 2),
        }
        return corrupt == 0 and again is not None, d
    finally:
        client.drop(w1)
        client.drop(w2)
        client.clear(True)


def store_and_read(client, model, writer, reader, i):
    """Stores a prompt and reads back what was kept of it: (chunks kept, whether their bytes are wrong)."""
    C, bpc = client.chunk, client.chunk // BS
    (w1, src), (w2, dst) = writer, reader
    t = client.tokens(PER * C)
    client.store_raw(w1, src, client.key(t, 0, PER * C, f"ev{i}", model), range(PER * bpc), BS)
    time.sleep(0.01)
    client.end(f"ev{i}")
    h = client.lookup(t, PER * C, f"eq{i}", model) or 0
    wrong = False
    if h and client.retrieve(w2, dst, client.key(t, 0, h * C, f"eq{i}", model), range(h * bpc), BS):
        r = list(range(h * bpc))
        wrong = not client.same(src, r, dst, r)
    client.end(f"eq{i}")
    return h, wrong


def full_store_after(client, model, w, src, limit=120):
    """The seconds until a full pool keeps a whole prompt again: a few. None when not within the limit."""
    C = client.chunk
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < limit:
        t = client.tokens(PER * C)
        client.store_raw(w, src, client.key(t, 0, PER * C, "evz", model), range(PER * (C // BS)), BS)
        time.sleep(0.01)
        client.end("evz")
        h = client.lookup(t, PER * C, "evy", model)
        client.c.free_lookup_locks(client.key(t, 0, PER * C, "evy", model, worker=None), 1).result(timeout=client.T)
        client.end("evy")
        if h == PER:
            return round(time.perf_counter() - t0, 3)
        time.sleep(0.1)
    return None


def burst_without_copy(client, model, w, prompts):
    """Reserves and commits prompts without copying, as fast as the server answers; None without a shared-memory pool."""
    ed = client.shm_context(w)
    if ed is None:
        return None
    client.clear(True)
    C, kept = client.chunk, 0
    t0 = time.perf_counter()
    for i in range(prompts):
        k = client.key(client.tokens(PER * C), 0, PER * C, f"eb{i}", model)
        got = ed.prepare_store(k, w._instance_id)
        if got is not None and got[1]:
            ed.commit_store(k, w._instance_id, [])
            kept += len(got[1])
        client.end(f"eb{i}")
    return {"chunks_offered": prompts * PER, "chunks_kept": kept, "seconds": round(time.perf_counter() - t0, 3)}
