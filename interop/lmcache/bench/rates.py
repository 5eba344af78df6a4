"""Clients that send small requests as fast as they are answered: processes with the real client, and one bare socket."""
import functools
import multiprocessing as mp
import time

from bench.process import lat_summary


def _rate_worker(url, jobs, results):
    """One client process: runs each job (operation, seconds) that arrives."""
    import zmq
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    ctx = zmq.Context()
    c = RequestClientFactory.create(url, context=ctx)
    for _ in range(20):
        c.noop().result(timeout=60)
    results.put("ready")
    while True:
        job = jobs.get()
        if job is None:
            break
        op, seconds = job
        call = c.noop if op == "noop" else functools.partial(c.ping, None)
        lats = []
        t0 = time.perf_counter()
        t_end = t0 + seconds
        while True:
            a = time.perf_counter()
            call().result(timeout=60)
            b = time.perf_counter()
            lats.append(b - a)
            if b >= t_end:
                break
        results.put((b - t0, lats))
    c.close()


class RateClients:
    """``n`` client processes kept alive for several measurements."""

    def __init__(self, url, n):
        ctx = mp.get_context("forkserver")  # one process imports the client, in 4 s, and the others begin as its copies
        ctx.set_forkserver_preload(["zmq", "lmcache.v1.multiprocess.transport.factory"])
        self.results = ctx.Queue()
        self.jobs = [ctx.Queue() for _ in range(n)]
        self.procs = [
            ctx.Process(target=_rate_worker, args=(url, j, self.results), daemon=True)
            for j in self.jobs
        ]
        for p in self.procs:
            p.start()
        for _ in self.procs:
            assert self.results.get(timeout=300) == "ready"

    def run(self, op, seconds):
        for j in self.jobs:
            j.put((op, seconds))
        total, lats = 0.0, []
        for _ in self.procs:
            dur, ls = self.results.get(timeout=seconds + 120)
            total += len(ls) / dur
            lats += ls
        return {"clients": len(self.procs), "rps": round(total, 1), **lat_summary(lats)}

    def close(self):
        for j in self.jobs:
            j.put(None)
        for p in self.procs:
            p.join(20)


def raw_rate(url, op_id, payloads, window, seconds):
    """Server capacity: one bare DEALER keeping ``window`` requests in flight."""
    import msgspec
    import zmq

    enc = msgspec.msgpack.encode
    ctx = zmq.Context()
    s = ctx.socket(zmq.DEALER)
    s.setsockopt(zmq.LINGER, 0)
    s.connect(url)
    op = enc(op_id)
    sent = got = 0
    born = {}
    lats = []
    t0 = time.perf_counter()
    t_end = t0 + seconds
    while True:
        now = time.perf_counter()
        if now >= t_end and got == sent:
            break
        while now < t_end and sent - got < window:
            u = enc(sent)
            born[u] = time.perf_counter()
            s.send_multipart([u, op] + payloads)
            sent += 1
        m = s.recv_multipart()
        lats.append(time.perf_counter() - born.pop(m[0]))
        got += 1
    dur = time.perf_counter() - t0
    s.close()
    ctx.term()
    return {"window": window, "rps": round(got / dur, 1), **lat_summary(lats)}
