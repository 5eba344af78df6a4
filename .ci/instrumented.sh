#!/usr/bin/env bash
# make test-all runs this after make test: tests with the race detector, and beside them, one package at a time, tests with
# invariants and with crash points. The latter mostly wait. Their output follows at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
output=$(mktemp)
beside() {
	.ci/invariants.sh && CGO_ENABLED=0 .ci/test.sh ./store/pool -tags crashpoints -timeout 300s
}
set -m # a process group of its own, which can be ended whole
beside >"$output" 2>&1 &
group=$!
set +m
finish() {
	if [ -n "$group" ]; then
		kill -TERM -- "-$group" 2>/dev/null || true # it may have ended
		wait "$group" || true                       # what it was ended with says nothing
	fi
	rm -f "$output"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
race=0 others=0
.ci/race.sh || race=$?
wait "$group" || others=$?
group=
cat "$output"
[ "$race" = 0 ] && [ "$others" = 0 ] || { echo "tests failed: .ci/race.sh ended with $race, those with invariants and crash points with $others" >&2; exit 1; }
