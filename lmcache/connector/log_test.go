// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// The lines that users of vLLM's connector look for are there at debug level.
func TestSchedulerLog(t *testing.T) {
	var text strings.Builder
	s, err := connector.NewScheduler(cacheOf64{}, connector.SchedulerOptions{
		BlockTokens: 16, ChunkTokens: 32, Log: slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &connector.Request{ID: "r", Tokens: make([]uint32, 80), Hashes: 5}
	if _, err := s.Match(r, 32); err != nil {
		t.Fatal(err)
	}
	if err := s.Allocated(r, [][]int{{1, 2, 3, 4, 5}}, 32); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Finish(r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`msg="vLLM hit is" request=r tokens=32 to_load=32`, `msg="Free locks of tokens since vLLM has them" request=r from=0 to=32`,
		`msg="Cleaned up request_tracker" request=r`,
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %s in\n%s", want, text.String())
		}
	}
}
