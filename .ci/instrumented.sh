#!/usr/bin/env bash
# What make test-all runs after make test: tests with invariants and with crash points, which mostly wait, one package at a time
# beside those with the race detector. Their output follows when both have ended.
set -euo pipefail
cd "$(dirname "$0")/.."
waiting=$(mktemp)
beside() {
	.ci/invariants.sh && CGO_ENABLED=0 .ci/test.sh ./store/pool -tags crashpoints -timeout 300s
}
set -m # a process group of its own, which can be ended whole
beside >"$waiting" 2>&1 &
group=$!
set +m
finish() {
	kill -TERM -- "-$group" 2>/dev/null || true # it may have ended
	wait "$group" || true                       # what it was ended with says nothing
	rm -f "$waiting"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
race=0 others=0
.ci/race.sh || race=$?
wait "$group" || others=$?
cat "$waiting"
[ "$race" = 0 ] && [ "$others" = 0 ] || { echo "tests failed: .ci/race.sh ended with $race, those with invariants and crash points with $others" >&2; exit 1; }
