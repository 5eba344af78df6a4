// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
)

// forHostAlone refuses changes that a browser on another host requests, while requests need no credential: a person who may look at the
// page must not be able to clear the cache only for that reason. It does not refuse programs, which the allowed networks limit. The Guard
// of each route has already refused pages of other sites.
func forHostAlone(gate *auth.Gate, h http.Handler) http.Handler {
	if gate.WantsCredentials() {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead && fromBrowser(r) && !fromHost(r) {
			writeJSON(w, http.StatusForbidden, map[string]string{"error": "without --token-file the page changes things only in a browser of the server's host"})
			return
		}
		h.ServeHTTP(w, r)
	})
}

// fromBrowser reports whether a browser sent a request for a page. Programs send neither of these headers.
func fromBrowser(r *http.Request) bool {
	return r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != ""
}

// fromHost reports whether a request came over a loopback address, hence from this host.
func fromHost(r *http.Request) bool {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && at.Addr().Unmap().IsLoopback()
}

// mayOf returns the scope of a request: read, write or admin.
func mayOf(gate *auth.Gate, r *http.Request) auth.Scope {
	if !gate.WantsCredentials() {
		if fromHost(r) {
			return auth.Admin
		}
		return auth.Read
	}
	for _, s := range []auth.Scope{auth.Admin, auth.Write} {
		if auth.Allows(r, s) {
			return s
		}
	}
	return auth.Read
}

// CheckPeer returns an error if text cannot be the address of another node's page.
func CheckPeer(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.User != nil {
		return fmt.Errorf("%.100q is not http://HOST:PORT", text)
	}
	return nil
}

// ErrNoEngine means that the proxy has no engine with that address.
var ErrNoEngine = errors.New("the proxy has no such engine")

// handleEngines serves the state of the engines of a proxy in this process, and drains them. The routes are those of the proxy's
// --admin-port.
func handleEngines(mux *http.ServeMux, guard httpserver.Guard, parts *Parts) {
	mux.Handle("GET /engines", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		engines, _ := parts.proxy()
		if engines == nil {
			noProxy(w)
			return
		}
		writeJSON(w, http.StatusOK, map[string]any{"engines": engines()})
	})))
	for path, on := range map[string]bool{"POST /engines/drain": true, "POST /engines/undrain": false} {
		mux.Handle(path, guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, drain := parts.proxy()
			if drain == nil {
				noProxy(w)
				return
			}
			q := r.URL.Query()
			if err := drain(q.Get("url"), q.Get("role"), on); err != nil {
				writeJSON(w, http.StatusNotFound, map[string]string{"error": err.Error()})
				return
			}
			writeJSON(w, http.StatusOK, map[string]any{"url": q.Get("url"), "draining": on})
		})))
	}
}

func noProxy(w http.ResponseWriter) {
	writeJSON(w, http.StatusNotFound, map[string]string{"error": "no proxy runs in this process: its engines are drained at its own --admin-port"})
}
