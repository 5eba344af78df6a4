#!/usr/bin/env bash
# entered.sh: which functions of the connectors, the Mooncake packages, the coordinator and the configuration commands enter.
# Builds kvasir with -cover, sends it through interop/entered/drive.py (seven minutes), and compares the functions that no
# process entered with docs/measured/entered.md, which has the reason for each. Fails below MINIMUM per cent (93), and when
# a function is neither entered nor listed. DATA=FOLDER keeps, and adds to, what was entered.
set -euo pipefail
cd "$(dirname "$0")/.."
data=${DATA:-$(mktemp -d)}
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -n "${DATA:-}" ] || rm -rf "$data"' EXIT
mkdir -p "$data"
module=$(go list -m)
go build -cover -coverpkg=./cmd/kvasir,./sim/kvconfig,./mooncake/...,./kv/coordinator,./lmcache/connector -o "$work/kvasir" ./cmd/kvasir
if [ "${1:-}" != --report ]; then
	newer=$(interop/python.sh interop/requirements-te-0.3.14.txt)
	interop/cuda-stub.sh "$newer"
	GOCOVERDIR=$data python3 interop/entered/drive.py "$work/kvasir" "$(interop/python.sh interop/requirements-te.txt)" "$newer" "$(interop/python.sh interop/requirements-te-old.txt)"
fi
go tool covdata textfmt -i="$data" -o "$work/profile"
go tool cover -func="$work/profile" | sed -n "s,^$module/\([^:]*\):[0-9]*:[[:space:]]*\([^[:space:]]*\)[[:space:]]*\([0-9.]*\)%\$,\1 \2 \3,p" |
	grep -v '^cmd/' >"$work/functions" # main itself is no subject
awk '$3 == "0.0" { print $1, $2 }' "$work/functions" | sort >"$work/unentered"
[ -z "${LIST:-}" ] || cp "$work/unentered" "$LIST"
all=$(wc -l <"$work/functions") not=$(wc -l <"$work/unentered")
echo "$((all - not)) of $all functions were entered by commands, $(((all - not) * 1000 / all))/1000"
sed -n 's/^- `\([^`]*\)`: /\1 /p' docs/measured/entered.md | tr -d '`,' | awk '{ for (i = 2; i <= NF; i++) print $1, $i }' | sort >"$work/listed"
unlisted=$(comm -23 <(uniq "$work/unentered") <(uniq "$work/listed"))
[ -z "$unlisted" ] || { echo "not entered, and not in docs/measured/entered.md:"; echo "$unlisted"; exit 1; } >&2
[ $(((all - not) * 100)) -ge $((${MINIMUM:-93} * all)) ] || { echo "fewer than ${MINIMUM:-93} %" >&2; exit 1; }
