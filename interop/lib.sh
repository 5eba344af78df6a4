# Shared by the interop scripts: source it after `set -euo pipefail`.

free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# start_server NAME [FLAG ...]: starts bin/kvasir server on free ports and waits until it
# answers; sets port, http and server_pid. The server is stopped when the script ends.
start_server() {
	local name=$1
	shift
	port=$(free_port) http=$(free_port)
	bin/kvasir server --host 127.0.0.1 --port "$port" --http-port "$http" "$@" >"$work/$name.log" 2>&1 &
	server_pid=$!
	servers="$servers $server_pid" ports="$ports $port"
	for _ in $(seq 100); do
		curl -sf -m 2 "http://127.0.0.1:$http/healthcheck" >/dev/null 2>&1 && return
		kill -0 "$server_pid" 2>/dev/null || break
		sleep 0.1
	done
	cat "$work/$name.log" >&2
	echo "the server did not start" >&2
	return 1
}

# start_phoenix NAME [FLAG ...]: like start_server, for a server that is to be killed.
# $work/NAME.kill, a script, kills it with SIGKILL and starts it again; $work/NAME.pid has
# its process id.
start_phoenix() {
	local name=$1
	shift
	port=$(free_port) http=$(free_port)
	ports="$ports $port"
	cat >"$work/$name.kill" <<-K
		[ ! -e "$work/$name.pid" ] || kill -9 \$(cat "$work/$name.pid")
		bin/kvasir server --host 127.0.0.1 --port $port --http-port $http $* >>"$work/$name.log" 2>&1 &
		echo \$! >"$work/$name.pid"
		for _ in \$(seq 100); do
			curl -sf -m 2 "http://127.0.0.1:$http/healthcheck" >/dev/null && exit
			sleep 0.05
		done
		exit 1
	K
	sh "$work/$name.kill" || { cat "$work/$name.log" >&2; return 1; }
}

stop_servers() {
	local pid
	for pid in $servers $(cat "$work"/*.pid 2>/dev/null); do
		kill -TERM "$pid" 2>/dev/null || continue
		for _ in $(seq 100); do # it may not be our child
			kill -0 "$pid" 2>/dev/null || break
			sleep 0.1
		done
	done
	for pid in $ports; do
		rm -f "/dev/shm/lmcache_l1_pool_kvasir_${pid}_"*
	done
	servers= ports=
	rm -f "$work"/*.pid
}

servers= ports=
work=$(mktemp -d)
trap 'stop_servers; rm -rf "$work"' EXIT
