#!/bin/sh
# After installation and upgrade: the user of registry, proxy and store-node, and systemd's list of units. Running services go on with
# the old binary until the operator restarts them: a server's pool stays. KVASIR_BIN is the program, if it is not the package's.
set -e
program=${KVASIR_BIN:-/usr/bin/kvasir}
if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers kvasir.conf || true
elif ! getent passwd kvasir >/dev/null && command -v useradd >/dev/null; then
	useradd --system --home-dir /var/lib/kvasir --no-create-home --shell /usr/sbin/nologin kvasir || true
fi
getent passwd kvasir >/dev/null || echo "kvasir: the system user kvasir could not be made: make it before you start kvasir-registry, kvasir-proxy or kvasir-store-node"
running=
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
	running=$(systemctl list-units --plain --no-legend --state=active 'kvasir-server@*.service' 'kvasir-all@*.service' kvasir-registry.service \
		kvasir-proxy.service kvasir-store-node.service | cut -d' ' -f1 | tr '\n' ' ')
fi
if [ -n "$running" ]; then
	echo "kvasir: still running with the former build: $running"
	echo "kvasir: systemctl restart UNIT takes the new one; a server's pool stays"
fi
# Processes that no unit started. Those of containers have a file system of their own.
by_hand=
for exe in /proc/[0-9]*/exe; do
	process=${exe%/exe}
	case $(readlink "$exe" 2>/dev/null) in
	"$program" | "$program "* | "$program."* | "$program;"*) ;;
	*) continue ;;
	esac
	if [ "$(readlink "$process/ns/mnt")" = "$(readlink /proc/self/ns/mnt)" ] && ! grep -Eqs '/kvasir-(server@|all@|registry|proxy|store-node)[^/]*\.service$' "$process/cgroup"; then
		by_hand="$by_hand ${process#/proc/}"
	fi
done
[ -z "$by_hand" ] || echo "kvasir: still running with the former build, started by hand: process$by_hand"
# Units of an archive hide those of a package.
if [ "$program" = /usr/bin/kvasir ] && [ -e /usr/local/lib/kvasir/install.sh ]; then
	echo "kvasir: an archive is installed, too, and its units count: sh /usr/local/lib/kvasir/install.sh remove"
fi
