#!/usr/bin/env bash
# test.sh "PACKAGE ..." FLAG ...: `go test FLAG ... PACKAGE ...`. With RERUN=1, each package in which a test failed is run once
# more, alone: one that fails again makes the run fail, one that passes is named at the end, with its first output.
# Never run again: what .ci/again.sh lists as a bug, a package that failed without a test of that name (leaks), and
# more than three packages at once.
# Tests end all that they start: processes that are left when they have ended are named and ended, and the run fails.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
read -rd "" -a packages <<<"$1" || true # by spaces and lines
shift
# Tests need little memory. With the race detector they take a tenth less processor time if garbage is collected a quarter as often.
export GOGC=${GOGC:-400}

# All processes that tests start inherit this variable. /proc shows what a process was started with: this shell does not have it.
export OF_TEST_RUN="$$-$RANDOM"
# left names and ends the processes that have the variable, and fails if there are some.
left() {
	local pid pids
	for _ in $(seq 50); do # the last ones may just be ending
		pids=
		for pid in $(grep -lsz "^OF_TEST_RUN=$OF_TEST_RUN\$" /proc/[0-9]*/environ | tr -dc '0-9\n'); do
			[ ! -e "/proc/$pid" ] || pids="$pids $pid" # not grep and tr themselves
		done
		[ -n "$pids" ] || return 0
		sleep 0.1
	done
	echo "processes that tests have left behind:" >&2
	for pid in $pids; do
		ps -o pid=,ppid=,args= -p "$pid" >&2 || true
		kill -KILL "$pid" 2>/dev/null || true
	done
	return 1
}

if [ "${RERUN:-}" != 1 ]; then
	code=0
	"$go" test "$@" "${packages[@]}" || code=$?
	left || code=1
	exit "$code"
fi

. .ci/again.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
red() { echo "tests failed, not run again: $1" >&2; exit 1; }

code=0
"$go" test "$@" "${packages[@]}" 2>&1 | tee "$work/all" || code=$?
left || red "processes were left behind"
[ "$code" != 0 ] || exit 0
if bug=$(shows_bug "$work/all"); then red "$bug"; fi

# What each failed package printed: N.out, its path in N.package.
awk -v work="$work" '
	{ text = text $0 "\n" }
	/^(ok  |\?   )\t/ { text = "" }
	/^FAIL\t/ { n++; printf "%s", text >work "/" n ".out"; print $2 >work "/" n ".package"; text = "" }' "$work/all"
failed=$(find "$work" -name '*.package' | wc -l)
[ "$failed" -gt 0 ] || red "no package is named"
[ "$failed" -le 3 ] || red "$failed packages failed"
for n in $(seq "$failed"); do
	grep -q '^--- FAIL: ' "$work/$n.out" || red "$(cat "$work/$n.package") failed, but none of its tests"
done
for n in $(seq "$failed"); do
	package=$(cat "$work/$n.package")
	echo "run again: $package"
	"$go" test "$@" -count=1 "$package" || { echo "$package failed twice" >&2; exit 1; }
	left || red "processes were left behind"
done
for n in $(seq "$failed"); do
	package=$(sed 's|^github.com/kvasir-kv/kvasir/||' "$work/$n.package")
	# shellcheck disable=SC2046
	unsteady "$work/$n.out" $(sed -n "s|^--- FAIL: \([^ ]*\).*|$package.\1|p" "$work/$n.out" | sort -u)
done
