package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/httpguard"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tenants"
)

// noSalt stands for the empty salt in paths and answers, as in LMCache's quota routes.
const noSalt = "_default"

// SaltName writes a salt for a path, and for people. A salt that is itself noSalt, or that with underscores
// before it, gets one more, so that every tenant has a name of its own.
func SaltName(salt string) string {
	switch {
	case salt == "":
		return noSalt
	case strings.HasSuffix(salt, noSalt) && strings.Trim(strings.TrimSuffix(salt, noSalt), "_") == "":
		return "_" + salt
	}
	return salt
}

// SaltOf reads what SaltName writes.
func SaltOf(name string) string {
	switch {
	case name == noSalt:
		return ""
	case SaltName(name) != name:
		return name[1:]
	}
	return name
}

// gib is the unit of limit_gb: LMCache's counts in 1024.
const gib = 1 << 30

// SetQuotas calls set for each of a list like team-a=20GiB, salts by name; size reads what is
// behind the last equals sign.
func SetQuotas(list []string, set func(salt string, bytes int64) error, size func(text []byte) (int64, error)) error {
	seen := make(map[string]bool)
	for _, s := range list {
		at := strings.LastIndexByte(s, '=')
		if at < 1 {
			return fmt.Errorf("--quota %q is not SALT=SIZE, as in team-a=20GiB", s)
		}
		name := s[:at]
		bytes, err := size([]byte(s[at+1:]))
		switch {
		case err != nil:
		case seen[name]:
			err = errors.New("the tenant has one already")
		default:
			err = set(SaltOf(name), bytes)
		}
		if err != nil {
			return fmt.Errorf("--quota %s: %w", name, err)
		}
		seen[name] = true
	}
	return nil
}

// Tenant is what one tenant with a quota has, in /status.
type Tenant struct {
	Salt         string `json:"cache_salt"`
	QuotaBytes   int64  `json:"quota_bytes"`
	Bytes        int64  `json:"bytes"` // staged and resident
	Objects      int    `json:"objects"`
	Evicted      uint64 `json:"evicted_objects"` // to make room
	EvictedBytes uint64 `json:"evicted_bytes"`
}

func tenantsOf(st *store.Store) []Tenant {
	var out []Tenant
	for _, u := range st.Quotas() {
		out = append(out, Tenant{SaltName(u.Salt), u.QuotaBytes, u.Bytes, u.Objects, u.Evicted, u.EvictedBytes})
	}
	return out
}

// tenantStats are the same as samples; tenants.MaxQuotas bounds the labels, and only an operator
// sets quotas, so no engine can name one.
type tenantStats struct {
	Quota   map[string]int64  `gauge:"kvasir_tenant_quota_bytes" label:"cache_salt" help:"Bytes that no other tenant takes from this one."`
	Bytes   map[string]int64  `gauge:"kvasir_tenant_bytes" label:"cache_salt" help:"Bytes of the pool that a tenant with a quota has, staged and resident."`
	Objects map[string]int    `gauge:"kvasir_tenant_objects" label:"cache_salt" help:"The same in objects."`
	Evicted map[string]uint64 `counter:"kvasir_tenant_evicted_bytes_total" label:"cache_salt" help:"Bytes of a tenant with a quota that were evicted."`
}

func statsOf(list []Tenant) tenantStats {
	out := tenantStats{make(map[string]int64), make(map[string]int64), make(map[string]int), make(map[string]uint64)}
	for _, t := range list {
		out.Quota[t.Salt], out.Bytes[t.Salt], out.Objects[t.Salt], out.Evicted[t.Salt] = t.QuotaBytes, t.Bytes, t.Objects, t.EvictedBytes
	}
	return out
}

// handleQuotas serves LMCache's routes of quotas: PUT, GET and DELETE /quota/{cache_salt} and
// GET /quota, with its bodies (lmcache 0.5.6, http_apis/quota_api.py).
func handleQuotas(mux *http.ServeMux, guard httpguard.Guard, st *store.Store) {
	handle := func(pattern string, f func(st *store.Store, w http.ResponseWriter, r *http.Request)) {
		mux.Handle(pattern, guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f(st, w, r) })))
	}
	handle("GET /quota", listQuotas)
	handle("PUT /quota/{salt}", setQuota)
	handle("GET /quota/{salt}", getQuota)
	handle("DELETE /quota/{salt}", dropQuota)
}

func listQuotas(st *store.Store, w http.ResponseWriter, _ *http.Request) {
	users := map[string]map[string]float64{}
	for _, t := range tenantsOf(st) {
		users[t.Salt] = map[string]float64{"limit_gb": float64(t.QuotaBytes) / gib, "current_usage_gb": float64(t.Bytes) / gib}
	}
	writeJSON(w, http.StatusOK, map[string]any{"users": users})
}

func setQuota(st *store.Store, w http.ResponseWriter, r *http.Request) {
	refuse := func(why string) { writeJSON(w, http.StatusBadRequest, map[string]string{"error": why}) }
	limit, err := limitOf(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		refuse(err.Error())
		return
	}
	bytes := int64(min(limit*gib, math.MaxInt64/2)) // more than any pool
	name := r.PathValue("salt")
	if err := st.SetQuota(SaltOf(name), bytes); err != nil {
		refuse(err.Error())
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"cache_salt": name, "limit_gb": limit, "status": "ok"})
}

// limitOf reads the body of a PUT: {"limit_gb": 1.5}, the number also as text.
func limitOf(body io.Reader) (float64, error) {
	var fields map[string]any
	if err := json.NewDecoder(body).Decode(&fields); err != nil {
		return 0, errors.New("body is not {\"limit_gb\": 1.5}: " + err.Error())
	}
	limit, err := 0.0, error(nil)
	switch v := fields["limit_gb"].(type) {
	case float64:
		limit = v
	case string:
		limit, err = strconv.ParseFloat(v, 64)
	default:
		return 0, errors.New("body has no limit_gb that is a number: want {\"limit_gb\": 1.5}")
	}
	if err != nil || math.IsNaN(limit) || math.IsInf(limit, 0) || limit < 0 {
		return 0, errors.New("limit_gb is no number of 0 or more")
	}
	return limit, nil
}

func getQuota(st *store.Store, w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("salt")
	var of tenants.Usage
	exists := false
	for _, u := range st.Quotas() {
		if u.Salt == SaltOf(name) {
			of, exists = u, true
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"cache_salt": name, "limit_gb": float64(of.QuotaBytes) / gib, "current_usage_gb": float64(of.Bytes) / gib, "exists": exists,
	})
}

func dropQuota(st *store.Store, w http.ResponseWriter, r *http.Request) {
	name, status := r.PathValue("salt"), "not_found"
	if st.DropQuota(SaltOf(name)) {
		status = "removed"
	}
	writeJSON(w, http.StatusOK, map[string]string{"cache_salt": name, "status": status})
}
