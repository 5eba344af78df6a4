#!/usr/bin/env python3
"""A C++ client of Mooncake Store that does what it is told.

  cpp.py --path                prints where the master's executable is
  cpp.py MASTER SEGMENT_BYTES  joins, gives so much memory, and answers one JSON line for each on its input

Run with the Python of a Mooncake wheel.
"""
import hashlib
import json
import os
import sys
import time

import mooncake

if sys.argv[1] == "--path":
    print(os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master"))
    sys.exit(0)
from mooncake.store import MooncakeDistributedStore


def remove(keys):
    """Takes objects out that may be leased. 0.3.7 has no force: their leases (5 s) are waited for."""
    if hasattr(store, "batch_remove"):
        return store.batch_remove(keys, True)
    end, codes = time.time() + 60, []
    for k in keys:
        while (code := store.remove(k)) and time.time() < end:
            time.sleep(0.2)
        codes.append(code)
    return codes


store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
print(json.dumps({"setup": code}), flush=True)
for line in sys.stdin:
    q = json.loads(line)
    try:
        keys = q["keys"]
        if q["do"] == "exist":
            answer = [x == 1 for x in store.batch_is_exist(keys)]
        elif q["do"] == "get":
            values = [store.get(k) for k in keys]
            answer = [[len(v), hashlib.sha256(v).hexdigest()] for v in values]
        elif q["do"] == "again":  # take the objects out, and put the same bytes
            values = [store.get(k) for k in keys]
            removed = remove(keys)
            answer = [removed, [store.put(k, v) for k, v in zip(keys, values)]]
        elif q["do"] == "shorten":  # put half of the bytes under the names
            values = [store.get(k) for k in keys]
            removed = remove(keys)
            answer = [removed, [store.put(k, v[: len(v) // 2]) for k, v in zip(keys, values)]]
        else:
            answer = "unknown"
    except Exception as e:  # noqa: BLE001 - the caller decides
        answer = repr(e)
    print(json.dumps(answer), flush=True)
os._exit(0)
