#!/usr/bin/env python3
"""Sends a build of kvasir through the configurations of P and D, cache servers, Mooncake Stores, registries, relays and
transfers, by commands and their HTTP routes alone.

  drive.py KVASIR [MOONCAKE_PYTHON ...]

ONLY=WORD takes the scenarios whose name has that word. KVASIR is built with -cover; each process writes what it entered to GOCOVERDIR. Every Python has the wheel of one release
of Mooncake. A scenario that fails is named, the others go on: what matters here is what was entered, and every answer is
checked by other tests. entered.sh calls it.
"""
import contextlib
import glob
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

KVASIR, PYTHONS = sys.argv[1], sys.argv[2:]
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "shared"))
from asking import fetch, figure, listens, until
from ports import free_port, free_ports

work = tempfile.mkdtemp(prefix="entered.")
running, failed, numbers, ports = [], [], itertools.count(), set()
MOONCAKE, LMCACHE, STORE = "MooncakeConnector", "LMCacheMPConnector", "MooncakeStoreConnector"


class Process:
    """A process of the scenario; its end is a SIGTERM, so that it writes what it entered."""

    def __init__(self, name, cmd, log=None, **env):
        self.log = log or os.path.join(work, f"{name}-{next(numbers)}.log")
        with open(self.log, "a") as f:
            self.p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=f, stderr=f, env=dict(os.environ, VLLM_HOST_IP="127.0.0.1", **env))
        running.append(self)

    def stop(self, how=signal.SIGTERM):
        if self.p.poll() is None:
            self.p.send_signal(how)
            try:
                self.p.wait(60)
            except subprocess.TimeoutExpired:
                self.p.kill()
                self.p.wait()
        if self in running:
            running.remove(self)


def kvasir(name, *args, **env):
    return Process(name, [KVASIR, *map(str, args)], **env)


def once(*args, data=b"", **env):
    """A command that ends by itself."""
    return subprocess.run([KVASIR, *map(str, args)], input=data, capture_output=True, env=dict(os.environ, **env), timeout=120, check=False).stdout


class Engine(Process):
    def __init__(self, connector, role="kv_both", extra=None, flags=(), engine_id="", multi=None, policy="recompute", **env):
        self.url = f"http://127.0.0.1:{free_port()}"
        c = {"kv_connector": connector, "kv_role": role, "kv_load_failure_policy": policy, "kv_connector_extra_config": extra or {}}
        if engine_id:
            c["engine_id"] = engine_id
        if multi:
            c = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": {"connectors": multi}}
        super().__init__("engine", [KVASIR, "engine", "--log-level", "debug", "--port", self.url.rsplit(":", 1)[1], "--kv-transfer-config", json.dumps(c), *map(str, flags)], **env)
        until("an engine serves", lambda: self.p.poll() is not None or fetch(self.url + "/health") == "", 60)
        if self.p.poll() is not None:
            with open(self.log) as f:
                raise RuntimeError(f.read()[-500:])

    def ask(self, prompt, tokens=4, params=None, request_id=None, timeout=60, **body):
        body = {"prompt": prompt, "max_tokens": tokens, **body}
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        r = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(), headers)
        return json.loads(urllib.request.urlopen(r, timeout=timeout).read())

    def leave(self, prompt, params=None, request_id=None):
        """A client that leaves at once."""
        with contextlib.suppress(Exception):
            self.ask(prompt, 500, params, request_id, timeout=0.02)

    def idle(self):
        until("no request runs", lambda: figure(self.url, "vllm:kv_cache_usage_perc") == 0, 60)
        fetch(self.url + "/metrics")


def quietly(f, *args):
    with contextlib.suppress(Exception):
        f(*args)


def words(n, seed):
    return " ".join(f"w{seed}x{i}" for i in range(n))


def pair(p, d, registry, transfer, n=200, first=False, engine="p", **more):
    """One prompt through P and D."""
    prompt = words(n, transfer)
    if first:
        answer = p.ask(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False}, request_id=transfer)
        return d.ask(prompt, 6, answer["kv_transfer_params"], request_id=transfer, **more)
    p.ask(prompt, 1, {"do_remote_decode": True, "transfer_id": transfer})
    return d.ask(prompt, 6, {"do_remote_prefill": True, "transfer_id": transfer, "remote_engine_id": engine, "remote_bootstrap_addr": registry}, **more)


def prefill_decode(first, layout, p_tp, d_tp, groups=(), heads=4):
    port = free_port()
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "4"}
    flags = ["--kv-layout", layout, "--kv-heads", heads, *groups] + (["--release", "0.13"] if first else [])
    p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=[*flags, "--tensor-parallel-size", p_tp], **env)
    d = Engine(MOONCAKE, "kv_consumer", flags=[*flags, "--tensor-parallel-size", d_tp], **env)
    registry = f"http://127.0.0.1:{port}"
    names = itertools.count()
    each = lambda i: pair(p, d, registry, f"t{i}-{next(names)}", 50 + 40 * (i % 5), first)
    threads = [threading.Thread(target=each, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    p.leave(words(300, "leaves"), {"do_remote_decode": True, "transfer_id": "leaves"}, "leaves")
    p.ask(words(100, "none"), 1, {"do_remote_decode": True, "transfer_id": "none"}, "none")  # no D pulls it
    if not first:
        unknown = {"do_remote_prefill": True, "transfer_id": "unknown", "remote_engine_id": "p", "remote_bootstrap_addr": registry}
        d.leave(words(90, "d"), unknown, "d-leaves")
        later = threading.Thread(target=lambda: d.ask(words(90, "late"), 3, {**unknown, "transfer_id": "late"}))
        later.start()  # D asks before P
        time.sleep(0.3)
        p.ask(words(90, "late"), 1, {"do_remote_decode": True, "transfer_id": "late"})
        later.join()
        for wrong in ({"do_remote_prefill": True}, {**unknown, "remote_engine_id": "nobody"}, {**unknown, "remote_bootstrap_addr": "http://127.0.0.1:1"}, {"do_remote_prefill": 3}):
            with contextlib.suppress(Exception):
                d.ask(words(60, "wrong"), 2, wrong, timeout=30)
        with contextlib.suppress(Exception):
            p.ask(words(60, "role"), 2, unknown)
            d.ask(words(60, "role"), 2, {"do_remote_decode": True, "transfer_id": "role"})
        pair(p, d, registry, "again", 200)
        p.stop(signal.SIGKILL)
        p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=[*flags, "--tensor-parallel-size", p_tp], **env)
        pair(p, d, registry, "second-life", 200)
        victim = Engine(MOONCAKE, "kv_consumer", flags=[*flags, "--tensor-parallel-size", d_tp], **env)
        threads = [threading.Thread(target=quietly, args=(pair, p, victim, registry, f"victim{i}", 900)) for i in range(8)]
        for t in threads:
            t.start()
        time.sleep(0.15)
        victim.stop(signal.SIGKILL)
        for t in threads:
            t.join()
    else:
        with contextlib.suppress(Exception):
            d.ask(words(60, "wrong"), 2, {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": port}, "nothing-there", timeout=30)
        with contextlib.suppress(Exception):
            d.ask(words(60, "wrong"), 2, {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": 1}, "nobody", timeout=30)
    until("what was not pulled expires", lambda: figure(p.url, "vllm:kv_cache_usage_perc") == 0, 60)
    for e in (p, d):
        e.idle()


def both_roles():
    """Three engines in a chain, over a registry of its own; the middle one is D and P."""
    registry = f"127.0.0.1:{free_port()}"
    state = os.path.join(work, "registry.state")
    serve = lambda *more: kvasir("bootstrap", "bootstrap", "--log-level", "debug", "--port", registry.rsplit(":", 1)[1], "--state", state, "--settle-seconds", 1, *more)
    r = serve("--tp", 2, "--pp", 1)
    until("the registry listens", lambda: fetch(f"http://{registry}/healthz"))
    extra = {"bootstrap_server_address": registry, "num_workers": 2, "mooncake_protocol": "tcp"}
    start = lambda rank: Engine(MOONCAKE, "kv_both", extra, engine_id="abc"[rank], flags=["--tensor-parallel-size", 2, "--num-gpu-blocks-override", 300, "--data-parallel-size", 3, "--data-parallel-rank", rank])
    a, b, c = (start(rank) for rank in range(3))
    prompt = words(250, "chain")
    a.ask(prompt, 1, {"do_remote_decode": True, "transfer_id": "ab"})
    b.ask(prompt, 1, {"do_remote_prefill": True, "transfer_id": "ab", "remote_engine_id": "a_dp0", "remote_bootstrap_addr": f"http://{registry}", "do_remote_decode": True})
    pair(a, c, f"http://{registry}", "ac", engine="a_dp0")
    pair(b, c, f"http://{registry}", "bc", engine="b_dp1")
    for path in ("query", "query?wait=1&tp=2", "query?wait=1&tp=4", "engines", "metrics", "healthz", "nothing"):
        with contextlib.suppress(Exception):
            fetch(f"http://{registry}/{path}")
    a.stop(signal.SIGKILL)
    a = start(0)
    pair(a, c, f"http://{registry}", "after", engine="a_dp0")
    r.stop(signal.SIGKILL)
    r = serve()
    until("the registry listens again", lambda: fetch(f"http://{registry}/healthz"))
    pair(a, c, f"http://{registry}", "restart", engine="a_dp0")
    for path in ("query", "query?wait=1&tp=2", "query?wait=1&tp=4", "engines", "metrics", "healthz", "nothing"):
        quietly(fetch, f"http://{registry}/{path}")
    a.stop(signal.SIGKILL)
    a = Engine(MOONCAKE, "kv_both", extra, engine_id="another", flags=["--data-parallel-size", 3])
    pair(a, c, f"http://{registry}", "another", engine="another_dp0")
    for query in ("wait=1&after=0", "wait=1&dp=3", "wait=1&engine_id=b_dp1&tp=2", "wait=x", "dp=9", "engine_id=zz"):
        quietly(fetch, f"http://{registry}/query?{query}")
    for method, path, body in (("DELETE", "register?engine_id=c_dp2", None), ("DELETE", "register?engine_id=zz", None), ("DELETE", "register", None), ("POST", "register", b"{"),
                               ("POST", "register", json.dumps({"engine_id": "m", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:1"}).encode()),
                               ("POST", "register", json.dumps({"engine_id": "n", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:2"}).encode()),
                               ("POST", "register", json.dumps({"engine_id": "m", "dp_rank": "x"}).encode())):
        with contextlib.suppress(Exception):
            urllib.request.urlopen(urllib.request.Request(f"http://{registry}/{path}", body, {"Content-Type": "application/json"}, method=method), timeout=10).read()
    for e in (a, b, c):
        e.stop()
    r.stop()
    with open(state, "w") as f:
        f.write("{")
    serve().stop()
    strict = free_port()
    s = kvasir("bootstrap", "bootstrap", "--port", strict, "--strict", "--max-workers", 2, "--token-guards", "all", "--token", "secret", "--allow-from", "127.0.0.0/8")
    until("the strict one listens", lambda: fetch(f"http://127.0.0.1:{strict}/healthz"))
    for token in ("secret", "other"):
        for i in (0, 0, 1, 2, 3):
            with contextlib.suppress(Exception):
                body = json.dumps({"engine_id": f"e{i % 2}", "dp_rank": i, "tp_rank": 0, "pp_rank": 0, "addr": f"tcp://127.0.0.1:{i + 1}"}).encode()
                urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{strict}/register", body, {"Content-Type": "application/json", "Authorization": "Bearer " + token}), timeout=10)
    s.stop()


def cut_short():
    """P's client leaves while P computes and D waits; D is killed while P writes to it."""
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "5"}
    registry = "http://127.0.0.1:" + env["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
    large = ["--layers", 8, "--head-bytes", 4096, "--num-gpu-blocks-override", 420, "--max-model-len", 3000]
    p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=[*large, "--prefill-tokens-per-second", 3000, "--max-num-batched-tokens", 256], **env)
    d = Engine(MOONCAKE, "kv_consumer", flags=large)
    for i in range(4):
        pulls = {"do_remote_prefill": True, "transfer_id": f"cut{i}", "remote_engine_id": "p", "remote_bootstrap_addr": registry}
        waits = threading.Thread(target=quietly, args=(d.ask, words(900, f"cut{i}"), 3, pulls))
        waits.start()
        time.sleep(0.1)
        with contextlib.suppress(Exception):
            p.ask(words(900, f"cut{i}"), 1, {"do_remote_decode": True, "transfer_id": f"cut{i}"}, timeout=0.1)
        if i % 2:
            d.leave(words(900, f"cut{i}b"), {**pulls, "transfer_id": f"cut{i}b"})
        waits.join()
    p.stop()
    p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=large, **env)
    for wait in (0.05, 0.15, 0.3):
        victim = Engine(MOONCAKE, "kv_consumer", flags=large)
        threads = [threading.Thread(target=quietly, args=(pair, p, victim, registry, f"v{wait}-{i}", 900)) for i in range(4)]
        for t in threads:
            t.start()
        time.sleep(wait + 0.3)
        victim.stop(signal.SIGKILL)
        for t in threads:
            t.join()
    p.idle()


def proxied():
    """The proxy asks P and D for itself."""
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())}
    p, d = Engine(MOONCAKE, "kv_producer", engine_id="p", **env), Engine(MOONCAKE, "kv_consumer")
    port = free_port()
    kvasir("proxy", "proxy", "--port", port, "--prefill", p.url, env["VLLM_MOONCAKE_BOOTSTRAP_PORT"], "--decode", d.url)
    until("the proxy answers", lambda: fetch(f"http://127.0.0.1:{port}/health") is not None, 20)
    for i in range(3):
        fetch(f"http://127.0.0.1:{port}/v1/completions", {"model": "simulated", "prompt": words(200, f"proxy{i}"), "max_tokens": 5})


def data_parallel(release):
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())}
    flags = ["--data-parallel-size", 2, "--release", release]
    ps = [Engine(MOONCAKE, "kv_producer", engine_id="p", flags=[*flags, "--data-parallel-rank", rank], **env) for rank in range(2)]
    d = Engine(MOONCAKE, "kv_consumer", flags=["--release", release], **env)
    for rank, p in enumerate(ps):
        pair(p, d, "http://127.0.0.1:" + env["VLLM_MOONCAKE_BOOTSTRAP_PORT"], f"dp{rank}", first=release == "0.13", engine=f"p_dp{rank}")


def pushes(address):
    """A PUSH socket, as SGLang's side channel has, connects by hand to a ZMQ socket."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), 10) as c:
        c.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
        c.recv(64)
        ready = b"\x05READY\x0bSocket-Type" + (4).to_bytes(4, "big") + b"PUSH"
        c.sendall(b"\x04" + bytes([len(ready)]) + ready)
        while c.recv(64):  # until the relay closes it
            pass


def relayed():
    """A relay between P and D, with prefixes; P is killed; the pool is small."""
    port, relay = free_ports(2)
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    for flags, groups in ((["--memory-gb", "4MiB"], []), (["--prefixes"], []), (["--keep-across-restarts"], ["--window", "64"])):
        p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=["--tensor-parallel-size", 2, *groups], **env)
        r = kvasir("relay", "relay", "--log-level", "debug", "--upstream", f"http://127.0.0.1:{port}", "--port", relay, "--timeout", 10, *flags)
        until("the relay has P", lambda: "engine_id" in fetch(f"http://127.0.0.1:{relay}/query"), 60)
        engine = json.loads(fetch(f"http://127.0.0.1:{relay}/query"))["0"]["engine_id"]
        d = Engine(MOONCAKE, "kv_consumer", flags=["--tensor-parallel-size", 2, *groups])
        for i in range(6):
            pair(p, d, f"http://127.0.0.1:{relay}", f"r{i}", 300, engine=engine)
            again = {"do_remote_prefill": True, "transfer_id": f"r{i}#2", "remote_engine_id": engine, "remote_bootstrap_addr": f"http://127.0.0.1:{relay}"}
            with contextlib.suppress(Exception):
                d.ask(words(300, f"r{i}"), 3, again, timeout=30)
            if i == 2:
                p.ask(words(300, "r0") + " more", 1, {"do_remote_decode": True, "transfer_id": "px"})
                with contextlib.suppress(Exception):
                    d.ask(words(300, "r0") + " more", 3, {**again, "transfer_id": "px^r0:10"}, timeout=30)
            fetch(d.url + "/reset_prefix_cache", {"x": 1})
        d.leave(words(300, "gone"), {**again, "transfer_id": "gone"})
        with contextlib.suppress(Exception):
            d.ask(words(40, "unknown"), 3, {**again, "transfer_id": "unknown"}, timeout=20)
        fetch(f"http://127.0.0.1:{relay}/metrics")
        p.stop(signal.SIGKILL)
        time.sleep(1.2)  # the relay asks P's registry again
        quietly(fetch, f"http://127.0.0.1:{relay}/query")
        p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=["--tensor-parallel-size", 2, *groups], **env)
        pair(p, d, f"http://127.0.0.1:{relay}", "life2", 300, engine=json.loads(fetch(f"http://127.0.0.1:{relay}/query"))["0"]["engine_id"])
        for x in (d, r, p):
            x.stop()
    p = Engine(MOONCAKE, "kv_producer", engine_id="p", **env)
    r = kvasir("relay", "relay", "--upstream", f"http://127.0.0.1:{port}", "--port", relay)
    until("the relay has P", lambda: "engine_id" in fetch(f"http://127.0.0.1:{relay}/query"), 60)
    quietly(pushes, json.loads(fetch(f"http://127.0.0.1:{relay}/query"))["0"]["worker_addr"]["0"]["0"])
    d = Engine(MOONCAKE, "kv_consumer", flags=["--tensor-parallel-size", 2])
    pair(p, d, f"http://127.0.0.1:{relay}", "unequal", engine=json.loads(fetch(f"http://127.0.0.1:{relay}/query"))["0"]["engine_id"])


def server(*flags, port=None, http=None, gb="0.0625"):
    port, http = port or free_port(), http or free_port()
    ports.add(port)
    s = kvasir("server", "server", "--log-level", "debug", "--port", port, "--http-port", http, "--l1-size-gb", gb, "--chunk-size", 64, "--trust-unsummed", *flags)
    until("the server answers", lambda: fetch(f"http://127.0.0.1:{http}/healthcheck"))
    return s, port, http


def cache_server(mode, flags, more=(), events=False, extra=None, servers=1, blocks=300):
    """Two engines, a client that leaves, a killed server, an engine that starts again."""
    nodes = [server(*more) for _ in range(servers)]
    keys = {"lmcache.mp.server_urls": [f"tcp://127.0.0.1:{port}" for _, port, _ in nodes], "lmcache.mp.mp_transfer_mode": mode, "lmcache.mp.heartbeat_interval": 0.5, **(extra or {})}
    flags = [*flags, "--num-gpu-blocks-override", blocks, "--max-model-len", 1500]
    def start():
        at, again = free_ports(2)
        config = {"enable_kv_cache_events": events, "endpoint": f"tcp://127.0.0.1:{at}", "replay_endpoint": f"tcp://127.0.0.1:{again}"}
        return Engine(LMCACHE, extra=keys, flags=[*flags, "--kv-events-config", json.dumps(config)])

    a, b = start(), start()
    for e in (a, b):
        threads = [threading.Thread(target=e.ask, args=(words(200 + 31 * i, i % 3), 30)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        e.ask(words(300, "salt"), 4, cache_salt="red")
        e.leave(words(700, "leaves"))
        e.idle()
    fetch(b.url + "/reset_prefix_cache", {"x": 1})
    b.ask(words(293, 0), 4)
    fetch(b.url + "/reset_prefix_cache", {"x": 1})
    s, port, http = nodes[-1]
    threads = [threading.Thread(target=quietly, args=(b.ask, words(200 + 31 * i, i % 3), 30)) for i in range(6)]
    for t in threads:
        t.start()
    time.sleep(0.01)
    s.stop(signal.SIGKILL)
    for t in threads:
        t.join()
    b.ask(words(250, "down"), 4)
    time.sleep(2)
    b.ask(words(250, "down too"), 4)
    nodes[-1] = server(*more, port=port, http=http)
    until("the server is healthy", lambda: figure(b.url, "kvasir_connector_server_healthy") >= servers, 60)
    time.sleep(1)
    fetch(b.url + "/reset_prefix_cache", {"x": 1})
    b.ask(words(293, 0), 4)
    b.idle()


def silent_server():
    """A cache server that stands still: clients leave during a lookup, and loads fail."""
    s, port, _ = server(gb="0.25")
    keys = {"lmcache.mp.server_urls": f"tcp://127.0.0.1:{port}", "lmcache.mp.mp_transfer_mode": "engine_driven", "lmcache.mp.heartbeat_interval": 0.2, "lmcache.mp.mq_timeout": 0.5}
    e = Engine(LMCACHE, extra=keys, flags=["--layers", 32, "--kv-heads", 16, "--head-bytes", 256, "--num-gpu-blocks-override", 100, "--max-model-len", 1500])
    rnd = random.Random(1)
    e.ask(words(600, "still"), 4)
    e.idle()
    # 75 MB take some tens of milliseconds; which moment is one of them depends on the machine.
    for i in range(60):
        fetch(e.url + "/reset_prefix_cache", {"x": 1})
        t = threading.Thread(target=quietly, args=(e.ask, words(600, "still"), 4))
        t.start()
        time.sleep(rnd.uniform(0, 0.05))
        s.p.send_signal(signal.SIGSTOP)
        if i == 0:
            e.leave(words(700, "leaves"))
        time.sleep(0.7)
        s.p.send_signal(signal.SIGCONT)
        t.join()
        until("the server is healthy", lambda: figure(e.url, "kvasir_connector_server_healthy") >= 1, 60)
        if figure(e.url, "kvasir_connector_failed_loads_total") > 0:
            break
    e.idle()


def full_pool():
    """Windows in a pool that is too small: chunks that no hit can load any more go first."""
    _node, port, _ = server("--separate-object-groups", gb="0.002")
    keys = {"lmcache.mp.server_urls": f"tcp://127.0.0.1:{port}", "lmcache.mp.mp_transfer_mode": "lmcache_driven"}
    e = Engine(LMCACHE, extra=keys, flags=["--window", 64, "--num-gpu-blocks-override", 600, "--max-model-len", 1500])
    for i in range(12):
        e.ask(words(600, f"full{i}"), 4)
        e.idle()


def masters(python):
    """A master and its C++ client's memory, with nodes of this build: the store's commands, engines, a tier."""
    cpp = os.path.join(HERE, "..", "store", "cpp.py")
    binary = subprocess.run([python, cpp, "--path"], capture_output=True, text=True, check=True).stdout.strip()
    rpc, pages, http = free_ports(3)
    address = f"127.0.0.1:{rpc}"
    library = os.path.dirname(binary) + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    for lib in ("nvidia/cuda_runtime/lib", "nvidia/cu13/lib"):
        library += ":" + os.path.join(os.path.dirname(os.path.dirname(binary)), lib)
    m = Process("master", [binary, f"--rpc_port={rpc}", f"--metrics_port={pages}"], LD_LIBRARY_PATH=library)
    until("the master listens", lambda: m.p.poll() is not None or listens(rpc), 60)
    node = kvasir("node", "store-node", "--master", address, "--memory-gb", "64MiB", "--http-port", http, "--grace", 1, "--name", "first")
    until("our node is mounted", lambda: fetch(f"http://127.0.0.1:{http}/healthz"), 60)
    blob = os.urandom(3_000_000)
    for key in ("one", "two"):
        once("store", "put", key, "--master", address, data=blob)
    once("store", "put", "one", "--master", address, data=blob)
    once("store", "ls", "one", "two", "none", "--master", address)
    ids = os.path.join(work, "ids.json")
    with open(ids, "w") as f:
        json.dump(list(range(200)), f)
    once("store", "ls", "m_" + "a" * 64 + "_0_k", "m_" + "b" * 64 + "_0_swa_k", "none", "--like", "hicache", "--master", address)
    once("store", "ls", "--like", "hicache", "--model", "org/name", "--tokens", ids, "--tensor-parallel-size", 2, "--master", address)
    once("store", "get", "one", "--master", address)
    once("store", "get", "none", "--master", address)
    once("store", "put", "big", "--master", address, data=bytes(80 << 20))
    once("store", "rm", "one", "none", "--master", address)
    once("store", "rm", "two", "--force", "--master", address)
    config = os.path.join(work, f"mooncake-{rpc}.json")
    with open(config, "w") as f:
        json.dump({"metadata_server": "P2PHANDSHAKE", "master_server_address": address, "protocol": "tcp"}, f)
    env = {"MOONCAKE_CONFIG_PATH": config, "VLLM_MOONCAKE_LOAD_RECV_THREADS": "2", "MOONCAKE_PREFERRED_SEGMENT": "first", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "h"}
    for flags, role, extra in ((["--window", 64, "--states", 1], "kv_both", {"save_decode_cache": True}), (["--release", "0.23", "--window", 64], "kv_producer", {"cache_prefix": "blue"}),
                               (["--kv-layout", "nhd", "--tensor-parallel-size", 2], "kv_both", None), (["--window", 64, "--prefix-cache-retention-interval", 64], "kv_both", None)):
        for turn in range(2):
            e = Engine(STORE, role, extra, flags=[*flags, "--num-gpu-blocks-override", 300, "--max-model-len", 1000], **env)
            threads = [threading.Thread(target=e.ask, args=(words(300 + 40 * i, i), 20)) for i in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            e.leave(words(300, 1))
            until("it is stored", lambda e=e: figure(e.url, "kvasir_store_connector_waiting_bytes") == 0, 60)
            if turn:
                fetch(e.url + "/reset_prefix_cache", {"x": 1})
                e.ask(words(300, 0), 4)
                tokens = os.path.join(work, "tokens.json")
                with open(tokens, "w") as f:
                    json.dump(json.loads(fetch(e.url + "/tokenize", {"prompt": words(300, 0)}))["tokens"], f)
                once("coordinator", "full,bs=16", "swa,bs=16,win=64", "--master", address, "--model", "simulated", "--tokens", tokens, "--ascii")
            e.stop()
    s, port, web = server("--l2-adapter", json.dumps({"type": "mooncake_store", "master_server_addr": address}))
    e = Engine(LMCACHE, extra={"lmcache.mp.server_urls": f"tcp://127.0.0.1:{port}", "lmcache.mp.mp_transfer_mode": "engine_driven"}, flags=["--num-gpu-blocks-override", 300, "--max-model-len", 1500])
    for i in range(3):
        e.ask(words(300, f"tier{i}"), 4)
    time.sleep(1)
    fetch(f"http://127.0.0.1:{web}/status")
    e.stop()
    s.stop()
    c = Process("cpp", [python, cpp, address, str(64 << 20)], LD_LIBRARY_PATH=library)
    with contextlib.suppress(Exception):
        until("the C++ node is mounted", lambda: len(fetch(f"http://127.0.0.1:{pages}/get_all_segments").split()) >= 2, 20)
    second = kvasir("node", "store-node", "--master", f"{address},127.0.0.1:1", "--memory-gb", "64MiB", "--http-port", free_port())
    time.sleep(1)
    e = Engine(STORE, flags=["--num-gpu-blocks-override", 300, "--max-model-len", 1500], MOONCAKE_CONFIG_PATH=config)
    for i in range(3):
        e.ask(words(500, f"nodes{i}"), 4)
    until("it is stored", lambda: figure(e.url, "kvasir_store_connector_waiting_bytes") == 0, 60)
    second.stop(signal.SIGKILL)
    c.stop(signal.SIGKILL)
    fetch(e.url + "/reset_prefix_cache", {"x": 1})
    for i in range(3):
        e.ask(words(500, f"nodes{i}"), 4)
    m.stop(signal.SIGKILL)
    e.ask(words(400, "no master"), 4)
    m = Process("master", [binary, f"--rpc_port={rpc}", f"--metrics_port={pages}"], LD_LIBRARY_PATH=library)
    until("the master listens again", lambda: listens(rpc), 60)
    time.sleep(3)
    e.ask(words(400, "a new master"), 4)
    e.stop()
    once("store", "put", "one", "--master", address, data=blob)
    for command in ("ls", "get"):
        spoilt(rpc, lambda at, command=command: once("store", command, "one", "--timeout", "1s", "--master", at))
    spoilt(rpc, lambda at: once("store", "put", "two", "--timeout", "1s", "--master", at, data=b"two"))
    node.stop()
    for address in ("127.0.0.1:1", f"127.0.0.1:{pages}"):
        once("store", "ls", "one", "--timeout", "2s", "--master", address)


class Liar:
    """Forwards connections to a port and spoils what comes back: at byte `at` of each answer it cuts, or turns bits over."""

    def __init__(self, target, at, cut):
        self.target, self.at, self.cut = target, at, cut
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                c, _ = self.socket.accept()
                s = socket.create_connection(("127.0.0.1", self.target), 5)
                threading.Thread(target=quietly, args=(self.copy, c, s, False), daemon=True).start()
                threading.Thread(target=quietly, args=(self.copy, s, c, True), daemon=True).start()

    def copy(self, source, to, spoil):
        while b := source.recv(1 << 16):
            if spoil and len(b) > self.at:
                b = b[: self.at] if self.cut else b[: self.at] + bytes(x ^ 0x5A for x in b[self.at : self.at + 4]) + b[self.at + 4 :]
            to.sendall(b)
            if spoil and self.cut:
                break
        for x in (source, to):
            x.shutdown(socket.SHUT_RDWR)


def spoilt(port, once):
    """Calls with a port behind which every answer is spoilt at another place."""
    for at in (0, 2, 3, 5, 8, 12, 16, 20, 21, 22, 24, 26, 30, 40, 60, 70, 90):
        for cut in (False, True):
            liar = Liar(port, at, cut)
            quietly(once, liar.address)
            liar.socket.close()


class Junk:
    """An HTTP server whose answers mean nothing."""

    def __init__(self, code, body):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.answer = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (code, len(body), body)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                c, _ = self.socket.accept()
                c.recv(1 << 16)
                c.sendall(self.answer)
                c.close()


def junk():
    """Registries, side channels and data ports that answer nonsense, and peers that send it."""
    d = Engine(MOONCAKE, "kv_consumer", VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="3")
    for i, (code, body) in enumerate(((200, b"{"), (200, b"[]"), (200, b'{"0":{"engine_id":7}}'), (500, b"no"), (200, b'{"0":{"engine_id":"p","worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}}}'),
                                      (200, b'{"0":{"engine_id":"p","worker_addr":{"x":{"0":"udp://a"}}}}'), (200, b'{"0":{"engine_id":"p","worker_addr":{}}}'))):
        quietly(lambda i=i, code=code, body=body: d.ask(words(60, f"junk{i}"), 2, {"do_remote_prefill": True, "transfer_id": f"junk{i}", "remote_engine_id": "p", "remote_bootstrap_addr": Junk(code, body).url}, timeout=20))
        if i < 4:
            quietly(lambda code=code, body=body: Engine(MOONCAKE, "kv_producer", {"bootstrap_server_address": Junk(code, body).url[7:]}, VLLM_MOONCAKE_CONNECTOR_TIMEOUT="2"))
    d.stop()
    for release in ("current", "0.13"):
        env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())}
        p = Engine(MOONCAKE, "kv_producer", engine_id="p", flags=["--release", release], **env)
        side = env["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
        if release == "current":
            side = json.loads(fetch(f"http://127.0.0.1:{side}/query"))["0"]["worker_addr"]["0"]["0"].rsplit(":", 1)[1]
        frames = [b"", b"\x00", b"\x80", b"\x81\xa1x\x01", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x86\xafremote_hostname\xa1h", b"\x82\xabremote_port\xa1x\xa8unknown!\x93\x01\x81\xa1a\xc4\x02ab\xd6\x01abcd"]
        for frame in frames:
            quietly(say, int(side), frame)
            quietly(say, int(side), frame, b"x")
        p.ask(words(60, "after junk"), 1)
        for at in (5, 70, 100, 130, 160):
            for cut in (False, True):
                liar = Liar(int(side), at, cut)
                host = liar.address.rsplit(":", 1)[1]
                d = Engine(MOONCAKE, "kv_consumer", flags=["--release", release], VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="2")
                name = f"liar{release}{at}{cut}"
                answer = p.ask(words(90, name), 1, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}, request_id=name)
                params = answer.get("kv_transfer_params") or {}
                if release == "current":
                    directory = json.dumps({"0": {"engine_id": "p", "worker_addr": {"0": {"0": f"tcp://127.0.0.1:{host}"}}}}).encode()
                    params = {"do_remote_prefill": True, "transfer_id": name, "remote_engine_id": "p", "remote_bootstrap_addr": Junk(200, directory).url}
                else:
                    params["remote_port"] = int(host)
                quietly(lambda d=d, name=name, params=params: d.ask(words(90, name), 2, params, request_id=name, timeout=10))
                d.stop()
        p.stop()


def say(port, *frames):
    """Sends one ZeroMQ message of a DEALER, by hand."""
    with socket.create_connection(("127.0.0.1", port), 5) as c:
        c.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31))
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        c.sendall(b"\x04" + bytes([len(ready)]) + ready)
        for i, f in enumerate(frames):
            c.sendall(bytes([1 if i < len(frames) - 1 else 0, len(f)]) + f)
        c.settimeout(0.5)
        while c.recv(4096):
            pass


def layouts_of_models():
    for layout in ("full,bs=16", "full,bs=16 swa,bs=16,win=64", "full,bs=32 swa,bs=16,win=100 mamba,bs=32,mode=align", "full,bs=16 mamba,bs=16 ret=128", "full,bs=16 chunk,bs=16,chunk=64",
                   "chunk,bs=16,chunk=64", "full,bs=16 swa,bs=16,win=64 eagle", "full,bs=16,eagle swa,bs=16,win=64", "full,bs=16 swa,bs=64,win=128 mamba,bs=32,mode=all", "full,bs=16 cross,bs=16",
                   "full,bs=16 sink,bs=16,win=64", "mla,bs=16", "rswa,bs=16,win=64", "swamla,bs=16,win=64 full,bs=16", "full,bs=32 swa,bs=32,win=64 hash=16 partial", "full,bs=0", "x", "{}", "full,bs=16 full,bs=7",
                   '{"g":[{"t":"full","bs":16},{"t":"swa","bs":16,"win":64}],"sched":16,"hash":16,"eagle":0}'):
        layout = [layout] if layout.startswith("{") else layout.split()
        for release in ("", "0.23", "0.33"):
            once("coordinator", *layout, "--prompt", 700, "--ascii", *(["--release", release] if release else []))
        once("coordinator", *layout, "--prompt", 700, "--remote")
        once("coordinator", *layout, "--prompt", 100000, "--remote")


def transfers():
    peer = os.path.join(work, "peer.json")
    t = kvasir("transfer", "transfer", "serve", "--size", "64MiB", "--peer-file", peer)
    until("the peer file", lambda: os.path.exists(peer) and os.path.getsize(peer))
    blob = os.urandom(5_000_000)
    once("transfer", "write", "--peer-file", peer, data=blob)
    once("transfer", "read", "--peer-file", peer, "--bytes", len(blob))
    once("transfer", "write", "--peer-file", peer, "--offset", 63 << 20, data=blob)
    once("transfer", "bench", "--peer-file", peer, "--sizes", "4k,64k,1m", "--batches", "1,64", "--seconds", "0.1", "--verify", "--ops", "write,read,socket")
    pieces = os.path.join(work, "pieces.json")
    with open(pieces, "w") as f:
        json.dump([[0, 4096], [8192, 4096]], f)
    once("transfer", "bench", "--peer-file", peer, "--pieces", pieces, "--seconds", "0.1")
    once("transfer", "bench", "--peer-file", peer, "--sizes", "64k", "--batches", "8", "--seconds", "0.1", "--layout", "reversed", "--callers", 2)
    with contextlib.suppress(OSError), open(peer) as f:
        for port in [v for v in json.load(f).values() if isinstance(v, int) and 1024 < v < 65536]:
            with socket.create_connection(("127.0.0.1", port), 5) as c:
                c.sendall(b"no request at all" * 10)
    with open(peer) as f:
        where = json.load(f)
    liars = Liar(int(where["peer"].rsplit(":", 1)[1]), 40, False), Liar(int(where["peer"].rsplit(":", 1)[1]), 10, True)
    for liar in liars:
        once("transfer", "read", "--peer", liar.address, "--addr", where["base"], "--bytes", 100, "--timeout", "2s")
    once("transfer", "write", "--peer", where["peer"], "--addr", where["base"] + (1 << 40), "--timeout", "2s", data=blob[:100])
    t.stop()
    once("transfer", "read", "--peer-file", peer, "--bytes", 10, "--timeout", "2s")


def proven():
    """Transfers between ends that prove a secret in common, and those that cannot."""
    peer, files = os.path.join(work, "proven.json"), {}
    for name in ("own", "other"):
        files[name] = os.path.join(work, f"secret-{name}")
        with open(os.open(files[name], os.O_CREAT | os.O_WRONLY, 0o600), "w") as f:
            f.write(os.urandom(32).hex() + "\n")
    blob = os.urandom(1_000_000)
    for stock in ([], ["--transfer-stock", "127.0.0.1"]):
        t = kvasir("transfer", "transfer", "serve", "--size", "64MiB", "--peer-file", peer, "--transfer-secret-file", files["own"], *stock)
        until("the peer file", lambda: os.path.exists(peer) and os.path.getsize(peer))
        for secret in (["--transfer-secret-file", files["own"]], ["--transfer-secret-file", files["other"]], []):
            once("transfer", "write", "--peer-file", peer, "--timeout", "2s", *secret, data=blob)
            once("transfer", "read", "--peer-file", peer, "--timeout", "2s", "--bytes", len(blob), *secret)
        t.stop()  # it removes the peer file


def wrong_configurations():
    for text in ("{", "[]", '{"kv_connector":"X"}', '{"kv_connector":"MooncakeConnector","kv_role":"kv_both","kv_rol":1}',
                 '{"kv_connector":"MooncakeConnector","kv_role":"kv_both","kv_connector_extra_config":{"num_workers":0,"mooncake_protocol":"rdma","device_name":"x","bootstrap_server_address":"p"}}',
                 '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.port":0,"lmcache.mp.mp_transfer_mode":"x","lmcache.mp.lazy_offload":true}}',
                 '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"store_tp_size":2,"preferred_segment":" "}}',
                 '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[]}}', '{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}'):
        once("engine", "--port", free_port(), "--kv-transfer-config", text, VLLM_MOONCAKE_BOOTSTRAP_PORT="70000", MOONCAKE_CONFIG_PATH="/nothing")
    for events in ("{", '{"enable_kv_cache_events":true,"publisher":"kafka","buffer_steps":0}'):
        once("engine", "--port", free_port(), "--kv-events-config", events)


def multi():
    _node, port, _ = server()
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())}
    connectors = lambda role: [{"kv_connector": MOONCAKE, "kv_role": role}, {"kv_connector": LMCACHE, "kv_role": "kv_both", "kv_connector_extra_config": {"lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.save_decode_cache": True, "lmcache.mp.eager_prefetch": True}}]
    p = Engine("", "kv_producer", multi=connectors("kv_producer"), **env)
    d = Engine("", "kv_consumer", multi=connectors("kv_consumer"), **env)
    engine = json.loads(fetch("http://127.0.0.1:" + env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] + "/query"))["0"]["engine_id"]
    pair(p, d, "http://127.0.0.1:" + env["VLLM_MOONCAKE_BOOTSTRAP_PORT"], "multi", engine=engine)


def scenarios():
    for layout in ("fused", "nhd", "hnd", "flashinfer", "mla"):
        yield f"P and D of 0.13, {layout}", lambda layout=layout: prefill_decode(True, layout, 1, 1)
    yield "P and D of 0.13, two ranks", lambda: prefill_decode(True, "fused", 2, 2)
    for layout, p, d in (("fused", 1, 1), ("fused", 4, 2), ("fused", 1, 2), ("flashinfer", 2, 2), ("flashinfer", 1, 2), ("mla", 2, 1)):
        yield f"P and D, {layout}, TP {p} and {d}", lambda layout=layout, p=p, d=d: prefill_decode(False, layout, p, d)
    yield "P and D, hybrid", lambda: prefill_decode(False, "fused", 2, 2, ["--window", 64, "--states", 1])
    yield "P and D, hybrid, unequal TP", lambda: prefill_decode(False, "fused", 2, 1, ["--window", 64])
    yield "P and D cut short", cut_short
    yield "proxy", proxied
    yield "data-parallel ranks", lambda: data_parallel("current")
    yield "data-parallel ranks of 0.13", lambda: data_parallel("0.13")
    yield "a chain over a registry", both_roles
    yield "relay", relayed
    for mode in ("engine_driven", "lmcache_driven", "auto"):
        yield f"cache server, {mode}", lambda mode=mode: cache_server(mode, ["--tensor-parallel-size", 2], events=True)
    yield "cache server, inline", lambda: cache_server("engine_driven", [], ["--pickle", "only"])
    for mode in ("lmcache_driven", "engine_driven"):
        yield f"cache server, windows and states, {mode}", lambda mode=mode: cache_server(mode, ["--window", 64, "--states", 1], ["--separate-object-groups"])
    for layout in ("nhd", "hnd", "flashinfer", "mla"):
        yield f"cache server, {layout}", lambda layout=layout: cache_server("lmcache_driven", ["--kv-layout", layout, "--tensor-parallel-size", 2])
    yield "cache server, MLA copied by its ranks", lambda: cache_server("engine_driven", ["--kv-layout", "mla", "--tensor-parallel-size", 2], events=True)
    yield "cache server, stages", lambda: cache_server("engine_driven", ["--pipeline-parallel-size", 2, "--tensor-parallel-size", 2])
    yield "two cache servers", lambda: cache_server("engine_driven", ["--tensor-parallel-size", 2], servers=2)
    yield "a memory so small that requests are preempted", lambda: cache_server("engine_driven", ["--max-num-batched-tokens", 96], blocks=100, extra={"lmcache.mp.mq_timeout": 5})
    yield "a server that stands still", silent_server
    yield "a full pool", full_pool
    yield "connectors beside each other", multi
    for python in PYTHONS:
        yield f"Mooncake Store of {python.split('/')[-4]}", lambda python=python: masters(python)
    yield "layouts of hybrid models", layouts_of_models
    yield "transfers", transfers
    yield "transfers with a secret", proven
    yield "nonsense of peers", junk
    yield "configurations that are refused", wrong_configurations


only = os.environ.get("ONLY", "")
for name, scenario in scenarios():
    if only not in name:
        continue
    began = time.time()
    try:
        scenario()
    except (OSError, RuntimeError, ValueError, KeyError, subprocess.SubprocessError):
        failed.append(name)
        traceback.print_exc()
    for p in list(reversed(running)):
        p.stop()
    for port in ports:  # pools of servers, which keep them for their next start
        for path in glob.glob(f"/dev/shm/lmcache_l1_pool_kvasir_{port}_*"):
            os.unlink(path)
    print(f"{'FAIL ' if name in failed else 'ok   '} {name} ({time.time() - began:.1f} s)", flush=True)
print(f"{len(failed)} scenarios failed; logs: {work}")
