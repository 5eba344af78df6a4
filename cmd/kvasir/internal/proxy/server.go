// SPDX-License-Identifier: Apache-2.0

// Package proxy is what kvasir proxy does beside its flags.
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

// Server serves a proxy.
type Server struct {
	Proxy    *proxy.Proxy
	Listener net.Listener // closed by Serve
	MaxConns int

	TLS *tls.Config // https; nil: http

	Gate, AdminGate *auth.Gate // in front of Listener and Admin; nil: every request is allowed

	Keys    *keys.Set    // read again when their file changes; nil: none
	Metrics http.Handler // guarded from pages of other sites; served at /metrics of Admin, or of Listener if there is neither Admin nor Keys

	Admin      net.Listener // of /engines; closed by Serve; nil: none
	AdminToken string

	AllowHosts []string // host names under which Metrics may be read, besides addresses, localhost and this machine's name

	Drain time.Duration // for requests in progress when ctx ends
	Log   *slog.Logger
}

// heapReserve are bytes of the heap that are never written, so that no memory stands behind them. The garbage collector
// begins when the heap has doubled. Without them that is after a few MiB of short requests, and a tenth of their processor
// time or more is the collector's. The process has up to as much more resident memory under load.
const heapReserve = 32 << 20

// Serve serves until ctx ends, and lets requests in progress finish.
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

// serve serves http, or https.
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

// Gate returns the gate in front of the API: it checks networks and client certificates. The proxy itself checks API keys; tokens are for
// the admin port.
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

// AdminGate returns the gate in front of the admin port. token is that of --admin-token; if there are no other credentials, the metrics
// need none.
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

// metrics serves Metrics, but not to pages of other sites: it refuses unknown host names, and requests that a browser marks as cross-site.
func (s *Server) metrics() http.Handler {
	return httpserver.Guard{AllowHosts: s.AllowHosts}.Handler(s.Metrics)
}
