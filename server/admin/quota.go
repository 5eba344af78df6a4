// SPDX-License-Identifier: Apache-2.0

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

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// noSalt represents the empty salt in paths and answers, as in LMCache's quota routes.
const noSalt = "_default"

// SaltName returns a salt in the form for paths and for people. A salt that is itself noSalt, or noSalt after underscores, gets one more
// underscore, so that every tenant has its own name.
func SaltName(salt string) string {
	switch {
	case salt == "":
		return noSalt
	case strings.HasSuffix(salt, noSalt) && strings.Trim(strings.TrimSuffix(salt, noSalt), "_") == "":
		return "_" + salt
	}
	return salt
}

// SaltOf returns the salt of a name that SaltName returned.
func SaltOf(name string) string {
	switch {
	case name == noSalt:
		return ""
	case SaltName(name) != name:
		return name[1:]
	}
	return name
}

// gib is the unit of limit_gb. LMCache uses powers of 1024 too.
const gib = 1 << 30

// EachSalt calls set for each element of a list such as team-a=20GiB, whose salts are in the form of SaltName. flag is the name of the flag
// that the list comes from, and value an example of the text after the equals sign: errors show both.
func EachSalt(flag, value string, list []string, set func(salt, value string) error) error {
	seen := make(map[string]bool)
	for _, s := range list {
		at := strings.LastIndexByte(s, '=')
		if at < 1 {
			return fmt.Errorf("%s %q is not SALT=VALUE, as in team-a=%s", flag, s, value)
		}
		name, err := s[:at], errors.New("the tenant is listed twice")
		if !seen[name] {
			err = set(SaltOf(name), s[at+1:])
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", flag, name, err)
		}
		seen[name] = true
	}
	return nil
}

// These are LMCache's routes of quotas: PUT, GET and DELETE /quota/{cache_salt} and GET /quota, with LMCache's bodies (lmcache 0.5.6,
// http_apis/quota_api.py).

func (t *tenantRoutes) listQuotas(w http.ResponseWriter, r *http.Request) {
	limit, users := auth.LimitOf(r), map[string]map[string]float64{}
	for _, u := range t.server.Store().Tenants() {
		if u.QuotaBytes >= 0 && limit.Allows(u.Salt) {
			users[SaltName(u.Salt)] = map[string]float64{"limit_gb": float64(u.QuotaBytes) / gib, "current_usage_gb": float64(u.Bytes) / gib}
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"users": users})
}

func (t *tenantRoutes) setQuota(w http.ResponseWriter, r *http.Request) {
	refuse := func(why string) { writeJSON(w, http.StatusBadRequest, map[string]string{"error": why}) }
	limit, err := limitOf(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		refuse(err.Error())
		return
	}
	bytes := int64(min(limit*gib, math.MaxInt64/2)) // larger than any pool
	name := r.PathValue("salt")
	err = t.terms.Set(SaltOf(name), tenant.Quota, tenant.BytesValue(bytes))
	if _, ok := errors.AsType[*tenant.NotKeptError](err); err != nil && !ok {
		refuse(err.Error())
		return
	}
	nameKnown(t.server, SaltOf(name))
	if err != nil {
		notKept(w, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"cache_salt": name, "limit_gb": limit, "status": "ok"})
}

// limitOf reads the body of a PUT: {"limit_gb": 1.5}. The number may also be a string.
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

func (t *tenantRoutes) getQuota(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("salt")
	var of tenant.Usage
	exists := false
	for _, u := range t.server.Store().Tenants() {
		if u.Salt == SaltOf(name) && u.QuotaBytes >= 0 {
			of, exists = u, true
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"cache_salt": name, "limit_gb": float64(of.QuotaBytes) / gib, "current_usage_gb": float64(of.Bytes) / gib, "exists": exists,
	})
}

func (t *tenantRoutes) dropQuota(w http.ResponseWriter, r *http.Request) {
	name, status := r.PathValue("salt"), "not_found"
	for _, u := range t.server.Store().Tenants() {
		if u.Salt == SaltOf(name) && u.QuotaBytes >= 0 {
			status = "removed"
		}
	}
	if err := t.terms.Set(SaltOf(name), tenant.Quota, tenant.Value{}); err != nil {
		notKept(w, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"cache_salt": name, "status": status})
}
