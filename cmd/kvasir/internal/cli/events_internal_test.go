// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"log/slog"
	"strings"
	"testing"
)

// Flags for events that do not go together are refused with what to do.
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

// Events on an address that other hosts reach are warned of.
func TestOpenEventsAreWarnedOf(t *testing.T) {
	f := func(events, replay string, want ...string) {
		t.Helper()
		var log strings.Builder
		(&eventFlags{Events: events, EventReplay: replay}).warnOpen(slog.New(slog.NewTextHandler(&log, nil)))
		if (log.Len() > 0) != (len(want) > 0) {
			t.Errorf("%s, %s: %q", events, replay, log.String())
		}
		for _, w := range want {
			if !strings.Contains(log.String(), w) || !strings.Contains(log.String(), "level=WARN") {
				t.Errorf("%s, %s: %q lacks %q", events, replay, log.String(), w)
			}
		}
	}
	f("tcp://*:5557", "tcp://127.0.0.1:5558", "tokens of all prompts", "--kv-events=")
	f("tcp://127.0.0.1:5557", "tcp://0.0.0.0:5558", "--kv-events-replay=")
	f("tcp://10.0.0.5:5557", "", "10.0.0.5:5557")
	f("tcp://127.0.0.1:5557", "tcp://[::1]:5558")
	f("ipc:///tmp/events", "")
}
