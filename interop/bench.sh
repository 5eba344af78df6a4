#!/usr/bin/env bash
# Races this build against the real LMCache 0.5.6 server: every row A,B,A,B in one run,
# ratios of medians. About 15 minutes. Needs bin/kvasir; `make bench` calls it.
# Arguments are passed on to the driver, for example --lookups 300.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(interop/python.sh)
lmcache=$(dirname "$python")/lmcache
mkdir -p bin
trap 'bin/kvasir server --l1-size-gb 2 --shm-name race_kvasir --drop 2>/dev/null' EXIT
"$python" interop/lmcache/mp_bench.py --l1-gb 2 --lookups 1000 --skip transfer --out bin/race.json "$@" --race \
	"$lmcache server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --http-port {http} --l1-size-gb 2 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto --shm-name race{port}" \
	"bin/kvasir server --host 127.0.0.1 --port {port} --http-port {http} --l1-size-gb 2 --shm-name race_kvasir --cold"
