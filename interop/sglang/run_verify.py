#!/usr/bin/env python3
"""kvasir verify on real SGLang engines over one kvasir server.

  run_verify.py --model DIR --kvasir bin/kvasir [--rounds N]

Two engines of one model share the server. `kvasir verify` has to pass --rounds times, with KV that one engine stored and the other loads.
Then prompts are kept, and the second engine begins again with an empty cache of its own each time: the right bytes have to pass, chunks
that are cut in the pool, below every checksum, have to fail, and the right bytes pass again. Prints one JSON line.
"""
import glob
import json
import os
import subprocess

from sgl import C, Engine, Server, lmcache


def cut(right, chunk):
    """The second half of each chunk zeroed. A small model of random weights tells that; chunks that are exchanged change its answers by less than its sums in 16 bits do."""
    b = bytearray(right)
    for at in range(0, len(b) - chunk + 1, chunk):
        b[at + chunk // 2:at + chunk] = bytes(chunk - chunk // 2)
    return bytes(b)


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--rounds", type=int, default=3)
    a = ap.parse_args()
    out, R = C.begin(a, "sglang_verify", steps={})
    check = C.Checks(R)
    kept = os.path.join(out, "kept.json")
    with C.reported(R):
        server = Server(a.kvasir, out)
        flags = lmcache(server, out)

        def sglang(n):
            return Engine(f"sglang{n}", a.model, out, *flags, timeout=a.timeout)

        def verify(name, code, url, *flags, restored=False):
            """Runs kvasir verify, which must end with that code; restored: KV of the other engine was among what passed."""
            cmd = [a.kvasir, "verify", "--url", url, "--prompt-tokens", "800", "--rate", "100", "--pause", "3s", "--json", *flags]
            p = subprocess.run(cmd, capture_output=True, text=True, timeout=a.timeout, check=False)
            r = json.loads(p.stdout) if p.stdout.startswith("{") else {"verdict": "error", "steps": [], "text": p.stderr[-500:]}
            steps = {s["name"]: [s["status"], round(s["largest_logprob_difference"], 4), s.get("why", "")[:200]] for s in r["steps"]}
            passed = [n for n, s in steps.items() if s[0] == "passed"]
            check(name, p.returncode == code and (not restored or any("second engine" in n for n in passed)), {"code": p.returncode, "steps": steps, "text": r.get("text", "")})

        one, two = sglang(1), sglang(2)
        for n in range(a.rounds):
            verify(f"two engines, round {n}", 0, one.url, "--second-url", two.url, "--server", server.url, restored=True)
        verify("prompts are kept", 0, one.url, "--second-url", two.url, "--keep", kept)
        (pool,) = [path for path in glob.glob(f"/dev/shm/*{server.shm}*") if os.path.getsize(path) > 1 << 27]
        with open(pool, "rb") as f:
            right = f.read()
        chunk = json.loads(C.http("GET", server.url + "/cache/objects?page_size=1")[1])["entries"][0]["size_bytes"]
        for name, code, pages in (("the kept prompts, another life", 0, None), ("chunks cut", 1, cut(right, chunk)), ("the right bytes again", 0, right)):
            two.stop()
            if pages:
                with open(pool, "r+b") as f:
                    f.write(pages)
            two = sglang(2)
            verify(name, code, two.url, "--expect", kept)
        one.stop()
        two.stop()
        server.stop()
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
