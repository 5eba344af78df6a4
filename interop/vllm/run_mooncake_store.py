#!/usr/bin/env python3
"""vLLM with its own MooncakeStoreConnector over a cluster whose memory is kvasir store-node's alone.

  run_mooncake_store.py --model DIR --kvasir bin/kvasir --out DIR

One mooncake_master and the client inside vLLM are of the wheel beside this Python. The engine gives no memory. Sequence:
  1. prompt A cold                      -> stored on node 1, which is alone
  2. node 2 joins; B and C cold         -> stored on both; C begins with half of A
  3. A, B and C again                   -> whole hits
  4. node 2 is killed (-9); B at once   -> the master still names what was there: those loads fail, and are computed
  5. the master has given node 2 up     -> A whole, of C and B what node 1 has; what was lost is stored anew
  6. C again                            -> whole, from node 1
  7. node 2 is started again; another engine process asks for A, B and C -> whole hits
Before each step the engine's own prefix cache is dropped. Always the answer must be the first one, and in time.
Prints one JSON line.
"""
import json
import os
import time

import common as C


class Node:
    """A kvasir store-node of 256 MiB."""

    def __init__(self, kvasir, name, master, out):
        self.name, self.page = name, f"http://127.0.0.1:{C.free_port()}"
        self.p = C.Proc(name, [kvasir, "store-node", "--master", master, "--memory-gb", "256MiB", "--name", name, "--http-port", self.page.rsplit(":", 1)[1]],
                        os.path.join(out, f"{name}-{time.time():.0f}.log"))
        C.wait_http(self.page + "/healthz", self.p, 60)

    def figure(self, name):
        return C.figure(self.page, "kvasir_store_node_" + name)


class Master:
    def __init__(self, out):
        import mooncake

        home = os.path.dirname(mooncake.__file__)
        self.address, self.pages = f"127.0.0.1:{C.free_port()}", f"http://127.0.0.1:{C.free_port()}"
        self.p = C.Proc("master", [os.path.join(home, "mooncake_master"), "--rpc_port=" + self.address.rsplit(":", 1)[1], "--metrics_port=" + self.pages.rsplit(":", 1)[1]],
                        os.path.join(out, "master.log"), dict(os.environ, LD_LIBRARY_PATH=home))
        C.wait_tcp(*self.address.split(":"), self.p, 60)

    def words(self, page):
        return set(C.http("GET", self.pages + page, timeout=30)[1].decode().split())

    def segments(self):
        return self.words("/get_all_segments")

    def keys(self):
        return self.words("/get_all_keys")


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--block-size", type=int, default=32)
    ap.add_argument("--prompt-tokens", type=int, default=700)
    ap.add_argument("--max-tokens", type=int, default=16)
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--shim", default="", help="KV_CPU_SHIM of the engine, see shim/")
    ap.add_argument("--vllm-arg", action="append", default=[])
    a = ap.parse_args()
    out, R = C.begin(a, "mooncake_store", steps={}, times={})
    wrong = R["wrong"] = []

    def check(what, ok, *detail):
        if not ok:
            wrong.append(" ".join([what, *map(str, detail)]))

    with C.reported(R):
        master = Master(out)
        one = Node(a.kvasir, "node-1", master.address, out)
        with open(os.path.join(out, "mooncake.json"), "w") as f:
            json.dump({"metadata_server": "P2PHANDSHAKE", "master_server_address": master.address, "protocol": "tcp", "device_name": "",
                       "mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "64MB"}, f)
        # Block hashes of engines up to 0.23 begin with PYTHONHASHSEED, or else with random bytes.
        env = C.cpu_env(extra={"KV_CPU_SHIM": a.shim, "MOONCAKE_CONFIG_PATH": f.name, "PYTHONHASHSEED": "0"})

        def start(tag):
            port = C.free_port()
            kv = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                  "kv_connector_extra_config": {"lookup_rpc_port": str(port)}}
            e = C.vllm("vllm-" + tag, out, a.model, port, kv, a.block_size, dtype=a.dtype, extra=a.vllm_arg, env=env)
            R["times"][f"vllm_{tag}_ready_s"] = C.wait_http(f"http://127.0.0.1:{port}/health", e, a.timeout)
            C.complete(f"http://127.0.0.1:{port}", C.prompt_ids(20, 5), 2)  # shorter than a block
            return e, f"http://127.0.0.1:{port}"

        whole = (a.prompt_tokens - 1) // a.block_size  # blocks of a hit: the last token is computed
        half = whole // 2 * a.block_size
        A, B = C.prompt_ids(a.prompt_tokens, 11), C.prompt_ids(a.prompt_tokens, 22)
        prompts = {"A": A, "B": B, "C": A[:half] + C.prompt_ids(a.prompt_tokens - half, 33)}
        first, own = {}, {}  # of each prompt: its first answer, and the keys that it added

        def step(name, prompt, base, reset=True):
            """Asks for a prompt; returns the tokens that came from the store."""
            if reset:
                C.reset_prefix_cache(base)
            before, t = C.metrics(base), time.time()
            r = C.complete(base, prompts[prompt], a.max_tokens, timeout=a.timeout)
            took = time.time() - t
            time.sleep(2)  # it stores behind its answer, and counts later still
            d = C.delta(before, C.metrics(base))
            hit = int(C.external_hits(d))
            R["steps"][name] = {"hit": hit, "seconds": round(took, 2), "store": {k.split("mooncake_")[-1]: round(v, 6) for k, v in d.items() if "mooncake" in k}}
            if prompt in first:
                same, diff = C.same(first[prompt], r)
                R["steps"][name].update(same=same, max_logprob_diff=diff)
                check(name + ": another answer", same and diff <= 0.002, diff)
                check(name + ": it took too long", took < 60, took)  # computed in a second, and no wait for a dead node is longer
            else:
                first[prompt] = r
            return hit

        def cold(prompt, base, reset=True):
            before = master.keys()
            hit = step(prompt + " cold", prompt, base, reset)
            check(prompt + " cold: a hit", hit == 0, hit)
            seen = [set()]

            def settled():  # all of it is stored: nothing comes any more
                was, seen[0] = seen[0], master.keys() - before
                time.sleep(0.5)
                return seen[0] and seen[0] == was
            C.until(prompt + " is stored", settled, 180)
            own[prompt] = seen[0]

        engine, base = start("1")
        check("memory is not ours alone", master.segments() == {"node-1"}, master.segments())
        cold("A", base)
        two = Node(a.kvasir, "node-2", master.address, out)
        check("memory is not ours alone", master.segments() == {"node-1", "node-2"}, master.segments())
        cold("B", base)
        C.reset_prefix_cache(base)
        C.complete(base, A, 1)
        cold("C", base, reset=False)  # the half of A is in the engine's own cache
        check("prompts answer alike", len({tuple(r["token_ids"]) for r in first.values()}) == 3)
        R["keys"] = {p: len(k) for p, k in own.items()}
        sent = one.figure("sent_bytes_total") + two.figure("sent_bytes_total")
        for p in "ABC":
            hit = step(p + " again", p, base)
            check(p + " again: no whole hit", hit >= whole * a.block_size, hit)
        sent = one.figure("sent_bytes_total") + two.figure("sent_bytes_total") - sent
        R["loaded_bytes"] = sent
        check("the nodes sent nothing", sent > 0)
        check("nothing lies on node 2", two.figure("received_bytes_total") > 0)
        check("writes or reads were refused", one.figure("rejected_total") + two.figure("rejected_total") == 0)

        two.p.kill()
        killed = time.time()
        step("B at once after the kill", "B", base)
        C.until("the master gives node 2 up", lambda: master.segments() == {"node-1"}, 180)
        R["times"]["given_up_s"] = round(time.time() - killed, 1)
        hit = step("A without node 2", "A", base)
        check("A without node 2: no whole hit", hit >= whole * a.block_size, hit)
        lost = 0
        for p in "CB":
            kept = own[p] & master.keys()
            lost += len(own[p]) - len(kept)
            hit = step(p + " without node 2", p, base)
            if len(kept) < len(own[p]):
                check(p + " without node 2: what is lost was hit", hit < whole * a.block_size, hit, len(kept))
            else:
                check(p + " without node 2: no whole hit", hit >= whole * a.block_size, hit)
            R["steps"][p + " without node 2"]["keys"] = [len(kept), len(own[p])]
            C.until(p + " is stored again", lambda p=p: own[p] <= master.keys(), 180)
        check("nothing was lost with node 2", lost > 0)
        hit = step("C stored anew", "C", base)
        check("C stored anew: no whole hit", hit >= whole * a.block_size, hit)

        two = Node(a.kvasir, "node-2", master.address, out)
        check("memory is not ours alone", master.segments() == {"node-1", "node-2"}, master.segments())
        engine.stop()
        engine, base = start("2")
        for p in "ABC":
            hit = step(p + " from another engine", p, base)
            check(p + " from another engine: no whole hit", hit >= whole * a.block_size, hit)
        engine.stop()
        C.emit(R, not wrong)


if __name__ == "__main__":
    main()
