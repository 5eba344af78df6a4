#!/usr/bin/env python3
"""Races kvasir bootstrap against vLLM's own MooncakeBootstrapServer, in turns.

    python interop/mooncake/bench_bootstrap.py --kvasir bin/kvasir --go . [--rounds 3]

Each is a process of its own; the load comes from one driver, the benchmarks named
Server of package mooncake/bootstrap. Prints medians and ratios: queries per second
of the server's CPU time (user and system), and how long answers take while 1,000
workers register. vLLM's server runs as vLLM starts it, access log included, its
output thrown away. Needs vLLM 0.31 or later and Go; no GPU.
"""

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

sys.dont_write_bytecode = True


def serve_original(port):
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer

    server = MooncakeBootstrapServer("127.0.0.1", port)
    server.start()
    signal.sigwait([signal.SIGTERM, signal.SIGINT])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def measure(command, driver, seconds):
    """One server's metrics: name → value."""
    port = free_port()
    server = subprocess.Popen([x.format(port=port) for x in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.time() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=5).read()
                break
            except OSError:
                if server.poll() is not None or time.time() > deadline:
                    raise SystemExit(f"{command[0]} did not start")
                time.sleep(0.2)
        time.sleep(1)
        env = {**os.environ, "KVASIR_BOOTSTRAP_SERVER": f"127.0.0.1:{port},{server.pid}"}
        out = ""
        for what, count in (("ServerQuery", f"{seconds}s"), ("ServerWorkers", "3x")):
            out += subprocess.run([driver, "-test.run", "-", "-test.bench", what, "-test.benchtime", count, "-test.timeout", "300s"],
                                  env=env, check=True, capture_output=True, text=True).stdout  # fmt: skip
    finally:
        server.terminate()
        server.wait(20)
    found = {}
    for line in out.splitlines():
        m = re.match(r"BenchmarkServer\w+/(\S+?)(?:-\d+)?\s+\d+\s+(.*)", line)
        if m:
            for value, unit in re.findall(r"([\d.e+-]+) (\S+)", m[2]):
                if unit != "ns/op":
                    found[f"{m[1]} {unit}"] = float(value)
    if not found:
        raise SystemExit("the driver measured nothing:\n" + out)
    return found


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", default="bin/kvasir")
    ap.add_argument("--go", metavar="DIR", default=".", help="the repository")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=int, default=4, help="per measurement")
    ap.add_argument("--serve-original", type=int, metavar="PORT", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.serve_original:
        return serve_original(a.serve_original)
    driver = os.path.abspath(os.path.join(a.go, "bin", "bootstrap.bench"))
    subprocess.run(["go", "test", "-c", "-o", driver, "./mooncake/bootstrap"], cwd=a.go, check=True)
    commands = {
        "original": [sys.executable, os.path.abspath(__file__), "--serve-original", "{port}"],
        "kvasir": [a.kvasir, "bootstrap", "--host", "127.0.0.1", "--port", "{port}"],
    }
    rounds = {name: [] for name in commands}
    try:
        for i in range(a.rounds):
            for name, command in commands.items():
                rounds[name].append(measure(command, driver, a.seconds))
                print(f"# round {i + 1} {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    finally:
        os.remove(driver)
    for key in rounds["kvasir"][0]:
        theirs, ours = (statistics.median(r[key] for r in rounds[n]) for n in ("original", "kvasir"))
        print(f"{key:34s} original {theirs:10.2f}  kvasir {ours:10.2f}  ratio {ours / theirs if theirs else 0:8.3f}")


if __name__ == "__main__":
    main()
