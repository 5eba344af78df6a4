#!/usr/bin/env python3
"""The OpenAI Python client through kvasir proxy: simulated P and D, and an engine that records what it is sent.

client.py --kvasir bin/kvasir
"""
import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import openai
import peers

checks = []


def check(what, ok, detail=""):
    checks.append((what, bool(ok)))
    if not ok:
        print(f"FAILED: {what} {detail}", file=sys.stderr)


class Recorder(BaseHTTPRequestHandler):
    """Answers as an engine with tools and log probabilities does, and keeps the bodies."""
    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[bytes]] = []

    def log_message(self, *a):
        pass

    def reply(self, text, kind="application/json"):
        raw = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.reply('{"object":"list","data":[{"id":"m","object":"model"}]}')

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        Recorder.bodies.append(raw)
        q = json.loads(raw)
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln \\"cached_tokens\\":5"}'}}
        probs = {"content": [{"token": "ü", "logprob": -0.25, "bytes": [195, 188], "top_logprobs": []}]}
        base = {"id": "x", "created": 1, "model": "m"}
        if not q.get("stream"):
            self.reply(json.dumps({**base, "object": "chat.completion", "choices": [{"index": 0, "finish_reason": "tool_calls", "logprobs": probs,
                       "message": {"role": "assistant", "content": "ü", "tool_calls": [call]}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}}))
            return
        name, arguments = dict(call, function={"name": "weather", "arguments": ""}), call["function"]["arguments"]
        events = [{"role": "assistant", "tool_calls": [name]}] + [{"tool_calls": [{"index": 0, "function": {"arguments": c}}]} for c in arguments]
        text = "".join("data: " + json.dumps({**base, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": d, "logprobs": probs}]}) + "\n\n" for d in events)
        self.reply(text + "data: [DONE]\n\n", "text/event-stream")


def metric(url, name):
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    return float(re.search(rf"^{name}{{[^}}]*}} (\S+)", text, re.MULTILINE).group(1))


def through_p_and_d(client, p, d):
    free = [metric(u, "kvasir_engine_free_blocks") for u in (p, d)]
    prompt = [{"role": "user", "content": "tell me of fish " * 40}]
    whole = client.chat.completions.create(model="simulated", messages=prompt, max_tokens=20)
    check("an answer", whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 20, whole)
    text, usage = "", None
    for event in client.chat.completions.create(model="simulated", messages=prompt, max_completion_tokens=20, stream=True, stream_options={"include_usage": True}):
        text += "".join(c.delta.content or "" for c in event.choices)
        usage = event.usage or usage
    check("a stream is the same answer", text == whole.choices[0].message.content, text)
    check("its usage", usage and usage.completion_tokens == 20 and usage.prompt_tokens == whole.usage.prompt_tokens, usage)
    check("D's KV is P's", metric(d, "vllm:external_prefix_cache_hits_total") > 100)
    old = client.completions.create(model="simulated", prompt="once upon a time " * 30, max_tokens=5)
    check("a completion", old.usage.completion_tokens == 5, old)
    for stop_after in (0, 3):
        stream = client.chat.completions.create(model="simulated", messages=[{"role": "user", "content": f"number {stop_after} " * 60}], max_tokens=5000, stream=True)
        for i, _ in enumerate(stream):
            if i >= stop_after:
                break
        stream.close()
    peers.wait_for("all blocks are free after streams were closed", lambda: [metric(u, "kvasir_engine_free_blocks") for u in (p, d)] == free, 180)
    peers.wait_for("nothing runs", lambda: metric(d, "vllm:num_requests_running") == 0 and metric(p, "vllm:num_requests_running") == 0, 180)
    check("models", [m.id for m in client.models.list()] == ["simulated"])
    for what, error, call in (
        ("a wrong model", openai.NotFoundError, lambda: client.chat.completions.create(model="other", messages=prompt)),
        ("a wrong key", openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list()),
        ("too long a prompt", openai.BadRequestError, lambda: client.completions.create(model="simulated", prompt="a " * 40000, max_tokens=1)),
    ):
        try:
            call()
            check(what, False, "was taken")
        except error:
            check(what, True)


def same_bytes(direct, proxied):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
    for stream in (False, True):
        answers = []
        for client in (direct, proxied):
            r = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": 'ü 漢 \u0001 "quoted" \\ end'}], tools=tools, tool_choice="auto", logprobs=True, top_logprobs=3,
                seed=2**53, temperature=0.1, stream=stream, extra_body={"unknown": {"z": 1, "a": [1.50, None, -0.0]}, "min_p": 1e-7})
            if stream:
                r = list(r)
                args = "".join(c.delta.tool_calls[0].function.arguments for e in r for c in e.choices if c.delta.tool_calls)
                answers.append((args, r[-1].choices[0].logprobs.content[0].token))
            else:
                m = r.choices[0]
                answers.append((m.message.tool_calls[0].function.arguments, m.logprobs.content[0].token))
        check(f"the body is the same byte for byte, stream={stream}", Recorder.bodies[-1] == Recorder.bodies[-2], Recorder.bodies[-2:])
        check(f"tools and log probabilities, stream={stream}", answers[0] == answers[1] and answers[0][1] == "ü" and "Köln" in answers[0][0], answers)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--kvasir", required=True)
    args = ap.parse_args()
    tmp = tempfile.mkdtemp(prefix="proxy-client-")
    registry, p, d, pd, plain = peers.free_ports(5)
    recorder = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    keys = os.path.join(tmp, "keys")
    with open(os.open(keys, os.O_CREAT | os.O_WRONLY, 0o600), "w") as f:
        f.write(f"someone {hashlib.sha256(b'secret').hexdigest()} rate=1000\n")
    url = "http://127.0.0.1:%d"
    role = '{"kv_connector":"MooncakeConnector","kv_role":"kv_%s","kv_connector_extra_config":{"bootstrap_server_address":"127.0.0.1:%d"}}'
    lines = [
        ("registry", ["bootstrap", "--port", str(registry)]),
        ("p", ["engine", "--port", str(p), "--step-time", "5ms", "--kv-transfer-config", role % ("producer", registry)]),
        ("d", ["engine", "--port", str(d), "--step-time", "5ms", "--kv-transfer-config", '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}']),
        ("proxy-pd", ["proxy", "--port", str(pd), "--prefill", url % p, str(registry), "--decode", url % d, "--api-keys", keys]),
        ("proxy", ["proxy", "--port", str(plain), "--worker-urls", url % recorder.server_port]),
    ]
    procs = [peers.Proc(name, [args.kvasir, "--log-level", "warn"] + argv, tmp) for name, argv in lines]
    try:
        for port, proc in ((pd, procs[3]), (plain, procs[4])):
            peers.wait_for("kvasir proxy", lambda port=port: peers.http("GET", url % port + "/health")[0] == 200, 180, proc)
        through_p_and_d(openai.OpenAI(base_url=url % pd + "/v1", api_key="secret", max_retries=0), url % p, url % d)
        direct, proxied = (openai.OpenAI(base_url=url % port + "/v1", api_key="k", max_retries=0) for port in (recorder.server_port, plain))
        same_bytes(direct, proxied)
    finally:
        for proc in reversed(procs):
            proc.stop()
        recorder.shutdown()
    failed = [what for what, ok in checks if not ok]
    print(f"{len(checks) - len(failed)} checks passed, failed: {failed or 'none'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
