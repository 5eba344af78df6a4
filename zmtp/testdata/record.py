"""Records what libzmq sends, as files NAME-libzmq-VERSION.bin in the folder given.

dealer: a DEALER with identity "kv-1" that sends [a], [empty, 300 x, end], [70000 y], then a PING.
router: greeting and READY of a ROUTER.
"""

import pathlib
import socket
import sys
import time

import zmq

out = pathlib.Path(sys.argv[1])
version = zmq.zmq_version()
greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)


def ready(kind):
    body = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes([4, len(body)]) + body


def drain(conn, seconds):
    conn.settimeout(0.1)
    got, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            got += conn.recv(1 << 20)
        except TimeoutError:
            pass
    return got


ctx = zmq.Context()
listener = socket.create_server(("127.0.0.1", 0))
dealer = ctx.socket(zmq.DEALER)
dealer.linger = 0
dealer.identity = b"kv-1"
dealer.heartbeat_ivl = 700
dealer.heartbeat_ttl = 2500
dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
dealer.send_multipart([b"a"])
dealer.send_multipart([b"", b"x" * 300, b"end"])
dealer.send_multipart([b"y" * 70000])
conn, _ = listener.accept()
conn.sendall(greeting + ready(b"ROUTER"))
(out / f"dealer-libzmq-{version}.bin").write_bytes(drain(conn, 1.0))

router = ctx.socket(zmq.ROUTER)
router.linger = 0
port = router.bind_to_random_port("tcp://127.0.0.1")
conn = socket.create_connection(("127.0.0.1", port))
conn.sendall(greeting + ready(b"DEALER"))
(out / f"router-libzmq-{version}.bin").write_bytes(drain(conn, 0.4))
ctx.destroy()
