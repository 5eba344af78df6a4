// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// Tenant is a tenant with settings of its own, in /status and /tenants.
type Tenant struct {
	Salt         string `json:"cache_salt"`
	Quota        *int64 `json:"quota_bytes"` // nil: no quota; then the next four are not counted
	Bytes        int64  `json:"bytes"`       // staged and resident
	Objects      int    `json:"objects"`
	Evicted      uint64 `json:"evicted_objects"` // to make room
	EvictedBytes uint64 `json:"evicted_bytes"`

	TTL     *float64 `json:"ttl_seconds"` // nil: the common TTL, and expired objects are not counted; -1: its objects do not expire
	Expired uint64   `json:"expired_objects"`

	PinLimit      int64 `json:"pin_limit_bytes"`
	PinnedBytes   int64 `json:"pinned_bytes"`
	PinnedObjects int   `json:"pinned_objects"`
}

func tenantsOf(st *store.Store) []Tenant {
	var out []Tenant
	for _, u := range st.Tenants() {
		t := Tenant{
			Salt: SaltName(u.Salt), Bytes: u.Bytes, Objects: u.Objects, Evicted: u.Evicted, EvictedBytes: u.EvictedBytes, Expired: u.Expired,
			PinLimit: u.PinLimit, PinnedBytes: u.PinnedBytes, PinnedObjects: u.PinnedObjects,
		}
		if u.QuotaBytes >= 0 {
			t.Quota = &u.QuotaBytes
		}
		if u.TTL != 0 {
			seconds := u.TTL.Seconds()
			if u.TTL == tenant.Forever {
				seconds = -1
			}
			t.TTL = &seconds
		}
		out = append(out, t)
	}
	return out
}

// tenantStats has the same figures as metrics. tenant.MaxQuotas bounds the labels. Only an operator gives settings to tenants, so no engine
// can add a label.
type tenantStats struct {
	Quota   map[string]int64  `gauge:"kvasir_tenant_quota_bytes" label:"cache_salt" help:"Bytes that no other tenant takes from this one."`
	Bytes   map[string]int64  `gauge:"kvasir_tenant_bytes" label:"cache_salt" help:"Bytes of the pool that a tenant with a quota has, staged and resident."`
	Objects map[string]int    `gauge:"kvasir_tenant_objects" label:"cache_salt" help:"The same in objects."`
	Evicted map[string]uint64 `counter:"kvasir_tenant_evicted_bytes_total" label:"cache_salt" help:"Bytes of a tenant with a quota that were evicted."`
	Expired map[string]uint64 `counter:"kvasir_tenant_expired_chunks_total" label:"cache_salt" help:"Chunks of a tenant with a TTL of its own that were dropped because they were unused for that long."`
	Pinned  map[string]int64  `gauge:"kvasir_tenant_pinned_bytes" label:"cache_salt" help:"Bytes of a tenant that an operator has pinned."`
	Limit   map[string]int64  `gauge:"kvasir_tenant_pin_limit_bytes" label:"cache_salt" help:"Bytes of a tenant that may be pinned at a time."`

	AllExpired   uint64 `counter:"kvasir_expired_chunks_total" help:"Chunks of all tenants that were dropped because they were unused for their time to live."`
	ExpiredBytes uint64 `counter:"kvasir_expired_bytes_total" help:"The same in bytes."`

	Unkept bool `gauge:"kvasir_tenant_settings_unkept" help:"1 while what was set for tenants is in effect and could not be written to the file of --state."`
}

func tenantStatsOf(st *store.Store, book *tenant.Terms) tenantStats {
	n := st.Stats()
	out := tenantStats{
		map[string]int64{},
		map[string]int64{},
		map[string]int{},
		map[string]uint64{},
		map[string]uint64{},
		map[string]int64{},
		map[string]int64{},
		n.ExpiredChunks, n.ExpiredBytes,
		book.Unkept(),
	}
	for _, t := range tenantsOf(st) {
		if t.Quota != nil {
			out.Quota[t.Salt], out.Bytes[t.Salt], out.Objects[t.Salt], out.Evicted[t.Salt] = *t.Quota, t.Bytes, t.Objects, t.EvictedBytes
		}
		if t.TTL != nil {
			out.Expired[t.Salt] = t.Expired
		}
		if t.PinLimit > 0 || t.PinnedBytes > 0 {
			out.Pinned[t.Salt], out.Limit[t.Salt] = t.PinnedBytes, t.PinLimit
		}
	}
	return out
}

// nameKnown applies a tenant's settings to its known namespaces. A namespace that no request has named since the start follows at the
// tenant's next request.
func nameKnown(s *server.Server, salt string) {
	seen := make(map[kv.Namespace]bool)
	var found []store.Object
	for from, more := 0, true; more; {
		found, from, more = s.Store().Objects(from, found[:0], maxPageSize)
		for _, o := range found {
			if !seen[o.Key.Namespace] {
				seen[o.Key.Namespace] = true
				if n, ok := s.NameOf(o.Key.Namespace); ok && n.Salt == salt {
					s.Store().NameTenant(o.Key.Namespace, []byte(salt))
				}
			}
		}
	}
}

// ParseTTL parses a TTL such as 90s or 24h, or never.
func ParseTTL(text string) (time.Duration, error) {
	if text == "never" {
		return tenant.Forever, nil
	}
	ttl, err := time.ParseDuration(text)
	if err != nil || ttl < time.Second || ttl > tenant.MaxTTL {
		return 0, fmt.Errorf("%q is no time from 1s to ten years, as 90s or 24h, and not never", text)
	}
	return ttl, nil
}

// tenantRoutes serves the settings of tenants: /tenants, and /quota in LMCache's form.
type tenantRoutes struct {
	server *server.Server
	terms  *tenant.Terms
}

func (t *tenantRoutes) handle(mux *http.ServeMux, guard httpserver.Guard) {
	for pattern, f := range map[string]http.HandlerFunc{
		"GET /tenants": t.list, "PUT /tenants/{salt}": t.set, "DELETE /tenants/{salt}": t.drop,
		"GET /quota": t.listQuotas, "PUT /quota/{salt}": t.setQuota, "GET /quota/{salt}": t.getQuota, "DELETE /quota/{salt}": t.dropQuota,
	} {
		if strings.HasSuffix(pattern, "{salt}") {
			of := f
			f = func(w http.ResponseWriter, r *http.Request) {
				if mayUse(w, r, SaltOf(r.PathValue("salt"))) {
					of(w, r)
				}
			}
		}
		mux.Handle(pattern, guard.Handler(f))
	}
}

func (t *tenantRoutes) list(w http.ResponseWriter, r *http.Request) {
	limit, all := auth.LimitOf(r), append([]Tenant{}, tenantsOf(t.server.Store())...)
	writeJSON(w, http.StatusOK, Tenants{slices.DeleteFunc(all, func(t Tenant) bool { return !limit.Allows(SaltOf(t.Salt)) })})
}

// Tenants is the answer to GET /tenants.
type Tenants struct {
	Tenants []Tenant `json:"tenants"` // by salt
}

// set changes the settings that its body names and leaves the others unchanged; null removes a setting.
func (t *tenantRoutes) set(w http.ResponseWriter, r *http.Request) {
	var fields struct {
		Quota json.RawMessage `json:"quota_bytes"`
		TTL   json.RawMessage `json:"ttl_seconds"`
		Pins  json.RawMessage `json:"pin_limit_bytes"`
	}
	in := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	in.DisallowUnknownFields()
	if err := in.Decode(&fields); err != nil {
		badRequest(w, "body is not {\"quota_bytes\": 1073741824, \"ttl_seconds\": 3600, \"pin_limit_bytes\": 1073741824}, or some of these: %v", err)
		return
	}
	salt, done := SaltOf(r.PathValue("salt")), 0
	var unkept error
	for _, f := range []struct {
		name  tenant.Field
		value json.RawMessage
	}{{tenant.Quota, fields.Quota}, {tenant.TTL, fields.TTL}, {tenant.PinLimit, fields.Pins}} {
		if len(f.value) == 0 {
			continue
		}
		v, err := valueOf(f.name, f.value)
		if err == nil {
			err = t.terms.Set(salt, f.name, v)
		}
		if _, ok := errors.AsType[*tenant.NotKeptError](err); ok {
			unkept, err = err, nil
		}
		if err != nil {
			if done > 0 { // the settings before this one are set already
				nameKnown(t.server, salt)
			}
			badRequest(w, "%s: %v", f.name, err)
			return
		}
		done++
	}
	nameKnown(t.server, salt)
	if unkept != nil {
		notKept(w, unkept)
		return
	}
	out := Tenant{Salt: SaltName(salt)}
	for _, u := range tenantsOf(t.server.Store()) {
		if SaltOf(u.Salt) == salt {
			out = u
		}
	}
	writeJSON(w, http.StatusOK, SetTenant{out, t.terms.Path()})
}

// SetTenant is the answer to PUT /tenants/{salt}.
type SetTenant struct {
	Tenant
	KeptIn string `json:"kept_in"` // the file that stores the settings over restarts; empty: they end with the server
}

// notKept answers with an error that a setting is in effect but may not outlive the server.
func notKept(w http.ResponseWriter, err error) {
	writeJSON(w, http.StatusInternalServerError, map[string]string{"error": err.Error()})
}

// valueOf reads the value of a field in a body.
func valueOf(f tenant.Field, text json.RawMessage) (tenant.Value, error) {
	if bytes.Equal(text, []byte("null")) {
		return tenant.Value{}, nil
	}
	v := 0.0
	if json.Unmarshal(text, &v) != nil || math.IsInf(v, 0) {
		return tenant.Value{}, errors.New("it is no number")
	}
	switch {
	case f != tenant.TTL:
		return tenant.BytesValue(bytesOf(v)), nil
	case v == -1:
		return tenant.TimeValue(tenant.Forever), nil
	case !(v >= 1 && v <= tenant.MaxTTL.Seconds()):
		return tenant.Value{}, errors.New("it is neither -1 nor a number of seconds from 1 to ten years")
	}
	return tenant.TimeValue(time.Duration(v * float64(time.Second))), nil
}

// bytesOf returns a number of bytes. A negative number becomes -1, and a number above any pool's size stays above it, so that both are out
// of range.
func bytesOf(v float64) int64 {
	if v < 0 {
		return -1
	}
	return int64(min(v, math.MaxInt64/2))
}

// drop removes all settings of a tenant. The tenant's objects stay, and its pins end.
func (t *tenantRoutes) drop(w http.ResponseWriter, r *http.Request) {
	name, status := r.PathValue("salt"), "not_found"
	for _, u := range t.server.Store().Tenants() {
		if u.Salt == SaltOf(name) {
			status = "removed"
		}
	}
	if had, err := t.terms.Drop(SaltOf(name)); err != nil {
		notKept(w, err)
		return
	} else if had {
		status = "removed"
	}
	writeJSON(w, http.StatusOK, map[string]string{"cache_salt": name, "status": status})
}
