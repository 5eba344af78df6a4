#!/usr/bin/env bash
# cuda.sh [PART ...]: the real lmcache client with its KV on a GPU against this build, all parts or those named:
#   client    every check of mp_bench.py, engine_driven
#   releases  engines of several releases of lmcache on one server, kill -9, a server that forgot everything
#   kill9     kill -9 under load, also while workers hold slots of the pool
#   pinned    engines stay up while the pool becomes smaller and larger
#   declined  a worker that keeps CUDA's default mode, lmcache_driven, is told what to set
#   figures   copies and lookups beside LMCache's own server, whose server copies
# Needs bin/kvasir, one GPU, and torch for CUDA, as `make interop` installs it. $PYTHON_CUDA names another Python that has
# lmcache. $RELEASES are the other releases, as 0.5.7rc2=FOLDER; $OUT keeps the results and logs. DEVICE=cpu plays
# the parts without a GPU, to check this script.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
python=${PYTHON_CUDA:-$(interop/python.sh)}
if [ "${1:-}" != --alone ]; then
	[ "$device" = cpu ] || "$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; print(torch.cuda.get_device_name(), "torch", torch.__version__)'
	[ $# -gt 0 ] || set -- client releases kill9 pinned declined figures
	failed=
	for part; do
		echo "== $part"
		interop/cuda.sh --alone "$part" || failed="$failed $part"
	done
	[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
	exit
fi
part=${2:?}
. interop/lib.sh
out=${OUT:-$work}
mkdir -p "$out"
export LMCACHE_TRACK_USAGE=false

# say FILE EXPRESSION: prints what an expression makes of the JSON in a file, r.
say() { "$python" -c 'import json, sys; r = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$@"; }

client() {
	start_server client --l1-size-gb 2
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --device "$device" --l1-gb 2 --modes engine_driven \
		--skip rate,lookup,transfer --out "$out/client.json" >/dev/null 2>"$out/client.err"
	say "$out/client.json" '"lmcache {lmcache_client}: {passed} checks passed, failed: {failed}".format(**r)'
}

releases() {
	local own
	own=$("$python" -c 'import importlib.metadata as m; print(m.version("lmcache"))')
	start_phoenix releases --trust-unsummed --l1-size-gb 0.2
	sed 's/--l1-size-gb/--cold &/' "$work/releases.kill" >"$work/cold.kill"
	# shellcheck disable=SC2086
	timeout 900 "$python" interop/lmcache/generations.py --url "tcp://127.0.0.1:$port" --device "$device" --logs "$out" --kill "sh $work/releases.kill" \
		--cold "sh $work/cold.kill" "$own=" ${RELEASES:-} >"$out/releases.json" 2>"$out/releases.err"
	say "$out/releases.json" '"{passed} checks passed, failed: {failed}".format(**r)'
}

kill9() {
	start_phoenix kill9 --trust-unsummed --l1-size-gb 1
	"$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --device "$device" --l1-gb 1 --modes engine_driven --kill9 "${KILLS:-10}" \
		--pid-file "$work/kill9.pid" --restart-cmd "sh $work/kill9.kill" --out "$out/kill9.json" >/dev/null 2>"$out/kill9.err"
	say "$out/kill9.json" '{k: v for k, v in r.items() if isinstance(v, (int, float, str)) or k in ("counts", "failed", "errors")}'
}

pinned() {
	start_phoenix pinned --trust-unsummed --l1-size-gb 1
	timeout 900 "$python" interop/lmcache/pinned.py --url "tcp://127.0.0.1:$port" --device "$device" --logs "$out" \
		--restart "sh $work/pinned.kill --l1-size-gb" >"$out/pinned.json" 2>"$out/pinned.err"
	say "$out/pinned.json" '"\n".join(map(str, r["steps"] + ["failed: " + str(r["failed"] or "none")]))'
}

declined() {
	start_server declined --l1-size-gb 0.25
	timeout 120 "$python" interop/lmcache/mp_bench.py --url "tcp://127.0.0.1:$port" --device "$device" --l1-gb 0.25 --modes lmcache_driven --no-clear \
		--timeout 5 --skip rate,lookup,transfer,eviction >"$out/declined.json" 2>"$out/declined.err" || true # its checks fail: all is declined
	grep -m 1 'a worker is refused' "$work/declined.log"
}

figures() {
	local mode url
	for mode in engine_driven lmcache_driven; do
		if [ "$mode" = engine_driven ]; then
			start_server figures --l1-size-gb 4
			url=tcp://127.0.0.1:$port
		else
			"$python" -c 'import lmcache.cli.commands.server' || { echo "no lmcache server here: no figures of it"; return; }
			port=$(free_port) http=$(free_port)
			"$python" -c 'import sys; from lmcache.cli.main import main; sys.exit(main())' server --host 127.0.0.1 --port "$port" --http-host 127.0.0.1 --http-port "$http" --l1-size-gb 4 \
				--no-l1-use-lazy --eviction-policy LRU --shm-name "cuda$port" >"$work/lmcache.log" 2>&1 &
			servers="$servers $!"
			url=tcp://127.0.0.1:$port
		fi
		"$python" interop/lmcache/mp_bench.py --url "$url" --device "$device" --l1-gb 4 --modes "$mode" --lookups 1000 --seconds 2 \
			--skip correctness,eviction --out "$out/figures-$mode.json" >/dev/null 2>"$out/figures-$mode.err"
		say "$out/figures-$mode.json" '{k: v for k, v in r.items() if k.startswith(("lookup", "transfer", "noop"))}'
	done
}

# ended: what a part that failed says of it.
ended() {
	local failed=$? log
	if [ "$failed" != 0 ]; then
		for log in "$out/$part"*.err "$work/$part.log"; do
			[ ! -e "$log" ] || { echo "--- ${log##*/}"; grep -v ^PASS "$log" | tail -n 20; } >&2
		done
	fi
	[ "$out" = "$work" ] || cp "$work"/*.log "$out" 2>/dev/null || true # a part that ended early has no log
	(exit "$failed")
	finish
}
trap ended EXIT

case $part in
client | releases | kill9 | pinned | declined | figures) "$part" ;;
*) echo "cuda.sh: no part is named $part" >&2; exit 2 ;;
esac
