#!/usr/bin/env python3
"""kvasir verify on real vLLM engines over one kvasir server with a tier.

Two engines of one model share the server. `kvasir verify` has to pass --rounds times, with restored KV from the pool and from the tier.
Then prompts are kept, the pool's bytes are changed below its checksums, and a third engine has to fail. A fourth engine of other weights
under the same name has to fail, too, as long as the server still serves the KV of the earlier ones.
Prints one JSON line.
"""
import json
import os
import subprocess

import common as C


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--other", required=True, help="the same model with other weights")
    ap.add_argument("--server", required=True, help="tcp://host:port of kvasir server")
    ap.add_argument("--http", required=True, help="its HTTP interface")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--dtype", default="bfloat16")
    a = ap.parse_args()
    out, R = C.begin(a, "verify", rounds=[], dtype=a.dtype)
    kept = os.path.join(out, "kept.json")
    kv = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
          "kv_connector_extra_config": {"lmcache.mp.server_urls": a.server, "lmcache.mp.mp_transfer_mode": "engine_driven"}}

    def start(name, model):
        port = C.free_port()
        proc = C.vllm("vllm-" + name, out, model, port, kv, 32, dtype=a.dtype, extra=["--enable-prompt-tokens-details"])
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

    with C.reported(R):
        one, two = start("1", a.model), start("2", a.model)
        first, second = ready(one), ready(two)
        ok = True
        for _ in range(a.rounds):
            code, r = verify(first, "--second-url", second, "--server", a.http)
            steps = {s["name"].split(" the tier")[0]: s["status"] for s in r["steps"]}
            good = code == 0 and steps.get("restored by a second engine") == "passed" and steps.get("restored from") == "passed"
            R["rounds"].append({"code": code, "verdict": r["verdict"], "noise": r.get("largest_difference_of_cold_runs"), "steps": short(r)})
            ok = ok and good
        code, r = verify(first, "--keep", kept)
        ok = ok and code in (0, 3)
        two[0].stop()
        status = json.loads(C.http("GET", a.http + "/status")[1])
        pool = os.path.join("/dev/shm", status["l1"]["shm_name"])
        with open(pool, "rb") as f:
            before = f.read()
        three = start("3", a.model)
        code, r = verify(ready(three), "--expect", kept)
        R["kept"] = {"code": code, "verdict": r["verdict"], "steps": short(r)}
        ok = ok and code == 0
        three[0].stop()
        with open(pool, "r+b") as f:  # off by one block of 4 KiB
            f.write(before[-4096:] + before[:-4096])
        four = start("4", a.model)
        code, r = verify(ready(four), "--expect", kept)
        R["shifted"] = {"code": code, "verdict": r["verdict"], "steps": short(r)}
        ok = ok and code == 1
        four[0].stop()
        with open(pool, "r+b") as f:
            f.write(before)
        one[0].stop()
        os.rename(a.model, a.model + ".before")  # other weights under the same name
        os.rename(a.other, a.model)
        five = start("5", a.model)
        code, r = verify(ready(five), "--expect", kept)
        R["stale"] = {"code": code, "verdict": r["verdict"], "steps": short(r)}
        ok = ok and code == 1
        five[0].stop()
    C.emit(R, ok)


if __name__ == "__main__":
    main()
