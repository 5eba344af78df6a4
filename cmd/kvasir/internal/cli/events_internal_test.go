// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"slices"
	"strings"
	"testing"
)

// Flags for events that exclude each other are refused, and the error says what to do.
func TestEventFlags(t *testing.T) {
	f := func(flags eventFlags, want string) {
		t.Helper()
		err := flags.check()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", flags, err)
		}
	}
	f(eventFlags{EventLog: 1}, "")
	f(eventFlags{}, "")
	f(eventFlags{EventLog: 1, Events: "tcp://127.0.0.1:5557", EventReplay: "tcp://127.0.0.1:5558"}, "")
	f(eventFlags{Events: "tcp://127.0.0.1:5557"}, "--kv-event-log-size is 0")
	f(eventFlags{EventLog: 1, EventReplay: "tcp://127.0.0.1:5558"}, "without --kv-events")
	if topic := (&eventFlags{}).publisherOptions(5555, 16, nil).Topic; !strings.HasPrefix(topic, "kv@") || !strings.HasSuffix(topic, ":5555@{model}") {
		t.Error(topic)
	}
	if topic := (&eventFlags{EventTopic: "x"}).publisherOptions(5555, 16, nil).Topic; topic != "x" {
		t.Error(topic)
	}
}

// Events over TCP count as a listener that needs access control; a UNIX socket does not.
func TestExposedEvents(t *testing.T) {
	f := func(events, replay string, want ...string) {
		t.Helper()
		var got []string
		for _, x := range (&eventFlags{Events: events, EventReplay: replay}).exposed() {
			got = append(got, x.host)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s, %s: %q, want %q", events, replay, got, want)
		}
	}
	f("tcp://*:5557", "tcp://127.0.0.1:5558", "", "127.0.0.1")
	f("tcp://0.0.0.0:*", "tcp://[::1]:5558", "0.0.0.0", "::1")
	f("ipc:///tmp/events", "")
	f("", "")
}
