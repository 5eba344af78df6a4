#!/usr/bin/env bash
# Runs the real peers against this build. Needs bin/kvasir; `make interop` calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(interop/python.sh)
. interop/lib.sh

echo "== the ZMQ library of the real peers against package zmtp"
KVASIR_PYTHON=$python go test -count=1 -timeout 120s ./zmtp

echo "== the real lmcache 0.5.6 client against kvasir server, both modes"
start_server one --l1-size-gb 0.5
"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
	--modes engine_driven,lmcache_driven --skip rate,lookup,transfer >"$work/one.json" 2>"$work/one.log" ||
	{ cat "$work/one.log" >&2; exit 1; }

echo "== two clients at once"
for tag in a b; do
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
		--modes engine_driven,lmcache_driven --skip rate --lookups 20 --no-clear --run-tag $tag >"$work/$tag.json" 2>"$work/$tag.log" &
	eval "pid_$tag=$!"
done
wait "$pid_a" || { cat "$work/a.log" >&2; exit 1; }
wait "$pid_b" || { cat "$work/b.log" >&2; exit 1; }

stop_servers

echo "== the same client without shared memory: pickled tensors"
start_server pickle --l1-size-gb 0.5 --pickle only
"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
	--modes engine_driven --skip rate,lookup,transfer >"$work/pickle.json"
stop_servers

# kill9 MODES N [CONSTRAINT ...]: kill -9 under load and restart, N times, every byte.
kill9() {
	local modes=$1 n=$2
	shift 2
	echo "== kill -9 under load, restart, every byte: $modes"
	start_phoenix kill --l1-size-gb 0.25
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.25 --modes "$modes" --kill9 "$n" "$@" \
		--pid-file "$work/kill.pid" --restart-cmd "sh $work/kill.kill" >"$work/kill.out" 2>"$work/kill.err" ||
		{ tail -20 "$work/kill.err" "$work/kill.log" >&2; exit 1; }
	tail -1 "$work/kill.err"
	stop_servers
}
kill9 engine_driven 3 --max-lost 0
kill9 lmcache_driven 3 --max-lost 0

echo "== an engine killed with SIGKILL leaves nothing behind"
start_server lend --l1-size-gb 0.1 --worker-reap-timeout-seconds 2 --worker-registration-grace-seconds 2
"$python" interop/lmcache/lend.py "tcp://127.0.0.1:$port" >"$work/lend.pid" 2>"$work/lend.err" &
job=$!
for _ in $(seq 600); do
	[ ! -s "$work/lend.pid" ] || break
	sleep 0.1
done
lender=$(cat "$work/lend.pid")
test -n "$(find /dev/shm -name "lmcache_kv_${lender}_*")"
kill -9 "$lender"
wait "$job" 2>/dev/null || true
for _ in $(seq 100); do
	left=$(find /dev/shm -name "lmcache_kv_${lender}_*")
	[ -n "$left" ] || break
	sleep 0.1
done
[ -z "$left" ] || { echo "left behind: $left" >&2; exit 1; }
stop_servers

"$python" - "$work"/*.json <<'P'
import json, sys
for path in sys.argv[1:]:
    r = json.load(open(path))
    print(f"{r['passed']} checks passed, failed: {r['failed'] or 'none'}")
P
stop_servers

echo "== clients of older lmcache releases, all at once, kill -9 and a server that forgot included"
interop/generations.sh

echo "== tracker and worker against the real lmcache server, restart included"
LMCACHE=$(dirname "$python")/lmcache PORT=$(free_port) HTTP=$(free_port) interop/lmcache/tracker.sh | grep -vE '^(=== |    )'

echo "== two generations of the C++ transfer engine against package transfer"
KVASIR_PYTHON_TE=$(interop/python.sh interop/requirements-te.txt) \
	KVASIR_PYTHON_TE_OLD=$(interop/python.sh interop/requirements-te-old.txt) \
	go test -count=1 -timeout 400s ./interop/transfer
echo "interop passed"
