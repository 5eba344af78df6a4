#!/usr/bin/env bash
# Runs the tests of all packages that link internal/invariant, with -tags invariants. In the others the tag changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
# A test binary's import path ends with .test.
packages=$("$go" list -tags invariants -test -f '{{.ImportPath}} {{join .Deps " "}}' ./... |
	awk '$1 ~ /\.test$/ { for (i = 2; i <= NF; i++) if ($i ~ /\/internal\/invariant$/) { sub(/\.test$/, "", $1); print $1; break } }')
[ -n "$packages" ] || { echo "no package links internal/invariant" >&2; exit 1; }
echo "with invariants: $(wc -w <<<"$packages") packages"
CGO_ENABLED=0 exec .ci/test.sh "$packages" -vet=off -p 4 -tags invariants -timeout 600s
