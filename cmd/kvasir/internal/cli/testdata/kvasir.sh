#!/usr/bin/env bash
# kvasir for pages that a test types: the commands that have no environment get the test's ports.
given() {
	local a
	for a in "${@:2}"; do [[ $a == "$1" || $a == "$1="* ]] && return; done
	return 1
}
case ${1:-} in
status | top | explain | advise | clear) given --url "$@" || set -- "$@" --url "http://127.0.0.1:$TEST_HTTP_PORT" ;;
quota) given --url "$@" || set -- "$@" --url "http://127.0.0.1:$TEST_HTTP_PORT" ;;
bench) given --port "$@" || set -- "$@" --port "$TEST_VLLM_PORT" ;;
all) export KVASIR_SERVER_L1_SIZE_GB=0.0625 KVASIR_RELAY_MEMORY_GB=0.0625 ;;
engine) # the default of an engine is localhost:5555
	args=()
	for a in "$@"; do
		if [[ $a == *LMCacheMPConnector* && $a != *lmcache.mp.port* && $a != *lmcache.mp.host* && $a != *server_urls* ]]; then
			if [[ $a == *'"kv_connector_extra_config":{'* ]]; then
				a=${a/'"kv_connector_extra_config":{'/'"kv_connector_extra_config":{"lmcache.mp.port":'$TEST_LMCACHE_PORT,}
			else
				a=${a/'"LMCacheMPConnector",'/'"LMCacheMPConnector","kv_connector_extra_config":{"lmcache.mp.port":'$TEST_LMCACHE_PORT'},'}
			fi
		fi
		args+=("$a")
	done
	set -- "${args[@]}"
	;;
esac
exec "$KVASIR_TEST_BINARY" "$@"
