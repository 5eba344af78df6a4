// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/server"
)

// dropTier removes what a tier has. It answers when that is done; a client that leaves ends it.
func dropTier(s *server.Server, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Tier  string `json:"tier"`
		Model string `json:"model"`
	}
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&body)
	if err != nil || body.Tier == "" || len(body.Model) > maxModelName {
		badRequest(w, `body is not {"tier": "NAME", "model": "NAME"}; the model may be left out`)
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
