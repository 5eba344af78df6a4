#!/usr/bin/env bash
# vllm serve for pages that a test types: kvasir engine in its place, which says what vLLM says once it serves.
[ "${1:-}" = serve ] || { echo "vllm: only vllm serve is simulated" >&2; exit 2; }
args=(engine --model "$2")
shift 2
port=$TEST_VLLM_PORT
while [ $# -gt 0 ]; do
	case $1 in
	--enable-prompt-tokens-details) ;;
	--port) port=$2; shift ;;
	*) args+=("$1") ;;
	esac
	shift
done
exec kvasir "${args[@]}" --port "$port" 2> >(trap '' INT TERM; exec sed -u 's/^.*msg="the engine serves".*$/INFO:     Application startup complete./')
