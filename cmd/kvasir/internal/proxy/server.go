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
	"sync"
	"time"

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

	CertFile, KeyFile string // https; "": http

	Keys    *keys.Set    // read again when their file changes; nil: none
	Metrics http.Handler // guarded from pages of other sites, at /metrics of Admin, or of Listener if there is neither Admin nor Keys

	Admin      net.Listener // of /engines; closed by Serve; nil: none
	AdminToken string

	AllowHosts []string // names under which Metrics are read, besides addresses, localhost and this machine's name

	Drain time.Duration // for requests in progress when ctx ends
	Log   *slog.Logger
}

// Serve serves until ctx ends, and lets requests in progress finish.
func (s *Server) Serve(ctx context.Context) (err error) {
	mux := http.NewServeMux()
	mux.Handle("/", s.Proxy)
	if s.Keys == nil && s.Admin == nil {
		mux.Handle("GET /metrics", s.metrics())
	}
	web := httpserver.NewServer(mux)
	web.WriteTimeout = 0 // the proxy gives each piece of an answer its own time
	scheme := "http://"
	if s.CertFile != "" {
		pair, err := httpserver.OpenCertificate(s.CertFile, s.KeyFile)
		if err != nil {
			return errors.Join(err, s.close())
		}
		web.TLSConfig = &tls.Config{GetCertificate: pair.Get, MinVersion: tls.VersionTLS12}
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
			if err := admin.Serve(httpserver.Limit(s.Admin, httpserver.MaxConns)); !errors.Is(err, http.ErrServerClosed) {
				s.Log.Error("the admin port ended", "err", err)
			}
		})
		defer admin.Close()
		s.Log.Info("engines can be added and removed", "address", "http://"+s.Admin.Addr().String()+"/engines")
	}
	s.Log.Info("the proxy serves", "address", scheme+s.Listener.Addr().String(), "engines", len(s.Proxy.Stats().Well))
	ended := make(chan error, 1)
	go func() {
		limited := httpserver.Limit(rawio.Listener{Listener: s.Listener}, s.MaxConns)
		if web.TLSConfig != nil {
			ended <- web.ServeTLS(limited, "", "")
			return
		}
		ended <- web.Serve(limited)
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
	return httpserver.NewServer(mux)
}

// metrics answers no page of another site: a name that leads here, or a request that a browser says to be cross-site, is refused.
func (s *Server) metrics() http.Handler {
	return httpserver.Guard{AllowHosts: s.AllowHosts}.Handler(s.Metrics)
}

func (s *Server) close() error {
	err := s.Listener.Close()
	if s.Admin != nil {
		err = errors.Join(err, s.Admin.Close())
	}
	return err
}
