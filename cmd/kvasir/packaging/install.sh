#!/bin/sh
# Puts the files of this archive below /usr/local, where systemd, man and the shells look. As root, in the archive's folder:
#
#   ./install.sh          installs, or upgrades; starts nothing, and leaves running servers as they are
#   ./install.sh remove   stops the units and removes the files; configurations, state, pools and tiers stay
#   ./install.sh purge    the same, and removes configurations, state and pools; never a tier's directory
#
# The last two are also there without the archive: sh /usr/local/lib/kvasir/install.sh remove
set -eu
umask 022
export KVASIR_BIN=/usr/local/bin/kvasir
own=/usr/local/lib/kvasir
fail() {
	echo "install.sh: $*: nothing was changed" >&2
	exit 1
}
deed=${1:-install}
case $deed in
install | remove | purge) ;;
-h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit ;;
*) fail "unknown deed $deed: want none, remove or purge" ;;
esac
[ $# -le 1 ] || fail "too many arguments"
here=$(cd "$(dirname "$0")" && pwd)
[ "$(id -u)" = 0 ] || fail "run it as root: sudo ./install.sh"

# place FILE: where a file of the archive goes; nothing: nowhere.
place() {
	case $1 in
	kvasir) echo $KVASIR_BIN ;;
	README.md | CHANGELOG.md | LICENSE) echo "/usr/local/share/doc/kvasir/$1" ;;
	man/*) echo "/usr/local/share/man/man1/${1#man/}" ;;
	completions/kvasir.bash) echo /usr/local/share/bash-completion/completions/kvasir ;;
	completions/_kvasir) echo /usr/local/share/zsh/site-functions/_kvasir ;;
	completions/kvasir.fish) echo /usr/local/share/fish/vendor_completions.d/kvasir.fish ;;
	systemd/kvasir.sysusers) echo /usr/local/lib/sysusers.d/kvasir.conf ;;
	systemd/*.service) echo "/usr/local/lib/systemd/system/${1#systemd/}" ;;
	scripts/* | install.sh) echo "$own/$1" ;;
	esac
}

# put FILE PLACE MODE: a file is the old one or the new one at any moment. Units name the program of /usr/local.
put() {
	mkdir -p "${2%/*}"
	case $1 in
	*.service) sed "s|^ExecStart=/usr/bin/kvasir |ExecStart=$KVASIR_BIN |" "$1" >"$2.new" ;;
	*) cp "$1" "$2.new" ;;
	esac
	chmod "$3" "$2.new"
	chown 0:0 "$2.new"
	mv -f "$2.new" "$2"
}

packaged=
[ ! -e /usr/lib/systemd/system/kvasir-server@.service ] || packaged=1
if [ "$deed" = install ]; then
	[ -e "$here/kvasir" ] || fail "there is no kvasir beside it: run the one of an unpacked archive"
	"$here/kvasir" --version >/dev/null 2>&1 || fail "the program of this archive does not run here ($(uname -s), $(uname -m)): take the archive of this machine"
	[ -z "$packaged" ] || fail "a package of kvasir is installed: remove it first (apt remove kvasir, dnf remove kvasir)"
	cd "$here"
	mkdir -p "$own" /etc/kvasir /var/lib/kvasir
	: >"$own/files.new"
	find . -type f | sed 's|^\./||' | sort | while read -r file; do
		case $file in
		config/*) # yours stay
			to=/etc/kvasir/${file#config/}
			if ! [ -e "$to" ]; then
				put "$file" "$to" 644
			elif cmp -s "$file" "$to"; then
				rm -f "$to.new"
			else
				cp "$file" "$to.new"
				echo "kvasir: $to stays; the one of this version is $to.new"
			fi
			continue
			;;
		esac
		to=$(place "$file")
		[ -n "$to" ] || continue
		mode=644
		case $file in kvasir | install.sh) mode=755 ;; esac
		put "$file" "$to" $mode
		echo "$to" >>"$own/files.new"
	done
	if [ -e "$own/files" ]; then # what an earlier version had, and this one has not
		while read -r file; do
			grep -qxF "$file" "$own/files.new" || rm -f "$file"
		done <"$own/files"
	fi
	mv -f "$own/files.new" "$own/files"
	sh "$own/scripts/postinstall.sh" configure
	next="systemctl enable --now kvasir-server@USER, who runs the engines"
	[ -d /run/systemd/system ] || next="start kvasir server --config /etc/kvasir/server.yaml as the engines' user"
	echo "kvasir: $($KVASIR_BIN --version) is installed; next: edit /etc/kvasir/server.yaml, then $next"
	exit
fi

[ "$deed" = remove ] || [ -z "$packaged" ] || fail "a package of kvasir is installed, whose configuration a purge would remove: apt purge kvasir, dnf remove kvasir"
for scripts in "$own/scripts" "$here/scripts" ""; do
	[ ! -e "$scripts/postremove.sh" ] || break
done
[ -n "$scripts" ] || fail "there is nothing in $own, and no folder scripts beside install.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$scripts"/*.sh "$work"
if [ -d "$own" ]; then
	sh "$work/preremove.sh" remove
	cat "$own/files" "$own/files.new" 2>/dev/null | while read -r file; do rm -f "$file"; done # the second is of an installation that did not end
	rm -f "$own/files" "$own/files.new"
	rmdir "$own/scripts" "$own" /usr/local/share/doc/kvasir 2>/dev/null || true
fi
sh "$work/postremove.sh" "$deed"
