#!/usr/bin/env bash
# P and D of a real vLLM (CPU build) with the MooncakeConnector, their registry being
# `kvasir bootstrap`: full attention and a hybrid model, P killed and started again
# under the running registry; then `kvasir relay` between P and D, and an engine made
# of our worker sides. Bit-equal log-probabilities and full external hits, or it
# fails. Needs bin/kvasir; `make interop-vllm` calls it. PD names the parts: qwen2,
# gemma3, relay, load, both. Two engines of 2 GB at a time, minutes each.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6
interop/vllm/setup_venv.sh "$dir"
python=$dir/bin/python
. interop/lib.sh

# start NAME COMMAND …: starts a command of bin/kvasir that takes --port and answers GET /query
# there; sets url.
start() {
	local name=$1 pid port
	shift
	port=$(free_port) url=http://127.0.0.1:$port
	bin/kvasir "$@" --port "$port" >"$work/$name.log" 2>&1 &
	pid=$!
	servers="$servers $pid"
	for _ in $(seq 100); do
		curl -sf -m 2 "$url/query" >/dev/null 2>&1 && return
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.1
	done
	cat "$work/$name.log" >&2
	echo "kvasir $1 did not start" >&2
	return 1
}

# pd NAME FLAG …: one run of the driver; its summary in short.
pd() {
	local name=$1
	shift
	"$python" interop/vllm/run_mooncake_pd.py --out "$work/$name" "$@" >"$work/$name.json" || {
		tail -c 3000 "$work/$name.json" >&2
		cat "$work"/*.log >&2
		return 1
	}
	"$python" - "$work/$name.json" <<'P'
import json, sys
r = json.loads(open(sys.argv[1]).read().strip().splitlines()[-1])
for name, s in r["steps"].items():
    hit = s.get("D_external_hit_tokens", [s[k]["D_external_hit_tokens"] for k in ("first", "second") if k in s])
    diff = s.get("max_logprob_diff", [x[1] for x in s.get("same", [])])
    print(f"  {name}: prompt {s['prompt']}, external hit {hit}, log-probability difference {diff}")
P
}

for part in ${PD:-qwen2 gemma3 relay load both}; do
	case $part in
	qwen2 | gemma3)
		echo "== vLLM P and D, $part, registry kvasir bootstrap, P killed and started again"
		"$python" interop/vllm/make_model.py "$work/$part" --kind "$part" >/dev/null
		start "bootstrap-$part" bootstrap --host 127.0.0.1 --state "$work/$part.state"
		pd "$part" --model "$work/$part" --bootstrap "$url" --restart-p
		grep -E "registered|replaced|refused" "$work/bootstrap-$part.log"
		;;
	relay)
		for kind in qwen2 gemma3; do
			echo "== vLLM P and D, $kind, with kvasir relay in between, and a second pull without P"
			"$python" interop/vllm/make_model.py "$work/relay-$kind" --kind "$kind" >/dev/null
			start "bootstrap-relay-$kind" bootstrap
			upstream=$url
			start "relay-$kind" relay --upstream "$upstream" --memory-gb 1
			pd "relay-$kind" --model "$work/relay-$kind" --bootstrap "$upstream" --relay "$url" --relay-twice
		done
		;;
	load)
		echo "== vLLM P and D with kvasir relay in between: load, aborts, kills, other weights, a prefix from memory"
		for seed in 0 1; do
			"$python" interop/vllm/make_model.py "$work/load-$seed" --kind qwen2 --seed $seed >/dev/null
		done
		start bootstrap-load bootstrap --host 127.0.0.1
		upstream=$url
		start relay-load relay --upstream "$upstream" --memory-gb 1 --prefixes
		"$python" interop/vllm/run_relay_load.py --models "$work/load-0,$work/load-1" --bootstrap "$upstream" --relay "$url" \
			--out "$work/load" >"$work/load.json" || {
			tail -c 3000 "$work/load.json" >&2
			tail -50 "$work/relay-load.log" >&2
			exit 1
		}
		"$python" -c 'import json, sys; [print("  ", k, v) for k, v in json.load(open(sys.argv[1]))["steps"].items()]' "$work/load.json"
		;;
	both)
		echo "== vLLM P and D with an engine of Sender and Receiver in between"
		go build -o "$work/both-engine" ./interop/mooncake/both
		"$python" interop/vllm/make_model.py "$work/both-model" --kind gemma3 >/dev/null
		start bootstrap-both bootstrap
		port=$(free_port)
		"$work/both-engine" --upstream "$url" --port "$port" >"$work/both.out" 2>"$work/both.log" &
		engine=$!
		servers="$servers $engine"
		pd both --model "$work/both-model" --bootstrap "$url" --relay "http://127.0.0.1:$port"
		kill -TERM "$engine"
		wait "$engine" || { tail -20 "$work/both.log" >&2; exit 1; }
		cat "$work/both.out"
		;;
	*) echo "PD: no part $part" >&2; exit 2 ;;
	esac
	stop_servers
done
echo "mooncake interop passed"
