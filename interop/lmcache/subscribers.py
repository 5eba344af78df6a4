#!/usr/bin/env python3
"""N subscribers of a server's own KV-event socket, as N routers would be: each reads every message of its connection.

    subscribers.py N ENDPOINT

Prints "subscribed" once each of them had a message, and at SIGTERM how many messages and bytes they read.
"""

import signal
import sys

import zmq

n, endpoint = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
context, poller = zmq.Context(), zmq.Poller()
for _ in range(n):
    s = context.socket(zmq.SUB)
    s.linger = 0
    s.subscribe(b"")
    s.connect(endpoint)
    poller.register(s, zmq.POLLIN)
had, messages, size = set(), 0, 0
try:
    while True:
        for s, _ in poller.poll():
            while s.poll(0):
                messages, size = messages + 1, size + sum(map(len, s.recv_multipart()))
            had.add(s)
        if len(had) == n:
            print("subscribed", flush=True)
            n = 0
finally:
    print(f"subscribers read {messages} messages, {size} bytes", flush=True)
