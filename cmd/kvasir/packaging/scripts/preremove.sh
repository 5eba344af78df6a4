#!/bin/sh
# Before removal, not before an upgrade: services end. deb calls it with "remove", rpm with the number of installations left.
set -e
case ${1:-} in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then # a failed stop must not block the removal of the package
	systemctl stop 'kvasir-server@*.service' 'kvasir-all@*.service' kvasir-registry.service kvasir-proxy.service kvasir-store-node.service || true
fi
