#!/usr/bin/env bash
# Runs package tier/s3 against an object store, gofakes3 in a module of its own, and two
# nodes with the real LMCache client over one bucket of it. Needs bin/kvasir.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(interop/python.sh)
. interop/lib.sh

(cd interop/s3 && go build -o "$work/store" .)
mkfifo "$work/end" # stores serve until nobody has it open

# start_store NAME FLAG...: sets addr.
start_store() {
	local name=$1
	shift
	"$work/store" "$@" 8>&- <"$work/end" >"$work/$name.addr" 2>"$work/$name.log" &
	exec 8>"$work/end"
	for _ in $(seq 300); do
		[ ! -s "$work/$name.addr" ] || break
		sleep 0.1
	done
	addr=$(cat "$work/$name.addr")
	[ -n "$addr" ] || { cat "$work/$name.log" >&2; exit 1; }
}
start_store careful -verify -ca "$work/ca.pem"
careful=$addr
start_store store
export AWS_ACCESS_KEY_ID=id AWS_SECRET_ACCESS_KEY=secret

echo "== a real object store (gofakes3) against tier/s3, both layouts"
KVASIR_S3=http://$addr/kvcache go test -count=1 -timeout 120s -run TestReal ./tier/s3

echo "== one that verifies signatures, over TLS with an authority of its own"
AWS_CA_BUNDLE=$work/ca.pem KVASIR_S3_KEYS=1 KVASIR_S3=https://$careful/kvcache go test -count=1 -timeout 120s -run TestReal ./tier/s3
AWS_ACCESS_KEY_ID=session AWS_SESSION_TOKEN=token AWS_CA_BUNDLE=$work/ca.pem AWS_ENDPOINT_URL=https://$careful bin/kvasir tier ls s3_native:kvcache/none

# two_nodes TYPE: two servers over one bucket.
two_nodes() {
	echo "== two nodes of this build over one bucket: $1"
	local adapter="{\\\"type\\\":\\\"$1\\\",\\\"s3_endpoint\\\":\\\"http://$addr\\\",\\\"s3_bucket\\\":\\\"kvcache\\\",\\\"s3_prefix\\\":\\\"two-$1\\\"}"
	start_phoenix "one-$1" --l1-size-gb 0.125 --cold --l2-prefetch-load-timeout 20 --l2-adapter "\"$adapter\""
	local one=$port one_http=$http
	start_phoenix "two-$1" --l1-size-gb 0.125 --cold --l2-prefetch-load-timeout 20 --l2-adapter "\"$adapter\""
	timeout 170 "$python" interop/lmcache/bucket.py --urls "tcp://127.0.0.1:$one" "tcp://127.0.0.1:$port" --https "http://127.0.0.1:$one_http" "http://127.0.0.1:$http" \
		--kill "sh $work/one-$1.kill" >"$work/two-$1.out" 2>"$work/two-$1.err" ||
		{ grep -E "^(PASS|FAIL)|not within" "$work/two-$1.err" >&2; tail -n 5 "$work/one-$1.log" "$work/two-$1.log" >&2; exit 1; }
	cat "$work/two-$1.out"
	stop_servers
}
two_nodes s3_native
two_nodes s3

echo "== kvasir tier over that bucket"
export AWS_ENDPOINT_URL=http://$addr
bin/kvasir tier verify s3_native:kvcache/two-s3_native
bin/kvasir tier copy s3_native:kvcache/two-s3_native s3_native:kvcache/copy
[ "$(bin/kvasir tier ls s3_native:kvcache/copy | tail -n 1 | cut -d' ' -f1)" = 7 ] || { bin/kvasir tier ls s3_native:kvcache/copy >&2; exit 1; }
exec 8>&-
