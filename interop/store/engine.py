#!/usr/bin/env python3
"""kvasir engine's MooncakeStoreConnector over a real master, and memory of kvasir store-node and of a C++ client.

  engine.py KVASIR MOONCAKE_PYTHON

What one engine process computed another one loads, which checks every byte; a node is killed in between. The keys
are read from the master, and must be vLLM's. Prints one line per case, exits 1 on the first check that fails.
"""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

KVASIR, PYTHON = sys.argv[1:3]
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "shared"))
from asking import fetch, figure, listens, until
from ports import free_port, free_ports

running, work = [], tempfile.mkdtemp()


def start(name, cmd, **env):
    with open(os.path.join(work, name + ".log"), "a") as log:
        p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=log, stderr=log, env=dict(os.environ, **env))
    running.append(p)
    return p


def check(what, ok, *detail):
    if not ok:
        print("FAIL  " + what, *detail, flush=True)
        raise SystemExit(1)


class Engine:
    def __init__(self, name, *flags):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.p = start(name, [KVASIR, "engine", "--model", "org/some-model", "--port", self.url.rsplit(":")[-1], "--tensor-parallel-size", "2", *flags, "--kv-transfer-config",
                              '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'], MOONCAKE_CONFIG_PATH=config)
        until(name + " serves", lambda: fetch(self.url + "/health") == "")

    def figure(self, name):
        return figure(self.url, name)

    def ask(self, prompt):
        return json.loads(fetch(self.url + "/v1/completions", {"model": "org/some-model", "prompt": prompt, "max_tokens": 8}))["choices"][0]["text"]

    def stored(self, least=1):
        until("everything is stored", lambda: self.figure("kvasir_store_connector_saved_total") >= least and self.figure("kvasir_store_connector_waiting_bytes") == 0)

    def stop(self):
        check("no wrong byte", self.figure("kvasir_engine_wrong_kv_requests_total") == 0)
        self.p.terminate()
        check("the engine ends well", self.p.wait(120) == 0)


try:
    binary = subprocess.run([PYTHON, os.path.join(HERE, "cpp.py"), "--path"], capture_output=True, text=True, check=True).stdout.strip()
    rpc, pages, http = free_ports(3)
    address = f"127.0.0.1:{rpc}"
    start("master", [binary, f"--rpc_port={rpc}", f"--metrics_port={pages}"], LD_LIBRARY_PATH=os.path.dirname(binary) + ":" + os.environ.get("LD_LIBRARY_PATH", ""))
    until("the master listens", lambda: listens(rpc))
    node = start("node", [KVASIR, "store-node", "--master", address, "--memory-gb", "512MiB", "--http-port", str(http)])
    until("our node is mounted", lambda: fetch(f"http://127.0.0.1:{http}/healthz"))
    cpp = start("cpp", [PYTHON, os.path.join(HERE, "cpp.py"), address, str(512 << 20)])
    until("the C++ node is mounted", lambda: len(fetch(f"http://127.0.0.1:{pages}/get_all_segments").split()) >= 2)
    config = os.path.join(work, "mooncake.json")
    with open(config, "w") as f:
        json.dump({"metadata_server": "P2PHANDSHAKE", "master_server_address": address, "protocol": "tcp"}, f)

    words = random.Random(1)
    for name, flags in {
        "full attention": [], "window": ["--window", "1024"], "window, retention 0": ["--window", "1024", "--prefix-cache-retention-interval", "0"],
        "window, retention 2048": ["--window", "1024", "--prefix-cache-retention-interval", "2048"], "states": ["--states", "1"],
        "window and states, keys of 0.23": ["--window", "1024", "--states", "1", "--release", "0.23"],
    }.items():
        prompt = " ".join(f"w{words.randrange(10**6)}" for _ in range(4100))
        a = Engine("a", *flags)
        want = a.ask(prompt)
        a.stored()
        saved, bytes_saved = a.figure("kvasir_store_connector_saved_total"), a.figure("kvasir_store_connector_saved_bytes_total")
        check("it was stored", saved > 0 and a.figure("kvasir_store_connector_save_errors_total") == 0, saved)
        a.stop()
        b = Engine("b", *flags)
        check("the same tokens", b.ask(prompt) == want)
        loaded, bytes_loaded = b.figure("kvasir_store_connector_loaded_total"), b.figure("kvasir_store_connector_loaded_bytes_total")
        hit, asked = b.figure("kvasir_store_connector_hit_tokens_total"), b.figure("kvasir_store_connector_lookup_keys_total")
        check("it was loaded", loaded > 0 and hit >= 4096 and b.figure("kvasir_store_connector_load_errors_total") == 0, loaded, hit)
        b.stored(0)
        if name == "window, retention 2048":
            with open(os.path.join(work, "tokens.json"), "w") as f:
                json.dump(json.loads(fetch(b.url + "/tokenize", {"model": "org/some-model", "prompt": prompt}))["tokens"], f)
            told = subprocess.run([KVASIR, "coordinator", "full,bs=16", "swa,bs=16,win=1024", "ret=2048", "--master", address, "--model", "org/some-model", "--tensor-parallel-size", "2",
                                   "--tokens", os.path.join(work, "tokens.json"), "--ascii"], capture_output=True, text=True, timeout=300, check=False)
            check("kvasir coordinator --master tells the same", told.returncode == 0 and "640 keys" in told.stdout and "finds 4096 tokens" in told.stdout
                  and "group 1 alone could continue from 4096 tokens" in told.stdout, told.stdout, told.stderr)
        b.stop()
        print(f"ok    {name:<32} stored {saved:.0f} objects, {bytes_saved / 1e6:.2f} MB; loaded {loaded:.0f}, {bytes_loaded / 1e6:.2f} MB; hit {hit:.0f} tokens, {asked:.0f} keys asked", flush=True)
    keys = fetch(f"http://127.0.0.1:{pages}/get_all_keys").split()
    form = re.compile(r"some-model@tp_rank:[01]@pcp0@dcp0@pp_rank:0@group:[012]@[0-9a-f]{32}")
    check("the keys are vLLM's", len(keys) > 1000 and all(form.fullmatch(k) for k in keys), [k for k in keys if not form.fullmatch(k)][:3])

    prompt = " ".join(f"x{words.randrange(10**6)}" for _ in range(2100))
    a = Engine("a", "--window", "512")
    want = a.ask(prompt)
    a.stored()
    a.stop()
    cpp.kill()
    cpp.wait()
    b = Engine("b", "--window", "512")
    began = time.time()
    check("after a node was killed the tokens are the same", b.ask(prompt) == want)
    took, failed = time.time() - began, b.figure("kvasir_store_connector_load_errors_total")
    check("and come in time", took < 150, took)
    b.stop()
    print(f"ok    a node was killed: right answer after {took:.1f} s, {failed:.0f} objects failed to load", flush=True)
    print("store: engines agree")
    code = 0
except BaseException:  # noqa: BLE001 - it is printed, and what was started is killed
    traceback.print_exc()
    for name in os.listdir(work):
        if name.endswith(".log"):
            with open(os.path.join(work, name), errors="replace") as f:
                sys.stderr.write(f"== {name}\n{''.join(f.readlines()[-8:])}")
    code = 1
for p in running:
    if p.poll() is None:
        p.kill()
        p.wait()
shutil.rmtree(work, ignore_errors=True)
sys.exit(code)
