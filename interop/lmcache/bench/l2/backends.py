"""The L2 below the servers: a directory, Redis, S3, or a private format. Each can read, change and delete single values."""
import http.client
import os
import shlex
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse

from ports import free_ports

from bench.process import stop_proc


class Slow(Exception):
    """A bounded wait ran out."""


class Dir:
    """A directory of files, names as LMCache's fs adapters use them."""

    kind = "dir"

    def __init__(self, path):
        self.path = path
        os.makedirs(path, exist_ok=True)

    def vars(self, direct=False):
        return {"dir": self.path, "l2port": 0, "bucket": ""}

    def name(self, model, rank, group, h, salt):
        s = f"{model.replace('/', '-SEP-')}@0x{rank:08x}@{group:x}@{h.hex()}" + (f"@{salt}" if salt else "")
        return s + ".data"

    def _p(self, n):
        return os.path.join(self.path, n)

    def size(self, n):
        try:
            return os.stat(self._p(n)).st_size
        except OSError:
            return None

    def read(self, n):
        with open(self._p(n), "rb") as f:
            return f.read()

    def write(self, n, data):
        with open(self._p(n) + ".x", "wb") as f:
            f.write(data)
        os.replace(self._p(n) + ".x", self._p(n))

    def resize(self, n, to):
        d = self.read(n)
        self.write(n, d[:to] + b"\xee" * max(0, to - len(d)))

    def delete(self, n):
        try:
            os.unlink(self._p(n))
        except FileNotFoundError:
            pass

    def cool(self, names):
        for n in names:
            fd = os.open(self._p(n), os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def leftovers(self):
        return sorted(f for f in os.listdir(self.path) if not f.endswith(".data"))

    def close(self):
        pass


class Proxy:
    """TCP proxy on 127.0.0.1: ``silent`` stops forwarding (connections stay open), ``hook`` runs once when a
    pattern is seen from the server's side, before these bytes go on. ``delay``: seconds that each answer waits."""

    def __init__(self, target):
        self.target = target
        self.open = threading.Event()
        self.open.set()
        self.hook, self.delay = None, 0.0
        self.lock = threading.Lock()
        self.ls = socket.socket()
        self.ls.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.ls.bind(("127.0.0.1", 0))
        self.ls.listen(256)
        self.port = self.ls.getsockname()[1]
        self.stop = False
        threading.Thread(target=self._accept, daemon=True).start()

    def on(self, patterns, fn):
        with self.lock:
            self.hook = ([p.encode() for p in patterns], fn)

    def _accept(self):
        while not self.stop:
            try:
                c, _ = self.ls.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(c,), daemon=True).start()

    def _serve(self, c):
        try:
            self.open.wait()
            s = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            s.settimeout(None)
        except OSError:
            c.close()
            return
        for x in (c, s):
            x.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._pump, args=(s, c, False), daemon=True).start()
        self._pump(c, s, True)

    def _pump(self, a, b, up):
        tail = b""
        try:
            while True:
                d = a.recv(1 << 18)
                if not d:
                    break
                if up and self.hook:
                    fn = None
                    with self.lock:
                        if self.hook and any(p in tail + d[:4096] for p in self.hook[0]):
                            fn, self.hook = self.hook[1], None
                    if fn:
                        fn()
                    tail = d[-16:]
                if not up and self.delay:
                    time.sleep(self.delay)
                self.open.wait()
                b.sendall(d)
        except OSError:
            pass
        for x in (a, b):
            try:
                x.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.stop = True
        self.open.set()
        self.ls.close()


def wait_port(port, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


class Net:
    """A network L2 of which this driver owns the process, behind a proxy."""

    def __init__(self, cmd, port):
        self.cmd, self.port, self.proc = cmd, port, None
        self.start()
        self.proxy = Proxy(port)

    def start(self):
        self.proc = subprocess.Popen(self.cmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                     start_new_session=True)
        if not wait_port(self.port, 60):
            raise Slow("the L2 process did not open its port")
        self.ready()

    def ready(self):
        pass

    def kill(self):
        self.proc.kill()
        self.proc.wait(10)

    def vars(self, direct=False):
        return {"dir": "", "l2port": self.port if direct else self.proxy.port, "bucket": "kvcache"}

    def name(self, model, rank, group, h, salt):
        return f"{model}@{rank:08x}@{group:x}@{h.hex()}" + (f"@{salt}" if salt else "")

    def resize(self, n, to):
        d = self.read(n)
        self.write(n, d[:to] + b"\xee" * max(0, to - len(d)))

    def cool(self, names):
        pass

    def leftovers(self):
        return []

    def close(self):
        self.proxy.close()
        stop_proc(self.proc)


class Redis(Net):
    kind = "redis"
    get_patterns = ("\r\nGET\r\n", "\r\nget\r\n", "\r\nMGET\r\n", "\r\nGETRANGE\r\n")

    def __init__(self, binary):
        (port,) = free_ports(1)
        self.sock = None
        super().__init__([binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                          "--dir", tempfile.gettempdir()], port)

    def call(self, *args):
        """One command on a connection of our own; the reply as bytes, int, None or an exception."""
        for attempt in (0, 1):
            try:
                if self.sock is None:
                    self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
                    self.buf = self.sock.makefile("rb")
                parts = [a if isinstance(a, bytes) else str(a).encode() for a in args]
                self.sock.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
                line = self.buf.readline()
                if not line:
                    raise OSError("closed")
                t, v = line[:1], line[1:-2]
                if t == b"-":
                    raise RuntimeError(v.decode())
                if t == b":":
                    return int(v)
                if t == b"$":
                    if int(v) < 0:
                        return None
                    return self.buf.read(int(v) + 2)[:-2]
                return v
            except OSError:
                self.sock = None
                if attempt:
                    raise

    def size(self, n):
        return self.call("STRLEN", n) or None

    def read(self, n):
        return self.call("GET", n)

    def write(self, n, data):
        self.call("SET", n, data)

    def delete(self, n):
        self.call("DEL", n)

    def ready(self):
        self.sock = None
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if self.call("PING"):
                    return
            except (OSError, RuntimeError):
                time.sleep(0.05)


class S3(Net):
    kind = "s3"
    get_patterns = ("GET /",)

    def __init__(self, cmd):
        (port,) = free_ports(1)
        super().__init__(shlex.split(cmd.replace("{s3port}", str(port))), port)

    def req(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            c.request(method, path, body=body, headers={
                "Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, "
                                 "SignedHeaders=host, Signature=0"})
            r = c.getresponse()
            return r.status, r.read(), r.getheader("content-length")
        finally:
            c.close()

    def ready(self):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if self.req("PUT", "/kvcache")[0] in (200, 409):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise Slow("the bucket could not be made")

    def _p(self, n):
        return "/kvcache/" + urllib.parse.quote(n)

    def size(self, n):
        st, _, ln = self.req("HEAD", self._p(n))
        return int(ln) if st == 200 and ln else None

    def read(self, n):
        return self.req("GET", self._p(n))[1]

    def write(self, n, data):
        self.req("PUT", self._p(n), data)

    def delete(self, n):
        self.req("DELETE", self._p(n))


class Private:
    """The server's own format in {dir}: nothing in it is looked at but its size."""

    kind = "private"

    def __init__(self, path):
        self.path = path
        os.makedirs(path, exist_ok=True)

    def vars(self, direct=False):
        return {"dir": self.path, "l2port": 0, "bucket": ""}

    def name(self, *a):
        return None

    def bytes(self):
        return sum(os.lstat(os.path.join(d, f)).st_blocks * 512 for d, _, fs in os.walk(self.path) for f in fs
                   if os.path.exists(os.path.join(d, f)))

    def leftovers(self):
        return []

    def cool(self, names):
        for d, _, fs in os.walk(self.path):
            for f in fs:
                try:
                    fd = os.open(os.path.join(d, f), os.O_RDONLY)
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
                except OSError:
                    pass

    def close(self):
        pass
