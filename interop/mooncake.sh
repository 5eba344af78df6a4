#!/usr/bin/env bash
# P and D of a real vLLM (CPU build) with the MooncakeConnector. 0.32, their registry being
# `kvasir bootstrap`: full attention and a hybrid model, P killed and started again
# under the running registry; then `kvasir relay` between P and D, and an engine made
# of our worker sides. Then engines of earlier releases, as far as each goes. Bit-equal
# log-probabilities and full external hits, or it fails. And engines with the MooncakeStoreConnector over a cluster whose
# memory is `kvasir store-node`'s alone, one of two nodes killed. Needs bin/kvasir; `make interop-vllm`
# calls it. PD names the parts: qwen2, gemma3, proxy, proxy-nixl, relay, load, both, engine, store (0.32), 0.33, 0.13, proxy-0.13, 0.18, 0.23,
# store-0.23, store-0.33. 0.33 is 0.32 with the connectors of 0.33. Two engines of 2 GB at a time, minutes each.
set -euo pipefail
cd "$(dirname "$0")/.."
. interop/lib.sh

# newest: the engines are vLLM 0.32.
newest() {
	local dir=${KVASIR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvasir}/vllm-0.32.0-lmcache-0.5.6
	interop/vllm/setup_venv.sh "$dir"
	python=$dir/bin/python over= preload=
}

# drive NAME SCRIPT FLAG …: runs a driver of interop/vllm; what it prints goes to $work/NAME.json.
drive() {
	local name=$1 script=$2
	shift 2
	LD_PRELOAD=$preload PYTHONPATH=$over "$python" "interop/vllm/$script" --out "$work/$name" "$@" >"$work/$name.json" || {
		tail -c 3000 "$work/$name.json" >&2
		tail -n 50 "$work"/*.log >&2
		return 1
	}
}

# steps NAME: the steps of a driver's report, one a line.
steps() { "$python" -c 'import json, sys; [print("  ", k, v) for k, v in json.load(open(sys.argv[1]))["steps"].items()]' "$work/$1.json"; }

# with_nixl: over has NIXL, whose transfers vLLM's NixlConnector needs; it runs without a GPU.
with_nixl() {
	over=$(dirname "$(dirname "$python")")/over/nixl-1.5.1
	[ -e "$over/complete" ] && return
	rm -rf "${over:?}"
	"$python" -m pip install -q --no-deps --target "$over" nixl==1.5.1 nixl-cu13==1.5.1 >&2
	touch "$over/complete"
}

# shapes NAME DIALECT MODEL FLAG …: many shapes of requests through the proxy over real engines. registry, if set, is P's.
shapes() {
	local name=$1 dialect=$2 model=$3 p d port
	shift 3
	p=$(free_port) d=$(free_port) port=$(free_port)
	bin/kvasir proxy --port "$port" --vllm-pd-disaggregation --kv-connector "$dialect" --prefill "http://127.0.0.1:$p" ${registry:+"${registry##*:}"} \
		--decode "http://127.0.0.1:$d" --keep-alive 1s >"$work/$name.log" 2>&1 &
	servers="$servers $!"
	drive "$name" run_proxy_shapes.py --dialect "$dialect" --model "$model" ${registry:+--bootstrap "$registry"} --proxy "http://127.0.0.1:$port" --ports "$p,$d" "$@"
	steps "$name"
}

# start NAME COMMAND …: starts a command of bin/kvasir that takes --port and answers GET /query
# there; sets url.
start() {
	local name=$1 pid port
	shift
	port=$(free_port) url=http://127.0.0.1:$port
	bin/kvasir "$@" --port "$port" >"$work/$name.log" 2>&1 &
	pid=$!
	servers="$servers $pid"
	for _ in $(seq 100); do
		curl -sf -m 2 "$url/query" >/dev/null 2>&1 && return
		kill -0 "$pid" 2>/dev/null || break
		sleep 0.1
	done
	cat "$work/$name.log" >&2
	echo "kvasir $1 did not start" >&2
	return 1
}

# square_model NAME: a model with as many KV heads as a block has tokens. Up to 0.18 the connector takes a dimension for the
# block size that on CPUs is the number of KV heads; with both 32 all that follows from it is right.
square_model() { "$python" interop/vllm/make_model.py "$work/$1" --kind llama --heads 32 --kv-heads 32 --head-dim 32 >/dev/null; }

# pd NAME FLAG …: one run of the driver; its summary in short.
pd() {
	local name=$1
	shift
	drive "$name" run_mooncake_pd.py "$@"
	"$python" - "$work/$name.json" <<'P'
import json, sys
r = json.loads(open(sys.argv[1]).read().strip().splitlines()[-1])
for name, s in r["steps"].items():
    hit = s.get("D_external_hit_tokens", [s[k]["D_external_hit_tokens"] for k in ("first", "second") if k in s])
    diff = s.get("max_logprob_diff", [x[1] for x in s.get("same", [])])
    print(f"  {name}: prompt {s['prompt']}, external hit {hit}, log-probability difference {diff}")
P
}

# start_both NAME UPSTREAM [FLAG …]: the engine of our two sides; sets both_url. stop_both NAME ends it and shows its counts.
start_both() {
	local name=both-$1 upstream=$2
	shift 2
	go build -o "$work/both-engine" ./interop/mooncake/both
	both_url=http://127.0.0.1:$(free_port)
	"$work/both-engine" --upstream "$upstream" --port "${both_url##*:}" "$@" >"$work/$name.out" 2>"$work/$name.log" &
	both_pid=$!
	servers="$servers $both_pid"
}

stop_both() {
	kill -TERM "$both_pid"
	wait "$both_pid" || { tail -n 20 "$work/both-$1.log" >&2; return 1; }
	cat "$work/both-$1.out"
}

# early NAME FLAG …: a run of the driver with a P that has a registry of its own.
early() {
	pd "$@" --model "$work/llama" --own-registry --in-flight 4 --vllm-arg=--num-gpu-blocks-override --vllm-arg=256
}

# over_our_nodes NAME KIND FLAG …: an engine whose MooncakeStoreConnector has only our memory; what it hit, step by step.
over_our_nodes() {
	local name=$1 kind=$2
	shift 2
	echo "== vLLM, $name, $kind, with its own MooncakeStoreConnector over two kvasir store-nodes, one of them killed and started again"
	"$python" interop/vllm/make_model.py "$work/$name" --kind "$kind" >/dev/null
	drive "$name" run_mooncake_store.py --model "$work/$name" --kvasir bin/kvasir --vllm-arg=--num-gpu-blocks-override --vllm-arg=256 "$@"
	"$python" - "$work/$name.json" <<'P'
import json, sys
r = json.loads(open(sys.argv[1]).read().strip().splitlines()[-1])
for name, s in r["steps"].items():
    print(f"  {name}: hit {s['hit']} tokens, {s['seconds']} s" + (f", log-probability difference {s['max_logprob_diff']}" if "same" in s else ""))
print(f"  {r['loaded_bytes'] / 1e6:.1f} MB came from our memory; the master gave the killed node up after {r['times']['given_up_s']} s")
P
}

for part in ${PD:-qwen2 gemma3 proxy proxy-nixl relay load both engine store 0.33 0.13 proxy-0.13 0.18 0.23 store-0.23 store-0.33}; do
	case $part in
	0.13 | proxy-0.13) pinned 0.13.0 ;;
	0.18) pinned 0.18.1 ;;
	0.23) pinned 0.23.0 mooncake-transfer-engine-non-cuda==0.3.13.post1 ;; # its own, 0.3.11, does not confirm writes
	store-0.23) pinned 0.23.0 ;; # Mooncake 0.3.11.post1 comes with it: master and client
	*) newest ;;
	esac
	[[ $part != *0.33 ]] || over=$(interop/vllm/setup_newer.sh "$(dirname "$(dirname "$python")")" 0.33.0)
	case $part in
	qwen2 | gemma3)
		echo "== vLLM P and D, $part, registry kvasir bootstrap, P killed and started again"
		"$python" interop/vllm/make_model.py "$work/$part" --kind "$part" >/dev/null
		start "bootstrap-$part" bootstrap --host 127.0.0.1 --state "$work/$part.state"
		pd "$part" --model "$work/$part" --bootstrap "$url" --restart-p
		grep -E "registered|replaced|refused" "$work/bootstrap-$part.log"
		;;
	proxy)
		for kind in qwen2 gemma3; do
			echo "== vLLM P and D, $kind, behind kvasir proxy, P killed and started again"
			"$python" interop/vllm/make_model.py "$work/proxy-$kind" --kind "$kind" >/dev/null
			start "bootstrap-proxy-$kind" bootstrap
			registry=$url p=$(free_port) d=$(free_port) port=$(free_port)
			bin/kvasir --log-level debug proxy --port "$port" --vllm-pd-disaggregation --prefill "http://127.0.0.1:$p" "${registry##*:}" \
				--decode "http://127.0.0.1:$d" >"$work/proxy-$kind.log" 2>&1 &
			servers="$servers $!"
			pd "proxy-$kind" --model "$work/proxy-$kind" --bootstrap "$registry" --proxy "http://127.0.0.1:$port" --ports "$p,$d" --restart-p --in-flight 8
		done
		stop_servers
		echo "== vLLM P and D behind kvasir proxy: lists, several answers, chats, responses, messages, refusals, the clients of OpenAI and Anthropic, P killed"
		start bootstrap-shapes bootstrap --host 127.0.0.1
		registry=$url shapes shapes mooncake "$work/proxy-qwen2" --clients "$(interop/vllm/setup_clients.sh)" --kill-p
		;;
	proxy-nixl)
		echo "== vLLM P and D with the NixlConnector behind kvasir proxy: the same requests"
		with_nixl
		"$python" interop/vllm/make_model.py "$work/nixl" --kind qwen2 >/dev/null
		registry= shapes shapes-nixl nixl "$work/nixl" --kill-p
		;;
	proxy-0.13)
		echo "== vLLM 0.13 P and D behind kvasir proxy: the same requests"
		square_model shapes013
		registry= shapes shapes-0.13 mooncake-0.13 "$work/shapes013" --vllm-arg=--num-gpu-blocks-override --vllm-arg=256
		;;
	relay)
		for kind in qwen2 gemma3; do
			echo "== vLLM P and D, $kind, with kvasir relay in between, and a second pull without P"
			"$python" interop/vllm/make_model.py "$work/relay-$kind" --kind "$kind" >/dev/null
			start "bootstrap-relay-$kind" bootstrap
			upstream=$url
			start "relay-$kind" relay --upstream "$upstream" --memory-gb 1
			pd "relay-$kind" --model "$work/relay-$kind" --bootstrap "$upstream" --relay "$url" --relay-twice
		done
		;;
	load)
		echo "== vLLM P and D with kvasir relay in between: load, aborts, kills, other weights, a prefix from memory"
		for seed in 0 1; do
			"$python" interop/vllm/make_model.py "$work/load-$seed" --kind qwen2 --seed $seed >/dev/null
		done
		start bootstrap-load bootstrap --host 127.0.0.1
		upstream=$url
		start relay-load relay --upstream "$upstream" --memory-gb 1 --prefixes
		drive load run_relay_load.py --models "$work/load-0,$work/load-1" --bootstrap "$upstream" --relay "$url"
		steps load
		;;
	engine)
		echo "== kvasir engine P -> vLLM -> kvasir engine D: every byte, full hits, clients that leave, P killed"
		"$python" interop/vllm/make_model.py "$work/engine-model" --kind qwen2 >/dev/null
		start bootstrap-engine bootstrap --host 127.0.0.1
		drive engine run_engine_pd.py --model "$work/engine-model" --bootstrap "$url"
		steps engine
		;;
	both)
		echo "== vLLM P and D with an engine of Sender and Receiver in between"
		"$python" interop/vllm/make_model.py "$work/both-model" --kind gemma3 >/dev/null
		start bootstrap-both bootstrap
		start_both newest "$url"
		pd both --model "$work/both-model" --bootstrap "$url" --relay "$both_url"
		stop_both newest
		;;
	0.33)
		echo "== vLLM 0.32 P and D with the MooncakeConnector of 0.33: registry kvasir bootstrap, P killed and started again; kvasir relay in between"
		"$python" interop/vllm/make_model.py "$work/newer" --kind gemma3 >/dev/null
		start bootstrap-033 bootstrap --host 127.0.0.1 --state "$work/033.state"
		upstream=$url
		pd v033 --model "$work/newer" --bootstrap "$upstream" --restart-p
		stop_servers
		start bootstrap-relay-033 bootstrap --host 127.0.0.1
		upstream=$url
		start relay-033 relay --upstream "$upstream" --memory-gb 1
		pd relay-033 --model "$work/newer" --bootstrap "$upstream" --relay "$url" --relay-twice
		;;
	0.13)
		echo "== vLLM 0.13 P and D, and our two sides of that release in between"
		go build -o "$work/both-engine" ./interop/mooncake/both
		square_model llama013
		drive v013 run_mooncake_pd_v013.py --model "$work/llama013" --middle "$work/both-engine"
		steps v013
		tail -n 1 "$work/v013/middle.log"
		;;
	0.18 | 0.23)
		# 0.23 asks for an accelerator's index, and takes each block for a region where keys and values lie together.
		# 0.18 does not say how large its blocks are: 32 tokens of 32 heads of 32 numbers of 4 bytes.
		shim=device,nosplit size=
		[ "$part" = 0.23 ] || shim= size=--block-bytes=131072
		square_model llama
		echo "== vLLM $part P and D: kvasir bootstrap, to which P's registration is copied, P killed and started again; P's own"
		start "bootstrap-$part" bootstrap --host 127.0.0.1
		early "registry-$part" --shim "$shim" --bootstrap "$url" --restart-p --requests 2
		grep -E "registered|replaced" "$work/bootstrap-$part.log"
		stop_servers
		echo "== vLLM $part P and D with kvasir relay in between, and a second pull without P"
		start "bootstrap-relay-$part" bootstrap --host 127.0.0.1
		upstream=$url
		start "relay-$part" relay --upstream "$upstream" --memory-gb 1 $size
		early "relay-$part" --shim "$shim" --bootstrap "$upstream" --relay "$url" --relay-twice --requests 2
		stop_servers
		echo "== vLLM $part P and D with an engine of Sender and Receiver in between"
		start "bootstrap-both-$part" bootstrap --host 127.0.0.1
		start_both "$part" "$url" $size
		early "both-$part" --shim "$shim" --bootstrap "$url" --relay "$both_url" --requests 2
		stop_both "$part"
		;;
	store)
		over_our_nodes store qwen2
		over_our_nodes store-windows gemma3
		;;
	store-0.23) over_our_nodes store-0.23 qwen2 ;;
	store-0.33)
		over_our_nodes store-0.33 qwen2
		over_our_nodes store-windows-0.33 gemma3
		;;
	*) echo "PD: no part $part" >&2; exit 2 ;;
	esac
	stop_servers
done
echo "mooncake interop passed"
