// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// dropTier removes what a tier has. It answers when all is removed. If the client leaves, it stops.
func dropTier(s *server.Server, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Tier  string `json:"tier"`
		Model string `json:"model"`
	}
	err := readStrict(w, r, &body)
	if err != nil || body.Tier == "" || len(body.Model) > maxModelName {
		badRequest(w, `body is not {"tier": "NAME", "model": "NAME"}; the model may be left out%s`, because(err))
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // a tier may have millions of objects
	removed, err := s.DropTier(r.Context(), body.Tier, body.Model, "POST /tiers/drop from "+r.RemoteAddr)
	switch {
	case errors.Is(err, server.ErrNoTier):
		writeJSON(w, http.StatusNotFound, map[string]string{"error": err.Error()})
	case err != nil:
		writeJSON(w, http.StatusInternalServerError, map[string]any{"status": "error", "removed": removed, "error": err.Error()})
	default:
		writeJSON(w, http.StatusOK, map[string]any{"status": "ok", "removed": removed})
	}
}

// rekeyInterval is the time between two lines in which rekeyTier reports its progress.
const rekeyInterval = time.Second

// rekeyLine is a line of the answer of rekeyTier.
type rekeyLine struct {
	seal.RekeyStats
	Status string `json:"status"` // running, ok, error
	Error  string `json:"error,omitempty"`
}

// rekeyWrite is how long a client of rekeyTier may read nothing of the answer.
const rekeyWrite = 30 * time.Second

// rekeyAnswer writes the lines of rekeyTier. Its methods are safe for concurrent use.
type rekeyAnswer struct {
	w      http.ResponseWriter
	answer *http.ResponseController
	leave  func() // ends the rekey

	mu    sync.Mutex
	begun bool
	last  seal.RekeyStats
}

func (a *rekeyAnswer) note(n seal.RekeyStats) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = n
}

// writeLine writes a line. A client that does not take it within rekeyWrite has left.
func (a *rekeyAnswer) writeLine(l rekeyLine) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.begun {
		a.w.Header().Set("Content-Type", "application/x-ndjson")
		a.begun = true
	}
	_ = a.answer.SetWriteDeadline(time.Now().Add(rekeyWrite)) // for each line: a tier may have terabytes, so its answer takes hours
	err := json.NewEncoder(a.w).Encode(l)
	if err == nil {
		err = a.answer.Flush()
	}
	if err != nil && !errors.Is(err, http.ErrNotSupported) {
		a.leave()
	}
}

// beat writes a line of progress once each interval until ctx ends, even while an object, an earlier write or the rate makes the rekey
// wait.
func (a *rekeyAnswer) beat(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		a.mu.Lock()
		n := a.last
		a.mu.Unlock()
		a.writeLine(rekeyLine{RekeyStats: n, Status: "running"})
	}
}

// rekeyTier encrypts a tier anew. Its answer is a line of JSON each second, and one at the end. If the client leaves, or reads nothing, it
// stops.
func rekeyTier(s *server.Server, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Tier string `json:"tier"`
		Rate int64  `json:"bytes_per_second"`
	}
	err := readStrict(w, r, &body)
	if err != nil || body.Tier == "" || body.Rate < 0 || body.Rate > server.MaxRekeyRate {
		badRequest(w, `body is not {"tier": "NAME", "bytes_per_second": N}; the rate may be left out%s`, because(err))
		return
	}
	ctx, leave := context.WithCancel(r.Context())
	defer leave()
	answer := &rekeyAnswer{w: w, answer: http.NewResponseController(w), leave: leave}
	beating, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { answer.beat(beating, rekeyInterval) })
	n, err := s.RekeyTier(ctx, body.Tier, body.Rate, "POST /tiers/rekey from "+r.RemoteAddr, answer.note)
	stop()
	wg.Wait()
	status := http.StatusInternalServerError
	switch {
	case err == nil:
		answer.writeLine(rekeyLine{RekeyStats: n, Status: "ok"})
		return
	case answer.begun:
		answer.writeLine(rekeyLine{RekeyStats: n, Status: "error", Error: err.Error()})
		return
	case errors.Is(err, server.ErrNoTier):
		status = http.StatusNotFound
	case errors.Is(err, seal.ErrNoKeys), errors.Is(err, seal.ErrBusy):
		status = http.StatusConflict
	}
	writeJSON(w, status, rekeyLine{RekeyStats: n, Status: "error", Error: err.Error()})
}
