#!/usr/bin/env bash
# Real clients of eight lmcache releases at once against one server: what each stores,
# all others load, also after kill -9 of the server and after it forgot everything. Needs
# bin/kvasir; interop/run.sh calls it. The older packages lie over the environment of
# 0.5.6, 65 MB each, without their own dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(interop/python.sh)
. interop/lib.sh

releases="0.4.6 0.4.7 0.5.0 0.5.2 0.5.3 0.5.4 0.5.5 0.5.7rc2"
engines=
for release in $releases; do
	engines="$engines $release=$(lmcache_release "$release")"
done

start_phoenix generations --trust-unsummed --l1-size-gb 0.2
sed 's/--l1-size-gb/--cold &/' "$work/generations.kill" >"$work/cold.kill"
# shellcheck disable=SC2086
timeout 900 "$python" interop/lmcache/generations.py --url "tcp://127.0.0.1:$port" --logs "$work" \
	--kill "sh $work/generations.kill" --cold "sh $work/cold.kill" $engines >"$work/generations.json" 2>"$work/generations.out" ||
	{ grep -v ^PASS "$work/generations.out"; tail -n 30 "$work/generations.log"; exit 1; } >&2
"$python" -c 'import json, sys; r = json.load(open(sys.argv[1])); print(r["passed"], "checks passed, failed:", r["failed"] or "none")' "$work/generations.json"
