#!/usr/bin/env bash
# Runs the tests of all packages that start goroutines with the race detector, which needs a C compiler, and with -tags
# invariants: who reads memory that was freed races with what poisons it. In the other packages nothing can race.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v "${CC:-cc}" >/dev/null; then
	echo "race detector: left out, no C compiler"
	exit 0
fi
# A program under the race detector waits for a second at its end, unless it is asked not to: tests start hundreds of them.
export GORACE=${GORACE:-atexit_sleep_ms=0}
packages=$("${GO:-go}" run ./internal/tools/concurrent ./...)
echo "race detector: $(wc -w <<<"$packages") packages"
CGO_ENABLED=1 exec .ci/test.sh "$packages" -race -tags invariants -vet=off -p 3 -timeout 900s
