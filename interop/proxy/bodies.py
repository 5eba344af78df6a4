#!/usr/bin/env python3
"""What unfinished bodies of one client do to kvasir proxy and to its other clients. Mock engine, loopback.

60 clients at 127.0.0.2 send bodies of 60 MiB all but the end, and wait. Meanwhile a client at 127.0.0.1 sends requests. The proxy must not grow
by more than 512 MiB, and the client's p99 must be at most twice its p99 without the others: the median of the ratios of all rounds.
Then the same clients come to `kvasir all` that may use 5 GiB of addresses: it must live, and answer.

bodies.py --kvasir bin/kvasir [--rounds 5]
"""
import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import peers

BODY, CLIENTS = 60 << 20, 60


def memory(pid, field="VmRSS"):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(field))


class Flood:
    """The clients at 127.0.0.2: how many hold a body open, and how many were answered."""

    def __init__(self, port):
        self.port, self.sockets, self.answers, self.threads = port, [], [], []
        self.lock = threading.Lock()
        for _ in range(CLIENTS):
            t = threading.Thread(target=self.one)
            t.start()
            self.threads.append(t)

    def one(self):
        s = socket.socket()
        with self.lock:
            self.sockets.append(s)
        piece = b"x" * (256 << 10)
        try:
            s.bind(("127.0.0.2", 0))
            s.connect(("127.0.0.1", self.port))
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{\"prompt\":\"" % BODY)
            for _ in range(BODY // len(piece) - 1):
                s.sendall(piece)
        except OSError:
            pass  # refused, or closed
        try:
            status = s.recv(12).decode()
        except OSError:
            status = "cut"
        with self.lock:
            self.answers.append(status)

    def end(self):
        for s in self.sockets:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for t in self.threads:
            t.join()
        for s in self.sockets:
            s.close()


def ask(load, url, seconds):
    """p99 of whole answers, ms; the answers are checked."""
    r = subprocess.run([load, "--url", url, "--conns", "4", "--size", "2KiB", "--duration", f"{seconds}s", "--max-duration", "60s", "--max-tokens", "4"], check=True, capture_output=True, text=True)
    res = json.loads(r.stdout)
    if res["failed"] or not res["requests"]:
        peers.die(f"an honest client: {res['failed']} of {res['requests']} requests failed: {res.get('errors')}")
    return res["total_ms"]["p99"]


def rounds(args, load, url, p, port):
    """Whether growth and times hold."""
    ask(load, url, 1)
    before, ratios = memory(p.pid), []
    for _ in range(args.rounds):
        quiet = ask(load, url, args.seconds)
        flood = Flood(port)
        time.sleep(0.2)
        busy = ask(load, url, args.seconds)
        flood.end()
        ratios.append(busy / quiet)
        refused = sum(" 503" in a for a in flood.answers)
        print(f"p99 {quiet:.2f} ms alone, {busy:.2f} ms beside {CLIENTS} unfinished bodies; {refused} were refused at once")
        peers.wait_for("requests end", lambda: b"\nkvasir_proxy_body_bytes 0\n" in peers.http("GET", url + "/metrics")[1], 90)
    grown = memory(p.pid, "VmHWM") - before
    ratio = statistics.median(ratios)
    print(f"unfinished bodies: the proxy grew by {grown >> 20} MiB at most (goal 512), p99 {ratio:.2f} times that alone (median of {args.rounds}; goal 2)")
    return grown < 512 << 20 and ratio <= 2


def whole_node(args, e, tmp):
    """Whether kvasir all lives and answers."""
    port, server, http = peers.free_ports(3)
    config = os.path.join(tmp, "all.yaml")
    with open(config, "w") as f:
        f.write(f"log-level: warn\nserver:\n  l1-size-gb: 0.25\n  host: 127.0.0.1\n  port: {server}\n  http-port: {http}\n  shm-name: bodies_{port}\n"
                f"proxy:\n  port: {port}\n  engine: [{', '.join(repr(u) for u in e.decode)}]\n")
    p = peers.Proc("kvasir-all", ["bash", "-c", f"ulimit -v 5242880; exec {args.kvasir} all --config {config}"], tmp)
    try:
        url = f"http://127.0.0.1:{port}"
        peers.wait_for("kvasir all", lambda: peers.probe(url)[0] == 200, 60, p)
        flood = Flood(port)
        time.sleep(2)
        ok = p.alive() and peers.probe(url)[0] == 200 and peers.http("GET", f"http://127.0.0.1:{http}/healthcheck")[0] == 200
        flood.end()
        print(f"kvasir all with 5 GiB of addresses, a pool of 0.25 GB and {CLIENTS} unfinished bodies: {'it answers' if ok else 'it does not answer'}, peak of {memory(p.pid, 'VmHWM') >> 20} MiB")
        return ok
    finally:
        p.stop()
        for name in os.listdir("/dev/shm"):
            if f"bodies_{port}" in name:
                os.unlink("/dev/shm/" + name)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--seconds", type=float, default=4)
    args = ap.parse_args()
    tmp = tempfile.mkdtemp(prefix="proxy-bodies-")
    engine, load, _ = peers.build(tmp)
    e = peers.Engines(engine, tmp, 1)
    p = None
    try:
        (port,) = peers.free_ports(1)
        p = peers.Proc("kvasir-proxy", [args.kvasir, "--log-level", "warn", "proxy", "--port", str(port), "--engine", e.decode[0]], tmp)
        url = f"http://127.0.0.1:{port}"
        peers.wait_for("kvasir", lambda: peers.probe(url)[0] == 200, 30, p)
        ok = rounds(args, load, url, p, port)
        ok = whole_node(args, e, tmp) and ok
    finally:
        if p:
            p.stop()
        e.stop()
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
