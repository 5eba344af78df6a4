#!/bin/sh
# Before removal, not before an upgrade: services end. deb calls it with "remove", rpm with the number of installations left.
set -e
case ${1:-} in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	systemctl stop 'kvasir-*.service' || true # a failed stop must not block the removal of the package
fi
