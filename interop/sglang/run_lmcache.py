#!/usr/bin/env python3
"""A real SGLang with --enable-lmcache on a kvasir server, and beside it a real vLLM of the same model name on the same server.

  run_lmcache.py --model DIR --kvasir bin/kvasir --vllm-python PYTHON [--restarts N]

Both engines copy themselves (engine_driven). Of prompt A each must find its own chunks, and answer with the same tokens:
after its own cache is dropped, after kill -9 of the server, which neither engine registers with again, and SGLang in N lives of its
process, every other one ended by kill -9. Another tail of A finds what the two have in common. Prints one JSON line.
"""
import os
import time

from sgl import C, Engine, Server, lmcache

CHUNK, PROMPT = 256, 1096
WHOLE = (PROMPT - 1) // CHUNK * CHUNK  # the last token is always computed


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--vllm-python", help="of an environment with vLLM; without it SGLang is alone")
    ap.add_argument("--restarts", type=int, default=10)
    a = ap.parse_args()
    out, R = C.begin(a, "sglang_lmcache", steps={})
    check = C.Checks(R)
    A, B = C.prompt_ids(PROMPT, 1), C.prompt_ids(PROMPT, 2)
    tail = A[:WHOLE - CHUNK] + B[:300]
    with C.reported(R):
        server = Server(a.kvasir, out)
        flags = lmcache(server, out)

        def sglang(n):
            return Engine(f"sglang{n}", a.model, out, *flags, timeout=a.timeout)

        first = {}

        def ask(name, ids, stored, engine=None, flush=True):
            """SGLang's answer to a prompt, of which that many tokens must come from the server; 0 is none at all, None any number."""
            engine = engine or sgl
            if flush:
                engine.flush()
            got = engine.ask(ids)
            same = got["ids"] is not None and got["ids"] == first.setdefault(tuple(ids), got["ids"])
            check("sglang: " + name, same and (stored is None or (got["stored"] >= stored if stored else not got["stored"])), {k: got[k] for k in got if k != "ids"})

        sgl = sglang(0)
        ask("A cold", A, 0)
        ask("B cold", B, 0)
        check("sglang: prompts answer alike", first[tuple(A)] != first[tuple(B)], "")
        C.until("A and B are stored", lambda: server.status()["l1"]["resident_chunks"] >= 2 * WHOLE // CHUNK, 60)
        ask("A from the server", A, WHOLE)

        vllm = base = None
        answers = {}

        def other(name, hit):
            """vLLM's answer to A."""
            if not vllm:
                return
            C.reset_prefix_cache(base)
            before = C.metrics(base)
            got = C.complete(base, A, 8)
            hits = C.external_hits(C.delta(before, C.metrics(base)))
            same = C.same(answers.setdefault("A", got), got)
            check("vllm: " + name, same[0] and (hits >= hit if hit else hits == 0), {"stored": hits, "logprob_diff": same[1]})

        if a.vllm_python:
            vllm, base = start_vllm(a, out, server)
            chunks = server.status()["l1"]["resident_chunks"]
            other("A cold, beside SGLang's chunks", 0)
            C.until("vLLM's A is stored", lambda: server.status()["l1"]["resident_chunks"] >= chunks + WHOLE // CHUNK, 60)
            other("A from the server", WHOLE)
            ask("A from the server, beside vLLM's chunks", A, WHOLE)
        server.kill()
        server.start()
        ask("A at once after kill -9 of the server", A, None)  # its connection has not named its worker yet
        time.sleep(5)  # two heartbeats
        ask("A after kill -9 of the server", A, WHOLE)
        other("A after kill -9 of the server", WHOLE)
        for n in range(1, a.restarts + 1):
            how = "kill -9" if n % 2 else "a stop"
            sgl.kill() if n % 2 else sgl.stop()
            sgl = sglang(n)
            ask(f"A in life {n}, after {how}", A, WHOLE, flush=False)
            ask(f"another tail in life {n}", tail, WHOLE - CHUNK)
        other("A after SGLang's lives", WHOLE)
        status = server.status()
        R["declined"] = status["declined"]
        check("nothing was declined for its layout", not status["declined"].get("several_layouts"), status["declined"])
        sgl.stop()
        if vllm:
            vllm.stop()
        server.stop()
        C.emit(R, check.ok)


def start_vllm(a, out, server):
    port = C.free_port()
    command = C.vllm_cmd(a.model, port, {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.server_urls": f"tcp://127.0.0.1:{server.port}", "lmcache.mp.mp_transfer_mode": "engine_driven", "lmcache.mp.mq_timeout": 30.0}})
    command[0] = a.vllm_python
    proc, base = C.Proc("vllm", command, os.path.join(out, "vllm.log"), C.cpu_env()), f"http://127.0.0.1:{port}"
    C.wait_http(base + "/health", proc, a.timeout)
    C.complete(base, C.prompt_ids(40, 5), 2)  # shorter than a chunk
    return proc, base


if __name__ == "__main__":
    main()
