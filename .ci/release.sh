#!/usr/bin/env bash
# Checks a release: two clones at different paths build the same bytes; the archive, the package and the image hold what they should;
# each unit is hardened; the manual has no fault; go install takes the module; the chart makes valid objects; the deb lives in a Debian of its own. Needs git, Go and, for the units, systemd-analyze. Writes below a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "release-check: $*" >&2; exit 1; }

for clone in one two/below; do
	mkdir -p "$(dirname "$work/$clone")"
	git clone -q . "$work/$clone"
	(cd "$work/$clone/internal/tools/release" && go build -o "$work/release" . && go vet .)
	(cd "$work/$clone" && "$work/release" -out "$work/dist-${clone%%/*}" >/dev/null)
done
diff -r "$work/dist-one" "$work/dist-two" || fail "two clones built different bytes"
echo "two clones built the same bytes: $(wc -l <"$work/dist-one/SHA256SUMS") files"
cd "$work/dist-one"
sha256sum --quiet -c SHA256SUMS

archive=$(echo kvasir-*-linux-amd64.tar.gz)
mkdir "$work/archive" && tar -xzf "$archive" -C "$work/archive"
binary=$work/archive/${archive%.tar.gz}/kvasir
version=$("$binary" --version | cut -d' ' -f2)
[[ $archive == "kvasir-${version%%+*}-"* ]] || fail "$archive has a binary of version $version"
for module in $(go version -m "$binary" | awk '$1 == "dep" { print $2 "@" $3 }'); do
	grep -q "pkg:golang/$module\"" kvasir-*-linux-amd64.cdx.json || fail "the list of modules lacks $module"
done
for name in kvasir-*-darwin-amd64.tar.gz kvasir-*-darwin-arm64.tar.gz kvasir-*-site.tar.gz; do [ -s "$name" ] || fail "there is no $name"; done
unpacked=$(tar -xOf kvasir-*-linux-amd64.image.tar --wildcards '*.tar.gz' | gzip -dc | wc -c)
[ "$unpacked" -le 30000000 ] || fail "the image has $unpacked bytes unpacked, more than 30 MB"
echo "image: $unpacked bytes unpacked"

if command -v dpkg-deb >/dev/null; then
	mkdir "$work/root"
	dpkg-deb -x kvasir_*_amd64.deb "$work/root"
	cmp "$work/root/usr/bin/kvasir" "$binary" || fail "package and archive have different binaries"
	for c in server:server proxy:proxy registry:bootstrap store-node:store-node kvasir:all; do
		"$work/root/usr/bin/kvasir" "${c#*:}" --config "$work/root/etc/kvasir/${c%:*}.yaml" --check-config >/dev/null || fail "the packaged ${c%:*}.yaml is refused"
	done
fi
if command -v systemd-analyze >/dev/null; then
	for unit in "$work/archive/${archive%.tar.gz}"/systemd/*.service; do
		systemd-analyze security --offline=true --threshold=30 "$unit" >"$work/security" 2>&1 || { cat "$work/security"; fail "$unit is not hardened enough"; }
		tail -n 1 "$work/security"
	done
fi
if command -v groff >/dev/null; then
	for page in "$work/archive/${archive%.tar.gz}"/man/*.1; do
		faults=$(groff -ww -man -Tutf8 -z "$page" 2>&1)
		[ -z "$faults" ] || fail "$page: $faults"
	done
fi
cd "$here"
(cd internal/tools/site && go vet . && go test -count=1 .)
.ci/goinstall.sh
.ci/chart.sh
.ci/packages.sh
echo "release-check passed"
