# Runs parts of interop in lanes; interop/run.sh, which explains it, sources it with the parts' names.

set -m # each part gets a process group
TIMEFORMAT="processors: %U s, and %S s in the system" # of a part
outputs=$(mktemp -d)
declare -A running=() # part by process id, which is the group's
declare -A began=()   # second by process id
failed=()
bug=

# environments makes the Python environments before the parts need them, one after the other.
environments() {
	local part
	local -A files=([interop/requirements.txt]=1)
	for part; do
		case $part in
		transfer) files[interop/requirements-te.txt]=1 files[interop/requirements-te-old.txt]=1 ;;
		openai) files[interop/requirements-proxy.txt]=1 ;;
		*@0.3.7) files[interop/requirements-te-old.txt]=1 ;;
		*@*) files[interop/requirements-te-${part#*@}.txt]=1 ;;
		cluster | tier | store-engine) files[interop/requirements-te.txt]=1 ;;
		esac
	done
	for part in "${!files[@]}"; do
		interop/python.sh "$part" >/dev/null
	done
}

# left GROUP: prints the processes of a group that have not ended, one a line. It starts no process: there may be many.
left() {
	local f stat state group command
	for f in /proc/[0-9]*/stat; do
		{ read -r stat <"$f"; } 2>/dev/null || continue
		read -r state _ group _ <<<"${stat##*) }"
		[ "$group" = "$1" ] && [ "$state" != Z ] || continue
		command=${stat#*(}
		echo "${stat%% *} ${command%)*}"
	done
}

# end GROUP: ends the processes of a group: politely, so that a part removes its servers, then not.
end() {
	local until=$((SECONDS + 90))
	kill -TERM -- "-$1" 2>/dev/null || return 0
	while [ -n "$(left "$1")" ]; do
		[ "$SECONDS" -lt "$until" ] || { kill -KILL -- "-$1" 2>/dev/null || true; break; }
		sleep 0.1
	done
}

end_all() {
	local group
	for group in "${!running[@]}"; do
		end "$group"
	done
	rm -rf "$outputs"
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

begin() {
	{ time interop/run.sh --alone "$1"; } >"$outputs/$1" 2>&1 </dev/null &
	running[$!]=$1 began[$!]=$SECONDS
}

# take waits until one of the running parts has ended.
take() {
	local pid code=0 part until shown took
	while true; do # wait -n misses a process that ended before it
		for pid in "${!running[@]}"; do
			kill -0 "$pid" 2>/dev/null || break 2
		done
		sleep 0.1
	done
	wait "$pid" || code=$?
	part=${running[$pid]} took=$((SECONDS - began[$pid]))
	until=$((SECONDS + 10))
	while [ -n "$(left "$pid")" ] && [ "$SECONDS" -lt "$until" ]; do
		sleep 0.1
	done
	if [ -n "$(left "$pid")" ]; then
		{ echo "part $part left processes behind:"; left "$pid"; } >>"$outputs/$part"
		end "$pid"
		code=1
	fi
	unset "running[$pid]"
	cat "$outputs/$part"
	echo "-- part $part: $took s$([ "$code" = 0 ] || echo ", failed")"
	[ "$code" != 0 ] || return 0
	failed+=("$part")
	if shown=$(shows_bug "$outputs/$part"); then
		bug="part $part, not run again: $shown"
	elif [ "${RERUN:-}" != 1 ]; then
		bug="part $part"
	fi
}

# drain waits until fewer than $1 parts run.
drain() {
	while [ "${#running[@]}" -ge "$1" ]; do
		take
	done
}

environments "$@"
solo=()
for part; do
	case $part in
	kill9-* | slow)
		solo+=("$part")
		continue
		;;
	esac
	drain "${LANES:-3}"
	[ -z "$bug" ] || break
	begin "$part"
done
drain 1
for part in "${solo[@]}"; do
	[ -z "$bug" ] || break
	begin "$part"
	drain 1
done
[ -z "$bug" ] || { echo "interop failed: $bug" >&2; exit 1; }

again=("${failed[@]}")
for part in "${again[@]}"; do
	echo "run again: part $part"
	mv "$outputs/$part" "$outputs/$part.first"
	failed=()
	begin "$part"
	drain 1
	[ "${#failed[@]}" = 0 ] || { echo "part $part failed twice" >&2; exit 1; }
done
for part in "${again[@]}"; do
	unsteady "$outputs/$part.first" "interop.$part"
done
echo "interop passed"
