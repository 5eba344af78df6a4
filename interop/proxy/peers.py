"""Starting and stopping what race.py and faults.py measure: mock engines, peers, a candidate. Loopback only, own processes only."""
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(os.path.dirname(HERE), "shared"))
from ports import free_ports


def http(method, url, body=None, timeout=5.0):
    """(status, bytes); status 0 when nothing answered."""
    data = json.dumps(body).encode() if body is not None else None
    req = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(req, timeout=timeout) as r:
            return r.status, r.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()
    except (OSError, ValueError) as e:
        return 0, str(e).encode()


class Proc:
    """A process in its own group; stop() ends that group only."""

    def __init__(self, name, argv, logdir):
        self.name, self.argv = name, argv
        self.log = os.path.join(logdir, name + ".log")
        with open(self.log, "ab") as f:
            self.p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=f, stderr=f, start_new_session=True)
        self.pid = self.p.pid

    def alive(self):
        return self.p.poll() is None

    def stop(self, sig=signal.SIGTERM, wait=60.0):
        for s, t in ((sig, wait), (signal.SIGKILL, 5.0)):
            if not self.alive():
                return
            try:
                os.killpg(self.pid, s)
            except ProcessLookupError:
                return
            try:
                self.p.wait(t)
                return
            except subprocess.TimeoutExpired:
                pass

    def tail(self, n=15):
        with open(self.log, errors="replace") as f:
            return "".join(f.readlines()[-n:])


def wait_for(what, check, seconds, proc=None):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if proc is not None and not proc.alive():
            raise RuntimeError(f"{what}: process ended\n{proc.tail()}")
        if check():
            return
        time.sleep(0.1)
    raise RuntimeError(f"{what}: not ready in {seconds} s" + (f"\n{proc.tail()}" if proc else ""))


def build(outdir):
    """Compiles mockengine, load and forward; returns their paths."""
    out = []
    for name in ("mockengine", "load", "forward"):
        path = os.path.join(outdir, name)
        subprocess.run(["go", "build", "-o", path, "."], cwd=os.path.join(HERE, name), check=True, env={**os.environ, "CGO_ENABLED": "0"})
        out.append(path)
    return out


class Engines:
    """P and D mock engines: one process each, any number of addresses."""

    def __init__(self, binary, logdir, n=2, p_args=(), d_args=(), engine_id="engine-a"):
        ports = free_ports(3 * n)
        self.binary, self.logdir, self.p_args = binary, logdir, list(p_args)
        self.p_ports, self.b_ports, self.d_ports = ports[:n], ports[n:2 * n], ports[2 * n:]
        self.prefill = [f"http://127.0.0.1:{p}" for p in self.p_ports]
        self.boot = [f"http://127.0.0.1:{p}" for p in self.b_ports]
        self.decode = [f"http://127.0.0.1:{p}" for p in self.d_ports]
        self.start_p(engine_id)
        argv = [binary, "--name", "D"]
        for p in self.d_ports:
            argv += ["--listen", f"127.0.0.1:{p}"]
        self.d = Proc("engine-d", argv + list(d_args), logdir)
        wait_for("decode engine", lambda: http("GET", self.decode[0] + "/health")[0] == 200, 60, self.d)

    def start_p(self, engine_id):
        self.engine_id = engine_id
        argv = [self.binary, "--name", "P", "--engine-id", engine_id]
        for p in self.p_ports:
            argv += ["--listen", f"127.0.0.1:{p}"]
        for p in self.b_ports:
            argv += ["--bootstrap", f"127.0.0.1:{p}"]
        self.p = Proc("engine-p", argv + self.p_args, self.logdir)
        wait_for("prefill engine", lambda: http("GET", self.prefill[0] + "/health")[0] == 200, 60, self.p)

    def stop(self):
        self.p.stop()
        self.d.stop()


def probe(url, model="mock", stream=False, timeout=10.0, max_tokens=2):
    return http("POST", url + "/v1/completions", {"model": model, "prompt": "probe", "max_tokens": max_tokens, "stream": stream}, timeout)


# Each starter takes (engines, venv bin directory, log directory, extra arguments) and returns (Proc, base URL), ready to serve.

def _ready(name, proc, url, seconds=60):
    wait_for(name, lambda: probe(url)[0] == 200, seconds, proc)
    return proc, url


def vllm_router(e, binary_dir, logdir, pd, extra=(), name="vllm-router"):
    port, prom = free_ports(2)
    argv = [os.path.join(binary_dir, "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prom), "--log-level", "warning"]
    if pd:
        argv += ["--vllm-pd-disaggregation", "--kv-connector", "mooncake"]
        for u, b in zip(e.prefill, e.b_ports):
            argv += ["--prefill", u, str(b)]
        for u in e.decode:
            argv += ["--decode", u]
    else:
        argv += ["--worker-urls", *e.decode]
    return _ready(name, Proc(name, argv + list(extra), logdir), f"http://127.0.0.1:{port}")


def smg(e, binary_dir, logdir, pd, extra=(), name="smg"):
    port, prom = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    argv = [os.path.join(binary_dir, "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(prom),
            "--backend", "vllm", "--log-level", "warn"]
    argv += ["--pd-disaggregation"] if pd else ["--worker-urls", *e.decode]
    p = Proc(name, argv + list(extra), logdir)
    if pd:
        # The command line has no option for the connector or the engine id of a static HTTP worker; the workers API has.
        wait_for(name, lambda: http("GET", url + "/workers")[0] == 200, 30, p)
        todo = [{"url": u, "worker_type": "prefill", "bootstrap_port": b, "kv_connector": "MooncakeConnector", "kv_role": "kv_producer",
                 "kv_engine_id": e.engine_id, "runtime_type": "vllm"} for u, b in zip(e.prefill, e.b_ports)]
        todo += [{"url": u, "worker_type": "decode", "kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "runtime_type": "vllm"} for u in e.decode]
        for w in todo:
            st, raw = http("POST", url + "/workers", w)
            if st not in (200, 201, 202):
                raise RuntimeError(f"smg refused worker {w}: {st} {raw!r}")
        wait_for(name, lambda: http("GET", url + "/workers")[1].count(b'"status":"ready"') == len(todo), 30, p)
    return _ready(name, p, url)


def sglang_router(e, binary_dir, logdir, extra=(), name="sglang-router"):
    """SGLang's router before P and D of SGLang."""
    port, prom = free_ports(2)
    argv = [os.path.join(binary_dir, "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(prom),
            "--log-level", "warn", "--pd-disaggregation", *_sglang_pair(e)]
    return _ready(name, Proc(name, argv + list(extra), logdir), f"http://127.0.0.1:{port}", 120)


def smg_sglang(e, binary_dir, logdir, extra=(), name="smg-sglang"):
    """smg before P and D of SGLang."""
    port, prom = free_ports(2)
    argv = [os.path.join(binary_dir, "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(prom),
            "--backend", "sglang", "--log-level", "warn", "--pd-disaggregation", *_sglang_pair(e)]
    return _ready(name, Proc(name, argv + list(extra), logdir), f"http://127.0.0.1:{port}", 120)


def _sglang_pair(e):
    return [x for u, b in zip(e.prefill, e.b_ports) for x in ("--prefill", u, str(b))] + [x for u in e.decode for x in ("--decode", u)]


def forward(e, binary, logdir, splice, name):
    """The floor: a bare forwarder, which looks into no prompt; with splice the kernel moves the prompts."""
    (port,) = free_ports(1)
    argv = [binary, "--listen", f"127.0.0.1:{port}"] + (["--splice"] if splice else [])
    for p in e.d_ports:
        argv += ["--to", f"127.0.0.1:{p}"]
    return _ready(name, Proc(name, argv, logdir), f"http://127.0.0.1:{port}")


def candidate(e, cmd, logdir, name="candidate", n=None):
    """cmd is a shell-like line. {port} is the port to listen on; {prefill}, {bootstrap}, {decode} and {workers} are lists of
    URLs; {pd_flags} is vllm-router's spelling (--prefill URL PORT … --decode URL …). n engines of each role are used, by default all."""
    (port,) = free_ports(1)
    flags = " ".join([f"--prefill {u} {b}" for u, b in list(zip(e.prefill, e.b_ports))[:n]] + [f"--decode {u}" for u in e.decode[:n]])
    line = cmd.format(port=port, prefill=",".join(e.prefill[:n]), bootstrap=",".join(e.boot[:n]), decode=",".join(e.decode[:n]), workers=" ".join(e.decode[:n]), pd_flags=flags)
    return _ready(name, Proc(name, shlex.split(line), logdir), f"http://127.0.0.1:{port}")


def die(msg):
    sys.stderr.write(msg + "\n")
    sys.exit(1)
