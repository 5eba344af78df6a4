#!/usr/bin/env bash
# A real SGLang 0.5.23 (its wheel, on a CPU) against this build. Needs bin/kvasir; `make interop-sglang` calls it. Arguments name the
# parts, else all are run: clients, clients57 (those of lmcache 0.5.6 and 0.5.7rc2 without an engine, byte by byte), lmcache (on kvasir
# server, beside a vLLM of the same model name), hicache, hicache-two, pages (over kvasir
# store-node), pages-cpp (over a C++ node beside it), pd (P and D behind kvasir proxy), verify (kvasir verify on two engines). About 10 GB the first time, 25 minutes on two cores; two engines of 2 to 3 GB at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}
peers=${VLLM_ENV:-$cache/vllm-0.32.0-lmcache-0.5.6}
env=${SGLANG_ENV:-$cache/sglang-0.5.23}
[ -n "${SGLANG_ENV:-}" ] || interop/sglang/setup_venv.sh "$peers" "$env" # who names an environment has made it
python=$env/bin/python
. interop/lib.sh

# drive NAME SCRIPT FLAG ...: runs a driver of interop/sglang and shows its steps.
drive() {
	local name=$1 script=$2 failed=
	shift 2
	mkdir -p "$work/$name"
	"$python" "interop/sglang/$script" --kvasir bin/kvasir --out "$work/$name" "$@" >"$work/$name.json" 2>"$work/$name/driver.log" || failed=1
	"$python" - "$work/$name.json" <<'P'
import json, sys
lines = open(sys.argv[1]).read().strip().splitlines()
r = json.loads(lines[-1]) if lines else {"steps": {}, "error": "it printed nothing"}
for name, step in r["steps"].items():
    print("  ", "ok  " if step.get("ok") else "FAIL", name, {k: v for k, v in step.items() if k != "ok"})
print("  ", {k: v for k, v in r.items() if k not in ("steps", "logs", "scenario")})
P
	[ -z "$failed" ] || { tail -n 15 "$work/$name"/*.log >&2; return 1; }
}

"$python" interop/vllm/make_model.py "$work/model" --kind qwen2 >/dev/null
for part in ${*:-clients clients57 lmcache hicache hicache-two pages pages-cpp pd verify}; do
	echo "== SGLang 0.5.23, $part"
	case $part in
	lmcache) drive lmcache run_lmcache.py --model "$work/model" --vllm-python "$peers/bin/python" --restarts "${RESTARTS:-10}" ;;
	clients) drive clients run_clients.py ;;
	clients57) PYTHONPATH=$(python=$peers/bin/python && lmcache_release 0.5.7rc2) drive clients57 run_clients.py --no-old ;;
	hicache) drive hicache run_hicache.py --model "$work/model" ;;
	hicache-two) drive hicache-two run_hicache.py --model "$work/model" --nodes 2 ;;
	pages) drive pages run_hicache.py --pages ;;
	pages-cpp) drive pages-cpp run_hicache.py --pages --cpp ;;
	pd) drive pd run_pd.py --model "$work/model" --load 60 --restart-p --kill p --kill d ;;
	verify)
		"$python" interop/vllm/make_model.py "$work/bytes" --kind qwen2 --bytes >/dev/null # its prompts are text
		drive verify run_verify.py --model "$work/bytes" --rounds "${ROUNDS:-3}"
		;;
	*) echo "sglang.sh: no part $part" >&2; exit 2 ;;
	esac
done
echo "SGLang interop passed"
