#!/usr/bin/env bash
# image.sh IMAGE.tar: runs an image as a container runtime does, in network, pid and mount namespaces of its own: read-only root, user 65532. A
# server serves; over IPv6 alone an engine hits; a small /dev/shm, and none, are refused with words. Needs root, unshare, ip, curl.
set -euo pipefail
if [ "$(id -u)" != 0 ] || ! unshare --mount --net --pid --fork true 2>/dev/null || ! command -v ip >/dev/null || ! command -v curl >/dev/null; then
	echo "image: not run: needs root, namespaces, ip and curl"
	exit
fi
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
fail() { echo "image: $*" >&2; exit 1; }
mkdir "$work/root"
tar -xOf "$1" --wildcards '*.tar.gz' | tar -xz -C "$work/root"
mkdir "$work"/root/{proc,dev,sys} # mount points: a runtime makes them

# contain SHM SCRIPT [ARG ...]: the script in a container whose /dev/shm is a tmpfs with these options, or is not there; ARGs are $4 and so on. "kvasir" in it is the image's.
# shellcheck disable=SC2016
setup='root=$1
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
touch "$root/dev/null"; mount --bind /dev/null "$root/dev/null"
[ -z "$2" ] || { mkdir "$root/dev/shm"; mount -t tmpfs -o "mode=1777,$2" tmpfs "$root/dev/shm"; }
mount -o remount,bind,ro "$root"
ip link set lo up
kvasir() { chroot --userspec=65532:65532 "$root" /usr/bin/kvasir "$@"; }
until_answers() { for n in $(seq 200); do curl -gsf -m 5 -o "$3/answer" "$1" && return; kill -0 "$2"; sleep 0.1; done; return 1; }
'
contain() { unshare --mount --net --pid --fork --kill-child bash -euc "$setup$2" image "$work/root" "$1" "$work" "${@:3}"; }

! contain size=64m 'kvasir server' >"$work/out" 2>&1 || fail "a pool of the default size in 64 MiB was not refused"
grep -q 'shared memory too small: .* take .*, /dev/shm has 64 MiB free' "$work/out" || fail "64 MiB: $(cat "$work/out")"
! contain '' 'kvasir server' >"$work/out" 2>&1 || fail "a server without /dev/shm started"
grep -q 'there is no folder /dev/shm: mount a tmpfs there' "$work/out" || fail "no /dev/shm: $(cat "$work/out")"
# serve is a script with three arguments: a server with the flags $4, and an engine with the connector's configuration $5, both at the host $6. The
# engine has no prefix cache of its own, so its second prompt hits in the server.
# shellcheck disable=SC2016
serve='
kvasir server --l1-size-gb 16MiB $4 & server=$!
until_answers "http://$6:8080/readyz" $server "$3"
kvasir engine --host "$6" --port 8100 --no-enable-prefix-caching --layers 1 --num-gpu-blocks-override 256 --kv-transfer-config "{\"kv_connector\":\"LMCacheMPConnector\",\"kv_role\":\"kv_both\",
	\"kv_connector_extra_config\":{$5\"lmcache.mp.mp_transfer_mode\":\"engine_driven\"}}" & engine=$!
until_answers "http://$6:8100/health" $engine "$3"
for i in 1 2; do
	curl -gsS "http://$6:8100/v1/completions" -H "Content-Type: application/json" -d "{\"max_tokens\":2,\"prompt\":\"$(seq -s " " 600)\"}" >"$3/answer"
done
grep -q "\"cached_tokens\":512" "$3/answer"
kvasir status --url "http://$6:8080"'
# The image has no /etc/hosts, which a runtime may bring: localhost, the default, is 127.0.0.1.
contain size=64m "$serve" '' '' 127.0.0.1 >"$work/out" 2>&1 || fail "$(cat "$work/out" "$work/answer")"
contain size=64m "ip -4 address del 127.0.0.1/8 dev lo$serve" '--host ::1 --http-host :: --allow-from http=::1' '"lmcache.mp.host":"tcp://[::1]",' '[::1]' >"$work/out" 2>&1 ||
	fail "over IPv6 alone: $(cat "$work/out" "$work/answer")"
echo "image: serves as user 65532 with a read-only root, hits, also over IPv6 alone, refuses a small /dev/shm and none"
