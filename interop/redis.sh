#!/usr/bin/env bash
# Runs package tier/redis against real servers: redis-server (or valkey-server) alone, and
# a cluster of six whose slots move, and whose master ends, in the middle; and two and four `kvasir server` over one. Needs bin/kvasir, Go and one of the two; without
# it says so and ends with 0.
set -euo pipefail
cd "$(dirname "$0")/.."
server=$(command -v redis-server || command -v valkey-server || true)
cli=$(command -v redis-cli || command -v valkey-cli || true)
if [ -z "$server" ] || [ -z "$cli" ]; then
	echo "neither redis-server nor valkey-server is installed (apt install redis-server): not run"
	exit 0
fi
work=$(mktemp -d)
stop() {
	for f in "$work"/*/pid; do
		[ ! -s "$f" ] || kill -KILL "$(cat "$f")" 2>/dev/null || true
	done
	for _ in $(seq 600); do # a node writes its file until it has ended
		! rm -rf "$work" 2>/dev/null || break
		sleep 0.1
	done
}
trap stop EXIT

# start NAME ARGUMENT ...: starts a server that keeps nothing.
start() {
	mkdir "$work/$1"
	"$server" --dir "$work/$1" --pidfile "$work/$1/pid" --logfile "$work/$1/log" --save "" --appendonly no --daemonize yes "${@:2}" >/dev/null
}

echo "== $("$server" --version | cut -c1-40) against tier/redis, all layouts"
start one --port 0 --unixsocket "$work/one.sock"
for _ in $(seq 600); do
	[ ! -S "$work/one.sock" ] || break
	sleep 0.1
done
KVASIR_REDIS=unix:$work/one.sock go test -count=1 -timeout 600s -run TestReal ./tier/redis ./proxy/limits

echo "== two and four servers over that Redis, and what kvasir sim fleet says of them"
KVASIR_REDIS=unix:$work/one.sock go test -count=1 -timeout 600s -v -run TestRealFleet ./interop/fleet >"$work/fleet.log" || { tail -n 40 "$work/fleet.log" >&2; exit 1; }
grep -E 'requests: |^ok' "$work/fleet.log"

echo "== a cluster of six: slots move under load, and a master ends in the middle"
# Ports of the nodes, and 10,000 above them those of the cluster, all below the ones that the system gives
# to clients. Where one is taken all the same, six others are tried.
answers() {
	for _ in $(seq 600); do
		[ "$("$cli" -p "$1" ping 2>/dev/null)" != PONG ] || return 0
		! grep -qi "address already in use\|failed listening" "$2" 2>/dev/null || return 1
		sleep 0.1
	done
	return 1
}
for try in 1 2 3 4 5; do
	base=$((10000 + RANDOM % 9000))
	nodes="" ready=yes
	for i in 1 2 3 4 5 6; do
		start "node$try$i" --port $((base + i)) --cluster-enabled yes --cluster-node-timeout 5000
		nodes="$nodes 127.0.0.1:$((base + i))"
	done
	for i in 1 2 3 4 5 6; do
		answers $((base + i)) "$work/node$try$i/log" || ready=no
	done
	[ "$ready" != yes ] || break
	[ "$try" != 5 ] || { echo "no six free ports, five times" >&2; exit 1; }
done
# shellcheck disable=SC2086
"$cli" --cluster create $nodes --cluster-replicas 1 --cluster-yes >"$work/create.log" || { tail -n 20 "$work/create.log" >&2; exit 1; }
for _ in $(seq 1200); do
	[ "$("$cli" -p $((base + 1)) info replication | tr -d '\r' | grep -c '^connected_slaves:1')" != 1 ] ||
		[ "$("$cli" -p $((base + 2)) info replication | tr -d '\r' | grep -c '^connected_slaves:1')" != 1 ] ||
		[ "$("$cli" -p $((base + 3)) info replication | tr -d '\r' | grep -c '^connected_slaves:1')" != 1 ] || break
	sleep 0.1
done
for i in 1 2 3 4 5 6; do # a node that has just joined serves nothing for a moment
	for _ in $(seq 600); do
		! "$cli" -p $((base + i)) cluster info | grep -q '^cluster_state:ok' || continue 2
		sleep 0.1
	done
	echo "a node of the cluster does not serve:" >&2
	"$cli" -p $((base + i)) cluster info >&2
	exit 1
done
KVASIR_REDIS_CLI=$cli KVASIR_REDIS_CLUSTER=127.0.0.1:$((base + 1)) go test -count=1 -timeout 600s -v -run TestReal ./tier/redis >"$work/cluster.log" || { grep -vE -e '^=== (RUN|PAUSE|CONT)' -e '--- (PASS|SKIP)' "$work/cluster.log" | tail -n 60 >&2; exit 1; }
grep -E 'were missing|slots moved|^ok' "$work/cluster.log"
