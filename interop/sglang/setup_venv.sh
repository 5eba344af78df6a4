#!/usr/bin/env bash
# setup_venv.sh PEERS DIR : makes DIR, a Python venv with a real SGLang engine for CPUs, over PEERS, the venv of
# ../vllm/setup_venv.sh; about 200 MB more. SGLang's package of CUDA kernels is replaced by stub/. What is there stays.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
peers=${1:?usage: setup_venv.sh PEERS DIR} dir=${2:?usage: setup_venv.sh PEERS DIR}
"$here/../vllm/setup_venv.sh" "$peers" >&2
stamp=$(cat "$here/requirements.txt" "$here/stub/sgl_kernel/__init__.py" | sha256sum)
[ "$(cat "$dir/complete" 2>/dev/null)" != "$stamp" ] || exit 0
[ -x "$dir/bin/python" ] || "$peers/bin/python" -m venv --without-pip "$dir"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
own=$(packages "$dir/bin/python")
# The packages of PEERS come after those of DIR.
echo "import site; site.addsitedir('$(packages "$peers/bin/python")')" >"$own/peers.pth"
UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} "$peers/bin/uv" pip install -q --python "$dir/bin/python" --no-deps -r "$here/requirements.txt" >&2
rm -rf "$own/sgl_kernel"
cp -r "$here/stub/sgl_kernel" "$own/sgl_kernel"
SGLANG_USE_CPU_ENGINE=1 "$dir/bin/python" -c 'import sglang.launch_server, sglang.srt.disaggregation.mooncake.conn' >&2
echo "$stamp" >"$dir/complete"
