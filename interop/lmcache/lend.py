#!/usr/bin/env python3
"""A CPU worker of the real lmcache client that lends its KV (lmcache_driven), stores a chunk and waits to be killed.

Prints its process id once the chunk is stored. Usage: lend.py tcp://127.0.0.1:PORT"""
import argparse
import os
import sys
import time

from bench.client import Client


def main():
    args = argparse.Namespace(url=sys.argv[1], modes="lmcache_driven", timeout=120.0, run_tag=f"lend{os.getpid()}", no_clear=True, verbose=False)
    b = Client(args)
    n = b.chunk // 16
    kv = b.kv(2, 2, 16, b.torch.float16, n + 1, 16)
    w = b.worker(kv, b.model("lend"), "lmcache_driven", 16)
    t = b.tokens(b.chunk)
    if not b.store(w, kv, b.key(t, 0, b.chunk, "s", b.model("lend")), range(1, n + 1), 16):
        sys.exit("store failed")
    print(os.getpid(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
