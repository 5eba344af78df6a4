"""Checks of pings and of the bytes that come back: block shapes, and several clients at once. The plan of all checks stands here."""
import threading
import zlib

from bench.eviction import eviction
from bench.semantics import check_semantics


def check_all(client, skip):
    """Runs every check, in each mode."""
    torch, T = client.torch, client.T
    client.check("noop", lambda: client.c.noop().result(timeout=T) == "OK")
    client.check("ping_none", lambda: client.c.ping(None).result(timeout=T) is True)
    client.check("ping_id", ping_registered, client)
    client.check("ping_unknown", ping_unknown, client)
    client.check("get_experimental", lambda: isinstance(client.c.get_experimental().result(timeout=T), list))
    for mode in client.modes:
        for shape in (
            (2, 2, 8, torch.float16, 16), (4, 8, 64, torch.bfloat16, 16),
            (3, 1, 128, torch.float32, 32), (5, 3, 40, torch.float16, 8),
            (2, 4, 64, torch.uint8, 64),
        ):
            name = f"{mode}/roundtrip_" + "x".join(str(x).replace("torch.", "") for x in shape)
            client.check(name, roundtrip, client, mode, *shape)
        client.check(f"{mode}/roundtrip_mla", roundtrip, client, mode, 3, 1, 96, torch.bfloat16, 16, mla=True)
        check_semantics(client, mode)
        client.check(f"{mode}/concurrent", concurrent, client, mode)
        if client.args.no_clear:
            client.skipped.append(f"{mode}/eviction")
        elif "eviction" not in skip:
            client.check(f"{mode}/eviction", eviction, client, mode)


def ping_registered(client):
    """true for an instance that is registered at this moment, in every mode."""
    got = []
    for mode in client.modes:
        kv = client.kv(1, 1, 8, client.torch.float16, 2, 16)
        w = client.worker(kv, client.model("ping"), mode, 16)
        try:
            got.append(client.c.ping(w._instance_id).result(timeout=client.T))
        finally:
            client.drop(w)
    return bool(got) and all(x is True for x in got), str(got)


def ping_unknown(client):
    """An instance that never registered: true and false are both right."""
    r = client.c.ping((1 << 62) + 5).result(timeout=client.T)
    return isinstance(r, bool), str(r)


def roundtrip(client, mode, layers, heads, dim, dtype, bs, nchunks=3, mla=False):
    C, bpc = client.chunk, client.chunk // bs
    model = client.model(f"rt-{layers}x{heads}x{dim}-{dtype}-{bs}-{mode}".replace("torch.", ""))
    nb = nchunks * bpc + 5
    src = client.kv(layers, heads, dim, dtype, nb, bs, mla=mla)
    dst = client.kv(layers, heads, dim, dtype, nb, bs, fill=False, mla=mla)
    w1, w2 = client.worker(src, model, mode, bs), client.worker(dst, model, mode, bs)
    try:
        t = client.tokens(nchunks * C + 7)
        end = nchunks * C
        sb = list(range(nb - 1, nb - 1 - nchunks * bpc, -1))  # reversed blocks
        db = list(range(2, 2 + nchunks * bpc))
        if client.lookup(t, end, "m0", model) != 0:
            return False, "expected a miss before the store"
        client.end("m0")
        if not client.store(w1, src, client.key(t, 0, end, "s0", model), sb, bs):
            return False, "store failed"
        client.end("s0")
        hit = client.lookup(t, end, "r0", model)
        if hit != nchunks:
            return False, f"expected {nchunks} chunks, got {hit}"
        if not client.retrieve(w2, dst, client.key(t, 0, end, "r0", model), db, bs):
            return False, "retrieve failed"
        client.end("r0")
        if not client.same(src, sb, dst, db, mla):
            return False, "bytes differ"
        return True
    finally:
        client.drop(w1)
        client.drop(w2)


def concurrent(client, mode, threads=4, rounds=6):
    torch, C, bs = client.torch, client.chunk, 16
    bpc = C // bs
    errs = []

    def run(i):
        try:
            cl = client.Factory.create(client.args.url, context=client.zctx)
            model = client.model(f"conc-{mode}-{i % 2}")
            src = client.kv(3, 2, 16, torch.bfloat16, 3 * bpc, bs)
            dst = client.kv(3, 2, 16, torch.bfloat16, 3 * bpc, bs, fill=False)
            w1 = client.worker(src, model, mode, bs, client=cl)
            w2 = client.worker(dst, model, mode, bs, client=cl)
            for r in range(rounds):
                g = client.np.random.default_rng(client.seed + [zlib.crc32(mode.encode()), i, r])
                t = g.integers(0, 100000, 3 * C).tolist()
                t[0] = i * 1000 + r
                a, b = f"c{i}-{r}-s", f"c{i}-{r}-r"
                for x in src.values():
                    x[:, :, 0, 0, 0] = float(r + i)
                client.store(w1, src, client.key(t, 0, 3 * C, a, model), range(3 * bpc), bs)
                client.end(a, cl)
                h = client.lookup(t, 3 * C, b, model, client=cl)
                if h != 3:
                    errs.append(f"hit {h}")
                    continue
                if not client.retrieve(w2, dst, client.key(t, 0, 3 * C, b, model), range(3 * bpc), bs):
                    errs.append("retrieve failed")
                client.end(b, cl)
                rr = list(range(3 * bpc))
                if not client.same(src, rr, dst, rr):
                    errs.append("bytes differ")
            client.drop(w1)
            client.drop(w2)
            cl.close()
        except Exception as e:  # noqa: BLE001 - the thread reports whatever it raised
            errs.append(f"{type(e).__name__}: {e}")

    ths = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for t in ths:
        t.start()
    for t in ths:
        t.join()
    return not errs, (errs[:5] or None)
