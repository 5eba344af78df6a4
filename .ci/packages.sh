#!/usr/bin/env bash
# packages.sh ARCH: the life of the deb in a Debian of its own: installed, a unit started, an engine hits, upgraded to a build with another
# version without losing the pool, removed, purged. systemd runs in namespaces of its own. Needs root, debootstrap, a Debian mirror, git, Go.
# Everything lies below a folder of its own, which is removed, and so is the cgroup.
set -euo pipefail
cd "$(dirname "$0")/.."
CGROUPS=/sys/fs/cgroup/unified
[ -e "$CGROUPS/cgroup.procs" ] || CGROUPS=/sys/fs/cgroup
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null || ! [ -e "$CGROUPS/cgroup.procs" ]; then
	echo "packages: not run: needs root, debootstrap (apt install debootstrap) and cgroups of version 2"
	exit
fi
arch=${1:-amd64}
work=$(mktemp -d)
root=$work/root
group=$CGROUPS/kvasir-packages-$$
outer=
finish() {
	if [ -n "$outer" ]; then
		kill -KILL "$outer" 2>/dev/null || true # --kill-child ends its namespaces
		wait "$outer" 2>/dev/null || true
	fi
	for _ in $(seq 50); do # once its processes are gone
		find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
		[ -d "$group" ] || break
		sleep 0.1
	done
	rm -rf --one-file-system "$work"
}
trap finish EXIT
fail() { echo "packages: $*" >&2; exit 1; }

for version in 0.1.0 0.1.1; do
	git clone -q . "$work/$version"
	(
		cd "$work/$version"
		sed -i "s/^const release = .*/const release = \"$version\"/" cmd/kvasir/internal/cli/help.go
		git diff --quiet || git -c user.name=check -c user.email=check@localhost commit -qam "release $version"
		[ -x "$work/release" ] || (cd internal/tools/release && go build -o "$work/release" .)
		"$work/release" -os linux -arch "$arch" -out "$work/dist-$version" >/dev/null
	)
done
debootstrap --variant=minbase --include=systemd bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$work/debootstrap.log" 2>&1 || { tail "$work/debootstrap.log"; fail "debootstrap"; }
cp "$work"/dist-*/*.deb "$root/root/"
chroot "$root" useradd --create-home alice
echo "127.0.0.1 localhost" >"$root/etc/hosts"

mkdir "$group"
(
	echo "$BASHPID" >"$group/cgroup.procs"
	# shellcheck disable=SC2016
	exec unshare --mount --uts --ipc --net --pid --cgroup --fork --kill-child bash -euc '
		root=$1
		mount --make-rprivate /
		mount --bind "$root" "$root"
		mount -t proc proc "$root/proc"
		mount -t sysfs sysfs "$root/sys"
		mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
		mount -t tmpfs -o mode=755 tmpfs "$root/run"
		mount -t tmpfs -o mode=755 tmpfs "$root/dev"
		for n in null zero full random urandom tty; do touch "$root/dev/$n"; mount --bind "/dev/$n" "$root/dev/$n"; done
		mkdir "$root/dev/shm" "$root/dev/pts"
		mount -t tmpfs -o mode=1777,size=512m tmpfs "$root/dev/shm"
		ln -s /proc/self/fd "$root/dev/fd"
		ip link set lo up
		cd "$root"
		pivot_root . mnt
		umount -l /mnt
		exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --log-target=null --show-status=false' boot "$root"
) >"$work/boot.log" 2>&1 &
outer=$!
# PID 1 of the namespaces is the only child of unshare.
init() { pgrep -P "$outer" | head -n 1; }
inside() { nsenter --all -t "$(init)" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash -euc "$1"; }
for n in $(seq 100); do
	inside 'systemctl is-system-running' 2>/dev/null | grep -Eq 'running|degraded' && break
	[ "$n" -lt 100 ] || { cat "$work/boot.log"; fail "systemd did not start"; }
	sleep 0.2
done

# ask sends one prompt to an engine of its own, which alice runs, and prints the answer.
# shellcheck disable=SC2016
ask='cd /home/alice; rm -f /root/engine.log
setpriv --reuid alice --regid alice --init-groups /usr/bin/kvasir engine --port 8100 --layers 1 --num-gpu-blocks-override 256 --kv-transfer-config "{\"kv_connector\":\"LMCacheMPConnector\",\"kv_role\":\"kv_both\"}" >/root/engine.log 2>&1 &
engine=$!
trap "kill $engine || true; wait $engine || true" EXIT
for n in $(seq 100); do grep -qs "the engine serves" /root/engine.log && break; sleep 0.1; done
grep -q "the engine serves" /root/engine.log || { cat /root/engine.log; exit 1; }
body="{\"max_tokens\":2,\"prompt\":\"$(seq -s " " 600)\"}"
exec 3<>/dev/tcp/127.0.0.1/8100
printf "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${#body}\r\n\r\n%s" "$body" >&3
cat <&3'
hits() { grep -q '"cached_tokens":512' <<<"$1"; }

inside "dpkg -i /root/kvasir_0.1.0-1_$arch.deb" >"$work/dpkg" 2>&1 || { cat "$work/dpkg"; fail "the package was not installed"; }
[ -z "$(inside "systemctl list-units --plain --no-legend 'kvasir-*.service'")" ] || fail "the installation started a unit"
inside 'sed -i "s/^l1-size-gb: .*/l1-size-gb: 32MiB/" /etc/kvasir/server.yaml; mkdir -p /var/lib/kvasir/tier; echo kv >/var/lib/kvasir/tier/object.data
	runuser -u alice -- kvasir server --config /etc/kvasir/server.yaml --check-config >/dev/null; systemctl start kvasir-server@alice' || { inside 'systemctl status kvasir-server@alice' || true; fail "the unit did not start"; }
answer=$(inside "$ask"); hits "$answer" && fail "an empty server has a hit: $answer"
answer=$(inside "$ask"); hits "$answer" || fail "the second prompt did not hit: $answer"
inside "dpkg -i /root/kvasir_0.1.1-1_$arch.deb" >"$work/dpkg" 2>&1 || { cat "$work/dpkg"; fail "the package was not upgraded"; }
grep -q 'still running with the former build: kvasir-server@alice.service' "$work/dpkg" || fail "the upgrade does not name the running unit: $(cat "$work/dpkg")"
answer=$(inside "$ask"); hits "$answer" || fail "the server did not go on over the upgrade: $answer"
inside 'systemctl restart kvasir-server@alice'
version=$(inside 'kvasir --version; exec 3<>/dev/tcp/127.0.0.1/8080; printf "GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n" >&3; cat <&3')
[ "$(grep -c '0\.1\.1' <<<"$version")" = 2 ] || fail "after the restart: $version"
grep -q 32MiB <(inside 'cat /etc/kvasir/server.yaml') || fail "the configuration was replaced"
answer=$(inside "$ask"); hits "$answer" || fail "the pool was lost with the upgrade: $answer"
inside 'dpkg -r kvasir' >"$work/dpkg" 2>&1
grep -q 'left in place: /etc/kvasir' "$work/dpkg" || fail "the removal does not say what stays: $(cat "$work/dpkg")"
inside '! grep -qsx kvasir /proc/[0-9]*/comm; ! [ -e /usr/bin/kvasir ]; [ -e /etc/kvasir/server.yaml ]; ls /dev/shm/lmcache_l1_pool_kvasir_* >/dev/null; [ -e /var/lib/kvasir/tier/object.data ]' || fail "after the removal"
inside 'dpkg -P kvasir' >"$work/dpkg" 2>&1
inside '! [ -e /etc/kvasir ]; ! ls /dev/shm/lmcache_l1_pool_kvasir_* 2>/dev/null; [ -e /var/lib/kvasir/tier/object.data ]' || fail "after the purge"
echo "packages: installed, started, hit, upgraded with its pool, removed, purged"
