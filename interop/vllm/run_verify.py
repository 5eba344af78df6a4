#!/usr/bin/env python3
"""kvasir verify on real vLLM engines over one kvasir server with a tier, and on a P and a D.

Two engines of one model share the server. `kvasir verify` has to pass --rounds times, with restored KV from the pool and from the tier.
Then prompts are kept, and six corruptions are planted below every checksum, of which each has to make it fail:
  swapped       two chunks of the pool exchanged
  layers        the first two layers of each chunk exchanged
  truncated     the second half of each chunk zeroed
  shifted       off by one block of 4 KiB
  salt          an adapter between engine and server that loses the salts
  stale         an engine of other weights under the same name, while the server still serves the KV of the earlier ones
Before, between and after them the right bytes have to pass. The engine of the first five has no prefix cache of its own, so that each
request asks the server. Last, P and D with the MooncakeConnector behind `kvasir proxy` have to pass --pd-rounds times against P alone.
Prints one JSON line.
"""
import json
import os
import re
import subprocess
import threading

import common as C
import zmq

SALT, NO_SALT = re.compile(rb"kvasir-verify-[0-9a-f]{16}"), b"kvasir-verify-" + b"0" * 16


class Adapter:
    """Passes messages between engines and a server, and loses their salts once told to."""

    def __init__(self, server):
        self.lose, self.server, self.context = False, server, zmq.Context.instance()
        self.front = self.context.socket(zmq.ROUTER)
        self.url = f"tcp://127.0.0.1:{self.front.bind_to_random_port('tcp://127.0.0.1')}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        poller, back = zmq.Poller(), {}
        poller.register(self.front, zmq.POLLIN)
        while True:
            for sock, _ in poller.poll():
                frames = sock.recv_multipart()
                if sock is not self.front:
                    self.front.send_multipart([next(k for k, v in back.items() if v is sock), *frames])
                    continue
                client, *frames = frames
                if client not in back:
                    back[client] = self.context.socket(zmq.DEALER)
                    back[client].connect(self.server)
                    poller.register(back[client], zmq.POLLIN)
                if self.lose:
                    frames = [SALT.sub(NO_SALT, f) for f in frames]
                back[client].send_multipart(frames)


def swapped(b, chunk, layers):
    for at in range(0, len(b) - 2 * chunk + 1, 2 * chunk):
        b[at:at + 2 * chunk] = b[at + chunk:at + 2 * chunk] + b[at:at + chunk]


def reordered(b, chunk, layers):
    one = chunk // layers
    for at in range(0, len(b) - chunk + 1, chunk):
        b[at:at + 2 * one] = b[at + one:at + 2 * one] + b[at:at + one]


def truncated(b, chunk, layers):
    for at in range(0, len(b) - chunk + 1, chunk):
        b[at + chunk // 2:at + chunk] = bytes(chunk - chunk // 2)


def shifted(b, chunk, layers):
    b[:] = b[-4096:] + b[:-4096]


CHANGES = {"swapped": swapped, "layers": reordered, "truncated": truncated, "shifted": shifted}


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--other", required=True, help="the same model with other weights")
    ap.add_argument("--server", required=True, help="tcp://host:port of kvasir server")
    ap.add_argument("--http", required=True, help="its HTTP interface")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--pd-rounds", type=int, default=1)
    ap.add_argument("--dtype", default="bfloat16")
    ap.add_argument("--parts", default="shared,pair", help="shared: engines over one server, and the corruptions; pair: P and D")
    a = ap.parse_args()
    out, R = C.begin(a, "verify", rounds=[], pd_rounds=[], dtype=a.dtype)
    kept = os.path.join(out, "kept.json")
    with open(os.path.join(a.model, "config.json"), encoding="utf-8") as f:
        layers = json.load(f)["num_hidden_layers"]

    def start(name, model, *extra, server=a.server):
        port = C.free_port()
        kv = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
              "kv_connector_extra_config": {"lmcache.mp.server_urls": server, "lmcache.mp.mp_transfer_mode": "engine_driven"}}
        proc = C.vllm("vllm-" + name, out, model, port, kv, 32, dtype=a.dtype, extra=["--enable-prompt-tokens-details", *extra])
        return proc, f"http://127.0.0.1:{port}"

    def ready(engine):
        C.wait_http(engine[1] + "/health", engine[0], a.timeout)
        return engine[1]

    def verify(url, *flags):
        cmd = ["bin/kvasir", "verify", "--url", url, "--prompt-tokens", "400", "--rate", "100", "--pause", "3s", "--json", *flags]
        p = subprocess.run(cmd, capture_output=True, text=True, timeout=a.timeout, check=False)
        report = json.loads(p.stdout) if p.stdout.startswith("{") else {"verdict": "error", "steps": [], "text": p.stderr}
        return p.returncode, report

    def short(report):
        return {s["name"]: [s["status"], round(s["largest_logprob_difference"], 4), s.get("why", "")[:200]] for s in report["steps"]}

    def result(code, r):
        return {"code": code, "verdict": r["verdict"], "noise": r.get("largest_difference_of_cold_runs"), "steps": short(r), "text": r.get("text", "")[:300]}

    def corruptions(pool):
        """Each of five on one engine, with the right bytes before, between and after them."""
        adapter = Adapter(a.server)
        probe = start("3", a.model, "--no-enable-prefix-caching", server=adapter.url)
        url = ready(probe)
        with open(pool, "rb") as f:
            right = f.read()
        entries = json.loads(C.http("GET", a.http + "/cache/objects?page_size=1")[1])["entries"]
        chunk = entries[0]["size_bytes"]
        R["chunk"], good = {"bytes": chunk, "layers": layers}, True

        def expect(name, want):
            code, r = verify(url, "--expect", kept)
            R[name] = result(code, r)
            return code == want

        good = expect("kept", 0)
        for name, change in CHANGES.items():
            b = bytearray(right)
            change(b, chunk, layers)
            with open(pool, "r+b") as f:
                f.write(b)
            good = expect(name, 1) and good
            with open(pool, "r+b") as f:
                f.write(right)
            good = expect("kept after " + name, 0) and good
        adapter.lose = True
        code, r = verify(url)
        R["salt"] = result(code, r)
        good = good and code == 1 and any("never sent" in s.get("why", "") for s in r["steps"])
        probe[0].stop()
        return good

    def pair():
        """P and D behind the proxy against P, which computes by itself. In float32: in bfloat16 the process of D's engine ends."""
        pport, dport, bport, xport = (C.free_port() for _ in range(4))
        env = {"KV_CPU_SHIM": "device", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bport), "MC_LOG_LEVEL": "INFO"}
        xc = {"mooncake_protocol": "tcp"}
        engines = [C.vllm(f"vllm-{name}", out, a.model, port, {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_connector_extra_config": xc}, 32,
                          dtype="float32", extra=["--enable-prompt-tokens-details"], env=C.cpu_env(extra=env))
                   for name, port, role in (("P", pport, "kv_producer"), ("D", dport, "kv_consumer"))]
        for port, e in zip((pport, dport), engines):
            C.wait_http(f"http://127.0.0.1:{port}/health", e, a.timeout)
            C.complete(f"http://127.0.0.1:{port}", C.prompt_ids(40, 5), 2)
        proxy = C.Proc("proxy", ["bin/kvasir", "proxy", "--port", str(xport), "--prefill", f"http://127.0.0.1:{pport} {bport}", "--decode", f"http://127.0.0.1:{dport}"],
                       os.path.join(out, "proxy.log"))
        C.wait_http(f"http://127.0.0.1:{xport}/health", proxy, 60)
        good = True
        for _ in range(a.pd_rounds):
            before = C.metrics(f"http://127.0.0.1:{dport}")
            code, r = verify(f"http://127.0.0.1:{xport}", "--single-url", f"http://127.0.0.1:{pport}")
            step = [s for s in r["steps"] if s["name"].startswith("prefill and decode")]
            hit = C.external_hits(C.delta(before, C.metrics(f"http://127.0.0.1:{dport}")))
            R["pd_rounds"].append({**result(code, r), "D_external_hit_tokens": hit})
            good = good and code == 0 and hit > 0 and bool(step) and step[0]["status"] == "passed"
        for p in (proxy, *engines):
            p.stop()
        return good

    def shared():
        """Engines over one server: healthy, and with each corruption."""
        one, two = start("1", a.model), start("2", a.model)
        first, second = ready(one), ready(two)
        ok = True
        for _ in range(a.rounds):
            code, r = verify(first, "--second-url", second, "--server", a.http)
            steps = {s["name"].split(" the tier")[0]: s["status"] for s in r["steps"]}
            good = code == 0 and steps.get("restored by a second engine") == "passed" and steps.get("restored from") == "passed"
            R["rounds"].append(result(code, r))
            ok = ok and good
        code, r = verify(first, "--keep", kept)
        ok = ok and code in (0, 3)
        two[0].stop()
        one[0].stop()
        status = json.loads(C.http("GET", a.http + "/status")[1])
        ok = corruptions(os.path.join("/dev/shm", status["l1"]["shm_name"])) and ok
        os.rename(a.model, a.model + ".before")  # other weights under the same name
        os.rename(a.other, a.model)
        last = start("4", a.model)
        code, r = verify(ready(last), "--expect", kept)
        R["stale"] = result(code, r)
        ok = ok and code == 1
        last[0].stop()
        os.rename(a.model, a.other)
        os.rename(a.model + ".before", a.model)
        return ok

    ok = True
    with C.reported(R):
        for part in a.parts.split(","):
            ok = {"shared": shared, "pair": pair}[part]() and ok
    C.emit(R, ok)


if __name__ == "__main__":
    main()
