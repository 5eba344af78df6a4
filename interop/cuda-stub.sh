#!/usr/bin/env bash
# cuda-stub.sh PYTHON: lets the libraries of Mooncake's CUDA wheel in PYTHON's environment load on a machine without a GPU. They
# ask for libcudart, which is a package, and for libcuda, which belongs to the driver: here it is a library whose functions all
# answer CUDA_ERROR_NO_DEVICE (100). Both go into the folder that the wheel's libraries search. Needs gcc, nm, and
# the packages ibverbs-providers and libcurl4.
set -euo pipefail
python=${1:?usage: cuda-stub.sh PYTHON}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
libs=$site/mooncake_transfer_engine_cuda13.libs
[ ! -e "$libs/libcuda.so.1" ] || exit 0
ln -sf "$site/nvidia/cu13/lib/libcudart.so.13" "$libs/libcudart.so.13"
chmod +x "$site"/mooncake/mooncake_master "$site"/mooncake/mooncake_client
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nm -D --undefined-only "$site"/mooncake/*.so "$site"/mooncake/mooncake_client |
	awk '$2 ~ /^cu[A-Z]/ { sub(/@.*/, "", $2); print "int " $2 "(void) { return 100; }" }' | sort -u >"$work/cuda.c"
gcc -shared -fPIC -O1 -Wl,-soname,libcuda.so.1 -o "$libs/libcuda.so.1" "$work/cuda.c"
"$python" -c 'import mooncake.store, mooncake.engine'
