#!/usr/bin/env bash
# Installs the commit as users do, go install MODULE/cmd/kvasir@VERSION, from a module proxy of files made here; then builds a module of
# another name that imports its packages. Nothing is downloaded: other modules come from this machine's module cache. Needs git, Go.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
fail() { echo "goinstall: $*" >&2; exit 1; }

module=$(go list -m)
version=v$(sed -n 's/^const release = "\(.*\)"$/\1/p' cmd/kvasir/internal/cli/help.go)
at=$work/proxy/$module/@v
mkdir -p "$at"
# As the go command makes a module's zip: no folder with a go.mod of its own.
nested=()
while read -r file; do nested+=(":(exclude)$(dirname "$file")"); done < <(git ls-files '*/go.mod')
git archive --format=zip --prefix="$module@$version/" -o "$at/$version.zip" HEAD -- . "${nested[@]}"
git show HEAD:go.mod >"$at/$version.mod"
printf '{"Version":"%s","Time":"%s"}' "$version" "$(TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)" >"$at/$version.info"
echo "$version" >"$at/list"

downloaded=$(go env GOMODCACHE)/cache/download
export GOPROXY="file://$work/proxy,file://$downloaded" GOFLAGS="-modcacherw -trimpath" GONOSUMDB="$module" GOSUMDB=off
export GOMODCACHE=$work/modules GOBIN=$work/bin CGO_ENABLED=0
(cd "$work" && go install "$module/cmd/kvasir@$version" 2>"$work/install") || cat "$work/install"
[ -x "$GOBIN/kvasir" ] || fail "go install $module/cmd/kvasir@$version"
[[ "$("$GOBIN/kvasir" --version)" == "kvasir ${version#v} "* ]] || fail "it says $("$GOBIN/kvasir" --version)"
echo "go install: $("$GOBIN/kvasir" --version), the zip has $(stat -c %s "$at/$version.zip") bytes"

mkdir "$work/consumer"
for program in policies lookup transfer; do
	git show "HEAD:docs/examples/$program/main.go" | install -D /dev/stdin "$work/consumer/$program/main.go"
done
cp docs/examples/trace.jsonl "$work/consumer"
cd "$work/consumer"
go mod init example.com/consumer 2>/dev/null
go mod edit -require="$module@$version"
go get ./... >"$work/get" 2>&1 || { cat "$work/get"; fail "go get of the packages that a module imports"; }
go build ./... || fail "a module that imports $module does not build"
go run ./policies trace.jsonl | grep -q leaf-hazard || fail "policies printed something else"
go run ./transfer | grep -q 'equal: true' || fail "transfer printed something else"
echo "a module that requires $module $version builds; it has $(grep -c '^	' go.mod) requirements"
