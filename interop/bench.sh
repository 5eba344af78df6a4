#!/usr/bin/env bash
# Races this build against the originals, in turns in one run, ratios of medians: the
# real LMCache 0.5.6 server, vLLM's hybrid coordinator and Mooncake connector,
# the C++ transfer engine, vllm-router and smg; and vllm bench serve with kvasir bench. About 50 minutes, and 10 GB the first time. Needs bin/kvasir;
# `make bench` calls it. Arguments are passed on to the drivers of lmcache, events and tiers, for example
# --lookups 300. BENCH names the parts: accuracy, lmcache, agents, events, tiers, redis, s3, sealed, timing, access, scale, coordinator, transfer, mooncake, store, proxy, sglang, clients.
# KVASIR_FLAGS are further flags of this build's server in lmcache: --memo-mib 0 has it hash each prompt, as at the first hit of a new one.
# KVASIR_BEFORE is the commit that part proxy races (cac70bb). KVASIR_BENCH_DIR is a directory on the disk for tiers; KVASIR_TRACE a trace for their hit rates.
# Not in the list, since they need vLLM: keeper (kvasir keeper under vLLM's fs tier; root, 10 GB of memory, KVASIR_TRACE) and tier (the tier socket under vLLM's manager).
set -euo pipefail
cd "$(dirname "$0")/.."
bench=${BENCH:-accuracy lmcache agents events tiers redis s3 sealed timing access scale coordinator transfer mooncake store proxy sglang clients}

# race_lmcache races the real LMCache server and this build under one client: of 0.5.6, or with RELEASE set of that one.
race_lmcache() {
	local python lmcache result=bin/race${RELEASE:-}.json
	python=$(interop/python.sh)
	lmcache=$(dirname "$python")/lmcache
	[ -z "${RELEASE:-}" ] || { . interop/lib.sh && PYTHONPATH=$(lmcache_release "$RELEASE") && export PYTHONPATH; }
	mkdir -p bin
	trap 'rm -f /dev/shm/lmcache_l1_pool_race_kvasir_*' EXIT
	"$python" interop/lmcache/mp_bench.py --l1-gb 2 --lookups 1000 --out "$result" "$@" --race \
		"$lmcache server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb 2 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto --shm-name race{port}" \
		"bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 2 --shm-name race_kvasir_{port} ${KVASIR_FLAGS:-}"
}

# race_events races this build without KV events against itself with ten subscribers of them: rows of race_lmcache.
# KVASIR_WITHOUT is another binary to race against, for example one built before something was added.
race_events() (
	local python dir
	python=$(interop/python.sh)
	mkdir -p bin
	dir=$(mktemp -d)
	trap 'rm -rf "$dir" /dev/shm/lmcache_l1_pool_race_kvasir_*' EXIT
	local flags="server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 2 --shm-name race_kvasir_{port}"
	"$python" interop/lmcache/mp_bench.py --l1-gb 2 --lookups 1500 --rounds 5 --out bin/race_events.json --subscribers 10 "ipc://$dir/{port}.events" "$@" --race \
		"${KVASIR_WITHOUT:-bin/kvasir} $flags --kv-event-log-size 0" "bin/kvasir $flags --kv-events ipc://$dir/{port}.events"
)

# race_tiers loads from and stores to tiers of both servers on one file system, beside a plain reader and
# writer with direct I/O, and opens a disk of a million objects.
race_tiers() (
	local python lmcache dir name adapter
	python=$(interop/python.sh)
	lmcache=$(dirname "$python")/lmcache
	mkdir -p bin
	dir=$(mktemp -d -p "${KVASIR_BENCH_DIR:-bin}" tiers-XXXXXX)
	dir=$(cd "$dir" && pwd)
	trap 'rm -rf "$dir"' EXIT
	local ours="bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 1 --shm-name {shm}"
	local theirs="$lmcache server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb 1 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto --shm-name {shm} --max-workers 4"
	one() { # NAME KIND COMMAND [FLAG ...]
		echo "$1" >&2
		mkdir "$dir/$1"
		"$python" interop/lmcache/l2_bench.py --l2 "$2" --dir "$dir/$1" --phases perf --a "$3" --out "bin/tiers_$1.json" "${@:4}" >/dev/null 2>"bin/tiers_$1.log" || { tail -n 5 "bin/tiers_$1.log" >&2; exit 1; }
		rm -rf "${dir:?}/$1"
	}
	for name in fs fs_native; do
		adapter="'{\"type\":\"$name\",\"base_path\":\"{dir}\"$([ $name = fs ] || echo ',"use_odirect":true')}'"
		one "lmcache_$name" dir "$theirs --l2-adapter $adapter" "$@"
		one "kvasir_$name" dir "$ours --l2-adapter $adapter" "$@"
	done
	one kvasir_disk private "$ours --disk {dir}/disk --disk-gb 4 --disk-min-free-gb 0.1 --disk-first-touch" "$@"
	one kvasir_none private "$ours" --settle 0.1 --mib 1 --rounds 1 "$@"
	"$python" interop/lmcache/tiers_table.py lmcache_fs=bin/tiers_lmcache_fs.json kvasir_fs=bin/tiers_kvasir_fs.json \
		lmcache_fs_native=bin/tiers_lmcache_fs_native.json kvasir_fs_native=bin/tiers_kvasir_fs_native.json kvasir_disk=bin/tiers_kvasir_disk.json none=bin/tiers_kvasir_none.json
	echo "Direct I/O of objects of 1 and 4 MiB: a plain reader and writer, and the disk tier"
	KVASIR_BENCH_DIR=$dir go test -run - -bench 'Read|Write' -benchtime 2s ./tier/disk | grep Benchmark
	echo "fs_native's layout beside plain files with direct I/O, without and with checksums: processor seconds a GB, the floor"
	KVASIR_BENCH_DIR=$dir go test -run - -bench Files -benchtime 3x ./tier/fs | grep Benchmark
	echo "A disk of a million objects: it is open within 1 s, and the first object is known within 100 ms"
	KVASIR_BENCH_DIR=$dir go test -run - -bench Open -benchtime 3x ./tier/disk | grep Benchmark
	[ -z "${KVASIR_TRACE:-}" ] || KVASIR_BENCH_DIR=$dir go test -run - -bench Trace -benchtime 1x -timeout 1h ./tier/disk | grep Benchmark
)

# race_sealed compares encrypted objects of 1 and 4 MiB with plain ones, per layout, one after the other and four at a time: medians of nine turns
# that alternate, and their ratio, wanted at most 1.1. s3_native and redis stand behind a link of 10 Gbit/s, too, since beside the client they share
# its processors; redis needs root for that (a network namespace). First the floor: AES-256-GCM of this machine.
race_sealed() (
	local redis port dir space=kvsealed$$
	# sealed_rows NAME PACKAGE [BENCHMARK] prints the rows of a layout.
	sealed_rows() {
		go test -run - -bench "${3:-Sealed}" -benchtime 1x "$2" | awk -v name="$1" '/^Benchmark/ {
			split($1, of, "/"); sub(/-[0-9]+$/, "", of[3])
			for (i = 3; i < NF; i += 2) m[$(i + 1)] = $i
			for (j = 1; j <= 2; j++) { w = j == 1 ? "store" : "load"
				printf "| %s | %s | %s | %s | %.0f | %.0f | %.2f |\n", name, of[2], of[3], w, m["us/" w "-plain"], m["us/" w "-sealed"], m[w "-ratio"] } }'
	}
	# start_redis ADDRESS [COMMAND ...] starts a Redis there by a command, and waits for it.
	start_redis() {
		"${@:2}" "$redis" --bind "$1" --protected-mode no --port "$port" --save "" --appendonly no --dir "$dir" >"$dir/redis.log" &
		pids+=($!)
		for _ in $(seq 100); do (exec 3<>"/dev/tcp/$1/$port") 2>/dev/null && break; sleep 0.1; done
	}
	echo "AES-256-GCM of a core, the floor:"
	go test -run - -bench AES ./tier/seal | grep Benchmark
	printf '\n| layout | object | at once | | plain, us | encrypted, us | ratio, wanted at most 1.1 |\n| --- | --- | --- | --- | --: | --: | --: |\n'
	dir=$(mktemp -d -p "${KVASIR_BENCH_DIR:-bin}" sealed-XXXXXX)
	dir=$(cd "$dir" && pwd)
	pids=()
	trap '[ ${#pids[@]} = 0 ] || kill "${pids[@]}"; ip netns del "$space" 2>/dev/null; rm -rf "$dir"' EXIT
	KVASIR_BENCH_DIR=$dir sealed_rows disk ./tier/disk
	sealed_rows "\`s3_native\`, store in the same process" ./tier/s3
	sealed_rows "\`s3_native\` over 10 Gbit/s" ./tier/s3 OverLink
	redis=$(command -v redis-server || command -v valkey-server) || { echo "neither redis-server nor valkey-server is installed: redis is left out"; return 0; }
	port=$(python3 interop/shared/ports.py)
	start_redis 127.0.0.1
	KVASIR_REDIS=127.0.0.1:$port sealed_rows "\`redis\`, server on the same machine" ./tier/redis
	if [ "$(id -u)" != 0 ] || ! ip netns add "$space" 2>/dev/null; then
		echo "no root, or no network namespaces: redis over a link is left out"
		return 0
	fi
	ip link add kvsealed0 type veth peer name eth0 netns "$space"
	ip addr add 10.231.7.1/30 dev kvsealed0
	ip link set kvsealed0 up
	ip -n "$space" addr add 10.231.7.2/30 dev eth0
	ip -n "$space" link set eth0 up
	tc qdisc add dev kvsealed0 root tbf rate 10gbit burst 256k latency 50ms
	tc -n "$space" qdisc add dev eth0 root tbf rate 10gbit burst 256k latency 50ms
	start_redis 10.231.7.2 ip netns exec "$space"
	KVASIR_REDIS=10.231.7.2:$port sealed_rows "\`redis\` over 10 Gbit/s" ./tier/redis
)

# race_timing has one tenant probe the prompts of another one: area under the curve of the times, of a shared namespace, own salts, and own salts
# with --timing-shield. KVASIR_TIMING is the number of probes.
race_timing() {
	KVASIR_TIMING=${KVASIR_TIMING:-10000} go test -count 1 -run Timing -v -timeout 60m ./interop/timing | grep -v '^=== \|^ *--- PASS\|^PASS$'
}

# race_access compares the proxy with API keys, https and networks with one that has none: added medians of nine turns that alternate, wanted at most 1.3.
race_access() {
	KVASIR_ACCESS=${KVASIR_ACCESS:-200} go test -count 1 -run Access -v -timeout 20m ./interop/timing | grep -v '^=== \|^ *--- PASS\|^PASS$'
}

# race_redis puts LMCache's resp adapter, ours and a plain loop over one Redis, in turns.
race_redis() {
	local python lmcache redis
	redis=$(command -v redis-server || command -v valkey-server) || { echo "neither redis-server nor valkey-server is installed: part redis is left out"; return 0; }
	python=$(interop/python.sh)
	lmcache=$(dirname "$python")/lmcache
	CGO_ENABLED=0 go build -o bin/plain ./interop/bench/plain
	local adapter="'{\"type\":\"resp\",\"host\":\"127.0.0.1\",\"port\":{l2port}}'"
	"$python" interop/lmcache/l2_race.py --l2 redis --redis "$redis" --plain bin/plain --out bin/race_redis.json \
		--a "$lmcache server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb 1 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto --shm-name {shm} --max-workers 4 --l2-adapter $adapter" \
		--b "bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 1 --shm-name {shm} --l2-adapter $adapter" "$@"
}

# race_s3 puts this build and plain parallel GETs over one bucket, in turns.
race_s3() {
	local python
	python=$(interop/python.sh)
	CGO_ENABLED=0 go build -o bin/plain ./interop/bench/plain
	(cd interop/s3 && CGO_ENABLED=0 go build -o ../../bin/s3-store .)
	local adapter="'{\"type\":\"s3\",\"s3_endpoint\":\"http://127.0.0.1:{l2port}\",\"s3_bucket\":\"{bucket}\",\"aws_access_key_id\":\"test\",\"aws_secret_access_key\":\"test\"}'"
	"$python" interop/lmcache/l2_race.py --l2 s3 --s3-cmd 'bin/s3-store -addr 127.0.0.1:{s3port}' --plain bin/plain --out bin/race_s3.json \
		--b "bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 1 --shm-name {shm} --l2-adapter $adapter" "$@"
}

# race_scale measures this build alone: the longest holds of the store's lock, long
# conversations, a restart over a full pool, idle peers, silent peers of P→D.
race_scale() {
	go test -run - -bench Hold -benchtime 5x ./store | grep Benchmark
	go test -run - -bench ManyConversations -benchtime 20x ./server | grep Benchmark
	echo "A restart over 8 GiB that are still to be compared: first answer under 100 ms, p99 of others at most 3 x"
	KVASIR_RESTART_GIB=8 go test -run - -bench RestartUncompared -benchtime 2x ./cmd/kvasir/internal/cli | grep Benchmark
	echo "1,000 streams of kvasir engine, a token each in every step: 10 us of processor time are a token each 10 ms on one core"
	GOMAXPROCS=1 go test -run - -bench Streams -benchtime 3x ./sim/api | grep Benchmark
	go test -run - -bench SilentPeers -benchtime 1x ./mooncake | grep Benchmark
	(
		python=python3
		. interop/lib.sh
		start_server idle --l1-size-gb 0.05
		python3 interop/lmcache/idle_peers.py "$server_pid" "127.0.0.1:$port"
	)
}

# race_accuracy plays the published tables in virtual time; it needs nothing but this build.
race_accuracy() {
	bin/kvasir sim table
	bin/kvasir sim accuracy --write docs/measured/accuracy-tables.md
}

# race_agents plays coding agents on a store with a disk of the pool's size, for each time at which chunks are written there.
race_agents() {
	go test -run - -bench Agents -benchtime 1x ./cmd/kvasir/internal/cli
}

# vllm_python prints the Python of an environment with vLLM, which it makes if there is none.
vllm_python() {
	local dir=${VLLM_ENV:-${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6}
	[ -n "${VLLM_ENV:-}" ] || interop/vllm/setup_venv.sh "$dir" >&2
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
	if [ "$(id -u)" = 0 ] && command -v ip >/dev/null && ip netns list >/dev/null 2>&1; then
		echo "pulls of real prompts between two network namespaces"
		"$python" interop/transfer/pulls.py --kvasir 'bin/kvasir transfer' --rounds 5
	else
		echo "no root or no ip: pulls between network namespaces are left out"
	fi
	echo "blocks on loopback"
	"$python" interop/transfer/compare.py --kvasir 'bin/kvasir transfer' --rounds 5
	"$python" interop/transfer/curves.py --kvasir 'bin/kvasir transfer' --rounds 3
}

# race_proxy races kvasir proxy, with its prefix-aware policy, against vllm-router and smg in turn,
# in front of the same mock engines: P/D and engines that do both.
race_proxy() {
	local python
	python=$(interop/python.sh interop/requirements-proxy.txt)
	"$python" interop/proxy/race.py --bin "$(dirname "$python")" --targets direct,forward,vllm-router-rr,vllm-router-pd-rr,smg-rr,smg-pd-rr \
		--conns 1,16,64,256 --stream on --shared-conns 0 --rate-share 0.6 --out bin/race_proxy.json \
		--candidate 'bin/kvasir --log-level warn proxy --port {port} --policy prefix_aware --vllm-pd-disaggregation --kv-connector mooncake {pd_flags}' \
		--candidate-plain 'bin/kvasir --log-level warn proxy --port {port} --policy prefix_aware --worker-urls {workers}' | grep '^|'
	echo "The hand-over from P to D, simulated engines that compute at once: P and D together, and one after the other"
	go test -run - -bench Handover -benchtime 1000x ./proxy | grep Benchmark
	"$python" interop/proxy/streams.py --kvasir bin/kvasir --streams 5000
	"$python" interop/proxy/bodies.py --kvasir bin/kvasir
	race_proxy_before "$python"
}

# race_sglang races kvasir proxy against sglang-router and smg before the same mock P and D of SGLang.
race_sglang() {
	local python
	python=$(interop/python.sh interop/requirements-routers.txt)
	"$python" interop/proxy/race.py --sglang --bin "$(dirname "$python")" --targets direct,sglang-router-rr,smg-sglang-rr --sizes "${SIZES:-2KiB,16KiB,220KiB,1MiB}" \
		--conns "${CONNS:-1,16,64}" --stream "${STREAM:-on,off}" --shared-conns 0 --rounds "${ROUNDS:-3}" --seconds "${ROUND_SECONDS:-1.2}" --rate-share 0.6 --out bin/race_sglang.json \
		--candidate 'bin/kvasir --log-level warn proxy --port {port} --pd-disaggregation {pd_flags}' | grep '^|'
}

# race_proxy_before races the proxy of the commit KVASIR_BEFORE and this build: the same requests through one P and one D, two of each,
# and two engines that do both, with both policies; the former build also races itself, which shows the noise of the machine. No median of
# the rounds' ratios may be above 1.1, beyond that noise.
race_proxy_before() (
	local before=${KVASIR_BEFORE:-cac70bb} dir args=() name policy build
	git cat-file -e "$before^{commit}" 2>/dev/null || { echo "no commit $before here: the race against an earlier build is left out"; return 0; }
	dir=$(mktemp -d)
	trap 'rm -rf "$dir"' EXIT
	git archive "$before" | tar -x -C "$dir"
	(cd "$dir" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o kvasir ./cmd/kvasir)
	local pd='--vllm-pd-disaggregation --kv-connector mooncake {pd_flags}'
	for policy in round_robin prefix_aware; do
		for name in 1P1D 2P2D plain; do
			for build in "$dir" bin; do
				args+=(--add "${build/#$dir/$before}-$name-$policy" "$([ $name = 1P1D ] && echo 1 || echo 2)"
					"$build/kvasir --log-level warn proxy --port {port} --policy $policy $([ $name = plain ] && echo '--worker-urls {workers}' || echo "$pd")")
			done
			args+=(--ratio "$before-$name-$policy" "bin-$name-$policy")
		done
	done
	args+=(--add "$before-itself" 2 "$dir/kvasir --log-level warn proxy --port {port} --policy prefix_aware $pd" --ratio "$before-2P2D-prefix_aware" "$before-itself")
	"$1" interop/proxy/race.py --bin "$(dirname "$1")" --targets direct --rounds "${ROUNDS:-5}" --seconds "${ROUND_SECONDS:-1}" --sizes "${SIZES:-2KiB,220KiB}" --conns "${CONNS:-1,16,64}" --stream on --shared-conns 0 \
		--out bin/race_proxy_before.json "${args[@]}" | grep -A 1000 '| Pair |'
)

# race_clients compares the figures of two clients of one engine: they are to agree within 2 %.
race_clients() {
	interop/bench/agree.sh
}

# race_store races the C++ client of Mooncake Store against ours, over the memory of each.
race_store() {
	CGO_ENABLED=0 go build -o bin/store-bench ./interop/store/bench
	python3 interop/store/race.py bin/kvasir bin/store-bench "$(interop/python.sh interop/requirements-te.txt)" --rounds 5 --seconds 0.5
}

# race_keeper prints a table of what kvasir keeper promises, as measured under vLLM's fs tier.
race_keeper() {
	"$(vllm_python)" interop/keeper/measure.py --trace "${KVASIR_TRACE:?a trace: JSON lines with hash_ids}" "$@"
}

# race_tier measures the module of kvasir vllm-tier beside memmove, another process that copies, and vLLM's fs tier.
race_tier() (
	local python dir port http server
	python=$(vllm_python)
	dir=$(mktemp -d)
	port=$(python3 interop/shared/ports.py) http=$(python3 interop/shared/ports.py)
	bin/kvasir vllm-tier >"$dir/kvasir_tier.py"
	bin/kvasir server --cold --shm-name race_kvasir_tier --l1-size-gb 3 --port "$port" --http-port "$http" --vllm-tier "$dir/socket" >"$dir/log" 2>&1 &
	server=$!
	trap 'kill $server; wait $server || true; rm -rf "$dir" /dev/shm/lmcache_l1_pool_race_kvasir_tier*' EXIT
	for _ in $(seq 100); do [ ! -S "$dir/socket" ] || break; sleep 0.1; done
	sleep "${SETTLE:-10}" # until the pool has its memory
	PYTHONPATH=$dir:interop/vllm "$python" interop/vllm/bench_tier.py --socket "$dir/socket" "$@" 2>"$dir/err" || { tail -n 5 "$dir/err" "$dir/log" >&2; exit 1; }
)

for part in $bench; do
	case $part in
	lmcache | events | tiers | redis | s3 | keeper | tier) "race_$part" "$@" ;;
	accuracy | agents | sealed | timing | access | scale | coordinator | transfer | mooncake | store | proxy | sglang | clients) "race_$part" ;;
	*) echo "BENCH: no part $part" >&2; exit 2 ;;
	esac
done
