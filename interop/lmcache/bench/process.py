"""Starts, measures and stops server processes: the first answered ping, memory, processor time. Summarises latencies."""
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time


def log(*a):
    print(*a, file=sys.stderr, flush=True)


def pct(xs, q):
    xs = sorted(xs)
    return xs[min(len(xs) - 1, int(q / 100.0 * len(xs)))]


def lat_summary(xs):
    return {
        "n": len(xs),
        "p50_us": round(pct(xs, 50) * 1e6, 1),
        "p99_us": round(pct(xs, 99) * 1e6, 1),
        "mean_us": round(statistics.fmean(xs) * 1e6, 1),
    }


def spawn(cmd, output=os.devnull, mode="w", shell=False):
    """Starts a command in a session of its own; its output goes to a file."""
    with open(output, mode) as f:
        return subprocess.Popen(cmd if shell else shlex.split(cmd), shell=shell, stdin=subprocess.DEVNULL, stdout=f,
                                stderr=subprocess.STDOUT, start_new_session=True)


def raw_ping_until(url, deadline, alive):
    """First answered ping, with a bare DEALER so the client import is not timed."""
    import msgspec
    import zmq

    enc = msgspec.msgpack.encode
    ctx = zmq.Context()
    s = ctx.socket(zmq.DEALER)
    s.setsockopt(zmq.LINGER, 0)
    s.setsockopt(zmq.RECONNECT_IVL, 10)
    s.setsockopt(zmq.RECONNECT_IVL_MAX, 20)
    s.connect(url)
    s.send_multipart([enc(0), enc(22), enc(None)])
    try:
        while time.monotonic() < deadline:
            if s.poll(20):
                s.recv_multipart()
                return True
            if not alive():
                return False
        return False
    finally:
        s.close()
        ctx.term()


def stop_proc(proc, grace=15):
    if proc is None:
        return
    for sig, wait in ((signal.SIGINT, grace), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if proc.poll() is not None:
            return
        proc.send_signal(sig)
        try:
            proc.wait(wait)
        except subprocess.TimeoutExpired:
            pass


def rss_tree_mb(pid):
    import psutil

    try:
        p = psutil.Process(pid)
        procs = [p] + p.children(recursive=True)
        rss = sum(x.memory_info().rss for x in procs)
        shared = sum(getattr(x.memory_info(), "shared", 0) for x in procs)
        return {
            "rss_mb": round(rss / 2**20, 1),
            "rss_minus_shared_mb": round((rss - shared) / 2**20, 1),
            "processes": len(procs),
            "threads": sum(x.num_threads() for x in procs),
        }
    except (psutil.Error, OSError) as e:
        return {"error": str(e)}


def cpu_seconds(pid):
    """User plus system time of the server so far; free of other load on the machine."""
    import psutil

    try:
        p = psutil.Process(pid)
        return sum(sum(x.cpu_times()[:2]) for x in [p] + p.children(recursive=True))
    except (psutil.Error, OSError):
        return None


def cpu_seconds_fine(pid):
    """The same with nanosecond resolution (sum over the threads alive now), where the kernel offers it."""
    import psutil

    try:
        p = psutil.Process(pid)
        total = 0
        for x in [p] + p.children(recursive=True):
            base = f"/proc/{x.pid}/task"
            for t in os.listdir(base):
                try:
                    with open(f"{base}/{t}/schedstat") as f:
                        total += int(f.read().split()[0])
                except (FileNotFoundError, ProcessLookupError):
                    if not os.path.exists("/proc/self/schedstat"):
                        return cpu_seconds(pid)
        return total / 1e9
    except (psutil.Error, OSError):
        return cpu_seconds(pid)


class CpuMeter:
    """Server CPU spent inside one or several ``with`` blocks (the sum is in ``s``)."""

    def __init__(self, pid, fine=False):
        self.pid = pid
        self.read = cpu_seconds_fine if fine else cpu_seconds
        self.s = None

    def __enter__(self):
        self.a = self.read(self.pid) if self.pid else None
        return self

    def __exit__(self, *exc):
        b = self.read(self.pid) if self.pid else None
        if self.a is not None and b is not None:
            self.s = (self.s or 0.0) + max(0.0, b - self.a)

    def per(self, n):
        return None if self.s is None or not n else round(self.s / n * 1e6, 1)


def pid_listening_on(url):
    import psutil

    port = int(url.rsplit(":", 1)[1])
    for c in psutil.net_connections("tcp"):
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid:
            return c.pid
    return None


def pid_alive(pid):
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
