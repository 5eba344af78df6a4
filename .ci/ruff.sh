#!/usr/bin/env bash
# Runs ruff check over the Python files; without the ruff whose rules they follow, says so and passes.
set -u
want="ruff 0.17.6"
have=$(ruff --version 2>/dev/null)
case $have in
"$want") ruff check --no-cache --quiet . && echo "ruff: nothing found" ;;
"") echo "ruff: not run, it is not installed" ;;
*) echo "ruff: not run, $have is installed and not $want, and the rules differ" ;;
esac
