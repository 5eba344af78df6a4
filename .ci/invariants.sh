#!/usr/bin/env bash
# Runs, with -tags invariants and at full volume, the tests of the packages that use internal/invariant themselves. All others
# that link it run with the tag in race.sh; without a C compiler, which the race detector needs, they run here.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
field='join .Deps " "' parallel=4
if command -v "${CC:-cc}" >/dev/null; then field='join .Imports " "' parallel=1; fi # race.sh runs beside it
# A test binary's import path ends with .test; the package with its tests has that name behind it, in brackets.
packages=$("$go" list -tags invariants -test -f "{{.ImportPath}} {{$field}}" ./... |
	awk '$1 !~ /\/internal\/invariant$/ { for (i = 2; i <= NF; i++) if ($i ~ /\/internal\/invariant$/) { sub(/(_test|\.test)$/, "", $1); print $1 } }' | sort -u)
[ -n "$packages" ] || { echo "no package uses internal/invariant" >&2; exit 1; }
echo "with invariants: $(wc -w <<<"$packages") packages"
CGO_ENABLED=0 exec .ci/test.sh "$packages" -vet=off -p $parallel -tags invariants -timeout 600s
