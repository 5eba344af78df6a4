// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strings"
)

// lmcacheFlags lists the flags of "lmcache server" 0.5.6 and 0.5.7 that have no effect here, and whether they take values. So command
// lines for that server work here; the server logs once which flags it ignores.
var lmcacheFlags = func() map[string]bool {
	m := make(map[string]bool)
	for _, name := range strings.Fields(`
		coordinator-event-reporting disable-grpc-metrics disable-logging disable-metrics
		disable-observability enable-blend-reorder enable-dedup-content enable-extra-logging
		enable-gc-monitor enable-segmented-prefix enable-token-trace enable-tracing gds-l1-use-direct-io
		isolated-ipc l1-mlock l1-use-hugepages l1-use-lazy run-script-api-enabled`) {
		m["--"+name], m["--no-"+name] = false, false
	}
	for _, name := range strings.Fields(`
		coordinator-advertise-ip coordinator-blend-match-concurrency coordinator-blend-timeout
		coordinator-event-flush-interval coordinator-event-transport coordinator-heartbeat-interval
		coordinator-kafka-bootstrap-servers coordinator-kafka-delivery-timeout
		coordinator-kafka-topic coordinator-url enable engine-type event-bus-queue-size
		eviction-ratio eviction-trigger-watermark extra-logging-interval format
		gc-monitor-min-pause-ms gc-monitor-top-objects gds-l1-backend gds-l1-path
		grpc-server-mode grpc-server-workers instance-id kv-load-policy l1-devdax-offset-gb l1-devdax-path l1-init-size-gb
		l1-manager l1-read-ttl-seconds l2-prefetch-inflight-watermark l2-prefetch-max-in-flight
		l2-prefetch-policy l2-store-policy lookup-hash-log-dir lookup-hash-log-max-files
		lookup-hash-log-rotation-interval lookup-hash-log-rotation-max-size max-cpu-workers
		max-gpu-workers max-workers metrics-sample-rate null-block-id otlp-endpoint output
		p2p-advertise-url p2p-listen-url p2p-load-timeout p2p-lookup-timeout
		p2p-transfer-engine periodic-notifier-interval-ms prometheus-port
		runtime-plugin-config runtime-plugin-locations script-allowed-imports server-module
		trace-level trace-output`) {
		m["--"+name] = true
	}
	return m
}()

// adapterBefore reports whether the last argument is a value of --l2-adapter, after which LMCache accepts further values.
func adapterBefore(args []string) bool {
	last := args[len(args)-1]
	return strings.HasPrefix(last, "--l2-adapter=") || strings.HasPrefix(last, "{") && args[len(args)-2] == "--l2-adapter"
}

// dropLMCacheFlags removes these flags, and their values, from the arguments of the server command.
func dropLMCacheFlags(args []string) (kept, dropped []string) {
	at := slices.Index(args, "server")
	if at < 0 {
		return args, nil
	}
	kept = append(kept, args[:at+1]...)
	for i := at + 1; i < len(args); i++ {
		if strings.HasPrefix(args[i], "{") && i > at+1 && len(kept) > 1 && adapterBefore(kept) { // --l2-adapter A B
			kept = append(kept, "--l2-adapter", args[i])
			continue
		}
		name, _, joined := strings.Cut(args[i], "=")
		takes, known := lmcacheFlags[name]
		if !known {
			kept = append(kept, args[i])
			continue
		}
		dropped = append(dropped, name)
		for takes && !joined && i+1 < len(args) && !strings.HasPrefix(args[i+1], "--") {
			i++
		}
	}
	slices.Sort(dropped)
	return kept, slices.Compact(dropped)
}
