#!/usr/bin/env python3
"""Writes golden results of vllm bench serve for package benchmark.

vLLM's own benchmark() runs with requests whose outcome is given, so that what it computes
and prints is its own: DIR/NAME.json has the samples, the options, the result and the table.
Usage: vectors.py DIR, with the Python of a vLLM 0.32.0.
"""
import asyncio
import contextlib
import io
import json
import os
import random
import sys
import time

from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput


def make(n, seed, failed=(), tokens=(1, 40)):
    rnd = random.Random(seed)
    out = []
    for i in range(n):
        if i in failed:
            out.append({"error": f"HTTP {500 + i % 3}", "input": 7})
            continue
        k = rnd.randint(*tokens)
        itl = [rnd.lognormvariate(-3.5, 0.6) for _ in range(k - 1)]
        ttft = rnd.lognormvariate(-1.5, 0.7)
        out.append({"ttft": ttft, "itl": itl, "latency": ttft + sum(itl), "input": rnd.randint(5, 900), "output": k, "error": ""})
    return out


def run(samples, rate, concurrency, metrics, percentiles, goodput):
    it = iter(samples)
    base = time.perf_counter() + 1  # so that no request starts before its turn
    for i, s in enumerate(samples):
        s["start"] = base + i * 0.11

    async def fake(request_func_input, session, pbar=None):
        s = next(it)
        o = RequestFuncOutput(success=not s["error"], error=s["error"], prompt_len=s["input"], start_time=s["start"])
        if o.success:
            o.ttft, o.itl, o.latency, o.output_tokens = s["ttft"], s["itl"], s["latency"], s["output"]
        return o

    serve.ASYNC_REQUEST_FUNCS["fake"] = fake
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        result = asyncio.run(serve.benchmark(
            task_type=serve.TaskType.GENERATION, endpoint_type="fake", api_url="http://127.0.0.1:1/v1/completions",
            base_url="http://127.0.0.1:1", model_id="m", model_name="m", tokenizer=object(),
            input_requests=[SampleRequest(prompt="x", prompt_len=1, expected_output_len=1) for _ in samples],
            logprobs=None, request_rate=rate, burstiness=1.0, disable_tqdm=True, num_warmups=0, profile=False,
            selected_percentile_metrics=metrics, selected_percentiles=percentiles, ignore_eos=False,
            goodput_config_dict=goodput, max_concurrency=concurrency, lora_modules=None, extra_headers=None, extra_body=None,
            ready_check_timeout_sec=0))
    table = text.getvalue()
    table = table[table.index("====="):]
    return result, table


def main():
    os.makedirs(sys.argv[1], exist_ok=True)
    inf = float("inf")
    every = ["ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"]
    cases = {
        "plain": (make(23, 1), inf, None, ["ttft", "tpot", "itl"], [99.0], {}),
        "limited": (make(60, 2, failed=(3, 17, 44)), 500.0, 64, every, [50.0, 90.0, 99.0, 99.9], {"ttft": 400.0, "tpot": 45.0}),
        "goodput": (make(31, 3), inf, 31, every, [25.0, 95.0], {"e2el": 1500.0}),
        "single": (make(4, 4, tokens=(1, 1)), inf, None, ["ttft", "tpot", "itl", "e2el"], [0.0, 100.0], {"tpot": 1.0}),
        "failed": (make(3, 5, failed=(0, 1, 2)), inf, 2, every, [99.0], {"ttft": 100.0}),
    }
    for name, (samples, rate, concurrency, metrics, percentiles, goodput) in cases.items():
        result, table = run(samples, rate, concurrency, metrics, percentiles, goodput)
        case = {"samples": samples, "rate": "inf" if rate == inf else rate, "max_concurrency": concurrency or 0, "metrics": metrics,
                    "percentiles": percentiles, "slos": [f"{k}:{v}" for k, v in goodput.items()], "result": result, "table": table}
        with open(os.path.join(sys.argv[1], name + ".json"), "w") as f:
            json.dump(case, f, indent=0, sort_keys=True)
            f.write("\n")


if __name__ == "__main__":
    main()
