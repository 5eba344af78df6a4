// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// What each route needs. A route that is not here, and is no GET, needs the scope admin.
func TestNeeds(t *testing.T) {
	for route, want := range map[string]auth.Need{
		"GET /": auth.NeedNothing, "GET /healthcheck": auth.NeedNothing, "GET /healthz": auth.NeedNothing, "GET /readyz": auth.NeedNothing,
		"GET /status": auth.NeedRead, "HEAD /status": auth.NeedRead, "GET /metrics": auth.NeedRead, "GET /explain": auth.NeedRead, "GET /cache/objects": auth.NeedRead,
		"GET /tenants": auth.NeedRead, "POST /cache/checksums": auth.NeedRead, "GET /cache/pins": auth.NeedRead, "GET /config": auth.NeedRead,
		"POST /cache/pins": auth.NeedWrite, "DELETE /cache/pins": auth.NeedWrite, "POST /cache/prefetches": auth.NeedWrite,
		"POST /cache/clear": auth.NeedAdmin, "POST /tiers/drop": auth.NeedAdmin, "POST /tiers/rekey": auth.NeedAdmin, "DELETE /cache/objects": auth.NeedAdmin, "PUT /quota/a": auth.NeedAdmin, "PUT /tenants/a": auth.NeedAdmin,
		"GET /debug/pprof/": auth.NeedAdmin, "GET /debug/pprof/heap": auth.NeedAdmin, "POST /none": auth.NeedAdmin, "GET /healthz/": auth.NeedRead, "GET /Healthz": auth.NeedRead,
	} {
		method, path, _ := strings.Cut(route, " ")
		if got := need(httptest.NewRequest(method, path, nil)); got != want {
			t.Errorf("%s needs %d, want %d", route, got, want)
		}
	}
}
