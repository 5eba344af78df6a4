// SPDX-License-Identifier: Apache-2.0

// Package httpserver protects an HTTP interface without passwords from web pages, and from peers that keep many connections open. Its
// Certificate reads a TLS certificate again when the files change.
//
// A web page that a person in this network opens can make the person's browser send requests to any address that the browser reaches.
// The page cannot forge the headers that say from where a request comes. It can make a name of its own resolve to our address, but then
// the browser sends that name as Host.
package httpserver

import (
	"encoding/json"
	"fmt"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
)

// Guard decides which requests are answered. As the Host of a request, the zero Guard accepts IP addresses, localhost and the machine's
// host name.
type Guard struct {
	AllowHosts []string // further accepted names, in lower case, without a port
}

// Handler returns a handler that answers a request that a page of another site could have sent with 403 or 415 and a JSON body
// {"error": ...}. It passes all other requests to h.
func (g Guard) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if code, why := g.refuse(r); why != "" {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(map[string]string{"error": why}) // the client is gone if this fails
			return
		}
		h.ServeHTTP(w, r)
	})
}

// Allows reports whether Handler would pass the request on.
func (g Guard) Allows(r *http.Request) bool {
	_, why := g.refuse(r)
	return why == ""
}

// refuse returns the status and the reason with which a request is refused; an empty why means that it is answered.
func (g Guard) refuse(r *http.Request) (code int, why string) {
	if !g.known(r.Host) {
		return http.StatusForbidden, fmt.Sprintf("host %.100q is no address and no name of this machine: --allow-host allows it", r.Host)
	}
	switch site := r.Header.Get("Sec-Fetch-Site"); site {
	case "", "none", "same-origin":
	default:
		return http.StatusForbidden, "a page of another site may not send this request"
	}
	for _, origin := range r.Header.Values("Origin") {
		if u, err := url.Parse(origin); err != nil || !strings.EqualFold(u.Host, r.Host) {
			return http.StatusForbidden, "a page of another site may not send this request"
		}
	}
	if r.ContentLength != 0 && r.Method != http.MethodGet && r.Method != http.MethodHead {
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			return http.StatusUnsupportedMediaType, "a body needs the header Content-Type: application/json"
		}
	}
	return 0, ""
}

// known reports whether a Host header names this machine.
func (g Guard) known(host string) bool {
	name := strings.ToLower(host)
	if h, _, err := net.SplitHostPort(name); err == nil {
		name = h
	}
	name = strings.TrimSuffix(strings.Trim(name, "[]"), ".")
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	if own, err := os.Hostname(); err == nil && name == strings.ToLower(own) {
		return true
	}
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	for _, allowed := range g.AllowHosts {
		if name == strings.ToLower(allowed) {
			return true
		}
	}
	return false
}
