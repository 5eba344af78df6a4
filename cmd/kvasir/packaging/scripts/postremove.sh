#!/bin/sh
# After removal: says what stays. After a purge (deb): configuration, state and pools go too. A tier's directory is never
# touched, also if it is below /var/lib/kvasir.
set -e
case ${1:-} in
remove | 0)
	echo "kvasir: left in place: /etc/kvasir, /var/lib/kvasir, the pools /dev/shm/lmcache_l1_pool_kvasir_*, and the directories of tiers"
	;;
purge)
	rm -rf /etc/kvasir
	rm -f /dev/shm/lmcache_l1_pool_kvasir_*
	if [ -d /var/lib/kvasir ]; then
		find /var/lib/kvasir -type f -name '*.state' -delete
		find /var/lib/kvasir -depth -type d -empty -delete
	fi
	if [ -d /var/lib/kvasir ]; then
		echo "kvasir: left in place: what tiers wrote below /var/lib/kvasir, and the user kvasir"
	else
		echo "kvasir: left in place: the directories of tiers, and the user kvasir"
	fi
	;;
esac
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
