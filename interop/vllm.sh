#!/usr/bin/env bash
# Real vLLM engines (CPU builds) with the LMCacheMPConnector against this build: the newest,
# and three older pairs of vLLM and lmcache. About 26 GB and some minutes the first time.
# Needs bin/kvasir; `make interop-vllm` calls it.
# Debian packages: libnuma1 libibverbs1 librdmacm1, and libtcmalloc-minimal4 for vLLM 0.18.
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

# old VLLM LMCACHE [ARG ...]: the same with engines of another time, whose next process loads
# what the first one stored; log-probabilities must be equal too.
old() {
	local vllm=$1 lmcache=$2 over preload=
	shift 2
	echo "== vLLM $vllm with lmcache $lmcache: kill -9 of the server, then a new engine"
	read -r python over < <(interop/vllm/setup_pinned.sh "$vllm" "$lmcache")
	if [ "$vllm" = 0.18.1 ]; then # its CPU worker wants both preloaded
		preload=$(ldconfig -p | sed -n 's/.*libtcmalloc_minimal\.so\.4 .*=> //p' | head -1)
		[ -n "$preload" ] || { echo "install libtcmalloc-minimal4" >&2; exit 1; }
		preload=$preload:$(dirname "$(dirname "$python")")/lib/libiomp5.so
	fi
	"$python" interop/vllm/make_model.py "$work/old" --kind qwen2 >/dev/null
	start_phoenix "old$lmcache" --l1-size-gb 0.5 --chunk-size 128
	LD_PRELOAD=$preload PYTHONPATH=$over "$python" interop/vllm/run_lmcache_mp.py --model "$work/old" --server "tcp://127.0.0.1:$port" \
		--dtype float32 --exact --restart --host-port --vllm-arg=--num-gpu-blocks-override --vllm-arg=256 --between "env -u LD_PRELOAD sh $work/old$lmcache.kill" --out "$work/old$lmcache" "$@"
	grep -E "(stored|retrieved) [0-9]+ tokens|took over" "$work/old$lmcache.log"
	stop_servers
}

old 0.18.1 0.4.6 --mode= --shim cudastub
old 0.23.0 0.4.7 --mode data
old 0.23.0 0.5.3 --mode engine_driven
