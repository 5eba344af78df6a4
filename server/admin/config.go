// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/store/tenant"
)

// config answers GET /config: the flags in effect; with ?sources=true also their sources, and the settings of tenants.
type config struct {
	flags, sources map[string]string
	terms          *tenant.Terms
}

// Config is the answer to GET /config?sources=true.
type Config struct {
	Flags   map[string]Setting `json:"flags"`
	Tenants []TenantSetting    `json:"tenants"` // by tenant
	State   *string            `json:"state"`   // the file that stores what is set while the server runs; nil: none
}

// Setting is the value and the source of a flag.
type Setting struct {
	Value string `json:"value"`
	From  string `json:"from"` // "command line", "$KVASIR_…", "FILE line 3", "default"
}

// TenantSetting is a setting of a tenant, from a flag or from a request.
type TenantSetting struct {
	Salt  string       `json:"cache_salt"`
	Field tenant.Field `json:"field"`
	Value *float64     `json:"value"`                   // nil: the setting was taken away
	From  string       `json:"from"`                    // "flag", or "set while running"
	At    *time.Time   `json:"set_at"`                  // nil for a flag
	Idle  string       `json:"not_in_effect,omitempty"` // why the setting is not in effect; empty: it is
}

func (c *config) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("sources") != "true" {
		flags := c.flags
		if flags == nil {
			flags = map[string]string{}
		}
		writeJSON(w, http.StatusOK, flags)
		return
	}
	out := Config{Flags: map[string]Setting{}, Tenants: []TenantSetting{}}
	for name, value := range c.flags {
		out.Flags[name] = Setting{value, c.sources[name]}
	}
	for _, t := range c.terms.List() {
		s := TenantSetting{Salt: SaltName(t.Salt), Field: t.Field, From: "flag", Idle: t.Idle}
		if t.Value.Set {
			s.Value = &t.Value.N
		}
		if !t.Flag {
			s.From, s.At = "set while running", &t.At
		}
		out.Tenants = append(out.Tenants, s)
	}
	if path := c.terms.Path(); path != "" {
		out.State = &path
	}
	writeJSON(w, http.StatusOK, out)
}
