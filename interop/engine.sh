#!/usr/bin/env bash
# engine.sh [RELEASE]: our simulated engine (two ranks, every byte checked) as a client of the real LMCache server, of 0.5.6 or RELEASE, in
# both transfer modes: what one engine process stored, the next one loads, and answers with the same
# tokens. With lmcache_driven, and with 0.5.7 in all modes, also models with sliding windows and with recurrent states. INLINE=1 takes a server without shared
# memory, to which chunks travel in messages. Needs bin/kvasir; interop/run.sh calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(interop/python.sh)
. interop/lib.sh

over=
[ -z "${1:-}" ] || over=$(lmcache_release "$1")
port=$(free_port) http=$(free_port)
name=kvasir_engine_interop_$$
shared=$name
[ -z "${INLINE:-}" ] || shared=
env ${over:+"PYTHONPATH=$over"} "$(dirname "$python")/lmcache" server --host 127.0.0.1 --port "$port" --http-host 127.0.0.1 --http-port "$http" --l1-size-gb 0.5 \
	--no-l1-use-lazy --eviction-policy LRU --separate-object-groups --supported-transfer-mode auto ${shared:+--shm-name "$shared"} >"$work/lmcache.log" 2>&1 &
lmcache=$!
servers="$servers $lmcache"
trap 'finish; rm -f /dev/shm/*'"$name"'*' EXIT
if ! wait_for 300 answers "http://127.0.0.1:$http/healthcheck" "$lmcache" || gone "$lmcache"; then
	tail -n 20 "$work/lmcache.log" >&2
	exit 1
fi

# settled: nothing is staged any more. The server answers stores before others find them.
settled() {
	local status
	status=$(curl -sf -m 30 "http://127.0.0.1:$http/status") && ! grep -Eq '"staging_object_count": ?[1-9]' <<<"$status"
}

# at_rest URL: the engine has no request, and none that ended waits for its stores: only then has each rank stored.
at_rest() {
	local figures
	figures=$(curl -sf -m 30 "$1/metrics") && grep -Eq '^kvasir_engine_kept_requests(\{.*\})? 0$' <<<"$figures" &&
		grep -Eq '^vllm:num_requests_running(\{.*\})? 0$' <<<"$figures" && grep -Eq '^vllm:kv_cache_usage_perc(\{.*\})? 0$' <<<"$figures"
}

# ask NAME MODE [FLAG …]: one engine process answers one prompt of some 2,000 tokens; prints the text and the external hit.
ask() {
	local name=$1 mode=$2 api pid text hits
	shift 2
	api=$(free_port)
	bin/kvasir engine --port "$api" --tp 2 --model "$name" "$@" --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",
		"kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:'"$port"'","lmcache.mp.mp_transfer_mode":"'"$mode"'"}}' \
		>"$work/engine.log" 2>&1 &
	pid=$!
	servers="$servers $pid"
	if ! wait_for 120 answers "http://127.0.0.1:$api/health" "$pid" || gone "$pid"; then
		cat "$work/engine.log" >&2
		return 1
	fi
	text=$("$python" - "$api" "$name" <<'P'
import json, sys, urllib.request
body = {"prompt": "the quick brown fox %s " % sys.argv[2] * 240, "max_tokens": 5}
r = urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=300)
print(json.load(r)["choices"][0]["text"])
P
	)
	wait_for 120 at_rest "http://127.0.0.1:$api" "$pid" && ! gone "$pid" || { echo "$name: stores do not end" >&2; cat "$work/engine.log" >&2; return 1; }
	hits=$(curl -sf -m 30 "http://127.0.0.1:$api/metrics" | sed -n 's/^vllm:external_prefix_cache_hits_total{.*} //p')
	kill "$pid"
	wait "$pid" || { cat "$work/engine.log" >&2; return 1; }
	grep -q "wrong_kv=0" "$work/engine.log" || { cat "$work/engine.log" >&2; return 1; }
	echo "$hits$text"
}

runs=("full engine_driven" "full lmcache_driven" "windows lmcache_driven --window 300 --window 1000" "states lmcache_driven --states 1")
[ -z "${INLINE:-}" ] || runs=("inline engine_driven")
[ -z "${1:-}" ] || runs+=("groups engine_driven --window 300 --window 1000" "groupstates engine_driven --states 1") # since 0.5.7
for run in "${runs[@]}"; do
	read -r kind mode flags <<<"$run"
	first=$(ask "$kind-$mode" "$mode" $flags)
	wait_for 60 settled || { echo "$kind, $mode: stores do not end" >&2; exit 1; }
	second=$(ask "$kind-$mode" "$mode" $flags)
	[ "${first%% *}" = 0 ] && [ "${second%% *}" -ge 1536 ] && [ "${first#* }" = "${second#* }" ] ||
		{ echo "$kind, $mode: first $first, second $second" >&2; tail -n 20 "$work/lmcache.log" >&2; exit 1; }
	echo "$kind, $mode: the second engine loaded ${second%% *} tokens, same answer"
done
