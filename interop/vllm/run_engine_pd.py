#!/usr/bin/env python3
"""KV bytes of `kvasir engine` through the memory of a real vLLM, which is D first and then P.

  our P -> real vLLM (kv_both, CPU, MooncakeConnector over TCP) -> our D

Our KV follows from the tokens, so our D knows each byte. The real engine pulls a prompt from our P, has it in its prefix
cache, computes the last token of the same prompt itself and offers all of it; our D pulls that. A prompt of whole blocks
and one token is right to the last byte: that token D computes. A prompt of one more is wrong exactly there: D must say so.
Checked too: full external hits in the real engine's metrics, no hang, no block in use afterwards in any of the three, clients
that leave in the middle, our P killed and started again.
Prints one JSON line.
"""
import concurrent.futures
import json
import os
import sys

import common as C

BLOCK = 32


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True, help="of make_model.py, full attention")
    ap.add_argument("--kvasir", default="bin/kvasir")
    ap.add_argument("--bootstrap", required=True, help="http://host:port of a registry for the real engine")
    ap.add_argument("--prompts", type=int, default=3)
    ap.add_argument("--in-flight", type=int, default=6)
    ap.add_argument("--shim", default="device")
    a = ap.parse_args()
    out, R = C.begin(a, "engine_pd", steps={})
    with C.reported(R):
        with open(os.path.join(a.model, "config.json")) as f:
            config = json.load(f)
        heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        shape = ["--layers", str(layers), "--kv-heads", str(heads), "--head-bytes", str(2 * dim * 4), "--block-size", str(BLOCK),
                 "--kv-blocks", "512"]
        rport, pport, dport, aport, bport = (C.free_port() for _ in range(5))

        def ours(name, port, transfer):
            env = dict(os.environ, VLLM_MOONCAKE_BOOTSTRAP_PORT=str(bport), VLLM_HOST_IP="127.0.0.1", VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="15")
            flags = ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
            return C.Proc(name, [a.kvasir, "engine", "--port", str(port), *shape, *flags], os.path.join(out, name + ".log"), env)

        def start_p(tag=""):
            p = ours("P" + tag, pport, {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "engine_id": "ours" + tag})
            C.wait_http(f"http://127.0.0.1:{pport}/health", p, 30, 0.1)
            return p

        real = C.vllm("vllm", out, a.model, rport, {
            "kv_connector": "MooncakeConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp", "bootstrap_server_address": a.bootstrap.split("://", 1)[1]},
        }, BLOCK, dtype="float32", env=C.cpu_env(extra={
            "KV_CPU_SHIM": a.shim, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "15", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(C.free_port())}))
        P = start_p()
        D = ours("D", dport, {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"})
        alone = ours("alone", aport, None)
        rb, pb, db, ab = (f"http://127.0.0.1:{x}" for x in (rport, pport, dport, aport))
        for url, proc in ((db, D), (ab, alone), (rb, real)):
            C.wait_http(url + "/health", proc, a.timeout)
        mine, engine = f"http://127.0.0.1:{bport}", "ours"

        def post(base, ids, n, params=None, timeout=120):
            """(status, token ids or error text); without log-probabilities, which random bytes make no numbers."""
            body = {"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            if params:
                body["kv_transfer_params"] = params
            st, raw = C.call("POST", base + "/v1/completions", body, timeout)
            return st, json.loads(raw)["choices"][0]["token_ids"] if st == 200 else raw.decode("utf-8", "replace")

        def through(name, ids, n=4):
            """One prompt through all three; what our D answers."""
            st, got = post(pb, ids, 1, C.offer(name + "-a"))
            assert st == 200, (name, "our P", st, got)
            st, got = post(rb, ids, 1, C.pull(name + "-a", engine, mine))
            assert st == 200, (name, "real D", st, got)
            st, got = post(rb, ids, 1, C.offer(name + "-b"))
            assert st == 200, (name, "real P", st, got)
            return post(db, ids, n, C.pull(name + "-b", C.engine_id(a.bootstrap), a.bootstrap))

        def check(name, blocks, seed):
            n = blocks * BLOCK + 1
            ids = C.prompt_ids(n, seed)
            m0, d0 = C.metrics(rb), C.metrics(db)
            st, got = through(name, ids)
            dr, dd = C.delta(m0, C.metrics(rb)), C.delta(d0, C.metrics(db))
            want = post(ab, ids, 4)[1]
            R["steps"][name] = s = {
                "prompt": n, "real_external_hit": C.external_hits(dr),
                "our_external_hit": C.external_hits(dd), "status": st, "same": got == want}
            assert st == 200 and got == want and s["real_external_hit"] >= n - 1 and s["our_external_hit"] >= n - 1, s

        for i in range(a.prompts):
            check(f"prompt{i}", 3 + 17 * i, 40 + i)

        ids = C.prompt_ids(5 * BLOCK + 2, 60)
        st, got = through("one_more", ids)
        R["steps"]["one_more"] = {"status": st, "error": got}
        assert st == 500 and f"token {5 * BLOCK}," in str(got), (st, got)

        def flight(i):
            ids = C.prompt_ids((2 + i % 5) * BLOCK + 1, 80 + i)
            return through(f"flight{i}", ids) == (200, post(ab, ids, 4)[1])

        def leave(i):  # the client leaves while the real engine pulls
            ids = C.prompt_ids((2 + i % 5) * BLOCK + 1, 180 + i)
            post(pb, ids, 1, C.offer(f"left{i}"))
            try:
                post(rb, ids, 400, C.pull(f"left{i}", engine, mine), timeout=0.2)
            except OSError:
                pass

        def flights(name):
            with concurrent.futures.ThreadPoolExecutor(a.in_flight) as pool:
                R["steps"][name] = list(pool.map(flight, range(2 * a.in_flight)))
            assert all(R["steps"][name])

        flights("in_flight")
        P.kill()
        P, engine = start_p("2"), "ours2"
        check("P_started_again", 11, 70)

        blocks = ("vllm:kv_cache_usage_perc",)

        def idle(name, *engines):
            quiet, use = C.idle(engines, 60, want=blocks)
            R["steps"][name] = [m.get(blocks[0]) for m in use]
            assert quiet and all(use), use

        idle("kv_in_use_afterwards", rb, pb, db)
        with concurrent.futures.ThreadPoolExecutor(a.in_flight) as pool:
            list(pool.map(leave, range(a.in_flight)))
        idle("kv_in_use_after_clients_left", pb, db)  # vLLM itself keeps blocks of some such requests
        R["steps"]["vllm_keeps"] = C.metrics(rb, blocks).get(blocks[0])
        check("after_clients_left", 7, 300)
        wrong = C.metrics(db, ("wrong_kv",))
        R["steps"]["wrong"] = wrong
        assert sum(wrong.values()) == 1, wrong  # the one that was to be
        C.emit(R, True)


if __name__ == "__main__":
    sys.exit(main())
