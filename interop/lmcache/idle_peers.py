#!/usr/bin/env python3
"""Connects many ZMTP 3.0 peers that say nothing after their handshake, and prints how much
memory the server takes for them, and that one more client is still answered.

    idle_peers.py PID HOST:PORT [PEERS]
"""
import resource
import socket
import sys
import time


def hello():
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    return greeting + b"\x04" + bytes([len(ready)]) + ready


def connect(host, port):
    s = socket.create_connection((host, port), timeout=20)
    s.sendall(hello())
    got = b""
    while len(got) < 64 + 2:
        more = s.recv(4096)
        if not more:
            raise SystemExit("closed in the handshake")
        got += more
    return s


def rss(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS")) / 1024


def main():
    pid, (host, port) = int(sys.argv[1]), sys.argv[2].rsplit(":", 1)
    peers = int(sys.argv[3]) if len(sys.argv) > 3 else 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (peers + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before = rss(pid)
    socks = [connect(host, int(port)) for _ in range(peers)]
    time.sleep(3)
    print(f"{len(socks)} idle peers: {before:.0f} MiB before, {rss(pid):.0f} MiB with them")
    one = connect(host, int(port))
    one.sendall(b"\x01\x01\x07" + b"\x00\x01\x18")  # noop, request 7
    if not one.recv(100):
        raise SystemExit("one more client is not answered")
    print("one more client is answered")


main()
