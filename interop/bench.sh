#!/usr/bin/env bash
# Races this build against the originals, in turns in one run, ratios of medians: the
# real LMCache 0.5.6 server, vLLM's hybrid coordinator, Mooncake connector and bootstrap server,
# the C++ transfer engine. About 28 minutes, and 10 GB the first time. Needs bin/kvasir;
# `make bench` calls it. Arguments are passed on to the first driver, for example
# --lookups 300. BENCH names the parts: lmcache, scale, coordinator, transfer, mooncake, bootstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
bench=${BENCH:-lmcache scale coordinator transfer mooncake bootstrap}

race_lmcache() {
	local python lmcache
	python=$(interop/python.sh)
	lmcache=$(dirname "$python")/lmcache
	mkdir -p bin
	trap 'rm -f /dev/shm/lmcache_l1_pool_race_kvasir_*' EXIT
	"$python" interop/lmcache/mp_bench.py --l1-gb 2 --lookups 1000 --out bin/race.json "$@" --race \
		"$lmcache server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb 2 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto --shm-name race{port}" \
		"bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 2 --shm-name race_kvasir_{port}"
}

# race_scale measures this build alone: the longest holds of the store's lock, long
# conversations, idle peers, silent peers of P→D.
race_scale() {
	go test -run - -bench Hold -benchtime 5x ./store | grep Benchmark
	go test -run - -bench ManyConversations -benchtime 20x ./server | grep Benchmark
	go test -run - -bench SilentPeers -benchtime 1x ./mooncake | grep Benchmark
	(
		python=python3
		. interop/lib.sh
		start_server idle --l1-size-gb 0.05
		python3 interop/lmcache/idle_peers.py "$server_pid" "127.0.0.1:$port"
	)
}

vllm_python() {
	local dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6
	interop/vllm/setup_venv.sh "$dir" >&2
	echo "$dir/bin/python"
}

race_coordinator() {
	"$(vllm_python)" interop/coordinator/bench_original.py --go .
}

race_mooncake() {
	"$(vllm_python)" interop/mooncake/bench_original.py --go .
	echo "A pull of 32k tokens, our worker sides: what is not the transfer engine's time"
	go test -run - -bench Pull7B -benchtime 3x ./mooncake | grep Benchmark
}

race_transfer() {
	local python
	python=$(interop/python.sh interop/requirements-te.txt)
	"$python" interop/transfer/compare.py --kvasir 'bin/kvasir transfer' --rounds 5
	"$python" interop/transfer/curves.py --kvasir 'bin/kvasir transfer' --rounds 3
}

race_bootstrap() {
	"$(vllm_python)" interop/mooncake/bench_bootstrap.py --kvasir bin/kvasir --go . --rounds 5 2>bin/bootstrap.rounds
}

for part in $bench; do
	case $part in
	lmcache) race_lmcache "$@" ;;
	scale | coordinator | transfer | mooncake | bootstrap) "race_$part" ;;
	*) echo "BENCH: no part $part" >&2; exit 2 ;;
	esac
done
