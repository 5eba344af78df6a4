#!/usr/bin/env bash
# python.sh [REQUIREMENTS]: makes the virtual environment of pinned real peers, once, in
# a cache folder keyed by the file's content, and prints its Python on standard output. Without an argument the file is
# $REQUIREMENTS, or requirements.txt.
# $KVASIR_CACHE moves the cache; $PYTHON chooses the interpreter (3.10 to 3.13).
set -euo pipefail
requirements=${1:-${REQUIREMENTS:-$(dirname "$0")/requirements.txt}}
key=$(sha256sum <"$requirements" | cut -c1-12)
dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/interop-$key

works() {
	"$@" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
	if [ -n "${PYTHON:-}" ]; then
		works "$PYTHON" && { echo "$PYTHON"; return; }
		echo "PYTHON=$PYTHON is not a working Python 3.10 to 3.13 with venv" >&2
		return 1
	fi
	local name path
	for name in python3.12 python3.11 python3.10 python3.13 python3; do
		# every match: a version manager's stub may stand before a real interpreter
		for path in $(type -aP "$name" || true); do
			works "$path" && { echo "$path"; return; }
		done
	done
	echo "no Python 3.10 to 3.13 with venv found; set PYTHON" >&2
	return 1
}

if [ ! -e "$dir/complete" ]; then
	python=$(find_python)
	echo "making $dir with $("$python" -V) (several GB, some minutes)" >&2
	mkdir -p "$dir"
	exec 9>"$dir/lock"
	flock 9
	if [ ! -e "$dir/complete" ]; then
		"$python" -m venv --clear "$dir/venv" >&2
		"$dir/venv/bin/python" -m pip install -q --disable-pip-version-check uv >&2
		UV_HTTP_TIMEOUT=300 VIRTUAL_ENV="$dir/venv" "$dir/venv/bin/uv" pip install -q --compile-bytecode -r "$requirements" >&2
		touch "$dir/complete"
	fi
fi
echo "$dir/venv/bin/python"
