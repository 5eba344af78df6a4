"""A libzmq socket that plays one scenario against ours: peer.py SCENARIO ENDPOINT [PARAMETER].

It exits with 0 when all went as it should. Every wait is bounded.
"""

import hashlib
import json
import os
import sys
import time

import zmq
import zmq.auth.thread
import zmq.utils.monitor

WAIT = 10_000  # ms
SECURITY = json.loads(os.environ.get("ZMQ_SECURITY", "{}"))  # options of every socket
ctx = zmq.Context()
authenticator = None
if SECURITY.keys() & {"curve_server", "plain_server"}:  # libzmq asks it who may connect
    authenticator = zmq.auth.thread.ThreadAuthenticator(ctx)
    authenticator.start()
    authenticator.configure_plain(domain="*", passwords={"ann": "secret"})
    authenticator.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)


def sock(kind, **options):
    s = ctx.socket(kind)
    s.linger = 0
    s.rcvtimeo = s.sndtimeo = WAIT
    for name, value in SECURITY.items():
        setattr(s, name, value.encode() if isinstance(value, str) else value)
    for name, value in options.items():
        setattr(s, name, value)
    return s


def ask(s, *frames):
    s.send_multipart(frames)
    return s.recv_multipart()


def want(got, *frames):
    if got != list(frames):
        sys.exit(f"got {[f[:40] for f in got]} ({[len(f) for f in got]} bytes), want {[len(f) for f in frames]}")


def body(size):
    return (hashlib.sha256(str(size).encode()).digest() * (size // 32 + 1))[:size]


# DEALERs and others against our ROUTER, which echoes and appends the identity
# when the first frame is "who".


def frames(endpoint):
    s = sock(zmq.DEALER)
    s.connect(endpoint)
    for m in [[b"a"], [b""], [b"", b""], [b"a", b"", b"c", b""], [b"x" * 255, b"y" * 256, b"z" * 8192]]:
        want(ask(s, *m), *m)
    for size in [160 << 10, 40_000_000, 100]:
        want(ask(s, b"uid", body(size), b""), b"uid", body(size), b"")


def identity(endpoint):
    for name in [b"worker-0", b"\x01\x00\xff", b"n" * 255]:
        s = sock(zmq.DEALER, identity=name)
        s.connect(endpoint)
        want(ask(s, b"who"), b"who", name)
    want(ask(connected(zmq.DEALER, endpoint), b"who"), b"who", b"")


def connected(kind, endpoint):
    s = sock(kind)
    s.connect(endpoint)
    return s


def req(endpoint):
    s = connected(zmq.REQ, endpoint)
    for _ in range(10):
        want(ask(s, b"a", b""), b"a", b"")


def pipeline(endpoint):
    s = connected(zmq.DEALER, endpoint)
    for i in range(1000):
        s.send_multipart([b"uid%d" % i, b"", b"p" * (i % 300)])
    for i in range(1000):
        want(s.recv_multipart(), b"uid%d" % i, b"", b"p" * (i % 300))


def heartbeat(endpoint):
    s = sock(zmq.DEALER, heartbeat_ivl=50, heartbeat_timeout=20000, heartbeat_ttl=30000)
    monitor = s.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
    s.connect(endpoint)
    want(ask(s, b"a"), b"a")
    time.sleep(0.7)
    want(ask(s, body(8_000_000)), body(8_000_000))
    if monitor.poll(0):
        sys.exit("the connection was lost")


def restart(endpoint):
    """Says "up", then asks until it is answered again after the ROUTER was gone."""
    s = connected(zmq.DEALER, endpoint)
    want(ask(s, b"before"), b"before")
    print("up", flush=True)
    sys.stdin.readline()  # the ROUTER is another one now
    s.rcvtimeo = 100
    end = time.monotonic() + WAIT / 1000
    while time.monotonic() < end:
        s.send(b"after")
        try:
            want(s.recv_multipart(), b"after")
            return
        except zmq.Again:
            pass
    sys.exit("no answer after the restart")


def refused(endpoint, kind):
    s = sock(getattr(zmq, kind))
    failed = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    monitor = s.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    s.connect(endpoint)
    if not monitor.poll(WAIT):
        sys.exit("nothing happened")


def denied(endpoint):
    s = sock(zmq.DEALER)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    monitor = s.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    s.connect(endpoint)
    if not monitor.poll(WAIT):
        sys.exit("nothing happened")
    print(zmq.utils.monitor.recv_monitor_message(monitor)["event"].name, flush=True)


# ROUTERs and others for our DEALER: they print their endpoint, and live until
# their input ends.


def router(endpoint, *_):
    serve(sock(zmq.ROUTER), endpoint)


def router_heartbeat(endpoint, *_):
    serve(sock(zmq.ROUTER, heartbeat_ivl=50, heartbeat_timeout=20000, heartbeat_ttl=30000), endpoint)


def bound(endpoint, kind):
    serve(sock(getattr(zmq, kind)), endpoint)


def serve(s, endpoint):
    s.bind(endpoint)
    print(s.last_endpoint.decode(), flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    if s.socket_type in (zmq.ROUTER, zmq.REP):
        poller.register(s, zmq.POLLIN)
    end = time.monotonic() + 6 * WAIT / 1000
    while time.monotonic() < end:
        ready = dict(poller.poll(1000))
        if sys.stdin.fileno() in ready:
            return
        if s in ready:
            m = s.recv_multipart()
            s.send_multipart(m + m[:1] if m[1:2] == [b"who"] else m)


# SUB and PUB against ours.


def subscribes(endpoint, kind):
    s = sock(getattr(zmq, kind))
    s.connect(endpoint)
    tell = s.send if kind == "XSUB" else None
    for t in [b"a", b"b"]:
        tell(b"\x01" + t) if tell else s.subscribe(t)
    want(s.recv_multipart(), b"a1", b"")
    want(s.recv_multipart(), b"b", b"x" * (1 << 20))
    want(s.recv_multipart(), b"a end")
    tell(b"\x00a") if tell else s.unsubscribe(b"a")
    want(s.recv_multipart(), b"b end")


def publishes(endpoint, kind):
    s = sock(getattr(zmq, kind))
    s.bind(endpoint)
    print(s.last_endpoint.decode(), flush=True)
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    end = time.monotonic() + 2 * WAIT / 1000
    while time.monotonic() < end and not poller.poll(20):
        s.send_multipart([b"a", b"ready"])
    for m in [[b"c", b"no"], [b"b", b"x" * (1 << 20)], [b"a", b"", b"last"]]:
        s.send_multipart(m)
    if kind == "XPUB":
        want([s.recv(), s.recv()], b"\x01a", b"\x01b")
        want([s.recv()], b"\x00a")
    else:
        sys.stdin.readline()
        sys.stdin.read()


try:
    globals()[sys.argv[1]](*sys.argv[2:])
finally:
    if authenticator:
        authenticator.stop()
