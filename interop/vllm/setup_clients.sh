#!/usr/bin/env bash
# setup_clients.sh: a Python venv with the clients of OpenAI and Anthropic; prints its interpreter. What is there stays.
set -euo pipefail
dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/clients-openai-3.57.0-anthropic-2.14.0
if [ ! -f "$dir/complete" ]; then
	"${PYTHON:-python3}" -m venv "$dir"
	"$dir/bin/pip" install --quiet openai==3.57.0 anthropic==2.14.0 >&2
	touch "$dir/complete"
fi
echo "$dir/bin/python"
