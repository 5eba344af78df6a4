"""Real SGLang engines on a CPU, for the drivers of this folder; C is ../vllm/common.py."""
import contextlib
import glob
import json
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "vllm"))
import common as C
from run_mooncake_store import Master, Node  # noqa: F401 - of the driver of HiCache

OFFLINE = {
    "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false", "LMCACHE_TRACK_USAGE": "false", "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1",
}


def environment(**more):
    return {**os.environ, **OFFLINE, **more}


def stop(proc, **how):
    """Ends a process group, and removes what it leaves in shared memory: a file of SGLang's scheduler, and Python's semaphores after kill -9."""
    left = set()
    members = subprocess.run(["ps", "-o", "pid=", "-g", str(proc.p.pid)], capture_output=True, text=True, check=False).stdout.split()
    for fd in (path for pid in members for path in glob.glob(f"/proc/{pid}/fd/*")):
        with contextlib.suppress(OSError):
            if (path := os.readlink(fd)).startswith("/dev/shm/sglang_loads_"):
                left.add(path)
    mapped = set()  # inodes: a semaphore is mapped under the name that it had before it was linked
    for pid in members:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as f:
            mapped.update(int(line.split()[4]) for line in f if "/dev/shm/sem." in line)
    for path in glob.glob("/dev/shm/sem.mp-*"):
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino in mapped:
                left.add(path)
    proc.kill() if how.get("kill") else proc.stop()
    for path in left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


class Engine:
    """An SGLang server of a model. Its memory is bounded by tokens: --mem-fraction-static is a share of what happens to be free."""

    def __init__(self, name, model, out, *args, port=None, page=16, timeout=600, env=None, wait=True):
        self.name, self.port = name, port or C.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.proc = C.Proc(name, [
            sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", "tiny", "--device", "cpu",
            "--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(self.port), "--page-size", str(page), "--random-seed", "0",
            "--max-total-tokens", "8192", "--mem-fraction-static", "0.4", "--disable-overlap-schedule", "--skip-server-warmup",
            "--enable-cache-report", *args], os.path.join(out, f"{name}-{time.time():.0f}.log"), environment(**(env or {})))
        if wait:
            self.ready(timeout)

    def ready(self, timeout=600):
        C.wait_http(self.url + "/health", self.proc, timeout)

    def stop(self):
        stop(self.proc)

    def kill(self):
        stop(self.proc, kill=True)

    def ask(self, ids, tokens=8, timeout=300):
        """Greedy tokens of a prompt, and how many of its tokens came from storage, which is not the engine's own cache."""
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
        status, raw = C.call("POST", self.url + "/generate", body, timeout)
        if status != 200:
            return {"status": status, "error": raw[:300].decode("utf-8", "replace"), "ids": None, "stored": 0}
        answer = json.loads(raw)
        meta = answer["meta_info"]
        return {"status": status, "ids": answer["output_ids"], "cached": meta.get("cached_tokens"), "stored": (meta.get("cached_tokens_details") or {}).get("storage") or 0}

    def flush(self):
        """Drops the engine's own cache."""
        C.http("POST", self.url + "/flush_cache", timeout=60)


def lmcache(server, out):
    """The flags with which an Engine uses a server: LMCache's client, which copies itself (engine_driven)."""
    config = os.path.join(out, "lmcache.yaml")
    with open(config, "w") as f:
        f.write(f"mp_host: 127.0.0.1\nmp_port: {server.port}\nextra_config:\n  lmcache.mp.mp_transfer_mode: engine_driven\n"
                "  lmcache.mp.mq_timeout: 30\n  lmcache.mp.heartbeat_interval: 2\n")
    return ["--enable-lmcache", "--lmcache-config-file", config]


class Server:
    """A kvasir server that can be killed and started again on its ports and its pool."""

    def __init__(self, kvasir, out, *flags):
        self.port, http = C.free_port(), C.free_port()
        self.url, self.out, self.proc = f"http://127.0.0.1:{http}", out, None
        self.shm = f"sgl_{os.getpid()}"
        self.command = [kvasir, "--log-level", "debug", "server", "--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(http), "--l1-size-gb", "0.5",
                        "--shm-name", self.shm, "--trust-unsummed", *flags]
        self.start()

    def start(self):
        self.proc = C.Proc("server", self.command, os.path.join(self.out, f"server-{time.time():.0f}.log"))
        C.wait_http(self.url + "/healthcheck", self.proc, 60)

    def kill(self):
        self.proc.kill()

    def stop(self):
        self.proc.stop()
        for path in glob.glob(f"/dev/shm/*{self.shm}*"):
            os.unlink(path)

    def status(self):
        return json.loads(C.http("GET", self.url + "/status")[1])
