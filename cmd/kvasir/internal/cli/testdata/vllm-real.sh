#!/usr/bin/env bash
# vllm serve for pages that interop/vllm.sh types: the real one of $KVASIR_PAGES_VLLM with the page's flags, and with what an engine without
# a GPU needs; in bfloat16 D of vLLM 0.32 ends at an illegal instruction of its own attention on CPUs with AMX.
[ "${1:-}" = serve ] || { echo "vllm: only vllm serve is typed" >&2; exit 2; }
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 LMCACHE_TRACK_USAGE=false VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_HOST_IP="${VLLM_HOST_IP:-127.0.0.1}" \
	PYTHONPATH="$KVASIR_PAGES_SHIM${PYTHONPATH:+:$PYTHONPATH}" KV_CPU_SHIM=device
exec "$KVASIR_PAGES_VLLM/bin/python" -m vllm.entrypoints.cli.main "$@" --dtype float32 --block-size 32 --max-model-len 4096 --enforce-eager --max-num-seqs 8 --generation-config vllm
