// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Two sources of log lines each have their own limit per second, and each reports how many
// lines were left out.
func TestLogLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a, b LogLimit
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		for range 1000 {
			a.Warn(log, "a")
		}
		b.Warn(log, "b")
		if n := strings.Count(out.String(), "msg=a"); n != linesPerSecond || strings.Count(out.String(), "msg=b") != 1 {
			t.Fatalf("%d lines", n)
		}
		time.Sleep(time.Second)
		out.Reset()
		a.Warn(log, "a", "k", "v")
		if !strings.Contains(out.String(), "k=v not_shown=990") {
			t.Fatal(out.String())
		}
	})
	if got := SomeNames([]string{"a", "b", "c", "d", "e", "f"}); got != "a b c d and 2 more" {
		t.Fatal(got)
	}
}
