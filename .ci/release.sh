#!/usr/bin/env bash
# Checks a release: two clones at different paths, of files of other hours, in other time zones, with another umask and a cold build cache
# make the same bytes; the archive, the packages and the image hold what they should; each unit is hardened; the manual has no fault, and
# manual and completions have each command; the image runs; go install takes the module; the chart makes valid objects; deb, rpm and archive live
# in a Debian of their own. COLD=0 leaves out the cold build cache, half of the time. Needs git, Go and, for the parts that say so, root, systemd-analyze, groff, debootstrap. Writes below a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
fail() { echo "release-check: $*" >&2; exit 1; }
began=0
part() { echo "== $1: $((SECONDS - began)) s" && began=$SECONDS; }

[ -z "$(git status --porcelain)" ] || fail "the tree has changes: a release is of a commit"
for file in go.mod internal/tools/*/go.mod interop/*/go.mod; do
	! grep -nE '^(replace|exclude)\b' "$file" || fail "$file has a replace or an exclude: a module that is installed may have none"
done

# clone PATH OUT HOURS: builds a release of a clone whose files are that many hours old.
clone() {
	mkdir -p "$(dirname "$work/$1")"
	git clone -q . "$work/$1"
	find "$work/$1" -exec touch -h -d "$3 hours ago" {} +
	[ -x "$work/release" ] || (cd "$work/$1/internal/tools/release" && go build -o "$work/release" . && go vet .)
	(cd "$work/$1" && "$work/release" -out "$work/$2" >/dev/null)
}
clone one dist-one 1
part "a release"
(
	umask 077
	export TZ=KVA-13:30 LC_ALL=C.UTF-8
	[ "${COLD:-1}" = 0 ] || export GOCACHE=$work/cache
	clone two/below dist-two 29
)
rm -rf "$work/cache"
diff -r "$work/dist-one" "$work/dist-two" || fail "two clones built different bytes"
echo "two clones built the same bytes: $(wc -l <"$work/dist-one/SHA256SUMS") files; SHA256SUMS: $(sha256sum <"$work/dist-one/SHA256SUMS" | cut -c 1-16)"
part "a release elsewhere"
cd "$work/dist-one"
sha256sum --quiet -c SHA256SUMS

archive=$(echo kvasir-*-linux-amd64.tar.gz)
mkdir "$work/archive" && tar -xzf "$archive" -C "$work/archive"
unpacked=$work/archive/${archive%.tar.gz}
binary=$unpacked/kvasir
version=$("$binary" --version | cut -d' ' -f2)
[[ $archive == "kvasir-${version%%+*}-"* ]] || fail "$archive has a binary of version $version"
for system in linux-amd64 linux-arm64 darwin-amd64 darwin-arm64; do
	mkdir -p "$work/of"
	tar -xzOf "kvasir-${version%%+*}-$system.tar.gz" --wildcards '*/kvasir' >"$work/of/$system"
	for module in $(go version -m "$work/of/$system" | awk '$1 == "dep" { print $2 "@" $3 }'); do
		grep -q "pkg:golang/$module\"" "kvasir-${version%%+*}-$system.cdx.json" || fail "the list of modules of $system lacks $module"
	done
done
[ -s "kvasir-${version%%+*}-site.tar.gz" ] || fail "there is no site"
for image in kvasir-*.image.tar; do
	bytes=$(tar -xOf "$image" --wildcards '*.tar.gz' | gzip -dc | wc -c)
	[ "$bytes" -le 30000000 ] || fail "$image has $bytes bytes unpacked, more than 30 MB"
	echo "$image: $bytes bytes unpacked"
done
commands=0
while read -r command; do
	commands=$((commands + 1))
	[ -s "$unpacked/man/kvasir-${command// /-}.1" ] || fail "the manual has no page of kvasir $command"
	for word in $command; do
		for file in kvasir.bash _kvasir kvasir.fish; do
			grep -qw -- "$word" "$unpacked/completions/$file" || fail "completions/$file lacks $word"
		done
	done
done < <(sed -n 's/^| \[`kvasir \([^`]*\)`\].*/\1/p' "$here/docs/reference/commands/README.md")
[ "$commands" -gt 40 ] || fail "only $commands commands are in the reference"
echo "manual and completions have $commands commands"

if command -v dpkg-deb >/dev/null; then
	mkdir "$work/root"
	dpkg-deb -x kvasir_*_amd64.deb "$work/root"
	cmp "$work/root/usr/bin/kvasir" "$binary" || fail "package and archive have different binaries"
	for c in server:server proxy:proxy registry:bootstrap store-node:store-node kvasir:all; do
		"$work/root/usr/bin/kvasir" "${c#*:}" --config "$work/root/etc/kvasir/${c%:*}.yaml" --check-config >/dev/null || fail "the packaged ${c%:*}.yaml is refused"
	done
fi
if command -v systemd-analyze >/dev/null; then
	for unit in "$unpacked"/systemd/*.service; do
		systemd-analyze security --offline=true --threshold=30 "$unit" >"$work/security" 2>&1 || { cat "$work/security"; fail "$unit is not hardened enough"; }
		tail -n 1 "$work/security"
	done
fi
if command -v groff >/dev/null; then
	for page in "$unpacked"/man/*.1; do
		faults=$(groff -ww -man -Tutf8 -z "$page" 2>&1)
		[ -z "$faults" ] || fail "$page: $faults"
	done
fi
part "what users get"
cd "$here"
.ci/image.sh "$work/dist-one/kvasir-${version%%+*}-linux-amd64.image.tar"
part "the image"
(cd internal/tools/site && go vet . && go test -count=1 .)
part "the site"
.ci/goinstall.sh
part "go install"
.ci/chart.sh
part "the chart"
.ci/packages.sh amd64 "$work/dist-one"
part "the packages"
echo "release-check passed in $SECONDS s"
