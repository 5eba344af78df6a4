#!/bin/sh
# Plays the engine-side script (request tracker and worker) against a real lmcache
# server, restart included. LMCACHE is its command; default: lmcache in PATH.
set -eu
cd "$(dirname "$0")/../.."

LMCACHE=${LMCACHE:-lmcache}
command -v "$LMCACHE" >/dev/null || { echo "no lmcache: set LMCACHE to the command of lmcache 0.5.6"; exit 77; }
PORT=${PORT:-15571}
HTTP=${HTTP:-15572}
state=$(mktemp -d)
export LMCACHE PORT HTTP state

# start returns when the server answers, stop when it is gone.
cat >"$state/start" <<'S'
"$LMCACHE" server --host 127.0.0.1 --port "$PORT" --http-host 127.0.0.1 --http-port "$HTTP" \
	--l1-size-gb 0.25 --no-l1-use-lazy --eviction-policy LRU --supported-transfer-mode auto \
	--shm-name "kvasir_tracker_$PORT" --chunk-size 32 >>"$state/log" 2>&1 </dev/null &
echo $! >"$state/pid"
i=0
until curl -fs "http://127.0.0.1:$HTTP/healthcheck" >/dev/null 2>&1; do
	i=$((i + 1))
	[ $i -lt 180 ] || { tail -20 "$state/log"; exit 1; }
	sleep 1
done
S
cat >"$state/stop" <<'S'
[ -f "$state/pid" ] || exit 0
pid=$(cat "$state/pid")
kill "$pid" 2>/dev/null || exit 0
i=0
while kill -0 "$pid" 2>/dev/null; do
	i=$((i + 1))
	[ $i -lt 20 ] || kill -9 "$pid" 2>/dev/null || true
	sleep 1
done
S
trap 'sh "$state/stop"; rm -rf "$state"' EXIT INT TERM
sh "$state/start"
KVASIR_LMCACHE_URL="tcp://127.0.0.1:$PORT" KVASIR_LMCACHE_STOP="sh $state/stop" KVASIR_LMCACHE_START="sh $state/start" \
	go test -count=1 -timeout 600s -run 'TestEngine(Script|Ranks)Real$' -v ./server
