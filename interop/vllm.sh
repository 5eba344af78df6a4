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
"$python" interop/vllm/make_model.py "$work/model" --kind qwen2
start_server vllm --l1-size-gb 1 --chunk-size 128
"$python" interop/vllm/run_lmcache_mp.py --model "$work/model" --server "tcp://127.0.0.1:$port" --mode engine_driven
grep -E "stored|retrieved" "$work/vllm.log"
stop_servers
