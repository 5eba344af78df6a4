// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// dropTier removes what a tier has. It answers when that is done; a client that leaves ends it.
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

// rekeyInterval is how often rekeyTier writes how far it is.
const rekeyInterval = time.Second

// rekeyLine is a line of the answer of rekeyTier.
type rekeyLine struct {
	seal.RekeyStats
	Status string `json:"status"` // running, ok, error
	Error  string `json:"error,omitempty"`
}

// rekeyTier encrypts a tier anew. Its answer is a line of JSON each second, and one at the end; a client that leaves ends it.
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
	answer := http.NewResponseController(w)
	_ = answer.SetWriteDeadline(time.Time{}) // a tier may have terabytes
	begun, last := false, time.Now()
	say := func(l rekeyLine) {
		if !begun {
			w.Header().Set("Content-Type", "application/x-ndjson")
			begun = true
		}
		_ = json.NewEncoder(w).Encode(l)
		_ = answer.Flush()
	}
	n, err := s.RekeyTier(r.Context(), body.Tier, body.Rate, "POST /tiers/rekey from "+r.RemoteAddr, func(n seal.RekeyStats) {
		if now := time.Now(); now.Sub(last) >= rekeyInterval {
			last = now
			say(rekeyLine{RekeyStats: n, Status: "running"})
		}
	})
	status := http.StatusInternalServerError
	switch {
	case err == nil:
		say(rekeyLine{RekeyStats: n, Status: "ok"})
		return
	case begun:
		say(rekeyLine{RekeyStats: n, Status: "error", Error: err.Error()})
		return
	case errors.Is(err, server.ErrNoTier):
		status = http.StatusNotFound
	case errors.Is(err, seal.ErrNoKeys), errors.Is(err, seal.ErrBusy):
		status = http.StatusConflict
	}
	writeJSON(w, status, rekeyLine{RekeyStats: n, Status: "error", Error: err.Error()})
}
