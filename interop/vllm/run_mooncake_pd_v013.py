#!/usr/bin/env python3
"""vLLM 0.13 P and D with its MooncakeConnector, which knows neither transfer ids nor a bootstrap server.

A proxy asks P first (do_remote_decode, one token); P's answer has kv_transfer_params with its side channel. D gets exactly
those. Both are told the same X-Request-Id, because the engine's request id, cmpl-<X-Request-Id>-0, names the transfer.
Phases: "direct", D pulls from P; and with --middle "middle": D is sent to that program's port, which pulls from P.
  requests    one after the other: full external hits, ids and log-probabilities (float32) those of D alone and of P alone,
              which have the prompt in their own prefix caches: bit-equal, since they compute its last token only, too.
              Engines that compute all of it round differently, by about 0.00001.
  in_flight   several at a time, against D alone that computes all of each (within 0.002: batches round)
  aborts      clients that leave while D waits or decodes; afterwards no block is in use and a prompt is right
  unknown     D asks for a request that P never had. P says that it has sent it: D answers with text computed from whatever
              its blocks held. The middle says that it failed: D logs that at once, and its client waits until it gives up,
              since this release tells no request that its KV will not come
Needs a model with as many KV heads as a block has tokens: on CPU the connector takes one for the other.
Prints one JSON line.
"""
import concurrent.futures
import http.client
import json
import os
import time
import uuid

import common as C

LIMIT = 0.002


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--middle", metavar="PROGRAM", help="takes --p-port, --port and --block-bytes")
    ap.add_argument("--block-bytes", type=int, default=32 * 32 * 32 * 4, help="of a block of keys or values of one layer")
    ap.add_argument("--block-size", type=int, default=32)
    ap.add_argument("--prompt-blocks", type=int, default=22)
    ap.add_argument("--max-tokens", type=int, default=16)
    ap.add_argument("--requests", type=int, default=3)
    ap.add_argument("--in-flight", type=int, default=6)
    a = ap.parse_args()
    out, R = C.begin(a, "mooncake_pd_v013", steps={})
    pport, dport, side = C.free_port(), C.free_port(), C.free_port()
    pb, db = f"http://127.0.0.1:{pport}", f"http://127.0.0.1:{dport}"
    # This release asks its transfer engine for "rdma"; MC_FORCE_TCP makes it TCP.
    env = {"MC_FORCE_TCP": "1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "20"}

    def start(name, port, role, side_port):
        kv = {"kv_connector": "MooncakeConnector", "kv_role": role}
        return C.vllm(name, out, a.model, port, kv, a.block_size, dtype="float32", extra=["--num-gpu-blocks-override", "256"],
                      env=C.cpu_env(extra=dict(env, VLLM_MOONCAKE_BOOTSTRAP_PORT=str(side_port))))

    def prefill(ids, rid):
        return C.complete(pb, ids, 1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
                          headers={"X-Request-Id": rid})["kv_transfer_params"]

    def reset():
        for b in (pb, db):
            C.reset_prefix_cache(b)

    def hits(before):
        return C.external_hits(C.delta(before, C.metrics(db)))

    def idle():
        """No block in use at either engine within 60 s."""
        def poke(looks):
            if looks % 5 == 0:  # an engine that has nothing to do does not look at its timeouts
                C.complete(pb, C.prompt_ids(40, 5), 1)

        quiet, use = C.idle((pb, db), 60, each=poke)
        if not quiet:
            R["not_idle"] = use
        return quiet

    def one(ids, to):
        """One prompt through both engines. Every metric but the hits is the caller's to look at."""
        rid = str(uuid.uuid4())
        params = prefill(ids, rid)
        return C.complete(db, ids, a.max_tokens, kv_transfer_params=dict(params, remote_port=to), headers={"X-Request-Id": rid}), params

    def requests(seed, to, count=a.requests):
        steps = []
        for i in range(count):
            n = (a.prompt_blocks + i) * a.block_size + 1
            ids = C.prompt_ids(n, seed + i)
            before = C.metrics(db)
            r, params = one(ids, to)
            hit = hits(before)
            got = [[C.same(x, r) for x in C.alone(b, ids, a.max_tokens)] for b in (db, pb)]
            steps.append({"prompt": n, "P_says": params, "hit": hit, "same": [x[0] for g in got for x in g],
                          "max_logprob_diff": max(g[1][1] for g in got), "against_cold_engines": max(g[0][1] for g in got)})
        ok = all(s["hit"] >= s["prompt"] - 1 and all(s["same"]) and s["max_logprob_diff"] == 0 and s["against_cold_engines"] <= LIMIT
                 and s["P_says"]["remote_port"] == side for s in steps)
        return ok, steps

    def in_flight(seed, to):
        prompts = [C.prompt_ids(200 + 90 * i, seed + i) for i in range(a.in_flight)]
        before = C.metrics(db)
        with concurrent.futures.ThreadPoolExecutor(a.in_flight) as pool:
            got = list(pool.map(lambda ids: one(ids, to)[0], prompts))
        hit = hits(before)
        same = []
        for ids, r in zip(prompts, got):
            reset()
            same.append(C.same(C.complete(db, ids, a.max_tokens), r))
        ok = all(s and d <= LIMIT for s, d in same) and hit >= sum(len(p) - 1 for p in prompts)
        return ok, {"requests": len(got), "prompt": sum(map(len, prompts)), "hit": hit, "same": [x[0] for x in same],
                    "max_logprob_diff": max(x[1] for x in same)}

    def send(ids, rid, params, timeout):
        """A request to D whose client does not wait for the answer yet."""
        c = http.client.HTTPConnection("127.0.0.1", dport, timeout=timeout)
        body = {"model": "tiny", "prompt": ids, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "kv_transfer_params": params}
        c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", "X-Request-Id": rid})
        return c

    def aborts(seed, to):
        for i, wait in enumerate((0.005, 0.05, 0.3)):
            ids, rid = C.prompt_ids(500, seed + i), str(uuid.uuid4())
            c = send(ids, rid, dict(prefill(ids, rid), remote_port=to), 60)
            time.sleep(wait)
            c.close()
        quiet = idle()
        ok, after = requests(seed + 50, to, 1)
        return ok and quiet, {"idle": quiet, "after": after}

    def unknown(seed, to, middle):
        ids, rid = C.prompt_ids(300, seed), "never-" + str(uuid.uuid4())
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": to}
        t0 = time.time()
        c, answered, told = send(ids, rid, params, 10), None, None
        if middle:
            while told is None and time.time() - t0 < 30:
                time.sleep(0.02)
                told = next((time.time() - t0 for x in D.text().splitlines() if rid in x and "Error happens" in x), None)
        try:
            r = c.getresponse()
            answered = {"status": r.status, "seconds": round(time.time() - t0, 2)}
            r.read()
        except TimeoutError:
            pass
        c.close()
        s = {"answered": answered, "D_told_after_s": told and round(told, 2), "idle": idle()}
        if middle:
            return told is not None and told < 2 and answered is None and s["idle"], s
        return answered is not None and answered["status"] == 200 and s["idle"], s

    with C.reported(R):
        P, D = start("vllm-P", pport, "kv_producer", side), start("vllm-D", dport, "kv_consumer", C.free_port())
        t0 = time.time()
        C.wait_http(pb + "/health", P, a.timeout)
        C.wait_http(db + "/health", D, a.timeout)
        R["ready_s"] = round(time.time() - t0, 1)
        for b in (pb, db):
            C.complete(b, C.prompt_ids(40, 5), 2)
        phases = [("direct", side)]
        if a.middle:
            mid = C.free_port()
            M = C.Proc("middle", [a.middle, "--p-port", str(side), "--port", str(mid), "--block-bytes", str(a.block_bytes)],
                       os.path.join(out, "middle.log"))
            C.wait_tcp("127.0.0.1", mid, M, 20)
            phases.append(("middle", mid))
        ok = True
        for k, (name, to) in enumerate(phases):
            seed = 1000 * (k + 1)
            for step, f, *more in (("requests", requests), ("in_flight", in_flight), ("aborts", aborts), ("unknown", unknown, name == "middle"),
                                   ("after_unknown", requests, 1)):
                good, R["steps"][f"{name}: {step}"] = f(seed, to, *more)
                seed += 100
                R["steps"][f"{name}: {step} ok"] = good
                ok = ok and good
        if a.middle:
            M.stop()
            R["middle"] = {"status": M.p.returncode, "says": M.text()[-600:]}
            ok = ok and M.p.returncode == 0
        D.stop()
        P.stop()
        C.emit(R, ok)


if __name__ == "__main__":
    main()
