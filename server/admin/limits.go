// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"net/http"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// perTenant lists the routes that a client limited to some tenants may use. Each shows and changes only those tenants.
var perTenant = []string{"/explain", "/metrics", "/version", "/tenants", "/quota", "/cache/pins", "/cache/prefetches", "/cache/objects"}

// limitTenants refuses requests of a client that is limited to some tenants to routes that are about all tenants.
func limitTenants(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if auth.LimitOf(r) == nil {
			next.ServeHTTP(w, r)
			return
		}
		for _, route := range perTenant {
			if r.URL.Path == route || strings.HasPrefix(r.URL.Path, route+"/") {
				next.ServeHTTP(w, r)
				return
			}
		}
		auth.RefuseTenant(w, r, "this client is limited to some tenants (--tenant-file), and this route is about all of them; it may use "+strings.Join(perTenant, " "))
	})
}

// mayUse reports whether the client of a request may use a tenant. If not, it has answered the request.
func mayUse(w http.ResponseWriter, r *http.Request, salt string) bool {
	if auth.LimitOf(r).Allows(salt) {
		return true
	}
	auth.RefuseTenant(w, r, "this client may not use the tenant "+SaltName(salt)+" (--tenant-file)")
	return false
}

// limitMetrics answers a client that is limited to some tenants with the samples of only those tenants.
func limitMetrics(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit := auth.LimitOf(r)
		if limit == nil {
			next.ServeHTTP(w, r)
			return
		}
		plain := r.Clone(r.Context())
		plain.Header.Del("Accept-Encoding")
		plain.Header.Del("Accept")
		all := &recorded{header: w.Header()}
		next.ServeHTTP(all, plain)
		w.Header().Del("Content-Length")
		if all.code != 0 && all.code != http.StatusOK {
			w.WriteHeader(all.code)
			return
		}
		_, _ = w.Write(samplesOf(all.body.Bytes(), limit)) // the client is gone if this fails
	})
}

// recorded is an http.ResponseWriter that keeps the answer.
type recorded struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (r *recorded) Header() http.Header { return r.header }

// WriteHeader implements http.ResponseWriter.
func (r *recorded) WriteHeader(code int) { r.code = code }

// Write implements http.ResponseWriter.
func (r *recorded) Write(b []byte) (int, error) { return r.body.Write(b) }

// samplesOf returns the samples, in a text of metrics, of tenants that the limit allows, with their HELP and TYPE lines.
func samplesOf(text []byte, limit *auth.Limit) []byte {
	var out, about []byte
	for line := range bytes.Lines(text) {
		switch {
		case bytes.HasPrefix(line, []byte("# HELP ")):
			about = append(about[:0], line...)
		case bytes.HasPrefix(line, []byte("#")):
			about = append(about, line...)
		default:
			salt, ok := saltLabel(line)
			if ok && bytes.HasPrefix(line, []byte("kvasir_tenant_")) {
				salt = SaltOf(salt) // other metrics have the salt itself, not its SaltName
			}
			if ok && limit.Allows(salt) {
				out = append(append(out, about...), line...)
				about = about[:0]
			}
		}
	}
	return out
}

// sharedSalt is the label of samples of several tenants.
const sharedSalt = "_other"

var labelEscapes = strings.NewReplacer(`\\`, `\`, `\"`, `"`, `\n`, "\n")

// saltLabel returns the label cache_salt of a sample. It reports false if the sample has none, or is of several tenants.
func saltLabel(line []byte) (string, bool) {
	// Labels are in the order of their names. A value before this one may have any text without an unescaped quotation mark.
	for rest := line; ; {
		name, value, ok := bytes.Cut(rest, []byte(`="`))
		if !ok {
			return "", false
		}
		end := 0
		for end < len(value) && value[end] != '"' {
			if value[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(value) {
			return "", false
		}
		if bytes.HasSuffix(name, []byte("{cache_salt")) || bytes.HasSuffix(name, []byte(",cache_salt")) {
			salt := labelEscapes.Replace(string(value[:end]))
			return salt, salt != sharedSalt
		}
		rest = value[end+1:]
	}
}
