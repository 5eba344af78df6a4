#!/usr/bin/env python3
"""Two unmodified vLLM engines, each with a server of its own, over one Redis.

  1. engine A computes a prompt, and server A writes it to the Redis
  2. engine B asks for it: a hit of all whole chunks, which only the Redis had, and the same output
  3. server A is killed with SIGKILL: engine B stores another prompt and loads it again, and the first one once more; engine A
     computes a new prompt
  4. server A starts again with an empty pool (--restart CMD): engine A loads what only server B had stored, with B's output
Output: greedy tokens. Prints one JSON line.
"""
import os
import time

import common as C


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--servers", nargs=2, required=True, help="tcp://host:port of servers A and B")
    ap.add_argument("--https", nargs=2, required=True, help="http://host:port of servers A and B")
    ap.add_argument("--pid-file", required=True, help="has the process id of server A")
    ap.add_argument("--restart", required=True, help="shell command that starts server A again")
    ap.add_argument("--chunk", type=int, default=128)
    ap.add_argument("--prompt-tokens", type=int, default=700)
    ap.add_argument("--max-tokens", type=int, default=16)
    a = ap.parse_args()
    out, R = C.begin(a, "fleet", steps={})
    whole = a.prompt_tokens // a.chunk * a.chunk
    check = C.Checks(R)

    def ask(base, seed):
        """One prompt, with nothing of it in the engine: the answer and how many tokens came from elsewhere."""
        C.reset_prefix_cache(base)
        m0 = C.metrics(base)
        r = C.complete(base, C.prompt_ids(a.prompt_tokens, seed), a.max_tokens)
        time.sleep(1)
        d = C.delta(m0, C.metrics(base))
        return r, int(C.external_hits(d))

    def written(http, before, chunks):
        """Waits until a server has written so many chunks more."""
        C.until("chunks are written", lambda: C.figure(http, "kvasir_tier_writes_total") >= before + chunks, 120)
        return True

    def until_hit(base, seed, want, limit=180):
        """Asks until the hit is as long: an engine that lost its server looks for it again every few seconds."""
        end = time.time() + limit
        while True:
            r, hit = ask(base, seed)
            if hit >= want or time.time() > end:
                return r, hit
            time.sleep(2)

    def degraded():
        with open(os.path.join(out, "vllm-A.log"), errors="replace") as fh:
            return fh.read().count("entering degraded mode")

    with C.reported(R):
        (A, abase), (B, bbase) = (C.lmcache_engine("vllm-" + n, a.model, url, out, a.timeout) for n, url in zip("AB", a.servers))
        first, hit = ask(abase, 11)
        check("A_cold", hit == 0, {"hit": hit})
        check("A_written", written(a.https[0], 0, whole // a.chunk), C.figure(a.https[0], "kvasir_tier_writes_total"))
        second, hit = ask(bbase, 11)
        check("B_hits_what_A_stored", hit >= whole - 1 and C.same(first, second)[0] and C.figure(a.https[1], "kvasir_tier_reads_total") >= whole // a.chunk,
              {"hit": hit, "expected": whole, "same_ids": C.same(first, second)[0], "max_logprob_diff": C.same(first, second)[1]})
        other, hit = ask(bbase, 22)
        check("B_control", hit == 0 and other["token_ids"] != first["token_ids"], {"hit": hit})

        with open(a.pid_file) as f:
            os.kill(int(f.read()), 9)
        before = C.figure(a.https[1], "kvasir_tier_writes_total")
        third, hit = ask(bbase, 33)
        check("B_stores_after_A_was_killed", hit == 0 and written(a.https[1], before, whole // a.chunk), {"hit": hit})
        again, hit = ask(bbase, 33)
        check("B_loads_it", hit >= whole - 1 and C.same(third, again)[0], {"hit": hit, "same_ids": C.same(third, again)[0]})
        again, hit = ask(bbase, 11)
        check("B_still_has_what_A_stored", hit >= whole - 1 and C.same(first, again)[0], {"hit": hit, "same_ids": C.same(first, again)[0]})
        # The scheduler's and the worker's heartbeat each find out by themselves. A store in between waits for mq_timeout, and
        # then the client's exception ends the engine.
        C.until("both heartbeats of engine A have noticed", lambda: degraded() >= 2, 60)
        t0 = time.time()
        alone, hit = ask(abase, 44)
        check("A_computes_without_its_server", alone["status"] == 200 and hit == 0, {"hit": hit, "seconds": round(time.time() - t0, 1)})

        C.shell(a.restart, os.path.join(out, "restart.log"))
        got, hit = until_hit(abase, 33, whole - 1)
        check("A_again_hits_what_B_stored", hit >= whole - 1 and C.same(third, got)[0], {"hit": hit, "same_ids": C.same(third, got)[0]})
        check("nothing_was_wrong", sum(C.figure(h, "kvasir_tier_corrupt_total") for h in a.https) == 0, {})
        A.stop()
        B.stop()
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
