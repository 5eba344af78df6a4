#!/usr/bin/env bash
# fuzz.sh SECONDS: gives each fuzz target of a rotating half of them an equal share of
# SECONDS. Inputs are not made small for long: a target with goroutines of its own would do
# nothing else. Which half follows from the day, so that all are fuzzed in two days.
set -euo pipefail
cd "$(dirname "$0")/.."
total=${1:-180}
export CGO_ENABLED=0 # as make test: one compilation of the dependencies serves both
targets=$(grep -rnoE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' . | sed -E 's|^\./(.*)/[^/]*_test.go:[0-9]+:func |\1 |' | sort)
half=$(($(date +%j | sed 's/^0*//') % 2))
picked=$(echo "$targets" | awk -v h=$half 'NR % 2 == h')
n=$(echo "$picked" | wc -l)
each=$((total / n > 0 ? total / n : 1))
fuzz() { go test -run '^$' -fuzz "^$2\$" -fuzztime "${each}s" -fuzzminimizetime 20x "./$1" 2>&1; }
echo "$picked" | while read -r pkg name; do
	echo "fuzz $pkg $name for ${each}s"
	if ! out=$(fuzz "$pkg" "$name"); then
		# Go's fuzzer sometimes takes the end of its own time for a failure, without an input that fails.
		[[ $out == *"    context deadline exceeded"* && $out != *"Failing input"* ]] || { echo "$out"; exit 1; }
		echo "its end was taken for a failure: once more"
		out=$(fuzz "$pkg" "$name") || { echo "$out"; exit 1; }
	fi
	echo "$out" | tail -1
done
