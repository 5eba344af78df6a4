#!/usr/bin/env bash
# Runs all tests with the race detector, which needs a C compiler. internal/arch is left out: it reads source texts in one goroutine,
# and make check runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v "${CC:-cc}" >/dev/null; then
	echo "race detector: left out, no C compiler"
	exit 0
fi
packages=$("${GO:-go}" list ./... | grep -v /internal/arch$)
CGO_ENABLED=1 exec .ci/test.sh "$packages" -race -vet=off -p 2 -timeout 900s
