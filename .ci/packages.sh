#!/usr/bin/env bash
# packages.sh ARCH [DIST]: the lives of the deb, the rpm and the archive in a Debian of its own, without Go: installed, a unit started, an
# engine hits, upgraded over a release to a build with another configuration without losing the pool, removed, purged. On the way: what is of
# another architecture, may not use /dev/shm, has too little memory or is another user's is refused, and nothing is lost. systemd runs in namespaces
# of its own. DIST has artefacts of this commit; without it they are built. Needs root, debootstrap, a Debian mirror, git, Go. Everything lies
# below a folder of its own, which is removed, and so is the cgroup.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
CGROUPS=/sys/fs/cgroup/unified
[ -e "$CGROUPS/cgroup.procs" ] || CGROUPS=/sys/fs/cgroup
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null || ! [ -e "$CGROUPS/cgroup.procs" ]; then
	echo "packages: not run: needs root, debootstrap (apt install debootstrap) and cgroups of version 2"
	exit
fi
arch=${1:-amd64}
dist=${2:-}
case $arch in
amd64) machine=x86_64 foreign=arm64 foreign_machine=aarch64 ;;
arm64) machine=aarch64 foreign=amd64 foreign_machine=x86_64 ;;
*) echo "packages: no release is built for $arch: want amd64 or arm64" >&2; exit 2 ;;
esac
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

# The release after the next one has another default in a configuration.
old=$(sed -n 's/^const release = "\(.*\)"$/\1/p' cmd/kvasir/internal/cli/help.go)
new=0.99.0
build() {
	(cd internal/tools/release && go build -o "$work/release" .)
	"$work/release" -os linux -arch "$1" -out "$2" >/dev/null
}
if [ -z "$dist" ]; then
	git clone -q . "$work/$old"
	(cd "$work/$old" && build "$arch,$foreign" "$work/dist-$old")
	dist=$work/dist-$old
fi
git clone -q . "$work/$new"
(
	cd "$work/$new"
	sed -i "s/^const release = .*/const release = \"$new\"/" cmd/kvasir/internal/cli/help.go
	sed -i 's/^port: 5555$/port: 5555   # as ever/' cmd/kvasir/packaging/config/server.yaml
	git -c user.name=check -c user.email=check@localhost commit -qam "release $new"
	build "$arch" "$work/dist-$new"
)
! "$work/release" -arch riscv64 -out "$work/none" 2>"$work/refused" || fail "a release for riscv64 was built"
grep -q 'no release is built for riscv64: want amd64 or arm64' "$work/refused" || fail "riscv64: $(cat "$work/refused")"
debootstrap --variant=minbase --include=systemd,rpm bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$work/debootstrap.log" 2>&1 || { tail "$work/debootstrap.log"; fail "debootstrap"; }
for d in "$dist" "$work/dist-$new"; do
	cp "$d"/*.deb "$d"/*.rpm "$d"/kvasir-*-linux-*.tar.gz "$root/root/"
done
chroot "$root" useradd --create-home alice
chroot "$root" useradd --create-home bob
echo "127.0.0.1 localhost" >"$root/etc/hosts"
! chroot "$root" sh -c 'command -v go' || fail "the root has Go"

# "no COMMAND" in a script: the command fails, else all ends (set -e does not see a command after "!").
# shellcheck disable=SC2016
no='no() { if "$@"; then echo "it is so: $*" >&2; exit 1; fi; }'
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# A machine without systemd, /proc and /dev/shm: all install and go, also a deb that was unpacked and not configured.
bare() { chroot "$root" env -i PATH=$path HOME=/root bash -euc "$no; $1" >"$work/out" 2>&1 || { cat "$work/out"; fail "without systemd: $1"; }; }
mv "$root/usr/bin/systemd-sysusers" "$work"
there="getent passwd kvasir; kvasir --version | grep -F ' $old'; [ -e /etc/kvasir/server.yaml ]"
gone='no [ -e /etc/kvasir ]; no command -v kvasir; userdel kvasir'
bare "dpkg --unpack /root/kvasir_$old-1_$arch.deb; dpkg -P kvasir; no command -v kvasir; dpkg --unpack /root/kvasir_$old-1_$arch.deb; dpkg --configure -a; $there; dpkg -P kvasir; $gone"
bare "rpm -U --nodeps --force-debian /root/kvasir-$old-1.$machine.rpm; $there; cp /usr/share/kvasir/postremove.sh /root; rpm -e --force-debian kvasir; sh /root/postremove.sh purge; $gone"
bare "cd /root; tar -xzf kvasir-$old-linux-$arch.tar.gz; kvasir-$old-linux-$arch/install.sh; $there; sh /usr/local/lib/kvasir/install.sh purge; $gone; rm -r kvasir-$old-linux-$arch"
mv "$work/systemd-sysusers" "$root/usr/bin"
echo "without systemd: installed and purged"

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
inside() { nsenter --all -t "$(init)" env -i PATH=$path HOME=/root bash -euc "$no; $1"; }
for n in $(seq 100); do
	inside 'systemctl is-system-running' 2>/dev/null | grep -Eq 'running|degraded' && break
	[ "$n" -lt 100 ] || { cat "$work/boot.log"; fail "systemd did not start"; }
	sleep 0.2
done

# ask sends one prompt to an engine of its own, which alice runs, and prints the answer.
# shellcheck disable=SC2016
ask='cd /home/alice; rm -f /root/engine.log
setpriv --reuid alice --regid alice --init-groups kvasir engine --port 8100 --layers 1 --num-gpu-blocks-override 256 --kv-transfer-config "{\"kv_connector\":\"LMCacheMPConnector\",\"kv_role\":\"kv_both\"}" >/root/engine.log 2>&1 &
engine=$!
trap "kill $engine || true; wait $engine || true" EXIT
for n in $(seq 100); do grep -qs "the engine serves" /root/engine.log && break; sleep 0.1; done
grep -q "the engine serves" /root/engine.log || { cat /root/engine.log; exit 1; }
body="{\"max_tokens\":2,\"prompt\":\"$(seq -s " " 600)\"}"
exec 3<>/dev/tcp/127.0.0.1/8100
printf "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${#body}\r\n\r\n%s" "$body" >&3
cat <&3'
hits() { # WHERE: a prompt that was stored hits
	local answer
	answer=$(inside "$ask") || fail "$1: $answer"
	grep -q '"cached_tokens":512' <<<"$answer" || fail "$1: no hit: $answer"
}

# do_ VERSION ARCH MACHINE and the like: the deeds of each kind.
deb_install() { inside "dpkg --force-confold -i /root/kvasir_$1-1_$2.deb"; }
deb_remove() { inside 'dpkg -r kvasir'; }
deb_purge() { inside 'dpkg -P kvasir'; }
rpm_install() { inside "rpm -U --nodeps --force-debian /root/kvasir-$1-1.$3.rpm"; }
rpm_remove() { inside "$(page 'rpm has no purge' | head -n 2)"; }
rpm_purge() { inside "$(page 'rpm has no purge' | tail -n 1)"; }
archive_install() { inside "cd /root; tar -xzf kvasir-$1-linux-$2.tar.gz; cd kvasir-$1-linux-$2; umask 077; ./install.sh"; }
archive_remove() { inside 'sh /usr/local/lib/kvasir/install.sh remove'; }
archive_purge() { inside "/root/kvasir-$new-linux-$arch/install.sh purge"; }

# page TEXT: the shell block of docs/operate/install.md after a line that has this text, without sudo, and with rpm for dnf.
page() { awk -v text="$1" 'index($0, text) { found = 1 } found && /^```$/ { exit } found && shell { print } found && /^```sh$/ { shell = 1 }' "$here/docs/operate/install.md" | sed 's/\<sudo //; s/dnf remove/rpm -e --force-debian/'; }

# refused WHAT TEXT COMMAND: a command fails with this text.
refused() {
	! inside "$3" >"$work/refused" 2>&1 || fail "$1: was not refused: $(cat "$work/refused")"
	grep -qE "$2" "$work/refused" || fail "$1: want '$2': $(cat "$work/refused")"
}

# unit_refused WHAT TEXT: kvasir-server@USER does not start, and its journal has this text.
unit_refused() {
	refused "$1" "$2" "systemctl reset-failed; if systemctl start kvasir-server@$3; then exit; fi; journalctl --sync || true; journalctl -q -o cat -u kvasir-server@$3 --since '-1min'; systemctl stop kvasir-server@$3; exit 1"
}

life() {
	local kind=$1 began=$SECONDS by_hand pool
	refused "$kind of another architecture" "$2" "$3"
	inside 'no [ -e /etc/kvasir ]; no command -v kvasir; no getent passwd kvasir' || fail "$kind: the root has a kvasir already"
	"${kind}_install" "$old" "$arch" "$machine" >"$work/out" 2>&1 || { cat "$work/out"; fail "$kind: was not installed"; }
	[ -z "$(inside "systemctl list-units --plain --no-legend 'kvasir-*.service'")" ] || fail "$kind: the installation started a unit"
	inside "getent passwd kvasir; kvasir --version | grep -F ' $old'; [ \"\$(stat -c %a%U \"\$(command -v kvasir)\" /etc/kvasir/server.yaml | tr '\n' ' ')\" = '755root 644root ' ]; ls -d /usr/share/man/man1/kvasir-server.1* /usr/local/share/man/man1/kvasir-server.1* | grep ." >/dev/null 2>&1 || fail "$kind: after the installation"

	inside 'sed -i "s/^l1-size-gb: .*/l1-size-gb: 32MiB/" /etc/kvasir/server.yaml; mkdir -p /var/lib/kvasir/tier /var/lib/kvasir/empty; echo kv >/var/lib/kvasir/tier/object.data; echo kv >/var/lib/kvasir/tier/other.state
		runuser -u alice -- kvasir server --config /etc/kvasir/server.yaml --check-config >/dev/null'
	# No rights to /dev/shm, before there is a pool.
	inside 'chmod 755 /dev/shm'
	unit_refused "$kind: /dev/shm is root's" 'uid [0-9]+ may not make files in /dev/shm, whose mode is drwxr-xr-x: chmod 1777 /dev/shm' alice
	inside 'chmod 1777 /dev/shm; systemctl reset-failed; systemctl enable --now kvasir-server@alice' >/dev/null 2>&1 || { inside 'systemctl status kvasir-server@alice' || true; fail "$kind: the unit did not start"; }
	answer=$(inside "$ask"); ! grep -q '"cached_tokens"' <<<"$answer" || fail "$kind: an empty server has a hit: $answer"
	hits "$kind: the second prompt"
	# With a pool: a unit that may not write there, one with too little memory, and another user's. The pool stays.
	inside 'systemctl stop kvasir-server@alice; mkdir -p /run/systemd/system/kvasir-server@alice.service.d; printf "[Service]\nReadOnlyPaths=/dev/shm\n" >/run/systemd/system/kvasir-server@alice.service.d/test.conf; systemctl daemon-reload'
	unit_refused "$kind: a read-only /dev/shm" '/dev/shm is read-only for this process.*ReadOnlyPaths=' alice
	if grep -qw memory "$group/cgroup.controllers"; then
		inside 'printf "[Service]\nMemoryMax=24M\n" >/run/systemd/system/kvasir-server@alice.service.d/test.conf; systemctl daemon-reload'
		unit_refused "$kind: a pool above the limit" 'l1-size-gb 32MiB is more than the memory limit of this process, 24 MiB' alice
	fi
	inside 'rm -r /run/systemd/system/kvasir-server@alice.service.d; systemctl daemon-reload'
	unit_refused "$kind: another user's pool" 'belongs to alice' bob
	inside 'systemctl reset-failed; systemctl start kvasir-server@alice'
	hits "$kind: after starts that were refused"

	# Upgrade, with a server of the unit and one that was started by hand.
	by_hand=$(inside 'setpriv --reuid bob --regid bob --init-groups kvasir server --port 5600 --http-port 8090 --l1-size-gb 16MiB >/tmp/by-hand.log 2>&1 & echo $!; for n in $(seq 100); do grep -q /status /tmp/by-hand.log && exit; sleep 0.1; done; cat /tmp/by-hand.log >&2; exit 1')
	"${kind}_install" "$new" "$arch" "$machine" >"$work/out" 2>&1 || { cat "$work/out"; fail "$kind: was not upgraded"; }
	grep -q 'still running with the former build: kvasir-server@alice.service' "$work/out" || fail "$kind: the upgrade does not name the running unit: $(cat "$work/out")"
	grep -q "still running with the former build, started by hand: process $by_hand\$" "$work/out" || fail "$kind: the upgrade does not name process $by_hand: $(cat "$work/out")"
	hits "$kind: the server over the upgrade"
	inside 'systemctl restart kvasir-server@alice'
	version=$(inside 'kvasir --version; exec 3<>/dev/tcp/127.0.0.1/8080; printf "GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n" >&3; cat <&3')
	[ "$(grep -cF "$new" <<<"$version")" = 2 ] || fail "$kind: after the restart: $version"
	inside 'grep -q 32MiB /etc/kvasir/server.yaml; ls /etc/kvasir | grep -Ex "server.yaml.(dpkg-dist|rpmnew|new)"' >/dev/null || fail "$kind: the configuration was replaced, or the new one is not beside it"
	hits "$kind: the pool over the upgrade"

	"${kind}_remove" >"$work/out" 2>&1 || { cat "$work/out"; fail "$kind: was not removed"; }
	grep -qE 'left in place: (/etc/kvasir|changed files of /etc/kvasir)' "$work/out" || fail "$kind: the removal does not say what stays: $(cat "$work/out")"
	inside "no command -v kvasir; no grep -qsx kvasir-server@alice.service <(systemctl list-units --plain --no-legend --state=active 'kvasir-*.service' | cut -d' ' -f1)
		no sh -c 'ls -d /usr/share/man/man1/kvasir* /usr/local/share/man/man1/kvasir* /usr/lib/systemd/system/kvasir* /usr/local/lib/systemd/system/kvasir* /usr/local/lib/kvasir 2>/dev/null | grep .'
		grep -q 32MiB /etc/kvasir/server.yaml*; ls /dev/shm/lmcache_l1_pool_kvasir_5555_* >/dev/null; [ -e /var/lib/kvasir/tier/object.data ]; kill -0 $by_hand" || fail "$kind: after the removal"
	"${kind}_purge" >"$work/out" 2>&1 || { cat "$work/out"; fail "$kind: was not purged"; }
	inside 'no [ -e /etc/kvasir ]; [ -e /var/lib/kvasir/tier/object.data ]; [ -e /var/lib/kvasir/tier/other.state ]; [ -d /var/lib/kvasir/empty ]
		no sh -c "ls -d /dev/shm/lmcache_l1_pool_kvasir_5555_* /var/lib/kvasir/server-* /etc/systemd/system/*.wants/kvasir* 2>/dev/null | grep ."' || fail "$kind: after the purge: $(cat "$work/out")"
	# A server that runs keeps its pool.
	inside "kill -0 $by_hand; ls /dev/shm/lmcache_l1_pool_kvasir_5600_* >/dev/null; kill $by_hand; for n in \$(seq 100); do kill -0 $by_hand 2>/dev/null || break; sleep 0.1; done; rm /dev/shm/lmcache_l1_pool_kvasir_5600_*" || fail "$kind: the pool of a server that runs was purged: $(cat "$work/out")"
	grep -qE 'left in place: /dev/shm/lmcache_l1_pool_kvasir_5600_[^ ]*, which a running server has' "$work/out" || fail "$kind: the purge does not say which pool stays: $(cat "$work/out")"
	inside 'rm -r /var/lib/kvasir; userdel kvasir; systemctl reset-failed; systemctl daemon-reload'
	echo "$kind: installed, started, hit, upgraded from $old to $new with its pool, removed, purged: $((SECONDS - began)) s"
}
life deb 'package architecture \(.*\) does not match system' "dpkg -i /root/kvasir_$old-1_$foreign.deb"
life rpm 'intended for a (different|.*) architecture' "rpm -U --nodeps --force-debian /root/kvasir-$old-1.$foreign_machine.rpm"
life archive 'the program of this archive does not run here .*: nothing was changed' "cd /root; tar -xzf kvasir-$old-linux-$foreign.tar.gz; kvasir-$old-linux-$foreign/install.sh"
# Both at once: an archive over a package is refused, and a package over an archive says whose units count.
deb_install "$old" "$arch" "$machine" >/dev/null 2>&1
refused "an archive over a package" 'a package of kvasir is installed: remove it first' "/root/kvasir-$new-linux-$arch/install.sh"
deb_purge >/dev/null 2>&1
archive_install "$old" "$arch" "$machine" >/dev/null 2>&1
deb_install "$new" "$arch" "$machine" >"$work/out" 2>&1
grep -q 'an archive is installed, too, and its units count: sh /usr/local/lib/kvasir/install.sh remove' "$work/out" || fail "a package over an archive: $(cat "$work/out")"
refused "purging an archive beside a package" 'a package of kvasir is installed, whose configuration a purge would remove' "sh /usr/local/lib/kvasir/install.sh purge"
inside 'sh /usr/local/lib/kvasir/install.sh remove' >/dev/null
inside "kvasir --version | grep -F ' $new'; [ -e /etc/kvasir/server.yaml ]" >/dev/null || fail "removing the archive took the package's files"
deb_purge >/dev/null 2>&1
echo "packages: passed"
