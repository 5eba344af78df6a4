// SPDX-License-Identifier: Apache-2.0

package server

import (
	"io"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// What a server answers is noted, with the engine's id where the operation has one.
func TestSlowRequests(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 8*4096, Options{ChunkTokens: 4})
	e := &engine{t, s}
	e.s.slow.SetFrom(0) // everything is slow
	e.register(7)
	e.call(lmcache.OpLookup, e.key("request 1", 1, 0, 2).Append(nil), lmcache.AppendInt(nil, 1))
	e.call(lmcache.OpEndSession, lmcache.AppendString(nil, "request 2"))
	e.call(lmcache.OpNoop)
	seen := map[string]string{}
	for _, r := range looked(e.s) {
		seen[r.Operation] = r.Request
		if _, err := time.Parse(time.RFC3339, r.At); err != nil || r.Seconds < 0 {
			t.Errorf("%+v", r)
		}
	}
	if id, ok := seen["noop"]; len(seen) < 4 || seen["lookup"] != "request 1" || seen["end_session"] != "request 2" || !ok || id != "" {
		t.Errorf("%v", seen)
	}
}

func looked(s *Server) []SlowRequest {
	_, slow := s.Look(1)
	return slow
}
