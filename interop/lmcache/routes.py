#!/usr/bin/env python3
"""LMCache's HTTP routes under the real 0.5.6 client: /status, /cache/prefetches, /cache/checksums.

    routes.py --url tcp://127.0.0.1:5555 --http http://127.0.0.1:8080 --dir DIR [--status FILE | --list]

Workers of both modes register and store; below the server lies DIR (an fs adapter). Checksums are compared with those of this
process' own tensors, a prefetch brings back what a clear dropped. --list prints the shape of /status, a line for each field: path and
type; --status says which lines of FILE, made of LMCache's server, this one lacks: lines that begin with "except " are not
expected. Prints one JSON line and exits 0 when all checks passed.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.request

from bench.client import Client
from bench.segments import unlink_kv

LIMIT = 120.0  # seconds for what comes soon


def ask(method, url, body=None):
    r = urllib.request.Request(url, method=method, data=None if body is None else json.dumps(body).encode(),
                               headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(r, timeout=LIMIT) as res:
            return res.status, json.loads(res.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


def shape(value, path=""):
    """Paths and types; a key that is a number stands for any."""
    if isinstance(value, dict):
        out = {f"{path} object"} if path else set()
        for k, v in value.items():
            out |= shape(v, f"{path}.{'*' if k.isdigit() else k}".lstrip("."))
        return out
    if isinstance(value, list):
        out = {f"{path} list"}
        for v in value:
            out |= shape(v, path + "[]")
        return out
    kind = "bool" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else "string" if isinstance(value, str) else "null"
    return {f"{path} {kind}"}


def digests(torch, kv, blocks, per, axis, layerwise):
    """As lmcache 0.5.6 makes them, of tensors that are here."""
    each = []
    for x in kv.values():
        x = x.index_select(axis, torch.tensor(blocks))
        each.append(x.to(torch.float32) if x.dtype == torch.bfloat16 else x)
    starts = range(0, len(blocks), per)

    def part(x, s):
        return x.narrow(axis, s, min(per, len(blocks) - s)).contiguous().numpy().tobytes()
    if layerwise:
        return {f"layer_{i}": [hashlib.md5(part(x, s)).hexdigest() for s in starts] for i, x in enumerate(each)}
    return [hashlib.md5(b"".join(part(x, s) for x in each)).hexdigest() for s in starts]


def main():
    p = argparse.ArgumentParser()
    for name in ("--url", "--http", "--dir"):
        p.add_argument(name, required=True)
    p.add_argument("--status")
    p.add_argument("--list", action="store_true")
    args = p.parse_args()
    b = Client(argparse.Namespace(url=args.url, modes="", timeout=60.0, run_tag="", no_clear=False, verbose=False))
    torch, bs, per = b.torch, 16, b.chunk // 16
    passed, failed = [], []

    def check(what, ok, seen=None):
        (passed if ok else failed).append(what)
        print("PASS" if ok else "FAIL", what, "" if ok else seen, file=sys.stderr, flush=True)

    def until(ok):
        end = time.monotonic() + LIMIT
        while not ok() and time.monotonic() < end:
            time.sleep(0.05)
        return ok()

    # Checksums, of K and V with 16 bits, both kinds, and of MLA's one plane.
    ids = [3, 1, 2, 3, 4, 5, 9]
    for name, dtype, mla in (("half", torch.float16, False), ("brain", torch.bfloat16, False), ("mla", torch.bfloat16, True)):
        kv = b.kv(3, 2, 8, dtype, 2 * per, bs, mla=mla)
        if dtype == torch.bfloat16:  # whole numbers: what is no number has many forms
            kv = {k: torch.randint(-99, 99, x.shape).to(dtype) for k, x in kv.items()}
        w = b.worker(kv, b.model(name), "lmcache_driven", bs)
        for layerwise in (False, True):
            code, got = ask("POST", args.http + "/cache/checksums", {"instance_id": b.iid, "block_ids": ids, "chunk_size": 3, "layerwise": layerwise})
            want = {"status": "success", "chunk_size": 3, "num_chunks": 3, "layerwise": layerwise, "block_id_ranges": [3, [1, 5], 9],
                    "chunk_checksums": digests(torch, kv, ids, 3, 0 if mla else 1, layerwise)}
            check(f"checksums of {name}{', by layer' if layerwise else ''}", code == 200 and got == want, (code, got, want))
        b.drop(w)
        unlink_kv(kv)
    for what, code, body in (("no worker", 404, {"instance_id": 1, "block_ids": [1], "chunk_size": 1}), ("no number", 422, {"block_ids": "x"})):
        got = ask("POST", args.http + "/cache/checksums", body)
        check(f"checksums: {what}", got[0] == code and "detail" in got[1], got)

    # A prefetch brings back what a clear of the pool dropped. (A client's clear reaches the directory below, too.)
    model = b.model("routes")
    src = b.kv(2, 2, 8, torch.float16, 4 * per, bs)
    w = b.worker(src, model, "lmcache_driven", bs)
    t = b.tokens(4 * b.chunk + 5)
    check("a prompt is stored", b.store(w, src, b.key(t, 0, 4 * b.chunk, "s", model), range(4 * per), bs))
    b.end("s")
    check("it comes to the directory below", until(lambda: sum(f.endswith(".data") for _, _, names in os.walk(args.dir) for f in names) >= 4))
    until(lambda: ask("GET", args.http + "/status")[1]["storage_manager"]["store_controller"]["in_flight_task_count"] == 0)
    code, got = ask("POST", args.http + "/cache/clear", {"tier": "l1", "force": True})
    check("the pool is cleared", code == 200, (code, got))
    body = {"model_name": model, "world_size": 1, "token_ids": t}
    code, got = ask("POST", args.http + "/cache/prefetches", body)
    check("a prefetch begins", code == 202 and got.get("chunks") == 4 and got.get("status") == "submitted", (code, got))
    at = f"{args.http}/cache/prefetches/{got.get('request_id')}"
    seen = []

    def ended():
        seen.append(ask("GET", at))
        return seen[-1][1].get("status") != "pending"
    end = time.monotonic() + LIMIT
    while not ended() and time.monotonic() < end:
        time.sleep(0.05)
    check("it ends with all of them", seen[-1] == (200, {"request_id": got.get("request_id"), "status": "completed", "found_keys": 4, "total_keys": 4}), seen[-1])
    code, gone = ask("GET", at)
    check("its end is told once", code == 404 and "detail" in gone, (code, gone))
    code, listed = ask("GET", args.http + "/status")
    l1 = listed["storage_manager"]["l1_manager"]
    check("they are in memory", l1["total_object_count"] == 4 and l1["read_locked_count"] == 0, l1)
    for what, want, change in (("less than a chunk", (202, {"chunks": 0, "status": "noop"}), {"token_ids": [1]}), ("another model", 503, {"model_name": "none"}),
                               ("another direction", 400, {"source_tier": "l1"}), ("a salt that is too long", 400, {"cache_salt": "x" * 200}),
                               ("no tokens", 422, {"token_ids": None})):
        got = ask("POST", args.http + "/cache/prefetches", {**body, **change})
        check(f"prefetch: {what}", got == want if isinstance(want, tuple) else got[0] == want and "detail" in got[1], got)

    # The shape of /status with workers of both modes.
    other = b.kv(2, 2, 8, torch.float16, per, bs)
    e = b.worker(other, model, "engine_driven", bs)
    mine = shape(ask("GET", args.http + "/status")[1])
    if args.list:
        print("\n".join(sorted(mine)))
    if args.status:
        with open(args.status) as f:
            want = [line.strip() for line in f if line.strip() and not line.startswith("#")]
        excepted = [line.split()[1] for line in want if line.startswith("except ")]
        plain = [line for line in want if not line.startswith("except ")]
        lacks = [line for line in plain if line not in mine]
        check(f"/status has {len(plain)} fields as there, {len(excepted)} exceptions", not lacks, lacks)
    b.drop(e)
    b.drop(w)
    for kv in (src, other):
        unlink_kv(kv)
    print(json.dumps({"passed": len(passed), "failed": failed}))
    sys.stdout.flush()
    os._exit(bool(failed))


main()
