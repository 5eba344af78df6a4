#!/usr/bin/env bash
# soak.sh: the share of interop/soak in .ci/run: three minutes of faults over a whole deployment, always with the same seed (SEED), with two
# requests at a time, without steps of clocks and without swaps. It takes a third of two processors for five minutes. It is left out, with
# the reason, where this user may not make namespaces or a program is missing.
# With RERUN=1 a run that broke a promise is made once more, as in .ci/test.sh; wrong bytes, races and panics are red at once.
set -euo pipefail
cd "$(dirname "$0")/.."
. .ci/again.sh
go=${GO:-go}
seed=${SEED:-1}
for program in unshare ip tc ss nsenter prlimit; do
	command -v "$program" >/dev/null || { echo "soak: left out, no $program"; exit 0; }
done
if ! why=$(unshare --net --mount --pid --ipc --fork ip link set lo up 2>&1); then
	echo "soak: left out, no namespaces: $why"
	exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The driver, which may have ended by itself, ends all that it started.
child=
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true; wait; exit 143' TERM INT
"$go" build -o "$work/soak" ./interop/soak

# play FOLDER: whether a run passes. Of its output, requests near a fault are left out: there are hundreds.
play() {
	local code=0
	"$work/soak" -for 3m -seed "$seed" -clients 2 -dir "$1" >"$1.out" 2>&1 &
	child=$!
	wait "$child" || code=$?
	child=
	grep -v ' request [0-9]* (' "$1.out" || true # a run that ended at once has no other lines
	return "$code"
}

if play "$work/first"; then exit; fi
if [ "${RERUN:-}" != 1 ] || shows_bug "$work/first.out"; then
	tail -n 20 "$work/first.out"
	echo "soak: failed; the same faults again: go run ./interop/soak -for 3m -clients 2 -seed $seed" >&2
	exit 1
fi
echo "soak: run again"
play "$work/second" || { echo "soak: failed twice" >&2; exit 1; }
unsteady "$work/first.out" interop.soak
