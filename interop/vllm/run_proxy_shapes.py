#!/usr/bin/env python3
"""Request shapes through a P/D proxy over real vLLM engines with the MooncakeConnector.

P and D are started on fixed ports under a running registry, behind a running proxy (--proxy). Each shape is sent to the
proxy and to D alone: lists of prompts, several answers of a prompt, chats, responses and messages, each as a stream and
not. The answers must be equal: the same text, token ids where the API has them, and log-probabilities within 0.002. After
each shape P must have no block in use within 5 s. With --clients URL, the OpenAI and Anthropic clients of that Python are
run against the proxy. With --kill-p, P is stopped and then killed in the middle of two streams, while comments keep them alive:
each client gets an answer or an error within 5 s.

--dialect names the connector: mooncake (vLLM 0.32, needs --bootstrap), nixl (0.32 with the nixl package), mooncake-0.13 (vLLM 0.13,
with a model of as many KV heads as a block has tokens).
Prints one JSON line.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import common as C

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"

# What an API needs to be answered by, and to stop at.
CLIENTS = """
import json, sys
base, out = sys.argv[1], {}
import openai
c = openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=120)
text = "w10 w20 w30 " * 40
r = c.completions.create(model="tiny", prompt=[text, text + "w7"], max_tokens=4, temperature=0)
out["completions"] = len(r.choices) == 2 and r.usage.completion_tokens == 8
parts = list(c.completions.create(model="tiny", prompt=[text, text + "w7"], max_tokens=4, temperature=0, stream=True))
out["completions_stream"] = {x.index for p in parts for x in p.choices} == {0, 1}
m = [{"role": "user", "content": text}]
r = c.chat.completions.create(model="tiny", messages=m, max_tokens=4, temperature=0)
out["chat"] = r.choices[0].finish_reason == "length"
parts = list(c.chat.completions.create(model="tiny", messages=m, max_tokens=4, temperature=0, stream=True))
out["chat_stream"] = parts[-1].choices[0].finish_reason == "length"
r = c.responses.create(model="tiny", input=text, max_output_tokens=4, temperature=0)
out["responses"] = r.status in ("completed", "incomplete")
last = [e.type for e in c.responses.create(model="tiny", input=text, max_output_tokens=4, temperature=0, stream=True)][-1]
out["responses_stream"] = last in ("response.completed", "response.incomplete")
import anthropic
a = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=120)
r = a.messages.create(model="tiny", messages=m, max_tokens=4, extra_body={"temperature": 0})
out["messages"] = r.stop_reason == "max_tokens"
with a.messages.stream(model="tiny", messages=m, max_tokens=4, extra_body={"temperature": 0}) as s:
    s.until_done()
    out["messages_stream"] = s.get_final_message().stop_reason == "max_tokens"
print(json.dumps(out))
"""


def words(n, seed):
    return " ".join(f"w{i % 1700}" for i in C.prompt_ids(n, seed))


def send(base, path, body, timeout=180, headers=None):
    """Status, and the answer: JSON, or the events of a stream."""
    req = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(req, timeout=timeout) as r:
            raw, status = r.read().decode(), r.status
    except urllib.error.HTTPError as e:
        raw, status = e.read().decode(), e.code
    if not body.get("stream") or status != 200:
        return status, json.loads(raw) if raw.startswith(("{", "[")) else raw
    events = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    return status, [e if e == "[DONE]" else json.loads(e) for e in events]


def merged(path, answer):
    """What a client makes of an answer: by choice its text, its token ids, its log-probabilities and why it ended."""
    out = {}
    events = answer if isinstance(answer, list) else [answer]
    for e in events:
        if e == "[DONE]":
            continue
        if e.get("error"):
            raise RuntimeError(f"error in the answer: {e['error']}")
        if path.endswith("/responses"):
            e = e.get("response", e)
            text = "".join(c.get("text", "") for o in e.get("output") or [] for c in o.get("content") or [])
            if e.get("status") in ("completed", "incomplete"):
                out[0] = {"text": text, "end": e["status"]}
            continue
        if path.endswith("/messages"):
            c = out.setdefault(0, {"text": "", "end": None})
            c["text"] += "".join(x.get("text", "") for x in e.get("content") or []) + (e.get("delta") or {}).get("text", "")
            c["end"] = e.get("stop_reason") or (e.get("delta") or {}).get("stop_reason") or c["end"]
            continue
        for x in e.get("choices", []):
            c = out.setdefault(x["index"], {"text": "", "ids": [], "logprobs": [], "end": None})
            c["text"] += x.get("text") or (x.get("message") or x.get("delta") or {}).get("content") or ""
            c["ids"] += x.get("token_ids") or []
            p = x.get("logprobs") or {}
            c["logprobs"] += p.get("token_logprobs") or [t["logprob"] for t in p.get("content") or []]
            c["end"] = x.get("finish_reason") or c["end"]
    return out


def differs(a, b):
    """Why two answers differ; None where they do not."""
    if set(a) != set(b):
        return f"choices {sorted(a)} and {sorted(b)}"
    for i in a:
        for k in a[i]:
            if k != "logprobs" and a[i][k] != b[i].get(k):
                return f"choice {i}, {k}: {a[i][k]!r} and {b[i].get(k)!r}"
        for x, y in zip(a[i].get("logprobs", []), b[i].get("logprobs", []), strict=True):
            if (x is None) != (y is None) or x is not None and abs(x - y) > 0.002:  # an echoed prompt's first token has none
                return f"choice {i}: log-probabilities {x} and {y}"
    return None


def shapes(block):
    """name, path, body"""
    def prompts(lengths):
        return [C.prompt_ids(n, 1000 + 7 * i) for i, n in enumerate(lengths)]

    base = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = {**base, "logprobs": 1, "return_token_ids": True}
    for name, lengths in (("1", [4 * block + 1]), ("2", [5 * block + 1, block // 2]), ("8", [block * (2 + i) + 3 * i for i in range(8)])):
        yield "list_" + name, "/v1/completions", {**ids, "prompt": prompts(lengths)}
    yield "texts_2", "/v1/completions", {**base, "prompt": [words(3 * block, 1), words(5 * block, 2)]}
    yield "texts_2_echo", "/v1/completions", {**base, "prompt": [words(3 * block, 6), words(4 * block, 7)], "echo": True, "logprobs": 1}
    sampled = {"temperature": 1, "seed": 11, "n": 3}
    yield "n_3", "/v1/completions", {**ids, **sampled, "prompt": prompts([4 * block + 1])[0]}
    yield "list_2_n_2", "/v1/completions", {**ids, **sampled, "n": 2, "prompt": prompts([4 * block + 1, 3 * block])}
    chat = {**base, "messages": [{"role": "user", "content": words(5 * block, 3)}]}
    yield "chat", "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}
    yield "chat_n_3", "/v1/chat/completions", {**chat, **sampled}
    yield "responses", "/v1/responses", {"model": "tiny", "temperature": 0, "max_output_tokens": 6, "input": words(5 * block, 4)}
    yield "messages", "/v1/messages", {"model": "tiny", "temperature": 0, "max_tokens": 6, "messages": [{"role": "user", "content": words(5 * block, 5)}]}


def refused(block):
    """What D refuses and P, which generates one token, does not: the same answer as D's alone, and P's blocks are free."""
    ids = {"model": "tiny", "temperature": 0, "prompt": C.prompt_ids(5 * block, 31)}
    yield "too_many_tokens", "/v1/completions", {**ids, "max_tokens": 100000}
    yield "too_many_tokens_list", "/v1/completions", {**ids, "max_tokens": 100000, "prompt": [C.prompt_ids(5 * block, 32), C.prompt_ids(7 * block, 33)]}
    yield "too_many_tokens_chat", "/v1/chat/completions", {"model": "tiny", "max_tokens": 100000, "messages": [{"role": "user", "content": words(5 * block, 34)}]}
    yield "empty_prompt", "/v1/completions", {**ids, "max_tokens": 4, "prompt": [C.prompt_ids(5 * block, 35), []]}
    yield "n_0", "/v1/completions", {**ids, "max_tokens": 4, "n": 0}
    yield "n_as_text", "/v1/completions", {**ids, "max_tokens": 4, "n": "three"}
    yield "lists_of_lists", "/v1/completions", {**ids, "max_tokens": 4, "prompt": [[C.prompt_ids(40, 36)], [C.prompt_ids(40, 37)]]}
    yield "rank_out_of_range", "/v1/completions", {**ids, "max_tokens": 4}, {"X-Data-Parallel-Rank": "7"}


def first_token(base, ids):
    """The first token of a greedy answer, and a request that it ends."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    status, got = send(base, "/v1/completions", body)
    token = got["choices"][0]["token_ids"][0] if status == 200 else None
    return {**body, "stop_token_ids": [token]}


def in_use(base):
    """The part of P's KV cache that requests hold."""
    m = C.metrics(base, want=("kv_cache_usage",))
    return sum(m.values())


def start(a, out):
    """P and D, once they answer, and their URLs."""
    template = os.path.join(out, "chat.jinja")
    with open(template, "w") as f:
        f.write(TEMPLATE)
    extra = ["--chat-template", template, *a.vllm_arg]
    if a.dialect != "mooncake-0.13":
        extra += ["--sse-keep-alive-interval", "1"]
    procs, bases = {}, {}
    for name, port, role in zip("PD", a.ports.split(","), ("kv_producer", "kv_consumer")):
        if a.dialect == "nixl":
            env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(C.free_port())}
            kv = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        elif a.dialect == "mooncake-0.13":
            env = {"MC_FORCE_TCP": "1", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(C.free_port())}
            kv = {"kv_connector": "MooncakeConnector", "kv_role": role}
        else:
            env = {"KV_CPU_SHIM": "device"}
            more = {"bootstrap_server_address": a.bootstrap.split("://", 1)[1]} if name == "P" else {}
            kv = {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_connector_extra_config": {"mooncake_protocol": "tcp", **more}}
        procs[name] = C.vllm("vllm-" + name, out, a.model, int(port), kv, a.block_size, dtype="float32", extra=extra, env=C.cpu_env(extra=env))
        bases[name] = f"http://127.0.0.1:{port}"
    for name, base in bases.items():
        C.wait_http(base + "/health", procs[name], a.timeout)
    for base in bases.values():
        C.complete(base, C.prompt_ids(40, 5), 2)
    return procs, bases["P"], bases["D"]


class Stream(threading.Thread):
    """A stream of a completion through the proxy: when comments and data came, and how it ended."""

    def __init__(self, proxy, ids):
        super().__init__()
        self.proxy, self.ids = proxy, ids
        self.comments, self.data, self.status, self.failure = [], [], None, None  # times, lines, and what went wrong

    def run(self):
        body = {"model": "tiny", "prompt": self.ids, "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True}
        req = urllib.request.Request(self.proxy + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(req, timeout=120) as r:
                self.status = r.status
                for line in r:
                    if line.startswith(b":"):
                        self.comments.append(time.time())
                    elif line.strip():
                        self.data.append(line.decode().strip())
        except urllib.error.HTTPError as e:
            self.status, self.failure = e.code, e.read().decode()
        except OSError as e:
            self.failure = f"{type(e).__name__}: {e}"
        self.failure = self.failure or next((line for line in self.data if line.startswith('data: {"error"')), None)
        self.ended = time.time()


def kill_p(a, p):
    """P stops in the middle of one stream and before another, and is killed 3 s later, while the second has had comments alone."""
    first, second = Stream(a.proxy, C.prompt_ids(100 * a.block_size, 77)), Stream(a.proxy, C.prompt_ids(100 * a.block_size, 78))
    first.start()
    time.sleep(0.1)
    os.killpg(p.p.pid, signal.SIGSTOP)
    second.start()
    C.until("comments come", lambda: len(second.comments) >= 2 or not second.is_alive(), 20)
    time.sleep(1)
    killed = time.time()
    os.killpg(p.p.pid, signal.SIGKILL)
    step = {"pass": True}
    for name, s in (("during", first), ("before", second)):
        s.join(60)
        after = round(s.ended - killed, 2) if not s.is_alive() else None
        step[name] = {"status": s.status, "comments": len(s.comments), "data": len(s.data), "seconds_after_kill": after, "failure": s.failure}
        step["pass"] = step["pass"] and after is not None and after < 5 and bool(s.failure or s.data[-1:] == ["data: [DONE]"])
    step["pass"] = step["pass"] and len(second.comments) >= 2 and bool(second.failure)
    return step


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--dialect", default="mooncake", choices=("mooncake", "nixl", "mooncake-0.13"))
    ap.add_argument("--bootstrap", help="http://host:port of the running registry")
    ap.add_argument("--proxy", required=True, help="URL of the running proxy")
    ap.add_argument("--ports", required=True, help="P's and D's HTTP ports")
    ap.add_argument("--clients", help="a Python with openai and anthropic")
    ap.add_argument("--kill-p", action="store_true")
    ap.add_argument("--only", help="comma separated shapes")
    ap.add_argument("--block-size", type=int, default=32)
    ap.add_argument("--out")
    ap.add_argument("--timeout", type=float, default=600)
    ap.add_argument("--vllm-arg", action="append", default=[])
    a = ap.parse_args()
    out, report = C.begin(a, "proxy_shapes", steps={}, dialect=a.dialect)
    with C.reported(report):
        procs, pb, db = start(a, out)
        C.wait_http(a.proxy + "/health", timeout=60)
        ok, served = True, (200, 404) if a.dialect == "mooncake-0.13" else (200,)  # that release does not have all APIs

        def freed():
            """What P's requests still hold after at most 5 s, and how long they held something. An idle engine of 0.13 does not look at
            what was fetched: it gets requests, and more time."""
            began = time.time()
            while in_use(pb) and time.time() < began + (60 if a.dialect == "mooncake-0.13" else 5):
                time.sleep(0.2)
                if a.dialect == "mooncake-0.13":
                    for base in (pb, db):
                        C.complete(base, C.prompt_ids(40, 5), 1)
            return {"P_in_use": in_use(pb), "P_free_after_s": round(time.time() - began, 1)}

        for name, path, body in shapes(a.block_size):
            for stream in (False, True):
                label = name + ("_stream" if stream else "")
                if a.only and label not in a.only.split(","):
                    continue
                asked = {**body, "stream": True} if stream else body
                step = report["steps"][label] = {}
                for base in (pb, db):
                    C.reset_prefix_cache(base)
                before = C.metrics(db)
                t0 = time.time()
                status, got = send(a.proxy, path, asked)
                step["seconds"] = round(time.time() - t0, 2)
                step["status"] = status
                step["D_external_hit_tokens"] = C.delta(before, C.metrics(db)).get("vllm:external_prefix_cache_hits_total", 0)
                C.reset_prefix_cache(db)
                want_status, want = send(db, path, asked)
                try:
                    step["differs"] = f"status {status} and {want_status}: {got}" if status != want_status else differs(merged(path, got), merged(path, want))
                except RuntimeError as e:
                    step["differs"] = str(e)
                step.update(freed())
                step["pass"] = status == want_status and status in served and step["differs"] is None and step["P_in_use"] == 0
                ok = ok and step["pass"]
                print(label, step, file=sys.stderr, flush=True)
        if not a.only:  # P's token must not be that one: P would keep no KV, and D wait for it
            asked = first_token(db, C.prompt_ids(5 * a.block_size, 41))
            for base in (pb, db):
                C.reset_prefix_cache(base)
            t0, before = time.time(), C.metrics(db)
            status, got = send(a.proxy, "/v1/completions", asked)
            step = report["steps"]["first_token_stops"] = {"status": status, "seconds": round(time.time() - t0, 2)}
            step["D_external_hit_tokens"] = C.delta(before, C.metrics(db)).get("vllm:external_prefix_cache_hits_total", 0)
            step["reason"] = got["choices"][0]["finish_reason"] if status == 200 else str(got)[:200]
            step["pass"] = step["reason"] == "stop" and step["seconds"] < 10
            step.update(freed())
            ok = ok and step["pass"] and step["P_in_use"] == 0
            print("first_token_stops", step, file=sys.stderr, flush=True)
        for name, path, body, *headers in refused(a.block_size):
            if a.only and name not in a.only.split(","):
                continue
            step = report["steps"][name] = {}
            (status, got), (want_status, want) = send(a.proxy, path, body, headers=headers[0] if headers else None), send(db, path, body)
            step.update(status=status, D_alone=want_status, answer=str(got)[:200], answer_of_D=str(want)[:200], **freed())
            step["pass"] = status == want_status and step["P_in_use"] == 0
            ok = ok and step["pass"]
            print(name, step, file=sys.stderr, flush=True)
        if a.clients:
            r = subprocess.run([a.clients, "-c", CLIENTS, a.proxy], capture_output=True, text=True, timeout=600, check=False)
            report["steps"]["clients"] = json.loads(r.stdout) if r.returncode == 0 else r.stderr[-2000:]
            ok = ok and r.returncode == 0 and all(report["steps"]["clients"].values())
        if a.kill_p:
            step = report["steps"]["kill_p"] = kill_p(a, procs["P"])
            ok = ok and step["pass"]
            print("kill_p", step, file=sys.stderr, flush=True)
        for p in procs.values():
            if p.alive():
                p.stop()
        C.emit(report, ok)


if __name__ == "__main__":
    main()
