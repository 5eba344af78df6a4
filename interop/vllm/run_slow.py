#!/usr/bin/env python3
"""One unmodified vLLM engine and a server whose tier, a Redis behind a proxy of ours, gives 1 MB/s.

  1. prompt A is computed, stored, and written to the Redis; --restart CMD kills the server and starts it with an empty pool
  2. some short prompts are computed and stored: they are in the pool
  3. the tier becomes slow, and A is asked for, which would take several times the deadline to load; the short prompts are
     asked for meanwhile, with nothing of them in the engine
  4. A is asked for until all of it is a hit: what came after the deadline stays, and so does what was computed
Every answer must be the one without a cache, A's must come soon after the deadline, and the short prompts' must be hits and come
while A's lookup is pending. Output: greedy tokens. Prints one JSON line.
"""
import os
import statistics
import threading
import time

import common as C
from throttle import Proxy  # of interop/shared, where common looks

RATE = 1e6  # bytes per second


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--server", required=True, help="tcp://host:port")
    ap.add_argument("--http", required=True, help="http://host:port of the server")
    ap.add_argument("--redis", type=int, required=True, help="port of the Redis")
    ap.add_argument("--listen", type=int, required=True, help="port of the proxy before it, which the server is given")
    ap.add_argument("--restart", required=True, help="shell command that starts the server, and kills the one before")
    ap.add_argument("--deadline", type=float, default=2.0, help="--l2-prefetch-load-timeout of the server")
    ap.add_argument("--chunk", type=int, default=128)
    ap.add_argument("--prompt-tokens", type=int, default=3968, help="of A: 2 KiB of KV each")
    ap.add_argument("--short-tokens", type=int, default=300)
    ap.add_argument("--max-tokens", type=int, default=16)
    a = ap.parse_args()
    out, R = C.begin(a, "slow_tier", steps={})
    whole = a.prompt_tokens // a.chunk * a.chunk
    short = a.short_tokens // a.chunk * a.chunk
    check = C.Checks(R)

    def restart():
        C.shell(a.restart, os.path.join(out, "restart.log"))

    def ask(n, seed):
        t0 = time.time()
        r = C.complete(base, C.prompt_ids(n, seed), a.max_tokens)
        return r | {"took": time.time() - t0}

    def hits():
        return C.external_hits(C.metrics(base))

    with C.reported(R):
        proxy = Proxy(a.listen, a.redis, RATE)
        restart()
        engine, base = C.lmcache_engine("vllm", a.model, a.server, out, a.timeout)

        first = ask(a.prompt_tokens, 11)
        C.until("A is below", lambda: C.figure(a.http, "kvasir_tier_writes_total") >= whole // a.chunk)
        restart()
        # The engine comes back within some heartbeats; then what it computes is stored again.
        seeds, cold = [], {}

        def computed(seed):
            C.reset_prefix_cache(base)
            before = C.figure(a.http, "kvasir_stored_bytes_total")
            cold[seed] = ask(a.short_tokens, seed)
            time.sleep(1)
            return C.figure(a.http, "kvasir_stored_bytes_total") > before

        def warm():
            n = 100 + len(cold)
            if computed(n):
                seeds.append(n)
            return len(seeds) >= 6
        C.until("short prompts are stored", warm)
        C.reset_prefix_cache(base)
        before, h0 = [], hits()
        for seed in seeds[:3]:
            r = ask(a.short_tokens, seed)
            before.append(r["took"])
            check.ok = check.ok and C.same(cold[seed], r)[0]
        check("short_prompts_are_hits", hits() - h0 >= 3 * short, {"hit": hits() - h0, "seconds": [round(x, 2) for x in before]})

        C.reset_prefix_cache(base)
        proxy.slow = True
        late, answer, h0 = C.figure(a.http, "kvasir_lookups_late_total"), [], hits()
        asked = C.figure(a.http, "kvasir_lookups_pending_total")
        t0 = time.time()
        long = threading.Thread(target=lambda: answer.append(ask(a.prompt_tokens, 11)), daemon=True)
        long.start()
        C.until("A's lookup is pending", lambda: C.figure(a.http, "kvasir_lookups_pending_total") > asked, 60)
        meanwhile, pending = [], 0
        for seed in seeds:
            r = ask(a.short_tokens, seed)
            meanwhile.append(r["took"])
            pending += C.figure(a.http, "kvasir_lookups_late_total") == late
            check(f"short_{seed}", C.same(cold[seed], r)[0], {"seconds": round(r["took"], 2)})
        long.join(a.timeout)
        second, hit = answer[0], hits() - h0 - len(seeds) * short
        check("A_at_the_deadline", C.same(first, second)[0] and 0 <= hit < whole and C.figure(a.http, "kvasir_lookups_late_total") > late
              and second["took"] < a.deadline + 3 * first["took"] + 5,
              {"hit": hit, "expected_below": whole, "seconds": round(second["took"], 2), "cold_seconds": round(first["took"], 2), "same_ids": C.same(first, second)[0]})
        check("short_prompts_meanwhile", pending >= 1 and statistics.median(meanwhile) < 3 * statistics.median(before) + 1,
              {"answered_while_A_was_pending": pending, "median_s": round(statistics.median(meanwhile), 2), "before_s": round(statistics.median(before), 2)})

        def come():
            C.reset_prefix_cache(base)
            h0 = hits()
            r = ask(a.prompt_tokens, 11)
            time.sleep(1)
            R["steps"].setdefault("A_as_it_comes", []).append([int(hits() - h0), C.same(first, r)[0]])
            return hits() - h0 >= whole - 1
        C.until("all of A has come", come)
        check("every_answer_right", all(same for _, same in R["steps"]["A_as_it_comes"]), {"seconds": round(time.time() - t0, 1)})
        check("it_was_slow", time.time() - t0 > a.deadline + 1, {})
        check("nothing_was_wrong", C.figure(a.http, "kvasir_tier_corrupt_total") == 0, {})
        engine.stop()
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
