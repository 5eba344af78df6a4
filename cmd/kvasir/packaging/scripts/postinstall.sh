#!/bin/sh
# After installation and upgrade: the user of registry, proxy and store-node, and systemd's list of units. Running services go on with
# the old binary until the operator restarts them: a server's pool stays.
set -e
if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers kvasir.conf
elif ! getent passwd kvasir >/dev/null; then
	useradd --system --home-dir /var/lib/kvasir --no-create-home --shell /usr/sbin/nologin kvasir
fi
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	running=$(systemctl list-units --plain --no-legend --state=active 'kvasir-*' | cut -d' ' -f1 | tr '\n' ' ')
	if [ -n "$running" ]; then
		echo "kvasir: still running with the former build: $running"
		echo "kvasir: systemctl restart UNIT takes the new one; a server's pool stays"
	fi
fi
