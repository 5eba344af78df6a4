# Shared by the interop scripts: source it after `set -euo pipefail`, in the root folder.

. .ci/again.sh

free_port() { "$python" interop/shared/ports.py; }

# lmcache_release RELEASE: prints the folder of an lmcache package that lies over $python's environment, and gets it
# first. It goes when the environment does.
lmcache_release() {
	local over
	over=$(dirname "$(dirname "$(dirname "$python")")")/over/$1
	if [ ! -e "$over/complete" ]; then
		rm -rf "${over:?}"
		UV_HTTP_TIMEOUT=300 "$(dirname "$python")/uv" pip install -q --python "$python" --no-deps --target "$over" "lmcache==$1" >&2
		touch "$over/complete"
	fi
	echo "$over"
}

# wait_for SECONDS COMMAND ...: runs a command again and again until it succeeds. It fails when it did not in that time,
# counted by the clock and not by the rounds, which take longer on a busy machine.
wait_for() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 0.1
	done
}

# answers URL [PID]: whether a server answers, or has ended.
answers() { curl -sf -m 10 "$1" >/dev/null 2>&1 || { [ -n "${2:-}" ] && gone "$2"; }; }

# gone PID: whether a process has ended, also while nobody has waited for it.
gone() { ! kill -0 "$1" 2>/dev/null || [ "$(sed 's/.*) //; s/ .*//' "/proc/$1/stat" 2>/dev/null)" = Z ]; }

# start_server NAME [FLAG ...]: starts bin/kvasir server on free ports and waits until it
# answers; sets port, http and server_pid. The server is stopped when the script ends.
start_server() {
	local name=$1
	shift
	port=$(free_port) http=$(free_port)
	bin/kvasir server --log-level debug --host 127.0.0.1 --port "$port" --http-port "$http" "$@" >"$work/$name.log" 2>&1 &
	server_pid=$!
	servers="$servers $server_pid" ports="$ports $port"
	wait_for 120 answers "http://127.0.0.1:$http/healthcheck" "$server_pid" && ! gone "$server_pid" && return
	cat "$work/$name.log" >&2
	echo "the server did not start" >&2
	return 1
}

# start_phoenix NAME [FLAG ...]: like start_server, for a server that is to be killed.
# $work/NAME.kill [FLAG ...], a script, kills it with SIGKILL, or with SIGNAL, and starts it again; $work/NAME.pid has
# its process id.
start_phoenix() {
	port=$(free_port) http=$(free_port)
	ports="$ports $port"
	write_phoenix "$@"
	sh "$work/$1.kill" || { cat "$work/$1.log" >&2; return 1; }
}

# write_phoenix NAME [FLAG ...]: start_phoenix without the start; port and http are set.
write_phoenix() {
	local name=$1
	shift
	cat >"$work/$name.kill" <<-K
		if [ -e "$work/$name.pid" ]; then
			pid=\$(cat "$work/$name.pid")
			kill -"\${SIGNAL:-KILL}" "\$pid" 2>/dev/null
			for _ in \$(seq 6000); do # its ports are its own until it has ended
				kill -0 "\$pid" 2>/dev/null && ! grep -q ') Z' "/proc/\$pid/stat" 2>/dev/null || break
				sleep 0.01
			done
		fi
		bin/kvasir server --log-level debug --host 127.0.0.1 --port $port --http-port $http $* "\$@" >>"$work/$name.log" 2>&1 &
		echo \$! >"$work/$name.pid"
		pid=\$! end=\$((\$(date +%s) + 120))
		until curl -sf -m 10 "http://127.0.0.1:$http/healthcheck" >/dev/null; do
			kill -0 "\$pid" && [ \$(date +%s) -lt "\$end" ] || exit 1
			sleep 0.05
		done
	K
}

# start_s3: an object store (gofakes3) with the bucket kvcache; sets s3, its address, and exports credentials for it.
start_s3() {
	[ -x "$work/s3" ] || (cd interop/s3 && go build -o "$work/s3" .)
	s3=127.0.0.1:$(free_port)
	"$work/s3" -addr "$s3" >"$work/s3.log" 2>&1 &
	servers="$servers $!"
	wait_for 60 listens "${s3##*:}" || { cat "$work/s3.log" >&2; return 1; }
	export AWS_ACCESS_KEY_ID=id AWS_SECRET_ACCESS_KEY=secret
}

# listens PORT: whether somebody listens there.
listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

stop_servers() {
	local pid
	for pid in $servers $(cat "$work"/*.pid 2>/dev/null); do
		kill -TERM "$pid" 2>/dev/null || continue
		wait_for 60 gone "$pid" || { # it may not be our child
			echo "process $pid did not end after SIGTERM" >&2
			kill -KILL "$pid" 2>/dev/null || true
		}
		rm -f "/dev/shm/lmcache_kv_${pid}_"* # of a client that was ended before it could
	done
	for pid in $ports; do
		rm -f "/dev/shm/lmcache_l1_pool_kvasir_${pid}_"*
	done
	servers= ports=
	rm -f "$work"/*.pid
}

# pinned VLLM [NAME==VERSION]: an engine of another time; sets python, and over and preload, its PYTHONPATH and LD_PRELOAD.
pinned() {
	read -r python over < <(interop/vllm/setup_pinned.sh "$@")
	preload=
	[ "$1" = 0.18.1 ] || return 0
	preload=$(ldconfig -p | sed -n 's/.*libtcmalloc_minimal\.so\.4 .*=> //p' | head -1) # its CPU worker wants both
	[ -n "$preload" ] || { echo "install libtcmalloc-minimal4" >&2; exit 1; }
	preload=$preload:$(dirname "$(dirname "$python")")/lib/libiomp5.so
}

# finish: stops the servers and removes $work; after a failure it first prints what their logs say of bugs of ours.
finish() {
	[ "$?" = 0 ] || grep -HsE "$bugs" "$work"/*.log | head -20 >&2 || true
	stop_servers
	for pid in $mounts; do umount -l "$pid"; done
	rm -rf "$work"
}

servers= ports= mounts=
work=$(mktemp -d)
trap finish EXIT
