#!/usr/bin/env python3
"""P and D of a real SGLang over Mooncake TCP behind kvasir proxy, compared with one engine that does both.

  run_pd.py --model DIR --kvasir bin/kvasir [--load N] [--restart-p] [--kill p] [--kill d]

Twelve forms of requests must be answered as one engine answers them: native, completions and chats, whole and as streams with usage, lists
of prompts, two answers to a prompt. --load N sends N requests, eight at a time, of which a third leave early; after it both engines must be
empty. --restart-p kills P (-9) and starts it again on its ports. --kill does so with P or D in the middle of another load, in which no
request may take longer than SGLang's own timeouts (--sglang-timeout) and 10 s; what is asked after the start must be right.
Prints one JSON line.
"""
import http.client
import json
import os
import queue
import random
import threading
import time

from sgl import C, Engine

PAGE = 16
LONG, SHORT, TEXT = C.prompt_ids(1100, 3), C.prompt_ids(PAGE, 4), "w1 w2 w3 w4 w5 w6 w7"
NATIVE = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
OPENAI = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT = {**OPENAI, "messages": [{"role": "user", "content": TEXT}]}
FORMS = {
    "long": ("/generate", {"input_ids": LONG, "sampling_params": NATIVE}),
    "short": ("/generate", {"input_ids": SHORT, "sampling_params": NATIVE}),
    "list": ("/generate", {"input_ids": [LONG[:200], SHORT], "sampling_params": NATIVE}),
    "two answers": ("/generate", {"text": TEXT, "sampling_params": {**NATIVE, "n": 2}}),
    "stream": ("/generate", {"text": TEXT, "sampling_params": NATIVE, "stream": True}),
    "completion": ("/v1/completions", {**OPENAI, "prompt": TEXT, "logprobs": 1}),
    "completion, stream": ("/v1/completions", {**OPENAI, "prompt": TEXT, **STREAM}),
    "completions of a list": ("/v1/completions", {**OPENAI, "prompt": [TEXT, "w9 w8 w7"]}),
    "two completions of a list": ("/v1/completions", {**OPENAI, "prompt": [TEXT, "w9 w8 w7"], "n": 2}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, stream": ("/v1/chat/completions", {**CHAT, **STREAM}),
    "two chats": ("/v1/chat/completions", {**CHAT, "n": 2}),
}


def ask(base, path, body, timeout=300):
    """The status and the answers: one object, or the events of a stream."""
    try:
        status, raw = C.call("POST", base + path, body, timeout)
    except (OSError, http.client.HTTPException) as e:
        return 0, [repr(e)]
    text = raw.decode("utf-8", "replace")
    if status == 200 and body.get("stream"):
        return status, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return status, json.loads(text) if text.startswith("[") else [json.loads(text)] if status == 200 else [text[:300]]


def meaning(status, answers):
    """What must be equal: what each choice says, and the usage."""
    if status != 200:
        return {"status": status, "error": answers}
    said, usage = {}, None
    requests = {(x.get("meta_info") or {}).get("id") for x in answers}
    for n, x in enumerate(answers):
        if "error" in x:
            return {"error": x["error"]}
        u = x.get("usage")
        usage = [u["prompt_tokens"], u["completion_tokens"]] if u else usage
        if "output_ids" in x:  # an event of a stream has all tokens so far
            said[x.get("index", 0 if len(requests) == 1 else n)] = x["output_ids"]
        for choice in x.get("choices", ()):
            piece = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            said[choice["index"]] = said.get(choice["index"], "") + piece
    return {"said": said, "usage": usage}


class Pair:
    """P and D, and the proxy before them."""

    def __init__(self, a, out):
        self.a, self.out = a, out
        self.ports, self.boot = {"p": C.free_port(), "d": C.free_port()}, C.free_port()
        self.engines = {}
        for role in "pd":
            self.start(role, wait=False)
        for e in self.engines.values():
            e.ready(a.timeout)
        port = C.free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.proxy = C.Proc("proxy", [a.kvasir, "proxy", "--port", str(port), "--pd-disaggregation", "--prefill", self.engines["p"].url, str(self.boot),
                                      "--decode", self.engines["d"].url], os.path.join(out, "proxy.log"))
        C.wait_http(self.url + "/health", self.proxy, 120)

    def start(self, role, wait=True):
        t = str(self.a.sglang_timeout)
        self.engines[role] = Engine(
            role, self.a.model, self.out, "--chat-template", template(self.out), "--disaggregation-mode", {"p": "prefill", "d": "decode"}[role],
            "--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", str(self.boot), "--hicache-size", "1",
            port=self.ports[role], page=PAGE, timeout=self.a.timeout, wait=wait, env={
                "MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": t, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": t,
                "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"})

    def use(self):
        """Requests and tokens that engines still have."""
        out = {}
        for role, e in self.engines.items():
            if not e.proc.alive():
                continue
            load = json.loads(C.http("GET", e.url + "/v1/loads", timeout=10)[1])["loads"][0]
            n = {k: load[k] for k in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
            n.update((k, v) for k, v in (load.get("disaggregation") or {}).items() if k.endswith("reqs"))
            out[role] = {k: v for k, v in n.items() if v}
        return out

    def empty(self, seconds):
        began = time.monotonic()
        while any(use := self.use()) and any(use.values()) and time.monotonic() - began < seconds:
            time.sleep(1)
        return not any(use.values()), {"seconds": round(time.monotonic() - began, 1), "in_use": use}


def template(out):
    path = os.path.join(out, "chat.jinja")
    with open(path, "w") as f:
        f.write("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    return path


def leave(url, body, after):
    """A client that closes its connection."""
    c = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    c.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(after)
    c.close()


def load(pair, n, kill=None):
    """Sends n requests, eight at a time; in the middle kill is killed."""
    rng, work, lock = random.Random(5), queue.Queue(), threading.Lock()
    R = {"ok": 0, "left": 0, "errors": {}, "longest_s": 0.0}
    for i in range(n):
        work.put((i, rng.random() < 0.3, rng.random(), C.prompt_ids(rng.randrange(40, 900), 100 + i)))

    def client():
        while True:
            try:
                i, leaves, after, ids = work.get_nowait()
            except queue.Empty:
                return
            if kill and i == n // 2:
                kill.kill()
            body = {"input_ids": ids, "stream": i % 2 == 1, "sampling_params": {**NATIVE, "max_new_tokens": 64 if leaves else 16}}
            began, error = time.monotonic(), None
            if leaves:
                try:
                    leave(pair.url, body, after)
                except OSError as e:
                    error = repr(e)
            else:
                got = meaning(*ask(pair.url, "/generate", body))
                error = None if got.get("said") else str(got)[:200]
            with lock:
                R["longest_s"] = max(R["longest_s"], round(time.monotonic() - began, 1))
                if error:
                    R["errors"][error] = R["errors"].get(error, 0) + 1
                else:
                    R["left" if leaves else "ok"] += 1

    clients = [threading.Thread(target=client) for _ in range(8)]
    for c in clients:
        c.start()
    for c in clients:
        c.join()
    return R


def right_again(pair, want):
    """Asks until an answer is right; the seconds, and what was wrong before."""
    began, wrong = time.monotonic(), []
    while (got := meaning(*ask(pair.url, *FORMS["long"]))) != want and time.monotonic() - began < 60:
        wrong.append(str(got)[:200])
        time.sleep(1)
    return got == want, {"seconds": round(time.monotonic() - began, 1), "wrong": wrong[:3]}


def main():
    ap = C.parser(__doc__)
    ap.add_argument("--model", required=True)
    ap.add_argument("--kvasir", required=True)
    ap.add_argument("--load", type=int, default=0)
    ap.add_argument("--restart-p", action="store_true")
    ap.add_argument("--kill", action="append", choices=["p", "d"], default=[])
    ap.add_argument("--sglang-timeout", type=int, default=20)
    a = ap.parse_args()
    out, R = C.begin(a, "sglang_pd", steps={})
    check = C.Checks(R)
    with C.reported(R):
        one = Engine("one", a.model, out, "--chat-template", template(out), page=PAGE, timeout=a.timeout)
        want = {name: meaning(*ask(one.url, *form)) for name, form in FORMS.items()}
        one.stop()
        check("one engine answers all forms", all("said" in w for w in want.values()), "")
        pair = Pair(a, out)
        for name, form in FORMS.items():
            began = time.monotonic()
            got = meaning(*ask(pair.url, *form, timeout=2 * a.sglang_timeout + 5))
            check(name, got == want[name], {"seconds": round(time.monotonic() - began, 2), **({} if got == want[name] else {"got": got, "want": want[name]})})
        check("empty after the forms", *pair.empty(10))
        if a.load:
            result = load(pair, a.load)
            check("load", not result["errors"], result)
            check("empty after the load", *pair.empty(10 + 2 * a.sglang_timeout))
        if a.restart_p:
            pair.engines["p"].kill()
            pair.start("p")
            check("right after P's restart", *right_again(pair, want["long"]))
        for role in a.kill:
            result = load(pair, a.load or 40, kill=pair.engines[role])
            check(f"load while {role} is killed", result["longest_s"] <= a.sglang_timeout + 10, result)
            check(f"the other engine is empty after {role} was killed", *pair.empty(10 + 2 * a.sglang_timeout))
            pair.start(role)
            check(f"right after the start of {role}", *right_again(pair, want["long"]))
        for e in pair.engines.values():
            e.stop()
        pair.proxy.stop()
        C.emit(R, check.ok)


if __name__ == "__main__":
    main()
