#!/usr/bin/env bash
# Real vLLM engines (CPU builds) with the LMCacheMPConnector against this build: the newest,
# and three older pairs of vLLM and lmcache. About 26 GB and some minutes the first time.
# Needs bin/kvasir; `make interop-vllm` calls it. Arguments name the parts, else all are run: engine_driven, lmcache_driven,
# ipc, pages, disk, fs, fleet, mooncakestore, slow, reset, resize, events, keeper, tier, verify, 0.4.6, 0.4.7, 0.5.3, 0.5.7.
# Debian packages: libnuma1 libibverbs1 librdmacm1, and libtcmalloc-minimal4 for vLLM 0.18.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${VLLM_ENV:-${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6}
[ -n "${VLLM_ENV:-}" ] || interop/vllm/setup_venv.sh "$dir" # who names an environment has made it
python=$dir/bin/python
. interop/lib.sh

# life MODE KIND [FLAG ...]: prompts computed, stored, and after kill -9 and a restart of
# the server loaded again with the same output.
life() {
	local mode=$1 kind=$2
	shift 2
	echo "== $mode, $kind: kill -9 of the server between store and load"
	"$python" interop/vllm/make_model.py "$work/$kind" --kind "$kind" >/dev/null
	start_phoenix "$mode" --trust-unsummed --l1-size-gb 1 --chunk-size 128 "$@"
	"$python" interop/vllm/run_lmcache_mp.py --model "$work/$kind" --server "tcp://127.0.0.1:$port" --mode "$mode" \
		--between "sh $work/$mode.kill" --out "$work/$mode"
	grep -E "msg=(stored|retrieved)|took over" "$work/$mode.log"
	stop_servers
}

# below NAME FLAG ...: the same with tiers, and after the kill the pool is dropped as well:
# what is loaded comes from below it.
below() {
	local name=$1
	shift
	echo "== $name below the pool: kill -9 of the server, and an empty pool"
	start_phoenix "$name" --l1-size-gb 1 --chunk-size 128 --cold "$@"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	"$python" interop/vllm/run_lmcache_mp.py --model "$work/qwen2" --server "tcp://127.0.0.1:$port" --mode engine_driven \
		--between "sh $work/$name.kill" --between-wait 25 --out "$work/$name"
	curl -sf "http://127.0.0.1:$http/metrics" | grep -E '^kvasir_(tier_(reads|failures|corrupt)|mooncake_store_(got|missing|get_errors))_total'
	stop_servers
}

# slow: the tier is a Redis that gives 1 MB/s: the deadline holds, output is the same, other requests do not wait.
slow() {
	local binary redis listen
	binary=$(command -v redis-server || command -v valkey-server) || { echo "neither redis-server nor valkey-server is installed: no slow tier"; return 0; }
	echo "== a tier that gives 1 MB/s"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	redis=$(free_port) listen=$(free_port)
	"$binary" --port "$redis" --bind 127.0.0.1 --save "" --appendonly no --daemonize yes --pidfile "$work/redis.pid" --dir "$work" >/dev/null
	# The driver listens there before it starts the server, which is started as if it were to be killed.
	port=$(free_port) http=$(free_port)
	ports="$ports $port"
	write_phoenix slow --l1-size-gb 1 --chunk-size 128 --cold --l2-adapter "\"{\\\"type\\\":\\\"resp\\\",\\\"host\\\":\\\"127.0.0.1\\\",\\\"port\\\":$listen,\\\"request_timeout\\\":30}\""
	"$python" interop/vllm/run_slow.py --model "$work/qwen2" --server "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" \
		--redis "$redis" --listen "$listen" --restart "sh $work/slow.kill" --out "$work/slow"
	stop_servers
}

# start_cluster: a Mooncake Store whose memory is a C++ client's; sets master.
start_cluster() {
	local binary
	binary=$("$python" interop/store/cpp.py --path)
	master=127.0.0.1:$(free_port)
	LD_LIBRARY_PATH=$(dirname "$binary") "$binary" --rpc_port="${master##*:}" --metrics_port="$(free_port)" >"$work/master.log" 2>&1 &
	servers="$servers $!"
	wait_for 60 listens "${master##*:}" || { cat "$work/master.log" >&2; return 1; }
	mkfifo "$work/cpp.in"
	"$python" interop/store/cpp.py "$master" $((256 << 20)) <>"$work/cpp.in" >"$work/cpp.out" 2>&1 & # open for both: it does not end
	servers="$servers $!"
	wait_for 120 grep -q '"setup": 0' "$work/cpp.out" || { cat "$work/cpp.out" "$work/master.log" >&2; return 1; }
}

# events MODE: what the engine publishes of this server's chunks on its own KV-event socket, to vLLM's own classes.
events() {
	local mode=$1
	echo "== $mode: the engine publishes what the server stores, evicts, clears, and has after kill -9"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	start_phoenix "events-$mode" --trust-unsummed --l1-size-gb 0.00390625 --chunk-size 128 # 16 chunks
	"$python" interop/vllm/run_events.py --model "$work/qwen2" --server "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" \
		--mode "$mode" --kill "sh $work/events-$mode.kill" --out "$work/events-$mode"
	stop_servers
}

# fleet: two servers over one Redis, an engine each: what one stored is a hit at the other, and one is killed.
fleet() {
	local redis one one_http
	redis=$(command -v redis-server || command -v valkey-server) || { echo "neither redis-server nor valkey-server is installed: no two servers over one Redis"; return 0; }
	echo "== two servers over one Redis, an engine each: kill -9 of one server"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	"$redis" --port 0 --unixsocket "$work/redis.sock" --save "" --appendonly no --daemonize yes --pidfile "$work/redis.pid" --dir "$work" >/dev/null
	local over="--l1-size-gb 1 --chunk-size 128 --cold --l2-adapter '{\"type\":\"redis\",\"unix_socket\":\"$work/redis.sock\"}'"
	start_phoenix fleet-a "$over"
	one=$port one_http=$http
	start_phoenix fleet-b "$over"
	"$python" interop/vllm/run_fleet.py --model "$work/qwen2" --servers "tcp://127.0.0.1:$one" "tcp://127.0.0.1:$port" --https "http://127.0.0.1:$one_http" "http://127.0.0.1:$http" \
		--pid-file "$work/fleet-a.pid" --restart "sh $work/fleet-a.kill" --out "$work/fleet"
	grep -hE "msg=(stored|retrieved)" "$work"/fleet-[ab].log
	stop_servers
}

# reset NAME SERVERS FLAG ...: the engine's reset reaches the tiers of all SERVERS servers, over kill -9 of all of them. DELAY is
# how long other servers may still serve older chunks; LOSE, if set, a command after which the tier has lost its generation.
reset() {
	local name=$1 count=$2 urls= kills= i
	shift 2
	echo "== $name: the engine's reset and kvasir clear reach every tier of $count servers, kill -9 of all of them"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	for i in $(seq "$count"); do
		start_phoenix "reset-$name-$i" --l1-size-gb 1 --chunk-size 128 --state "$work/reset-$name-$i.state" "$@"
		urls="$urls tcp://127.0.0.1:$port" kills="${kills}sh $work/reset-$name-$i.kill; "
	done
	# shellcheck disable=SC2086
	"$python" interop/vllm/run_reset.py --model "$work/qwen2" --servers $urls --kill "$kills" --out "$work/reset-$name" \
		--wait "${DELAY:-0.2}" ${LOSE:+--lose "$LOSE"} \
		--command "bin/kvasir clear --model $work/qwen2 --force --url http://127.0.0.1:$http"
	stop_servers
}

# resize: a pool becomes smaller and larger under a running engine that loads, in a /dev/shm of 1.1 times the larger pool.
resize() {
	local large=192 small=96
	if [ -z "${RESIZE_HERE:-}" ]; then
		unshare --mount --propagation private true 2>/dev/null || { echo "no mount namespace can be made here: no pool is resized in a small /dev/shm"; return 0; }
		RESIZE_HERE=1 unshare --mount --propagation private sh -c "mount -t tmpfs -o size=$((large * 11 / 10))m none /dev/shm && exec interop/vllm.sh resize"
		return
	fi
	echo "== a pool of $large MiB becomes one of $small MiB and of $large MiB again under an engine that loads, /dev/shm has $((large * 11 / 10)) MiB"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	port=$(free_port) http=$(free_port)
	ports="$ports $port"
	write_phoenix resize --chunk-size 128
	sh "$work/resize.kill" --l1-size-gb "${large}MiB" || { cat "$work/resize.log" >&2; return 1; }
	"$python" interop/vllm/run_resize.py --model "$work/qwen2" --server "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" \
		--smaller "SIGNAL=TERM sh $work/resize.kill --l1-size-gb ${small}MiB" --larger "SIGNAL=TERM sh $work/resize.kill --l1-size-gb ${large}MiB" --out "$work/resize" ||
		{ grep -E "resized|took over|level=(WARN|ERROR)" "$work/resize.log" >&2; tail -n 30 "$work/resize/vllm.log" >&2; return 1; }
	grep -E "resized|took over|level=(WARN|ERROR)" "$work/resize.log"
	stop_servers
}

# old VLLM LMCACHE [ARG ...]: the same with engines of another time, whose next process loads
# what the first one stored; log-probabilities must be equal too.
old() {
	local vllm=$1 lmcache=$2
	shift 2
	echo "== vLLM $vllm with lmcache $lmcache: kill -9 of the server, then a new engine"
	pinned "$vllm" "lmcache==$lmcache"
	"$python" interop/vllm/make_model.py "$work/old" --kind qwen2 >/dev/null
	start_phoenix "old$lmcache" --trust-unsummed --l1-size-gb 0.5 --chunk-size 128
	LD_PRELOAD=$preload PYTHONPATH=$over "$python" interop/vllm/run_lmcache_mp.py --model "$work/old" --server "tcp://127.0.0.1:$port" \
		--dtype float32 --exact --restart --host-port --vllm-arg=--num-gpu-blocks-override --vllm-arg=256 --between "env -u LD_PRELOAD sh $work/old$lmcache.kill" --out "$work/old$lmcache" "$@"
	grep -E "msg=(stored|retrieved)|took over" "$work/old$lmcache.log"
	stop_servers
}

# newer MODE KIND [FLAG ...]: the same engine with lmcache 0.5.7rc2 over its own, which negotiates the chunk size; hybrid
# models run engine_driven too. Log-probabilities must be equal.
newer() {
	local mode=$1 kind=$2 over
	shift 2
	echo "== vLLM 0.32.0 with lmcache 0.5.7rc2, $mode, $kind: kill -9 of the server between store and load"
	over=$(lmcache_release 0.5.7rc2)
	"$python" interop/vllm/make_model.py "$work/$kind" --kind "$kind" >/dev/null
	start_phoenix "newer-$mode-$kind" --trust-unsummed --l1-size-gb 1 --chunk-size 128 "$@"
	PYTHONPATH=$over "$python" interop/vllm/run_lmcache_mp.py --model "$work/$kind" --server "tcp://127.0.0.1:$port" --mode "$mode" \
		--exact --between "env -u PYTHONPATH sh $work/newer-$mode-$kind.kill" --out "$work/newer-$mode-$kind"
	grep -E "msg=(stored|retrieved)|took over" "$work/newer-$mode-$kind.log"
	if grep -E "msg=declined" "$work/newer-$mode-$kind.log" >&2; then return 1; fi
	stop_servers
}

# verify: kvasir verify passes on two engines and on P and D, VERIFY_ROUNDS and VERIFY_PD_ROUNDS times, and finds six corruptions.
verify() {
	echo "== kvasir verify on two engines over one server with a disk"
	"$python" interop/vllm/make_model.py "$work/verify/tiny" --kind qwen2 --bytes >/dev/null
	"$python" interop/vllm/make_model.py "$work/verify-other/tiny" --kind qwen2 --bytes --seed 1 >/dev/null
	start_server verify --l1-size-gb 0.25 --chunk-size 128 --disk "$work/verify-disk" --disk-gb 1 --disk-min-free-gb 1
	"$python" interop/vllm/run_verify.py --model "$work/verify/tiny" --other "$work/verify-other/tiny" --server "tcp://127.0.0.1:$port" \
		--http "http://127.0.0.1:$http" --rounds "${VERIFY_ROUNDS:-3}" --pd-rounds "${VERIFY_PD_ROUNDS:-1}" --parts "${VERIFY_PARTS:-shared,pair}" --out "$work/verify-out"
	stop_servers
}

# ipc: the same over a UNIX socket, as between the pods of a node (docs/operate/kubernetes.md).
ipc() {
	echo "== lmcache.mp.host is a UNIX socket: kill -9 of the server between store and load"
	"$python" interop/vllm/make_model.py "$work/qwen2" --kind qwen2 >/dev/null
	start_phoenix ipc --trust-unsummed --l1-size-gb 1 --chunk-size 128 --ipc "$work/lmcache.sock:5555"
	"$python" interop/vllm/run_lmcache_mp.py --model "$work/qwen2" --server "ipc://$work/lmcache.sock:5555" --host-port --mode engine_driven \
		--between "sh $work/ipc.kill" --out "$work/ipc"
	grep -E "msg=(stored|retrieved)|took over" "$work/ipc.log"
	stop_servers
}

# pages: the pages' own vllm serve lines, in a network namespace with their addresses and ports and a /dev/shm of its own. What differs from the page is
# the model's folder, the pool's size and what an engine without a GPU needs (cmd/kvasir/internal/cli/testdata/vllm-real.sh). PAGES names some.
pages() {
	unshare --net --mount true 2>/dev/null || { echo "no namespaces can be made here: no page is typed"; return 0; }
	echo "== pages as they are typed, with real vLLM"
	"$python" interop/vllm/make_model.py "$work/bytes" --kind qwen2 --bytes >/dev/null
	go test -c -o "$work/pages.test" ./cmd/kvasir/internal/cli
	KVASIR_PAGES=${PAGES:-README.md docs/start/vllm-box.md docs/start/pd-hosts.md docs/operate/server.md docs/operate/pd.md} KVASIR_PAGES_VLLM=$dir KVASIR_PAGES_MODEL=$work/bytes KVASIR_PAGES_SHIM=$PWD/interop/vllm/shim \
		unshare --net --mount sh -euc 'ip link set lo up
			for n in 1 2 3 5 7 8; do ip address add 10.0.0.$n/24 dev lo; done
			mount -t tmpfs -o size=4g tmpfs /dev/shm
			cd cmd/kvasir/internal/cli
			exec "$0" -test.run "^TestPagesAsTyped$" -test.v -test.timeout 3600s' "$work/pages.test"
}

# tier: the real TieringOffloadingManager with the module of kvasir vllm-tier; ROUNDS times something is killed or stopped.
tier() {
	echo "== vLLM's tiered offloading over kvasir server: two engines, kill -9 and SIGSTOP of either side"
	mkdir "$work/tier"
	bin/kvasir vllm-tier >"$work/kvasir_tier.py"
	port=$(free_port) http=$(free_port)
	ports="$ports $port"
	PYTHONPATH=$work:interop/vllm "$python" interop/vllm/run_tier.py --work "$work/tier" --port "$port" --http-port "$http" --rounds "${ROUNDS:-40}" \
		2>"$work/tier.err" || { tail -n 20 "$work/tier.err" "$work/tier/server.log" >&2; return 1; }
	stop_servers
}

# keeper: the real fs offloading tier writes and reads as fast as it can, in a file system of its own that kvasir keeper holds at
# its limit.
keeper() {
	local root=$work/keeper limit=$((256 << 20)) pid
	mkdir -p "$root"
	mount -t tmpfs -o size=1g none "$root" || { echo "no file system can be mounted here: the keeper is left out"; return 0; }
	mounts="$mounts $root"
	echo "== vLLM's fs offloading tier under kvasir keeper"
	mkdir "$root/kv"
	bin/kvasir keeper "$root/kv" --max-gb "${limit}B" --state-dir "$work/keeper-state" >"$work/keeper.log" 2>&1 &
	pid=$!
	servers="$servers $pid"
	wait_for 60 bin/kvasir keeper status "$root/kv" >/dev/null 2>&1 || { cat "$work/keeper.log" >&2; return 1; }
	"$python" interop/keeper/play_trace.py --root "$root/kv" --requests 1500 --limit "$limit"
	bin/kvasir keeper status "$root/kv"
	kill -9 "$pid"
	bin/kvasir keeper "$root/kv" --max-gb "$((limit / 2))B" --state-dir "$work/keeper-state" >>"$work/keeper.log" 2>&1 &
	servers="$servers $!"
	wait_for 60 keeps_less "$root/kv" $((limit / 2)) || { echo "after kill -9 the limit does not hold within a minute" >&2; cat "$work/keeper.log" >&2; return 1; }
	bin/kvasir keeper verify "$root/kv" --state-dir "$work/keeper-state"
	echo "== the keeper's KV events beside those of vLLM's tier, to vLLM's own classes"
	mkdir "$root/events"
	bin/kvasir keeper "$root/events" --max-gb "$((16 << 20))B" --kv-events "ipc://$work/keeper.events" --kv-events-replay "ipc://$work/keeper.replay" >>"$work/keeper.log" 2>&1 &
	servers="$servers $!"
	wait_for 60 bin/kvasir keeper status "$root/events" >/dev/null 2>&1 || { cat "$work/keeper.log" >&2; return 1; }
	"$python" interop/keeper/check_events.py --root "$root/events" --events "ipc://$work/keeper.events" --replay "ipc://$work/keeper.replay"
	stop_servers
}

keeps_less() { [ "$(find "$1" -name '*.bin' -printf '%s\n' 2>/dev/null | awk '{ n += $1 } END { print n + 0 }')" -le "$2" ]; }

for part in ${*:-pages engine_driven lmcache_driven ipc disk fs fleet mooncakestore slow reset resize events keeper tier verify 0.4.6 0.4.7 0.5.3 0.5.7}; do
	case $part in
	pages) pages ;;
	engine_driven) life engine_driven qwen2 ;;
	ipc) ipc ;;
	lmcache_driven) life lmcache_driven gemma3 --separate-object-groups ;;
	disk) below disk --disk "$work/below-disk" --disk-gb 1 --disk-min-free-gb 1 --disk-first-touch ;;
	fs) below fs --l2-adapter "'{\"type\":\"fs\",\"base_path\":\"$work/below-fs\"}'" ;;
	fleet) fleet ;;
	mooncakestore)
		start_cluster
		below mooncakestore --l2-adapter "'{\"type\":\"mooncake_store\",\"master_server_addr\":\"$master\"}'"
		;;
	slow) slow ;;
	reset)
		reset disk 1 --disk "$work/reset-disk" --disk-gb 1 --disk-min-free-gb 1 --disk-first-touch
		redis=$(command -v redis-server || command -v valkey-server) || { echo "neither redis-server nor valkey-server is installed: no reset of two servers"; continue; }
		"$redis" --port 0 --unixsocket "$work/redis.sock" --save "" --appendonly no --daemonize yes --pidfile "$work/redis.pid" --dir "$work" >/dev/null
		cli="$(dirname "$redis")/$(basename "$redis" server)cli -s $work/redis.sock"
		LOSE="$cli --scan --pattern '*kvasir-generations*' | grep . | xargs $cli del" reset redis 2 --l2-adapter "'{\"type\":\"redis\",\"unix_socket\":\"$work/redis.sock\"}'"
		start_s3
		DELAY=1.5 reset s3 2 --l2-adapter "'{\"type\":\"s3_native\",\"s3_endpoint\":\"http://$s3\",\"s3_bucket\":\"kvcache\"}'"
		;;
	resize) resize ;;
	events)
		events engine_driven
		events lmcache_driven
		;;
	keeper) keeper ;;
	tier) tier ;;
	verify) verify ;;
	0.4.6) old 0.18.1 0.4.6 --mode= --shim cudastub ;;
	0.4.7) old 0.23.0 0.4.7 --mode data ;;
	0.5.3) old 0.23.0 0.5.3 --mode engine_driven ;;
	0.5.7)
		newer engine_driven qwen2
		newer engine_driven gemma3
		newer lmcache_driven gemma3 --separate-object-groups
		;;
	*) echo "vllm.sh: no part $part" >&2; exit 2 ;;
	esac
done
