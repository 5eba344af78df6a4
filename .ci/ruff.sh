#!/usr/bin/env bash
# Runs ruff check over the Python files, with the release whose rules they follow: the one that is installed, or one from PyPI in
# the cache of interop/python.sh. Without both it says so and passes.
set -u
cd "$(dirname "$0")/.."
want="ruff 0.17.6"
ruff=ruff
if [ "$(ruff --version 2>/dev/null)" != "$want" ]; then
	if ! python=$(interop/python.sh interop/requirements-ruff.txt 2>/dev/null); then
		echo "ruff: not run, $want is not installed and cannot be installed"
		exit 0
	fi
	ruff=$(dirname "$python")/ruff
fi
"$ruff" check --no-cache --quiet . && echo "ruff: nothing found"
