# pods.sh FORM KVASIR FOLDER: a server and an engine, each in a pid and a mount namespace of its own, as two containers are. sidecar: one network
# and one memory volume, as in a pod. daemonset: networks of their own, one tmpfs of the node, and a UNIX socket. The engine computes a
# prompt twice, without a prefix cache of its own, and the second answer is printed. The server takes no worker through its socket (--pickle off).
# The caller gives this script a mount and a network namespace, and ends it.
set -euo pipefail
form=$1 kvasir=$2 dir=$3
mkdir "$dir/shm" "$dir/sockets"
: >"$dir/server.log"; : >"$dir/engine.log"
mount -t tmpfs -o size=256m tmpfs "$dir/shm"
ip link set lo up
container=(unshare -m -p --fork --kill-child)
server=() connect=127.0.0.1 # TCP port 5555
if [ "$form" = daemonset ]; then
	container+=(-n)
	server=(--ipc "$dir/sockets/lmcache.sock:5555")
	connect=ipc://$dir/sockets/lmcache.sock # and the engine adds its port, 5555
fi
enter='mount --bind "$0/shm" /dev/shm; mount -t proc proc /proc; ip link set lo up;'
"${container[@]}" sh -c "$enter"' exec "$@"' "$dir" "$kvasir" server --l1-size-gb 16MiB --pickle off "${server[@]}" 2>"$dir/server.log" &
until grep -q /status "$dir/server.log"; do sleep 0.1; kill -0 $!; done
"${container[@]}" bash -euc "$enter"'
	"$1" engine --port 8100 --no-enable-prefix-caching --num-gpu-blocks-override 256 --layers 1 --kv-transfer-config "{\"kv_connector\":\"LMCacheMPConnector\",\"kv_role\":\"kv_both\",
		\"kv_connector_extra_config\":{\"lmcache.mp.host\":\"$2\",\"lmcache.mp.port\":5555,\"lmcache.mp.mp_transfer_mode\":\"engine_driven\"}}" 2>"$0/engine.log" &
	until grep -q "the engine serves" "$0/engine.log"; do sleep 0.1; kill -0 $!; done
	for i in 1 2; do
		curl -sS http://127.0.0.1:8100/v1/completions -H "Content-Type: application/json" -d "{\"max_tokens\":2,\"prompt\":\"$(seq -s " " 600)\"}"
	done' "$dir" "$kvasir" "$connect"
