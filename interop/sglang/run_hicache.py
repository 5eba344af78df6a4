#!/usr/bin/env python3
"""SGLang's HiCache with its mooncake backend, over a mooncake_master and memory of kvasir store-node alone.

  run_hicache.py --model DIR --kvasir bin/kvasir [--nodes 2]
  run_hicache.py --pages [--cpp] --kvasir bin/kvasir

A whole engine stores prompts, drops its own cache, is replaced by another process, and finds their pages. Then a node is killed (-9):
answers stay the same; with two nodes the lost pages are stored again once the master has given the node up, and found.
--pages: HiCache's own storage class alone puts 32 pages and gets them, byte for byte; with --cpp over a C++ node beside Kvasir's, each of
which has some of them. Prints one JSON line.
"""
import collections
import json
import os
import re
import subprocess
import sys
import time

from sgl import OFFLINE, C, Engine, Master, Node

PAGE = 64
HICACHE = ("--enable-hierarchical-cache", "--hicache-size", "1", "--hicache-write-policy", "write_through", "--hicache-storage-backend", "mooncake",
           "--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct", "--hicache-storage-prefetch-policy", "wait_complete")


def settings(master):
    return {"MOONCAKE_MASTER": master.address, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1", "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_DEVICE": "", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0", "MC_FORCE_TCP": "1"}


CPP = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
time.sleep(3600)
"""


def cpp_node(master, out, check):
    """A node of Mooncake's own client."""
    node = C.Proc("cpp", [sys.executable, "-c", CPP, master.address], os.path.join(out, "cpp.log"), dict(os.environ, MC_FORCE_TCP="1"))
    before = master.segments()
    C.until("the C++ node is there", lambda: not node.alive() or len(master.segments()) > len(before), 60)
    check("a C++ node is beside it", len(master.segments() - before) == 1, sorted(master.segments()))
    return node


def placed(a, master, check):
    """Both nodes have some of the objects."""
    keys = sorted(k for k in master.words("/get_all_keys") if k.endswith(("_k", "_v")))
    listed = subprocess.run([a.kvasir, "store", "ls", "--master", master.address, *keys], capture_output=True, text=True, check=False).stdout
    at = collections.Counter(re.findall(r": \d+ bytes at (\S+), complete", listed))
    check("each of two nodes has some of the objects", len(at) == 2 and sum(at.values()) == len(keys), {"keys": len(keys), "at": dict(at)})


def pages(a, master, check):
    """What SGLang's class does with 32 pages of two objects."""
    os.environ.update({**OFFLINE, **settings(master)})
    import sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store as upstream
    import torch
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

    count, size = 32, 16384
    pool, memory = upstream.create_mock_host_kv_cache(64 * 2 * size, entries_per_page=2, page_elements=size)
    store = MooncakeStore(upstream.make_hicache_storage_config(is_mla_model=False, tp_rank=0, tp_size=1), pool)
    store.register_mem_pool_host(pool)
    keys, half = upstream.generate_batch_query_keys(count), count * 2 * size
    check("no page is there", store.batch_exists(keys) == 0, "")
    check("pages are put", sum(store.batch_set_v1(keys, torch.arange(count))) == count, "")
    check("pages are there", store.batch_exists(keys) == count, store.batch_exists(keys))
    if a.cpp:
        placed(a, master, check)
    want = memory[:half].clone()
    memory[half:] = 0
    check("pages are got", sum(store.batch_get_v1(keys, torch.arange(count, 2 * count))) == count, "")
    check("pages have their bytes", torch.equal(memory[half:], want), "")
    store.close()


def engine(a, out, master, nodes, check, R):
    first = {}
    A, B = C.prompt_ids(1096, 1), C.prompt_ids(1096, 2)
    whole = 1095 // PAGE * PAGE

    def start(n):
        return Engine(f"engine{n}", a.model, out, *HICACHE, page=PAGE, timeout=a.timeout, env=settings(master))

    def ask(name, ids, stored=None, flush=True):
        if flush:
            sgl.flush()
        got = sgl.ask(ids)
        same = got["ids"] is not None and got["ids"] == first.setdefault(tuple(ids), got["ids"])
        check(name, same and (stored is None or (got["stored"] >= stored if stored else not got["stored"])), {k: got[k] for k in got if k != "ids"})
        return got["stored"]

    def there():
        return {k for k in master.words("/get_all_keys") if k.startswith("tiny_")}

    def settled():
        """The keys of pages, once none comes any more."""
        seen = [None]

        def still():
            was, seen[0] = seen[0], there()
            time.sleep(1)
            return seen[0] and was == seen[0]
        C.until("pages are stored", still, 120)
        return seen[0]

    sgl = start(0)
    ask("A cold", A, 0)
    ask("B cold", B, 0)
    keys = settled()
    R["keys"], R["example"] = len(keys), sorted(keys)[:2]
    check("every page has two objects", len(keys) >= 2 * 2 * whole // PAGE, len(keys))
    ask("A, its own cache dropped", A)
    sgl.stop()
    sgl = start(1)
    ask("A in another process", A, whole, flush=False)
    ask("A with another tail", A[:512] + B[:300], 512)
    listed = subprocess.run([a.kvasir, "store", "ls", "--like", "hicache", "--model", "tiny", "--page", str(PAGE), "--master", master.address, "--tokens", prompt_file(out, A)],
                            capture_output=True, text=True, check=False)
    check("kvasir store ls --like hicache", f"SGLang finds {whole} of 1096 tokens" in listed.stdout, (listed.stdout + listed.stderr)[-200:])
    nodes[-1].p.kill()
    ask("A at once after a node is killed", A)
    if len(nodes) > 1:
        alive = {n.name for n in nodes[:-1]}
        C.until("the master gives the node up", lambda: master.segments() == alive, 180)
        kept = there()
        R["lost"] = len(keys - kept)
        check("pages were lost with the node", keys - kept, len(keys - kept))
        ask("A without the node", A)
        C.until("what is lost of A is stored again", lambda: f"finds {whole} of" in subprocess.run(listed.args, capture_output=True, text=True, check=False).stdout, 120)
        sgl.stop()
        sgl = start(2)
        ask("A stored anew, in another process", A, whole, flush=False)
    sgl.stop()


def prompt_file(out, ids):
    path = os.path.join(out, "prompt.json")
    with open(path, "w") as f:
        json.dump(ids, f)
    return path


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model")
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--nodes", type=int, default=1)
    ap.add_argument("--pages", action="store_true")
    ap.add_argument("--cpp", action="store_true", help="with --pages: a C++ node beside Kvasir's")
    a = ap.parse_args()
    out, R = C.begin(a, "sglang_hicache", nodes=a.nodes, steps={})
    check = C.Checks(R)
    with C.reported(R):
        master = Master(out)
        nodes = [Node(a.kvasir, f"node-{i + 1}", master.address, out) for i in range(a.nodes)]
        check("all memory is ours", master.segments() == {n.name for n in nodes}, sorted(master.segments()))
        if a.pages:
            node = cpp_node(master, out, check) if a.cpp else None
            pages(a, master, check)
            if node:
                node.kill()
        else:
            engine(a, out, master, nodes, check, R)
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
