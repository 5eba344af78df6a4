#!/usr/bin/env bash
# fuzz.sh SECONDS [FOLDER]: gives each fuzz target of a rotating half of them an equal share of SECONDS. Inputs are not made
# small for long: a target with goroutines of its own would do nothing else. Which half follows from the day, so that all are
# fuzzed in two days. FOLDER has the test binaries that fuzz.sh build FOLDER made before, and the names of their targets, since a new day
# may have begun; without it they are made first.
set -euo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=0 # as make test: one compilation of the dependencies serves both
go=${GO:-go}
targets=$(grep -rnoE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' . | sed -E 's|^\./(.*)/[^/]*_test.go:[0-9]+:func |\1 |' | sort)
half=$(($(date +%j | sed 's/^0*//') % 2))
picked=$(echo "$targets" | awk -v h=$half 'NR % 2 == h')

# build FOLDER: one binary a package, with the fuzzer's instrumentation. Its name is the package's, with dashes.
build() {
	local pkg
	echo "$picked" >"$1/targets"
	for pkg in $(echo "$picked" | awk '{ print $1 }' | uniq); do
		"$go" test -c -vet=off -fuzz=. -o "$1/${pkg//\//-}" "./$pkg"
	done
}

if [ "${1:-}" = build ]; then
	build "$2"
	exit
fi

total=${1:-180} folder=${2:-}
if [ -z "$folder" ]; then
	folder=$(mktemp -d)
	trap 'rm -rf "$folder"' EXIT
	build "$folder"
fi
picked=$(cat "$folder/targets")
n=$(echo "$picked" | wc -l)
each=$((total / n > 0 ? total / n : 1))
cache=$("$go" env GOCACHE)/fuzz/$("$go" list -m) # where go test -fuzz has the inputs that it found
fuzz() {
	(cd "$1" && exec "$folder/${1//\//-}" -test.run '^$' -test.fuzz "^$2\$" -test.fuzztime "${each}s" -test.fuzzminimizetime 20x \
		-test.fuzzcachedir "$cache/$1" -test.timeout 10m -test.paniconexit0 2>&1)
}
while read -r pkg name; do
	echo "fuzz $pkg $name for ${each}s"
	if ! out=$(fuzz "$pkg" "$name"); then
		# Go's fuzzer sometimes takes the end of its own time for a failure, without an input that fails.
		[[ $out == *"    context deadline exceeded"* && $out != *"Failing input"* ]] || { echo "$out"; exit 1; }
		echo "its end was taken for a failure: once more"
		out=$(fuzz "$pkg" "$name") || { echo "$out"; exit 1; }
	fi
	echo "$out" | grep '^fuzz: elapsed' | tail -1
done <<<"$picked"
