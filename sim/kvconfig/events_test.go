// SPDX-License-Identifier: Apache-2.0

package kvconfig_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim/kvconfig"
)

func TestParseEvents(t *testing.T) {
	f := func(text string, want *kvconfig.Events) {
		t.Helper()
		got, err := kvconfig.ParseEvents([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if (got == nil) != (want == nil) || got != nil && *got != *want {
			t.Errorf("%s: %+v", text, got)
		}
	}
	f(`{}`, nil)
	f(`{"enable_kv_cache_events":false,"publisher":"zmq"}`, nil)
	f(`{"enable_kv_cache_events":true,"publisher":"null"}`, nil)
	f(`{"enable_kv_cache_events":true,"hwm":5}`, &kvconfig.Events{Endpoint: "tcp://*:5557", Buffer: 10000})
	f(`{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"ipc:///tmp/e","replay_endpoint":"tcp://127.0.0.1:1","topic":"kv","buffer_steps":3}`,
		&kvconfig.Events{Endpoint: "ipc:///tmp/e", Replay: "tcp://127.0.0.1:1", Topic: "kv", Buffer: 3})
	bad := func(text string, what ...string) {
		t.Helper()
		_, err := kvconfig.ParseEvents([]byte(text))
		wants(t, err, what...)
	}
	bad(`{"enable_kv_cache_event":true,"publisher":"kafka","endpoint":"5557","buffer_steps":0}`,
		`did you mean "enable_kv_cache_events"?`, `"kafka": one of zmq, null`, `endpoint "5557": tcp://host:port`, "buffer_steps")
	bad(`[]`, "kv-events-config")
	bad(strings.Repeat(" ", 1<<20)+"{}", "bytes")
}
