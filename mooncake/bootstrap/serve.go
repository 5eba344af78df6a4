// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/peercred"
)

const (
	readTimeout  = 10 * time.Second // for reading a whole request
	writeTimeout = 30 * time.Second // from the end of a request's head: for its body, a probe, and the answer
	idleTimeout  = 75 * time.Second // without a request; then the connection is closed
	drainTimeout = 5 * time.Second  // for requests in progress when Serve ends; then their connections are cut
	maxHeader    = 16 << 10         // bytes of a request's head; a longer one is refused
)

// Serve answers requests that arrive on l until ctx ends. Then it answers requests that wait for a directory, and gives others 5 s to
// finish. It closes l but not the registry.
func (r *Registry) Serve(ctx context.Context, l net.Listener) error {
	r.log.Info("Mooncake Bootstrap Server started at " + l.Addr().String())
	var stopping atomic.Bool
	var silent sync.Map // connections without a request so far; Shutdown leaves such ones open for 5 s
	web := &http.Server{
		Handler: r, ReadHeaderTimeout: r.readTimeout, ReadTimeout: r.readTimeout, WriteTimeout: writeTimeout, IdleTimeout: r.idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, originKey{}, peercred.OriginOf(httpserver.Unlimited(c)))
		},
		ConnState: func(c net.Conn, s http.ConnState) {
			silent.Delete(c)
			if s == http.StateNew {
				if silent.Store(c, nil); stopping.Load() {
					_ = c.Close()
				}
			}
		},
	}
	failed := make(chan error, 1)
	go func() { // the value is received below
		limited := httpserver.Limit(l, r.o.MaxConns)
		if r.o.TLS != nil {
			web.TLSConfig = r.o.TLS
			failed <- web.ServeTLS(limited, "", "")
			return
		}
		failed <- web.Serve(limited)
	}()
	var err error
	select {
	case err = <-failed:
		failed <- http.ErrServerClosed
	case <-ctx.Done():
	}
	r.drain()
	stopping.Store(true)
	silent.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	if web.Shutdown(drain) != nil {
		err = errors.Join(err, web.Close())
	}
	if e := <-failed; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(err, e)
	}
	r.log.Info("Mooncake Bootstrap Server stopped.")
	return err
}

// counters are the counters behind Stats.
type counters struct {
	queries, registers, errors, invalid                            atomic.Uint64
	registered, repeated, refused, replaced, expired, unregistered atomic.Uint64
	saveErrors, gaveWay                                            atomic.Uint64
	unsaved                                                        atomic.Bool
}

// Stats are the figures of a Registry, for metrics.
type Stats struct {
	Engines          uint64 `gauge:"kvasir_bootstrap_engines" help:"Engines that are registered, complete or not."`
	EnginesShown     uint64 `gauge:"kvasir_bootstrap_engines_shown" help:"Engines that GET /query shows."`
	Workers          uint64 `gauge:"kvasir_bootstrap_workers" help:"Workers registered."`
	Waiters          uint64 `gauge:"kvasir_bootstrap_waiters" help:"Requests that wait for an expected directory."`
	Generation       uint64 `gauge:"kvasir_bootstrap_generation" help:"Generation of the directory."`
	StateUnsaved     uint64 `gauge:"kvasir_bootstrap_state_unsaved" help:"1 while the state file cannot be written."`
	Queries          uint64 `counter:"kvasir_bootstrap_queries_total" help:"Requests for the directory, GET /query."`
	RegisterRequests uint64 `counter:"kvasir_bootstrap_register_requests_total" help:"Registrations asked for, POST /register."`
	Registered       uint64 `counter:"kvasir_bootstrap_registered_total" help:"Workers that were registered."`
	Repeated         uint64 `counter:"kvasir_bootstrap_repeated_total" help:"Registrations that were there already: repeated, or a lease renewed."`
	Refused          uint64 `counter:"kvasir_bootstrap_refused_total" help:"Registrations refused for a conflict or a limit."`
	Invalid          uint64 `counter:"kvasir_bootstrap_invalid_total" help:"Registrations that do not decode."`
	Replaced         uint64 `counter:"kvasir_bootstrap_replaced_total" help:"Engines replaced by a restarted one."`
	GaveWay          uint64 `counter:"kvasir_bootstrap_gave_way_total" help:"Engines that gave way in a full registry."`
	Expired          uint64 `counter:"kvasir_bootstrap_expired_total" help:"Workers whose lease ended without a renewal."`
	Unregistered     uint64 `counter:"kvasir_bootstrap_unregistered_total" help:"Workers taken back with DELETE."`
	Errors           uint64 `counter:"kvasir_bootstrap_errors_total" help:"Requests answered with anything but 2xx."`
	StateErrors      uint64 `counter:"kvasir_bootstrap_state_errors_total" help:"Writes of the state file that failed."`
}

// Stats returns the figures.
func (r *Registry) Stats() Stats {
	d, n, unsaved := r.current(), &r.n, 0
	if n.unsaved.Load() {
		unsaved = 1
	}
	r.mu.Lock()
	engines, workers := len(r.mu.engines), r.mu.workers
	r.mu.Unlock()
	return Stats{
		Engines:          uint64(engines),
		EnginesShown:     uint64(len(d.engines)),
		Workers:          uint64(workers),
		Waiters:          uint64(r.waiters.Taken()),
		Generation:       d.gen,
		StateUnsaved:     uint64(unsaved),
		Queries:          n.queries.Load(),
		RegisterRequests: n.registers.Load(),
		Registered:       n.registered.Load(),
		Repeated:         n.repeated.Load(),
		Refused:          n.refused.Load(),
		Invalid:          n.invalid.Load(),
		Replaced:         n.replaced.Load(),
		GaveWay:          n.gaveWay.Load(),
		Expired:          n.expired.Load(),
		Unregistered:     n.unregistered.Load(),
		Errors:           n.errors.Load(),
		StateErrors:      n.saveErrors.Load(),
	}
}
