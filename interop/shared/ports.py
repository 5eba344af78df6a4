#!/usr/bin/env python3
"""Free TCP ports of 127.0.0.1. As a command: ports.py [N] prints N of them.

They lie below the ports that the system gives to clients: nobody gets one by chance between this call and the start of
the server that it is for, or while that server is down. A client that connects to a port of its own range while nobody
listens there may even connect to itself.
"""
import random
import socket
import sys

FIRST, LAST = 15000, 31000  # Mooncake's C++ clients take ports below, Linux gives those from 32768 on to clients


def free_ports(n):
    """n different ports on which nobody listens."""
    held = []
    try:
        for port in random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST):
            if len(held) == n:
                break
            s = socket.socket()
            try:
                s.bind(("127.0.0.1", port))
                held.append(s)
            except OSError:
                s.close()
        if len(held) < n:
            raise OSError("no free ports")
        return [s.getsockname()[1] for s in held]
    finally:
        for s in held:
            s.close()


def free_port():
    return free_ports(1)[0]


if __name__ == "__main__":
    print(*free_ports(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
