#!/usr/bin/env bash
# setup_newer.sh VLLM_ENV RELEASE: the vLLM of an environment with the connectors of a later release over it: those of the Mooncake and of
# LMCache's multiprocess mode, which are Python alone. Prints the folder for PYTHONPATH. The rest are links to the environment.
set -euo pipefail
dir=$(cd "${1:?usage: setup_newer.sh VLLM_ENV RELEASE}" && pwd) release=${2:?usage: setup_newer.sh VLLM_ENV RELEASE}
over=$dir/over/vllm-$release
if [ ! -e "$over/complete" ]; then
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	"$dir/bin/python" -m pip --version >/dev/null 2>&1 || "$dir/bin/python" -m ensurepip -q >&2
	# pip asks a source distribution for its metadata, for which it needs these and neither torch nor a compiler.
	"$dir/bin/python" -m pip install -q --no-deps --target "$work/tools" setuptools-rust==1.13.0 semantic-version==2.10.0 setuptools-scm==10.3.4 vcs-versioning==2.6.0 >&2
	PYTHONPATH=$work/tools VLLM_VERSION_OVERRIDE=$release VLLM_TARGET_DEVICE=empty "$dir/bin/python" -m pip download -q --no-deps --no-build-isolation \
		--no-binary vllm -d "$work" "vllm==$release" >&2
	tar -xzf "$work"/vllm-*.tar.gz -C "$work"
	rm -rf "${over:?}"
	mkdir -p "$over"
	cp -rs "$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm" "$over/vllm"
	connectors=vllm/distributed/kv_transfer/kv_connector/v1
	for one in mooncake lmcache_mp_connector.py; do
		rm -rf "${over:?}/$connectors/$one"
		cp -r "$work"/vllm-*/"$connectors/$one" "$over/$connectors/$one"
	done
	touch "$over/complete"
fi
echo "$over"
