#!/usr/bin/env python3
"""A pool becomes smaller and larger under a running engine while that loads: no wrong byte, nothing lost that fits.

One engine with the LMCacheMPConnector and no prefix cache of its own, so that each prompt is loaded. Sequence:
  1. --prompts prompts are computed, which are the answers to compare with, stored and loaded
  2. some clients load the --hot prompts that were used last, again and again, until the end of step 4
  3. --smaller: the server ends and starts with a smaller pool, in which the hot prompts fit; all of them are full hits
  4. --larger: it ends and starts with a larger pool; all hot prompts are full hits
  5. the prompts that were lost are stored again, and all are full hits
All answers are those of step 1, and the engine never ends. Prints one JSON line.
"""
import json
import random
import subprocess
import threading
import time
import urllib.error

import common as C


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--server", required=True, help="tcp://host:port")
    ap.add_argument("--http", required=True, help="the server's HTTP interface")
    ap.add_argument("--smaller", required=True, help="a shell command that ends the server and starts it with a smaller pool")
    ap.add_argument("--larger", required=True, help="a shell command that ends the server and starts it with a larger pool")
    ap.add_argument("--chunk", type=int, default=128)
    ap.add_argument("--chunks", type=int, default=8, help="of each prompt")
    ap.add_argument("--prompts", type=int, default=40)
    ap.add_argument("--hot", type=int, default=15)
    ap.add_argument("--clients", type=int, default=3)
    a = ap.parse_args()
    out, R = C.begin(a, "resize", steps={})
    check = C.Checks(R)
    with C.reported(R):
        port = C.free_port()
        kv = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
              "kv_connector_extra_config": {"lmcache.mp.server_urls": a.server, "lmcache.mp.mp_transfer_mode": "engine_driven", "lmcache.mp.mq_timeout": 20.0}}
        engine, base = C.vllm("vllm", out, a.model, port, kv, 32, dtype="float32", extra=["--no-enable-prefix-caching"]), f"http://127.0.0.1:{port}"
        C.wait_http(base + "/health", engine, a.timeout)
        C.complete(base, C.prompt_ids(40, 5), 2)
        whole = a.chunks * a.chunk
        prompts = [C.prompt_ids(whole + 17, 100 + i) for i in range(a.prompts)]
        first, wrong, loads, failed = {}, [], [0], []

        def compare(i, r):
            ids, diff = C.same(first[i], r)
            if not ids or not diff < 0.01:
                wrong.append({"prompt": i, "logprob_difference": diff})

        def hits(which):
            """The external hit of each of these prompts, one after the other."""
            full = 0
            for i in which:
                before = C.metrics(base)
                compare(i, C.complete(base, prompts[i], 8))
                full += C.external_hits(C.delta(before, C.metrics(base))) >= whole
            return full

        def settled(which, seconds=90):
            """How many of these prompts are full hits once the engine has found the server again."""
            end = time.time() + seconds
            while True:
                full = hits(which)
                if full == len(which) or time.time() > end:
                    return full
                time.sleep(1)

        for i in range(a.prompts):
            first[i] = C.complete(base, prompts[i], 8)
        check("stored and loaded", hits(range(a.prompts)) == a.prompts, {"prompts": a.prompts, "hit_tokens": whole})
        hot = list(range(a.prompts - a.hot, a.prompts))
        ended = threading.Event()

        def load(seed):
            rnd = random.Random(seed)
            while not ended.is_set():
                i = rnd.choice(hot)
                try:
                    compare(i, C.complete(base, prompts[i], 8))
                    loads[0] += 1
                except (urllib.error.URLError, OSError) as e:
                    failed.append(str(e))
                    ended.wait(0.1)

        def resize(name, command):
            """Resizes the pool under load."""
            threads = [threading.Thread(target=load, args=(n,)) for n in range(a.clients)]
            ended.clear()
            for t in threads:
                t.start()
            time.sleep(2)
            before = loads[0]
            r = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300, check=False)
            time.sleep(5)
            ended.set()
            for t in threads:
                t.join()
            status = json.loads(C.http("GET", a.http + "/status")[1])
            check(name, r.returncode == 0, {"rc": r.returncode, "out": (r.stdout + r.stderr)[-300:], "loads": loads[0] - before, "pool_bytes": status["l1"]["total_bytes"], "resident_chunks": status["l1"]["resident_chunks"]})
            full = settled(hot)
            check(name + ": hot prompts", full == a.hot, {"full_hits": full, "of": a.hot})

        resize("smaller", a.smaller)
        resize("larger", a.larger)
        hits(range(a.prompts))
        full = hits(range(a.prompts))
        check("all prompts stored again", full == a.prompts, {"full_hits": full, "of": a.prompts})
        check("answers", not wrong, {"loads": loads[0], "wrong": len(wrong), "examples": wrong[:3]})
        check("requests", not failed, {"failed": len(failed), "examples": failed[:3]})
        check("engine", engine.alive(), {"pid": engine.p.pid})
        engine.stop()
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
