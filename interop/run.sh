#!/usr/bin/env bash
# run.sh [PART ...]: runs the real peers against this build, all parts or those named. Needs bin/kvasir; `make interop`
# calls it. Each part is a process group of its own with a folder and servers of its own; LANES of them, three by default,
# run at a time. Those that kill servers under load or measure a slow tier run alone, after the others. A part's output is
# printed whole when the part has ended, with its time. With RERUN=1 a part that failed is run once more, alone: one that
# passes then is named at the end, with its first output. One that shows a bug of ours, as a panic, a data race or wrong
# bytes, is not: .ci/again.sh. cluster, tier and store-engine may name a release of Mooncake, as in cluster@0.3.7; make
# interop-masters runs them with all others.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" != --alone ]; then
	# the longest first: at the end no lane waits for one of them
	[ $# -gt 0 ] || set -- transfer client57 tracker redis s3 cluster engine race engine57 pending client fs_native versitygw fs two generations tier zmtp sizes pickle series \
		routes store-engine events lend openai kill9-engine kill9-lmcache slow
	. .ci/again.sh
	. interop/lanes.sh "$@"
	exit
fi
part=${2:?}
python=$(interop/python.sh)
. interop/lib.sh

# passed FILE ...: how many checks of mp_bench.py passed, by its results.
passed() {
	"$python" - "$@" <<-'P'
		import json, sys
		for path in sys.argv[1:]:
		    r = json.load(open(path))
		    print(f"{r['passed']} checks passed, failed: {r['failed'] or 'none'}")
	P
}

# kill9 MODES N [CONSTRAINT ...]: kill -9 under load and restart, N times, every byte.
kill9() {
	local modes=$1 n=$2
	shift 2
	echo "== kill -9 under load, restart, every byte: $modes"
	start_phoenix kill --trust-unsummed --l1-size-gb 0.25 --l2-prefetch-load-timeout 60
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.25 --modes "$modes" --kill9 "$n" "$@" \
		--pid-file "$work/kill.pid" --restart-cmd "sh $work/kill.kill" >"$work/kill.out" 2>"$work/kill.err" ||
		{ tail -n 20 "$work/kill.err" "$work/kill.log" >&2; exit 1; }
	tail -n 1 "$work/kill.err"
}

# one_directory NAME [FLAG]: our server and LMCache's own over one directory.
one_directory() {
	echo "== one directory below this server and lmcache server: $1"
	local adapter="{\\\"type\\\":\\\"$1\\\",\\\"base_path\\\":\\\"$work/shared-$1\\\"}"
	[ "$1" = fs ] || adapter="{\\\"type\\\":\\\"$1\\\",\\\"use_odirect\\\":true,\\\"base_path\\\":\\\"$work/shared-$1\\\"}"
	start_phoenix "dir-$1" --l1-size-gb 0.125 --cold --l2-prefetch-load-timeout 120 --l2-adapter "\"$adapter\""
	timeout 900 "$python" interop/lmcache/tier.py --url "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" --kill "sh $work/dir-$1.kill" \
		--dir "$work/shared-$1" --lmcache "$(dirname "$python")/lmcache" "${@:2}" >"$work/dir-$1.out" 2>"$work/dir-$1.err" ||
		{ grep -E "^(PASS|FAIL)|not within" "$work/dir-$1.err" >&2; tail -n 5 "$work/dir-$1.log" >&2; exit 1; }
	cat "$work/dir-$1.out"
}

# slow_tier: below the server lies a Redis, `server`, that gives 1 MB/s.
slow_tier() {
	local redis listen
	redis=$(free_port) listen=$(free_port)
	"$server" --port "$redis" --bind 127.0.0.1 --save "" --appendonly no --daemonize yes --pidfile "$work/redis.pid" --dir "$work" >/dev/null
	# The script listens there before it starts the server, which is started as if it were to be killed.
	port=$(free_port) http=$(free_port)
	ports="$ports $port"
	write_phoenix slow --l1-size-gb 0.125 --cold --l2-adapter "\"{\\\"type\\\":\\\"resp\\\",\\\"host\\\":\\\"127.0.0.1\\\",\\\"port\\\":$listen,\\\"request_timeout\\\":30}\""
	timeout 240 "$python" interop/lmcache/slow.py --url "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" --kill "sh $work/slow.kill" \
		--redis "$redis" --listen "$listen" >"$work/slow.out" 2>"$work/slow.err" ||
		{ grep -E "^(PASS|FAIL)|not within" "$work/slow.err" >&2; tail -n 5 "$work/slow.log" >&2; exit 1; }
	cat "$work/slow.out"
}

# mooncake: sets te, the Python of the Mooncake that the part names, or else $TE or that of the newest.
mooncake() {
	case $part in
	*@0.3.7) te=$(interop/python.sh interop/requirements-te-old.txt) ;;
	*@*) te=$(interop/python.sh "interop/requirements-te-${part#*@}.txt") ;;
	*) te=${TE:-$(interop/python.sh interop/requirements-te.txt)} ;;
	esac
	case $part in
	*@0.3.14) interop/cuda-stub.sh "$te" ;;
	*@0.3.12) LD_LIBRARY_PATH=$("$te" -c 'import nvidia.cuda_runtime as r; print(list(r.__path__)[0] + "/lib")') && export LD_LIBRARY_PATH ;;
	esac
}

case $part in
zmtp)
	echo "== the ZMQ library of the real peers against package zmtp"
	KVASIR_PYTHON=$python go test -count=1 -timeout 600s ./zmtp
	;;
redis)
	interop/redis.sh
	;;
s3)
	interop/s3.sh
	;;
versitygw)
	interop/versitygw.sh
	;;
client)
	echo "== the real lmcache 0.5.6 client against kvasir server, both modes"
	start_server one --l1-size-gb 0.5
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
		--modes engine_driven,lmcache_driven --skip rate,lookup,transfer >"$work/one.json" 2>"$work/one.log" ||
		{ cat "$work/one.log" >&2; exit 1; }
	passed "$work/one.json"
	;;
client57)
	echo "== the real lmcache 0.5.7rc2 client against kvasir server: both modes, and inline"
	newer=$(lmcache_release 0.5.7rc2)
	start_server shm57 --l1-size-gb 0.5
	PYTHONPATH=$newer "$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
		--modes engine_driven,lmcache_driven --skip rate,lookup,transfer >"$work/shm57.json" 2>"$work/shm57.err" ||
		{ cat "$work/shm57.err" >&2; exit 1; }
	start_server inline57 --l1-size-gb 0.5 --pickle only
	PYTHONPATH=$newer "$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
		--modes engine_driven --skip rate,lookup,transfer >"$work/inline57.json" 2>"$work/inline57.err" ||
		{ cat "$work/inline57.err" >&2; exit 1; }
	passed "$work/shm57.json" "$work/inline57.json"
	;;
series)
	echo "== the series that lmcache server shows under the same driver"
	start_server series --l1-size-gb 0.125 --l2-adapter "{\"type\":\"fs\",\"base_path\":\"$work/series\"}"
	# Other parts judge the checks of this driver. The check of evictions is left out: it begins with a clear by a client
	# without workers. This server declines that clear, and the client waits a minute for an answer.
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.125 \
		--modes engine_driven,lmcache_driven --skip rate,lookup,transfer,eviction >"$work/series.json" 2>"$work/series.log" ||
		[ -s "$work/series.json" ] || { cat "$work/series.log" >&2; exit 1; }
	grep -E '^FAIL' "$work/series.log" || true
	"$python" interop/lmcache/series.py --http "http://127.0.0.1:$http" --against server/admin/testdata/lmcache-0.5.6.series
	;;
routes)
	echo "== LMCache's HTTP routes: /status, /cache/prefetches, /cache/checksums"
	mkdir "$work/routes"
	start_server routes --l1-size-gb 0.125 --l2-adapter "{\"type\":\"fs\",\"base_path\":\"$work/routes\"}"
	timeout 600 "$python" interop/lmcache/routes.py --url "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" --dir "$work/routes" \
		--status server/admin/testdata/lmcache-0.5.6.status >"$work/routes.out" 2>"$work/routes.err" || { grep -vE '^PASS' "$work/routes.err" >&2; tail -n 5 "$work/routes.log" >&2; exit 1; }
	cat "$work/routes.out"
	;;
race)
	echo "== a short race of this build against itself: rates, control messages, a full pool, and no pool is left"
	tag=interop_race_$$
	trap 'rm -f "/dev/shm/lmcache_l1_pool_$tag"*; finish' EXIT
	serve="bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 0.125 --shm-name ${tag}_"
	"$python" interop/lmcache/mp_bench.py --l1-gb 0.125 --rounds 2 --seconds 0.2 --skip lookup,transfer --race "${serve}a_{port}" "${serve}b" \
		>"$work/race.json" 2>"$work/race.err" || { tail -n 20 "$work/race.err" >&2; exit 1; }
	pools=$(find /dev/shm -name "lmcache_l1_pool_$tag*")
	[ -z "$pools" ] || { echo "the race left pools behind: $pools" >&2; exit 1; }
	grep -E '^start_to_first_ping_s' "$work/race.err"
	;;
two)
	echo "== two clients at once"
	start_server two --l1-size-gb 0.5
	for tag in a b; do
		"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
			--modes engine_driven,lmcache_driven --skip rate --lookups 20 --no-clear --run-tag $tag >"$work/$tag.json" 2>"$work/$tag.log" &
		eval "pid_$tag=$!"
		servers="$servers $!"
	done
	wait "$pid_a" || { cat "$work/a.log" >&2; exit 1; }
	wait "$pid_b" || { cat "$work/b.log" >&2; exit 1; }
	passed "$work/a.json" "$work/b.json"
	;;
pickle)
	echo "== the same client without shared memory: pickled tensors"
	start_server pickle --l1-size-gb 0.5 --pickle only
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
		--modes engine_driven --skip rate,lookup,transfer >"$work/pickle.json"
	passed "$work/pickle.json"
	;;
kill9-engine)
	kill9 engine_driven 3 --max-lost 0
	;;
kill9-lmcache)
	kill9 lmcache_driven 3 --max-lost 0
	;;
pending)
	echo "== lookups right after kill -9, while the pool is compared with its checksums"
	# The servers of later compare what nobody asks for at 1 MiB/s: however late a lookup comes, it is early enough. It may
	# wait for as long as a busy machine takes.
	start_phoenix pending --trust-unsummed --l1-size-gb 2 --l2-prefetch-load-timeout 120
	sed 's/--l1-size-gb/--checksum-mib-per-second 1 &/' "$work/pending.kill" >"$work/pending-later.kill"
	timeout 900 "$python" interop/lmcache/pending.py --url "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" \
		--kill "sh $work/pending-later.kill" >"$work/pending.out" 2>"$work/pending.err" || { tail -n 20 "$work/pending.err" "$work/pending.log" >&2; exit 1; }
	cat "$work/pending.out"
	;;
events)
	echo "== KV events: the real client subscribes, and again after kill -9; vLLM's classes read our own socket"
	start_phoenix events --trust-unsummed --l1-size-gb 0.125 --kv-events "ipc://$work/events.sock" --kv-events-replay "ipc://$work/replay.sock"
	timeout 300 "$python" interop/lmcache/events.py --url "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" --kill "sh $work/events.kill" \
		--events "ipc://$work/events.sock" --replay "ipc://$work/replay.sock" >"$work/events.out" 2>"$work/events.err" || { tail -n 20 "$work/events.err" "$work/events.log" >&2; exit 1; }
	cat "$work/events.out"
	;;
fs)
	one_directory fs
	;;
fs_native)
	one_directory fs_native --native
	;;
slow)
	if server=$(command -v redis-server || command -v valkey-server); then
		echo "== a tier that gives 1 MB/s"
		slow_tier
	else
		echo "neither redis-server nor valkey-server is installed: no tier that gives 1 MB/s"
	fi
	;;
lend)
	echo "== an engine killed with SIGKILL leaves nothing behind"
	start_server lend --l1-size-gb 0.1 --worker-reap-timeout-seconds 10 --worker-registration-grace-seconds 10
	"$python" interop/lmcache/lend.py "tcp://127.0.0.1:$port" >"$work/lend.pid" 2>"$work/lend.err" &
	job=$!
	servers="$servers $job"
	lent() { [ -s "$work/lend.pid" ] || gone "$job"; }
	if ! wait_for 180 lent || [ ! -s "$work/lend.pid" ]; then
		cat "$work/lend.err" >&2
		exit 1
	fi
	lender=$(cat "$work/lend.pid")
	segments() { find /dev/shm -name "lmcache_kv_${lender}_*"; }
	none() { [ -z "$(segments)" ]; }
	test -n "$(segments)"
	kill -9 "$lender"
	wait "$job" 2>/dev/null || true
	wait_for 120 none || { echo "left behind: $(segments)" >&2; exit 1; }
	;;
generations)
	echo "== clients of older lmcache releases, all at once, kill -9 and a server that forgot included"
	interop/generations.sh
	;;
sizes)
	echo "== chunks of 144 to 544 tokens on one server: clients of 0.5.6 and 0.5.7rc2 at once, kill -9 included"
	newer=$(lmcache_release 0.5.7rc2)
	small=$(free_port) large=$(free_port)
	# LRU keeps what was stored last, which is checked. leaf-hazard may take the end of a new prompt before that of an old one.
	start_phoenix sizes --trust-unsummed --l1-size-gb 0.006 --eviction-policy LRU --listen "$small:144" --listen "$large:544"
	timeout 900 "$python" interop/lmcache/sizes.py --url "tcp://127.0.0.1:$port" --listen "$small:144" "$large:544" --http "http://127.0.0.1:$http" \
		--kill "sh $work/sizes.kill" --newer "$newer" --logs "$work" >"$work/sizes.json" 2>"$work/sizes.out" ||
		{ grep -v ^PASS "$work/sizes.out"; tail -n 30 "$work/sizes.log"; exit 1; } >&2
	passed "$work/sizes.json"
	;;
engine)
	echo "== the simulated engine against the real lmcache 0.5.6 server, both modes"
	interop/engine.sh
	;;
engine57)
	echo "== the simulated engine against the real lmcache 0.5.7rc2 server, both modes, and without shared memory"
	interop/engine.sh 0.5.7rc2
	INLINE=1 interop/engine.sh 0.5.7rc2
	;;
openai)
	echo "== the OpenAI Python client through kvasir proxy: P and D, streams, tools, cancels, keys"
	"$(interop/python.sh interop/requirements-proxy.txt)" interop/proxy/client.py --kvasir bin/kvasir
	;;
tracker)
	echo "== tracker and worker against the real lmcache server, restart included"
	LMCACHE=$(dirname "$python")/lmcache PORT=$(free_port) HTTP=$(free_port) interop/lmcache/tracker.sh | grep -vE '^(=== |    )'
	;;
transfer)
	echo "== two generations of the C++ transfer engine against package transfer"
	KVASIR_PYTHON_TE=$(interop/python.sh interop/requirements-te.txt) \
		KVASIR_PYTHON_TE_OLD=$(interop/python.sh interop/requirements-te-old.txt) \
		go test -count=1 -timeout 900s ./interop/transfer
	;;
cluster | cluster@*)
	echo "== a real mooncake_master and C++ clients over storage nodes of this build, kills included: $part"
	mooncake
	WORK=$work timeout 900 "$te" interop/store/cluster.py bin/kvasir >"$work/cluster.out" 2>"$work/cluster.err" ||
		{ cat "$work/cluster.out"; tail -n 20 "$work/cluster.err" "$work"/node-*.log; exit 1; }
	tail -n 1 "$work/cluster.out"
	;;
tier | tier@*)
	echo "== kvasir server over a real mooncake_master and memory of a C++ client: $part"
	mooncake
	master=$(free_port)
	start_phoenix pool --l1-size-gb 0.125 --cold --l2-adapter "'{\"type\":\"mooncake_store\",\"master_server_addr\":\"127.0.0.1:$master\"}'"
	timeout 1200 "$python" interop/store/tier.py --url "tcp://127.0.0.1:$port" --http "http://127.0.0.1:$http" --kill "sh $work/pool.kill" --master "$master" \
		--mooncake "$te" >"$work/pool.out" 2>"$work/pool.err" ||
		{ grep -E "^(PASS|FAIL)|not within|Error" "$work/pool.err" >&2; tail -n 5 "$work/pool.log" >&2; exit 1; }
	cat "$work/pool.out"
	;;
store-engine | store-engine@*)
	echo "== engines over a real Mooncake Store: hybrid models, bytes by the masks, a node killed: $part"
	mooncake
	timeout 1800 "$python" interop/store/engine.py bin/kvasir "$te"
	;;
*)
	echo "no part $part" >&2
	exit 2
	;;
esac
