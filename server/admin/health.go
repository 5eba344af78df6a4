// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/server"
)

// health is the body of /healthcheck.
type health struct {
	Status  string `json:"status"`
	Reason  string `json:"reason,omitempty"`
	Workers *int   `json:"workers,omitempty"` // number of workers that can load a hit, if the request asks for it
}

// answerHealth answers 200 while the server can serve; with ?workers=N only while at least N workers can load a hit.
func answerHealth(s *server.Server, w http.ResponseWriter, r *http.Request) {
	why := s.Unhealthy()
	var out health
	if text := r.URL.Query().Get("workers"); text != "" {
		want, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			http.Error(w, fmt.Sprintf("workers=%.20q is no number of workers", text), http.StatusBadRequest)
			return
		}
		n := s.Awake()
		out.Workers = &n
		if uint64(n) < want {
			why = append(why, fmt.Sprintf("%d of %d workers can load a hit", n, want))
		}
	}
	if len(why) > 0 {
		out.Status, out.Reason = "unhealthy", strings.Join(why, "; ")
		writeJSON(w, http.StatusServiceUnavailable, out)
		return
	}
	out.Status = "healthy"
	writeJSON(w, http.StatusOK, out)
}
