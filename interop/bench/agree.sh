#!/usr/bin/env bash
# Two clients, one engine: vllm bench serve and kvasir bench play the same trace on kvasir
# engine, and their figures are compared (agree.py). Needs bin/kvasir; ROUNDS (3) is how often.
# What else runs on the machine disturbs the last percentiles: REALTIME=1 puts engine and clients
# before it (chrt, as root).
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6
interop/vllm/setup_venv.sh "$dir" >/dev/null 2>&1
python=$dir/bin/python
. interop/lib.sh
"$python" interop/vllm/make_model.py "$work/model" --kind qwen2 >/dev/null 2>&1

# urgent PID: all its threads run before others.
urgent() { [ -z "${REALTIME:-}" ] || chrt --all-tasks --rr --pid 10 "$1" >/dev/null; }

# setting NAME GAP STEP [FLAG ...]: 24 requests of 1,000 to 2,500 tokens, GAP ms apart, at an engine
# with steps of STEP whose first tokens take 200 ms and more. A request that just misses a step
# waits for one more, which is chance: where requests overlap, steps are to be short beside that.
# FLAGs are of both clients.
setting() {
	local name=$1 gap=$2 step=$3 round
	shift 3
	"$python" - "$gap" >"$work/$name.jsonl" <<-'P'
		import json, random, sys
		rnd, used = random.Random(5), 0
		for i in range(24):
		    n = rnd.randint(1000, 2500)
		    blocks = -(-n // 512)
		    print(json.dumps(dict(timestamp=i * int(sys.argv[1]), input_length=n, output_length=rnd.randint(8, 20), hash_ids=list(range(used, used + blocks)))))
		    used += blocks
	P
	for round in $(seq "${ROUNDS:-3}"); do
		for client in vllm kvasir; do
			port=$(free_port)
			bin/kvasir engine --port "$port" --prefill-tokens-per-second 5000 --step-time "$step" --no-enable-prefix-caching >"$work/engine.log" 2>&1 &
			engine=$!
			servers="$servers $engine"
			urgent "$engine"
			for _ in $(seq 100); do
				curl -sf -m 2 "http://127.0.0.1:$port/health" >/dev/null 2>&1 && break
				sleep 0.1
			done
			play="--port $port --model simulated --dataset-name timed_trace --dataset-path $work/$name.jsonl --num-prompts 24
				--timed-trace-chunk-hash-size 512 --timed-trace-sec-multiplier 0.001 --percentile-metrics ttft,tpot,itl,e2el
				--metric-percentiles 50,90,99 --save-result --save-detailed --result-filename $work/$name.$client.$round.json"
			if [ $client = vllm ]; then
				PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 "$dir/bin/vllm" bench serve $play --tokenizer "$work/model" --temperature 0 --disable-tqdm \
					--timed-trace-label-timestamp timestamp --timed-trace-label-input-length input_length \
					--timed-trace-label-output-length output_length --timed-trace-label-hash-ids hash_ids "$@" >"$work/$client.log" 2>&1 &
			else
				bin/kvasir bench $play "$@" >"$work/$client.log" 2>&1 &
			fi
			job=$!
			until grep -qsE "Starting main benchmark run|requests of timed_trace" "$work/$client.log" || ! kill -0 "$job" 2>/dev/null; do sleep 0.05; done
			urgent "$job" || true
			wait "$job" || { tail -20 "$work/$client.log" >&2; exit 1; }
			kill "$engine"
			wait "$engine" || { cat "$work/engine.log" >&2; exit 1; }
		done
	done
	echo "== $name: vllm bench serve and kvasir bench on the same engine and trace"
	bin/kvasir bench --compare "$work/$name.vllm.1.json" "$work/$name.kvasir.1.json" --result-filename - >/dev/null # both can be read
	"$python" interop/bench/agree.py "$work/$name" || failed="$failed $name"
}

failed=

setting alone 0 50ms --max-concurrency 1
setting steady 500 10ms
[ -z "$failed" ] || { echo "no agreement:$failed" >&2; exit 1; }
