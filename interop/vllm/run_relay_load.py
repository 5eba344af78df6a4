#!/usr/bin/env python3
"""vLLM P and D with kvasir relay between them, under load and over several lives.

  1. 24 requests, 8 in flight, one in six aborted by its client
  2. P and D are killed with requests in flight and start again with other weights; the registry and the relay
     stay; the same transfer ids come again
  3. D alone is killed and starts again on its HTTP port
  4. a prompt whose first blocks the relay has under another transfer: P sends the rest only (counted)
Every answer equals one engine's of the weights that run (log-probabilities within 0.002: batches round), requests in
flight at a kill end within their deadline, and at the end no block is in use.
Prints one JSON line.
"""
import concurrent.futures
import contextlib
import http.client
import json
import random
import threading
import time

import common as C

LIMIT = 0.002


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--models", required=True, help="two folders: the weights before and after the restart")
    ap.add_argument("--bootstrap", required=True)
    ap.add_argument("--relay", required=True)
    ap.add_argument("--requests", type=int, default=24)
    ap.add_argument("--in-flight", type=int, default=8)
    ap.add_argument("--max-tokens", type=int, default=8)
    ap.add_argument("--block-size", type=int, default=32)
    ap.add_argument("--deadline", type=float, default=180)
    a = ap.parse_args()
    models = a.models.split(",")
    out, R = C.begin(a, "relay_load", steps={})
    pport, dport, bport = C.free_port(), C.free_port(), C.free_port()
    pb, db = f"http://127.0.0.1:{pport}", f"http://127.0.0.1:{dport}"
    xc = {"mooncake_protocol": "tcp"}
    # A request that its client gave up before D heard of it stays at P until P's own timeout (480 s by
    # default): nobody asks for it.
    env = {"KV_CPU_SHIM": "device", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bport), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "40"}
    pk = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer",
          "kv_connector_extra_config": {**xc, "bootstrap_server_address": a.bootstrap.split("://", 1)[1]}}
    dk = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": xc}
    args = ["--num-gpu-blocks-override", "512"]

    def start(name, model, port, kv):
        return C.vllm(name, out, model, port, kv, a.block_size, dtype="float32", extra=args, env=C.cpu_env(extra=env))

    def ready(*procs):
        for proc, base in procs:
            C.wait_http(base + "/health", proc, a.timeout)

    def engine(not_in=()):
        t0 = time.time()
        while time.time() - t0 < 90:
            try:
                for e in C.registered(a.relay, 10).values():
                    if e["engine_id"] not in not_in:
                        return e["engine_id"]
            except OSError:
                pass
            time.sleep(0.5)
        raise RuntimeError("no engine at the relay")

    def relay_counter(name):
        return C.figure(a.relay, name)

    def ask(eng, tid, ids, p_tid=None, abort_after=None):
        """One prompt: P in the background, D through the relay. None: aborted or failed."""
        def prefill():
            with contextlib.suppress(Exception):  # P may be killed meanwhile
                C.complete(pb, ids, 1, timeout=a.deadline, kv_transfer_params=C.offer(p_tid or tid))
        bg = threading.Thread(target=prefill, daemon=True)
        bg.start()
        params = C.pull(tid, eng, a.relay)
        try:
            if abort_after is not None:
                c = http.client.HTTPConnection("127.0.0.1", dport, timeout=abort_after)
                body = {"model": "tiny", "prompt": ids, "max_tokens": 200, "ignore_eos": True, "stream": True,
                        "kv_transfer_params": params}
                c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                time.sleep(abort_after)
                c.close()
                return None
            return C.complete(db, ids, a.max_tokens, timeout=a.deadline, kv_transfer_params=params)
        except Exception:  # noqa: BLE001 - D may be killed meanwhile, and the callers count answers
            return None
        finally:
            bg.join(a.deadline)

    def load(eng, seed, n, kill=None):
        """n requests, a.in_flight at a time. kill is called when a third have ended."""
        rnd = random.Random(seed)
        prompts = [C.prompt_ids(150 + rnd.randrange(500), seed * 1000 + i) for i in range(n)]
        longest = 0
        ended = [0]

        def one(i):
            t0 = time.time()
            r = ask(eng, f"xfer-{i}", prompts[i], abort_after=0.05 + rnd.random() * 0.3 if i % 6 == 5 else None)
            ended[0] += 1
            return i, r, time.time() - t0

        answers = {}
        with concurrent.futures.ThreadPoolExecutor(a.in_flight) as pool:
            fs = [pool.submit(one, i) for i in range(n)]
            if kill:
                while ended[0] < n // 3:
                    time.sleep(0.02)
                kill()
            for f in concurrent.futures.as_completed(fs):
                i, r, took = f.result()
                longest = max(longest, took)
                if r is not None:
                    answers[i] = r
        return prompts, answers, longest

    def check(prompts, answers):
        """The answers against D alone, its prefix cache dropped."""
        worst, wrong = 0.0, 0
        for i, r in answers.items():
            C.reset_prefix_cache(db)
            s, d = C.same(C.complete(db, prompts[i], a.max_tokens), r)
            worst = max(worst, d)
            wrong += not s or not d <= LIMIT
        return wrong, round(worst, 6)

    def idle():
        """All blocks free at both engines, nothing running."""
        quiet, use = C.idle((pb, db), 90)
        if not quiet:
            R["not_idle"] = use
        return quiet

    with C.reported(R):
        P, D = start("vllm-P", models[0], pport, pk), start("vllm-D", models[0], dport, dk)
        ready((P, pb), (D, db))
        eng = engine()
        ok = True

        prompts, answers, longest = load(eng, 1, a.requests)
        wrong, worst = check(prompts, answers)
        R["steps"]["load"] = {"answers": len(answers), "wrong": wrong, "max_logprob_diff": worst, "longest_s": round(longest, 1),
                              "idle": idle()}
        ok = ok and wrong == 0 and len(answers) >= a.requests * 5 // 6 and R["steps"]["load"]["idle"]

        def kill():
            P.kill()
            D.kill()
        _, answers, longest = load(eng, 2, a.requests, kill)
        R["steps"]["kill"] = {"answers": len(answers), "longest_s": round(longest, 1)}
        ok = ok and longest < a.deadline

        P, D = start("vllm-P2", models[1], pport, pk), start("vllm-D2", models[1], dport, dk)
        ready((P, pb), (D, db))
        eng = engine(not_in=(eng,))
        prompts, answers, longest = load(eng, 3, a.requests)
        wrong, worst = check(prompts, answers)
        R["steps"]["other_weights"] = {"answers": len(answers), "wrong": wrong, "max_logprob_diff": worst,
                                       "longest_s": round(longest, 1), "idle": idle()}
        ok = ok and wrong == 0 and len(answers) >= a.requests * 5 // 6 and R["steps"]["other_weights"]["idle"]

        D.kill()
        D = start("vllm-D3", models[1], dport, dk)
        ready((D, db))
        prompts, answers, longest = load(eng, 4, 8)
        wrong, worst = check(prompts, answers)
        R["steps"]["D_again"] = {"answers": len(answers), "wrong": wrong, "max_logprob_diff": worst, "longest_s": round(longest, 1)}
        ok = ok and wrong == 0 and len(answers) >= 7

        shared = C.prompt_ids(10 * a.block_size, 77)
        first, second = shared + C.prompt_ids(20, 78), shared + C.prompt_ids(7 * a.block_size - 5, 79)
        C.reset_prefix_cache(db)
        before = relay_counter("kvasir_relay_pulled_bytes_total")
        r1 = ask(eng, "prefix-1", first)
        middle = relay_counter("kvasir_relay_pulled_bytes_total")
        C.reset_prefix_cache(db)
        r2 = ask(eng, "rest-1^prefix-1:10", second, p_tid="rest-1")
        after, prefix = relay_counter("kvasir_relay_pulled_bytes_total"), relay_counter("kvasir_relay_prefix_bytes_total")
        block = (middle - before) / 11
        wrong, worst = check({1: first, 2: second}, {k: v for k, v in ((1, r1), (2, r2)) if v})
        R["steps"]["prefix"] = {"wrong": wrong, "max_logprob_diff": worst, "answers": sum(x is not None for x in (r1, r2)),
                                "blocks_from_P": [(middle - before) / block, (after - middle) / block], "blocks_from_prefix": prefix / block}
        ok = ok and wrong == 0 and r1 and r2 and after - middle == 7 * block and prefix == 10 * block
        R["steps"]["end"] = {"idle": idle()}
        ok = ok and R["steps"]["end"]["idle"]
        P.stop()
        D.stop()
        C.emit(R, ok)


if __name__ == "__main__":
    main()
