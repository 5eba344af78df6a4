#!/usr/bin/env bash
# Runs the real peers against this build. Needs bin/kvasir; `make interop` calls it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(interop/python.sh)
. interop/lib.sh

echo "== the ZMQ library of the real peers against package zmtp"
KVASIR_PYTHON=$python go test -count=1 -timeout 120s ./zmtp

echo "== the real lmcache 0.5.6 client against kvasir server"
start_server one --l1-size-gb 0.5
"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
	--modes engine_driven --skip rate,lookup,transfer >"$work/one.json"

echo "== two clients at once"
for tag in a b; do
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.5 \
		--modes engine_driven --skip rate --lookups 20 --no-clear --run-tag $tag >"$work/$tag.json" 2>"$work/$tag.log" &
	eval "pid_$tag=$!"
done
wait "$pid_a" || { cat "$work/a.log" >&2; exit 1; }
wait "$pid_b" || { cat "$work/b.log" >&2; exit 1; }

stop_servers

echo "== kill -9 under load, restart, every byte"
port=$(free_port)
ports="$ports $port"
cat >"$work/restart.sh" <<R
bin/kvasir server --host 127.0.0.1 --port $port --http-port 0 --l1-size-gb 0.25 2>>"$work/kill.log" &
echo \$! >"$work/kill.pid"
wait
R
"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --l1-gb 0.25 --modes engine_driven --kill9 3 --max-lost 0 \
	--pid-file "$work/kill.pid" --restart-cmd "sh $work/restart.sh" >"$work/kill.out" 2>"$work/kill.err" ||
	{ tail -20 "$work/kill.err" "$work/kill.log" >&2; exit 1; }
servers="$servers $(cat "$work/kill.pid")"
tail -1 "$work/kill.err"

"$python" - "$work"/*.json <<'P'
import json, sys
for path in sys.argv[1:]:
    r = json.load(open(path))
    print(f"{r['passed']} checks passed, failed: {r['failed'] or 'none'}")
P
stop_servers

echo "== tracker and worker against the real lmcache server, restart included"
LMCACHE=$(dirname "$python")/lmcache PORT=$(free_port) HTTP=$(free_port) interop/lmcache/tracker.sh | grep -vE '^(=== |    )'

echo "== two generations of the C++ transfer engine against package transfer"
KVASIR_PYTHON_TE=$(interop/python.sh interop/requirements-te.txt) \
	KVASIR_PYTHON_TE_OLD=$(interop/python.sh interop/requirements-te-old.txt) \
	go test -count=1 -timeout 400s ./interop/transfer
echo "interop passed"
