// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/http"
	"slices"
	"strings"
)

// CORS says which web pages may use the API from a browser. The zero value allows none.
type CORS struct {
	Origins     []string // "*" allows any
	Methods     []string // default all methods
	Headers     []string // default all header fields
	Credentials bool
}

func has(list []string, s string) bool {
	return len(list) == 0 || slices.Contains(list, "*") || slices.ContainsFunc(list, func(v string) bool { return strings.EqualFold(v, s) })
}

// headers adds the header fields that let a web page read the answer, if its origin is allowed. If r is a preflight request (OPTIONS),
// headers answers it and returns true.
func (c *CORS) headers(w http.ResponseWriter, r *http.Request) (answered bool) {
	origin := r.Header.Get("Origin")
	if len(c.Origins) == 0 || origin == "" {
		return false
	}
	h := w.Header()
	h.Add("Vary", "Origin")
	allowed := has(c.Origins, origin)
	if allowed {
		if slices.Contains(c.Origins, "*") && !c.Credentials {
			origin = "*"
		}
		h.Set("Access-Control-Allow-Origin", origin)
		if c.Credentials {
			h.Set("Access-Control-Allow-Credentials", "true")
		}
		h.Set("Access-Control-Expose-Headers", "X-Request-Id")
	}
	method := r.Header.Get("Access-Control-Request-Method")
	if r.Method != http.MethodOptions || method == "" {
		return false
	}
	wanted := r.Header.Get("Access-Control-Request-Headers")
	for name := range strings.SplitSeq(wanted, ",") {
		allowed = allowed && (strings.TrimSpace(name) == "" || has(c.Headers, strings.TrimSpace(name)))
	}
	if !allowed || !has(c.Methods, method) {
		h.Del("Access-Control-Allow-Origin")
		h.Del("Access-Control-Allow-Credentials")
		fail(w, &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: "the origin, the method or a header is not allowed"})
		return true
	}
	h.Set("Access-Control-Allow-Methods", method)
	if wanted != "" {
		h.Set("Access-Control-Allow-Headers", wanted)
	}
	h.Set("Access-Control-Max-Age", "600")
	w.WriteHeader(http.StatusOK)
	return true
}
