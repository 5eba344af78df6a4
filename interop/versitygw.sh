#!/usr/bin/env bash
# Runs package tier/s3 against versitygw, a gateway to a directory that compares signatures, has accounts and policies, and knows
# conditional PUTs. Its program is from the module of interop/s3. Needs bin/kvasir.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
stop() {
	stop_gateway
	rm -rf "$work"
}
trap stop EXIT

(cd interop/s3 && go build -o "$work/store" . && go build -o "$work/versitygw" github.com/versity/versitygw/cmd/versitygw)
# start_gateway [FLAG ...]: sets addr.
start_gateway() {
	rm -f "$work/addr"
	mkfifo "$work/end" # the store serves until nobody has it open
	"$work/store" -gateway "$work/versitygw" "$@" 8>&- <"$work/end" >"$work/addr" 2>"$work/log" &
	store_pid=$!
	exec 8>"$work/end"
	for _ in $(seq 900); do
		[ ! -s "$work/addr" ] && kill -0 "$store_pid" 2>/dev/null || break
		sleep 0.1
	done
	addr=$(cat "$work/addr")
	[ -n "$addr" ] || { cat "$work/log" >&2; exit 1; }
}

# stop_gateway ends it.
stop_gateway() {
	exec 8>&-
	[ -z "${store_pid:-}" ] || wait "$store_pid" || true
	store_pid=
	rm -f "$work/end"
}

# try_layouts URL: package tier/s3 over the bucket at URL.
try_layouts() {
	KVASIR_S3=$1/kvcache KVASIR_S3_REVOKE="$work/versitygw admin --allow-insecure --access id --secret secret --endpoint-url $1 delete-user --access leaver" \
		go test -count=1 -timeout 300s -run TestReal ./tier/s3
}

export AWS_ACCESS_KEY_ID=id AWS_SECRET_ACCESS_KEY=secret
start_gateway -ca "$work/ca.pem"
echo "== versitygw over TLS with an authority of its own"
AWS_CA_BUNDLE=$work/ca.pem try_layouts "https://$addr"
AWS_CA_BUNDLE=$work/ca.pem AWS_ENDPOINT_URL=https://$addr bin/kvasir tier verify s3_native:kvcache/none
if AWS_ENDPOINT_URL=https://$addr bin/kvasir tier ls s3_native:kvcache/none >"$work/out" 2>&1; then
	cat "$work/out" >&2
	echo "a certificate of an unknown authority was taken" >&2
	exit 1
fi
grep -q "certificate" "$work/out" || { cat "$work/out" >&2; exit 1; }
stop_gateway

start_gateway
echo "== versitygw over a directory: both layouts, conditional PUTs, accounts with wrong keys, that may only read, that are deleted"
try_layouts "http://$addr"

echo "== kvasir tier over that bucket"
export AWS_ENDPOINT_URL=http://$addr
bin/kvasir tier verify s3_native:kvcache/none
AWS_SECRET_ACCESS_KEY=another bin/kvasir tier ls s3_native:kvcache/none >"$work/out" 2>&1 && { cat "$work/out" >&2; echo "keys that are wrong were taken" >&2; exit 1; }
grep -q "does not accept the credentials\|SignatureDoesNotMatch" "$work/out" || { cat "$work/out" >&2; exit 1; }
