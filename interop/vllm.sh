#!/usr/bin/env bash
# A real vLLM engine (CPU build) with the LMCacheMPConnector against this build. About
# 10 GB and some minutes the first time. Needs bin/kvasir; `make interop-vllm` calls it.
# Debian packages: libnuma1 libibverbs1 librdmacm1.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6
interop/vllm/setup_venv.sh "$dir"
python=$dir/bin/python
. interop/lib.sh

# life MODE KIND [FLAG ...]: prompts computed, stored, and after kill -9 and a restart of
# the server loaded again with the same output.
life() {
	local mode=$1 kind=$2
	shift 2
	echo "== $mode, $kind: kill -9 of the server between store and load"
	"$python" interop/vllm/make_model.py "$work/$kind" --kind "$kind" >/dev/null
	start_phoenix "$mode" --l1-size-gb 1 --chunk-size 128 "$@"
	"$python" interop/vllm/run_lmcache_mp.py --model "$work/$kind" --server "tcp://127.0.0.1:$port" --mode "$mode" \
		--between "sh $work/$mode.kill" --out "$work/$mode"
	grep -E "stored|retrieved|took over" "$work/$mode.log"
	stop_servers
}

life engine_driven qwen2
life lmcache_driven gemma3 --separate-object-groups
