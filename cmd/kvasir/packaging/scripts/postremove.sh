#!/bin/sh
# After removal: says what stays. After a purge: configuration, state, pools that no server has, and the links of enabled units go too. A
# tier's directory is never touched, also if it is below /var/lib/kvasir. deb calls it with "remove" and "purge", rpm with 0; the last is for
# a rpm's user, too: rpm has no purge.
set -e
pools='/dev/shm/lmcache_l1_pool_kvasir_*'

# served FILE: whether a kvasir maps it, such as one of a container or one that was started by hand.
served() {
	inode=$(stat -c %i "$1") || return 1
	for maps in /proc/[0-9]*/maps; do
		if grep -qsx kvasir "${maps%maps}comm" && grep -qs " $inode *$1\$" "$maps"; then return 0; fi
	done
	return 1
}

# disable removes the links that systemctl enable made.
disable() {
	for unit in 'kvasir-server@*' 'kvasir-all@*' kvasir-registry kvasir-proxy kvasir-store-node; do
		for link in /etc/systemd/system/*.wants/$unit.service; do
			if [ -L "$link" ]; then rm -f "$link"; fi
		done
	done
}

# delete_state removes what units wrote, below their own folders alone, and those of these folders that are empty then.
delete_state() {
	rm -f /var/lib/kvasir/*.state /var/lib/kvasir/*.state.tmp
	for dir in /var/lib/kvasir/server-* /var/lib/kvasir/all-* /var/lib/kvasir/registry /var/lib/kvasir/proxy /var/lib/kvasir/store-node; do
		if [ -d "$dir" ] && ! [ -L "$dir" ]; then
			rm -f "$dir"/*.state "$dir"/*.state.tmp
			rmdir "$dir" 2>/dev/null || true
		fi
	done
	if [ -d /var/lib/kvasir ]; then rmdir /var/lib/kvasir 2>/dev/null || true; fi
}

case ${1:-} in
remove)
	echo "kvasir: left in place: /etc/kvasir, /var/lib/kvasir, the pools $pools, and the directories of tiers"
	;;
0)
	disable
	echo "kvasir: left in place: changed files of /etc/kvasir as FILE.rpmsave, /var/lib/kvasir, the pools $pools, and the directories of tiers"
	;;
purge)
	disable
	rm -rf /etc/kvasir
	kept=
	for file in $pools; do
		pool=${file%.kvasir}
		pool=${pool%.workers*}
		if [ -e "$pool" ] && served "$pool"; then
			kept=$pool
		else
			rm -f "$file"
		fi
	done
	[ -z "$kept" ] || echo "kvasir: left in place: $kept, which a running server has"
	delete_state
	if [ -d /var/lib/kvasir ]; then
		echo "kvasir: left in place: what tiers wrote below /var/lib/kvasir, and the user kvasir"
	else
		echo "kvasir: left in place: the directories of tiers, and the user kvasir"
	fi
	;;
esac
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true
fi
