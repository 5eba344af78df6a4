// SPDX-License-Identifier: Apache-2.0

// Package proxy does the work of kvasir proxy, apart from the declaration of its flags: it reads their values, and serves the proxy.
package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/rawio"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/keys"
)

// Server serves a proxy over HTTP, with an optional listener for administration.
type Server struct {
	Proxy    *proxy.Proxy
	Listener net.Listener // Serve closes it
	MaxConns int

	TLS *tls.Config // nil: http, else https

	Gate, AdminGate *auth.Gate // in front of Listener, and of Admin; nil: every request is allowed

	Keys    *keys.Set    // read again when their file changes; nil: there are no keys
	Metrics http.Handler // refused to pages of other sites; served at /metrics of Admin, or of Listener if there is neither Admin nor Keys

	Admin      net.Listener // serves /engines; Serve closes it; nil: none
	AdminToken string

	AllowHosts []string // host names under which Metrics may be read, besides addresses, localhost and this machine's name

	Drain time.Duration // how long requests in progress may still take when ctx ends
	Log   *slog.Logger
}

// heapReserve is the size in bytes of an array that Serve keeps and never writes, so that it takes no memory. The garbage collector
// begins when the heap has doubled. Without the array that happens after a few MiB of short requests, and the collector takes a tenth
// of the processor time or more. Under load the process may have up to heapReserve more resident memory.
const heapReserve = 32 << 20

// Serve serves until ctx ends. Then it takes no more connections, and lets requests in progress finish for the time Drain.
func (s *Server) Serve(ctx context.Context) (err error) {
	reserve := make([]byte, heapReserve)
	defer runtime.KeepAlive(reserve)
	mux := http.NewServeMux()
	mux.Handle("/", s.Proxy)
	if s.Keys == nil && s.Admin == nil {
		mux.Handle("GET /metrics", s.metrics())
	}
	web := httpserver.NewServer(guarded(s.Gate, mux))
	web.WriteTimeout = 0 // the proxy gives each piece of an answer its own time
	scheme := "http://"
	if s.TLS != nil {
		scheme = "https://"
	}
	var beside sync.WaitGroup
	defer beside.Wait()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	if s.Keys != nil {
		beside.Go(func() { s.Keys.Watch(watching, 2*time.Second, s.Log) })
	}
	if s.Admin != nil {
		admin := s.admin()
		beside.Go(func() {
			if err := s.serve(admin, httpserver.Limit(s.Admin, httpserver.MaxConns)); !errors.Is(err, http.ErrServerClosed) {
				s.Log.Error("the admin port ended", "err", err)
			}
		})
		defer admin.Close()
		s.Log.Info("engines can be added and removed", "address", scheme+s.Admin.Addr().String()+"/engines")
	}
	s.Log.Info("the proxy serves", "address", scheme+s.Listener.Addr().String(), "engines", len(s.Proxy.Stats().Well))
	ended := make(chan error, 1)
	go func() {
		ended <- s.serve(web, httpserver.Limit(rawio.Listener{Listener: s.Listener}, s.MaxConns))
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	s.Proxy.Drain()
	s.Log.Info("stopping: requests in progress may finish", "requests", s.Proxy.Stats().InFlight, "within", s.Drain)
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.Drain)
	defer cancel()
	if web.Shutdown(late) != nil {
		err = web.Close()
	}
	<-ended
	n := s.Proxy.Stats()
	s.Log.Info("the proxy stopped", "ok", n.Requests["ok"], "failed", n.Requests["failed"]+n.Requests["no_engine"], "broken_off", n.Requests["broken_off"], "retries", n.Retries)
	return err
}

func (s *Server) admin() *http.Server {
	mux := http.NewServeMux()
	mux.Handle("/", s.Proxy.Admin(s.AdminToken))
	mux.Handle("GET /metrics", s.metrics())
	return httpserver.NewServer(guarded(s.AdminGate, mux))
}

// serve serves on l: https if TLS is set, else http.
func (s *Server) serve(web *http.Server, l net.Listener) error {
	if s.TLS == nil {
		return web.Serve(l)
	}
	web.TLSConfig = s.TLS
	return web.ServeTLS(l, "", "")
}

func guarded(g *auth.Gate, h http.Handler) http.Handler {
	if g == nil {
		return h
	}
	return g.Handler(h)
}

// Gate returns the gate in front of the API. It checks networks and client certificates. It ignores tokens, which are for the admin
// port; the proxy itself checks API keys.
func Gate(o auth.Options) *auth.Gate {
	o.Tokens = nil
	o.Need = func(r *http.Request) auth.Need {
		switch r.URL.Path {
		case "/health", "/healthz", "/healthcheck", "/ping":
			return auth.NeedNothing
		}
		return auth.NeedWrite
	}
	return auth.New(o)
}

// AdminGate returns the gate in front of the admin port. token is the value of --admin-token. If o has neither tokens nor authorities,
// reading /metrics needs no credential.
func AdminGate(o auth.Options, token string) *auth.Gate {
	openFigures := o.Tokens == nil && o.Authorities == nil
	if token != "" {
		o.Keys = []string{token}
	}
	o.Need = func(r *http.Request) auth.Need {
		if r.URL.Path == "/metrics" && openFigures {
			return auth.NeedPeer
		}
		if r.Method == http.MethodGet || r.Method == http.MethodHead {
			return auth.NeedRead
		}
		return auth.NeedAdmin
	}
	return auth.New(o)
}

// metrics returns the handler of Metrics. It refuses requests that may come from pages of other sites: those with an unknown host name,
// and those that a browser marks as cross-site.
func (s *Server) metrics() http.Handler {
	return httpserver.Guard{AllowHosts: s.AllowHosts}.Handler(s.Metrics)
}
