// SPDX-License-Identifier: Apache-2.0

package safelog_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

func TestText(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		if got := safelog.Text(in, 20); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	f("model/ä 7", "model/ä 7")
	f("a\n04:41:57 forged", `a\n04:41:57 forged`)
	f("\x1b]0;x\a\r", `\x1b]0;x\a\r`)
	f("\xff\u202e\u2028", `\xff\u202e\u2028`)
	f(strings.Repeat("x", 25), strings.Repeat("x", 20)+"... (5 bytes more)")
	f(strings.Repeat("x", 19)+"äöü", strings.Repeat("x", 19)+"... (6 bytes more)")
	if n := len(safelog.Text(strings.Repeat("\x80", 1<<20), 20)); n > 200 {
		t.Errorf("%d bytes", n)
	}
}

// A name that a peer chose cannot forge a log line, in a message or in an attribute. One
// place in the code logs a bounded number of lines.
func TestLogger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := safelog.New(slog.New(slog.NewJSONHandler(&out, nil)))
		flood := func(n int) {
			for i := range n {
				l.Info(fmt.Sprintf("registered %s %d", "evil\nforged \x1b[2J", i), "model", "m\r"+strings.Repeat("y", 1<<20), "n", i)
			}
		}
		flood(1000)
		l.Info("another place")
		if got := out.String(); strings.Count(got, "\n") != safelog.Burst+1 || !strings.Contains(got, "another place") || strings.Contains(got, "\x1b") {
			t.Fatalf("%d lines, %d bytes", strings.Count(got, "\n"), len(got))
		}
		if n := out.Len(); n > 200<<10 {
			t.Errorf("%d bytes were logged", n)
		}
		out.Reset()
		time.Sleep(time.Second)
		flood(1)
		if got := out.String(); !strings.Contains(got, `"not_shown":900`) || !strings.Contains(got, `"n":0`) {
			t.Errorf("%s", got)
		}
	})
}

// A flood for one reason does not suppress another reason's lines of the same place. With a
// nil logger nothing is logged.
func TestPer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := safelog.New(slog.New(slog.NewTextHandler(&out, nil)))
		for i := range 2 * safelog.Burst {
			for _, reason := range []string{"flood", "rare"} {
				if reason == "flood" || i == 2*safelog.Burst-1 {
					l.Warn("declined", safelog.Per("reason", reason))
				}
			}
		}
		if flood, rare := strings.Count(out.String(), "reason=flood"), strings.Count(out.String(), "reason=rare"); flood != safelog.Burst || rare != 1 {
			t.Errorf("%d lines of the flood, %d of another reason", flood, rare)
		}
		safelog.New(nil).Error("nobody listens")
	})
}

func TestHideLogin(t *testing.T) {
	for text, want := range map[string]string{
		"redis://:hunter2@h:6379": "redis://(set)@h:6379", "x https://a:b@h/c and //d@e": "x https://(set)@h/c and //(set)@e", "https://h/a@b": "https://h/a@b", "unix:@name": "unix:@name",
	} {
		if got := safelog.HideLogin(text); got != want {
			t.Errorf("%s: %s", text, got)
		}
	}
}
