#!/usr/bin/env bash
# Renders the chart for three configurations of both forms with Helm's library, tests what it makes, has bin/kvasir check the flags, and
# compares each object with the schemas of Kubernetes (kubernetes-validate, in an environment of its own). A ServiceMonitor has no schema there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$PWD
make -s build
(cd internal/tools/chart && KVASIR=$root/bin/kvasir go test -count=1 ./... && go build -o "$work/chart" .)
mkdir "$work/out"
"$work/chart" cmd/kvasir/packaging/chart "$work/out" internal/tools/chart/testdata/*.yaml
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q kubernetes-validate==1.37.0
find "$work/out" -name '*.yaml' ! -name '*-ServiceMonitor.yaml' -print0 | xargs -0 "$work/venv/bin/kubernetes-validate" --strict --quiet
echo "chart: $(find "$work/out" -name '*.yaml' ! -name '*-ServiceMonitor.yaml' | wc -l) objects are valid, $(find "$work/out" -name '*-ServiceMonitor.yaml' | wc -l) have no schema here"
if ! command -v promtool >/dev/null && command -v apt-get >/dev/null; then # unpacked, not installed: the package would start a server
	(mkdir "$work/prometheus" && cd "$work/prometheus" && apt-get download -qq prometheus && dpkg-deb -x ./*.deb .) >"$work/apt" 2>&1 || cat "$work/apt"
	PATH=$PATH:$work/prometheus/usr/bin
fi
if command -v promtool >/dev/null; then
	promtool check rules docs/reference/prometheus-rules.yml
	promtool check config docs/examples/prometheus.yml
else
	echo "promtool is not installed (package prometheus): rules and scrape configuration were checked by make test alone"
fi
