#!/usr/bin/env python3
"""Play one C++ transfer engine on command, for the tests of this folder.

Reads one JSON object per line on standard input and answers with one:

    {"do": "ready"}                                 -> segment, base, len, version
    {"do": "fill", "seed": 7}                       local memory := pattern(seed)
    {"do": "hash", "places": [[off, len], ...]}     -> sha256 over these pieces
    {"do": "write"|"read", "peer": "h:p", "list": [[local offset, address, len], ...]}  -> rc, seconds

Local memory is one registered buffer. pattern(seed)[i] = byte of a 64-bit
multiplicative sequence, so that the Go side makes the same.
"""
import hashlib
import importlib.metadata
import json
import os
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine


def pattern(n, seed):
    i = np.arange((n + 7) // 8, dtype=np.uint64)
    with np.errstate(over="ignore"):
        v = (i + np.uint64(seed) * np.uint64(0x100000001)) * np.uint64(0x9E3779B97F4A7C15)
        v ^= v >> np.uint64(29)
    return v.view(np.uint8)[:n]


def main():
    out = os.fdopen(os.dup(1), "w")  # the engine logs to standard output
    os.dup2(2, 1)
    n = int(sys.argv[1])
    e = TransferEngine()
    if e.initialize(sys.argv[2], "P2PHANDSHAKE", "tcp", ""):
        sys.exit("the engine does not start")
    mem = np.zeros(n, dtype=np.uint8)
    mem[:] = 1
    base = int(mem.ctypes.data)
    if e.register_memory(base, n):
        sys.exit("the engine does not register memory")
    host = f"[{sys.argv[2]}]" if ":" in sys.argv[2] else sys.argv[2]
    for line in sys.stdin:
        q = json.loads(line)
        r = {}
        if q["do"] == "ready":
            r = {"segment": f"{host}:{e.get_rpc_port()}", "base": base, "len": n,
                 "version": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}
        elif q["do"] == "fill":
            mem[:] = pattern(n, q["seed"])
        elif q["do"] == "hash":
            h = hashlib.sha256()
            for off, size in q["places"]:
                h.update(mem[off:off + size])
            r = {"sha256": h.hexdigest()}
        else:
            call = e.batch_transfer_sync_write if q["do"] == "write" else e.batch_transfer_sync_read
            t = time.perf_counter()
            rc = call(q["peer"], [base + x[0] for x in q["list"]], [x[1] for x in q["list"]], [x[2] for x in q["list"]])
            r = {"rc": rc, "seconds": time.perf_counter() - t}
        out.write(json.dumps(r) + "\n")
        out.flush()
    os._exit(0)  # the engine's threads do not end by themselves


main()
