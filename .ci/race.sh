#!/usr/bin/env bash
# Runs all tests with the race detector, which needs a C compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v "${CC:-cc}" >/dev/null; then
	echo "race detector: left out, no C compiler"
	exit 0
fi
CGO_ENABLED=1 exec .ci/test.sh ./... -race -vet=off -p 4 -timeout 900s
