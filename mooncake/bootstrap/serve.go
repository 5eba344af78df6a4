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

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	readTimeout  = 10 * time.Second // of a whole request
	writeTimeout = 10 * time.Second
	idleTimeout  = 75 * time.Second
	drainTimeout = 5 * time.Second
	maxHeader    = 16 << 10
)

// Serve answers on l until ctx is done; then requests that wait are answered
// and those under way may finish for 5 s. It closes l and not the registry.
func (r *Registry) Serve(ctx context.Context, l net.Listener) error {
	web := &http.Server{
		Handler: r, ReadHeaderTimeout: r.readTimeout, ReadTimeout: r.readTimeout, WriteTimeout: writeTimeout, IdleTimeout: r.idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: log.New(io.Discard, "", 0),
	}
	front := newFront(r, l.Addr())
	failed := make(chan error, 1)
	var accepting sync.WaitGroup
	go func() { failed <- web.Serve(front.slow) }() // received below
	accepting.Go(func() {
		front.accept(&limitListener{Listener: l, max: int64(r.o.MaxConns), refused: &r.n.connsRefused})
	})
	<-ctx.Done()
	err := l.Close()
	accepting.Wait()
	r.drained.Do(func() { close(r.draining) })
	front.drain()
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	if web.Shutdown(drain) != nil {
		err = errors.Join(err, web.Close())
	}
	stop := context.AfterFunc(drain, front.cut)
	front.wg.Wait()
	stop()
	if e := <-failed; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(err, e)
	}
	return err
}

// counters are what the metrics show.
type counters struct {
	queries, registers, errors, invalid                            atomic.Uint64
	registered, repeated, refused, replaced, expired, unregistered atomic.Uint64
	saveErrors, connsRefused                                       atomic.Uint64
	unsaved                                                        atomic.Bool
}

func (r *Registry) metrics(w http.ResponseWriter) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(r)
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{DisableCompression: true}).ServeHTTP(w, &http.Request{Method: http.MethodGet, Header: http.Header{}})
}

// Describe implements prometheus.Collector as an unchecked collector.
func (r *Registry) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (r *Registry) Collect(ch chan<- prometheus.Metric) {
	emit := func(kind prometheus.ValueType, name, help string, v float64) {
		ch <- prometheus.MustNewConstMetric(prometheus.NewDesc("kvasir_bootstrap_"+name, help, nil, nil), kind, v)
	}
	gauge := func(name, help string, v float64) { emit(prometheus.GaugeValue, name, help, v) }
	count := func(name, help string, v *atomic.Uint64) {
		emit(prometheus.CounterValue, name, help, float64(v.Load()))
	}
	d := r.current()
	r.mu.Lock()
	engines, workers := len(r.mu.engines), r.mu.workers
	r.mu.Unlock()
	gauge("engines", "Engines registered.", float64(engines))
	gauge("engines_shown", "Engines that GET /query shows.", float64(len(d.engines)))
	gauge("workers", "Workers registered.", float64(workers))
	gauge("waiters", "Requests that wait for an expected directory.", float64(r.waiters.Load()))
	gauge("generation", "Generation of the directory.", float64(d.gen))
	unsaved := 0.0
	if r.n.unsaved.Load() {
		unsaved = 1
	}
	gauge("state_unsaved", "1 while the state file cannot be written.", unsaved)
	count("queries_total", "GET /query.", &r.n.queries)
	count("register_requests_total", "POST /register.", &r.n.registers)
	count("registered_total", "Workers registered.", &r.n.registered)
	count("repeated_total", "Registrations repeated or renewed.", &r.n.repeated)
	count("refused_total", "Registrations refused for a conflict or a limit.", &r.n.refused)
	count("invalid_total", "Registrations that do not decode.", &r.n.invalid)
	count("replaced_total", "Engines replaced by a restarted one.", &r.n.replaced)
	count("expired_total", "Leases that ended.", &r.n.expired)
	count("unregistered_total", "Workers taken back with DELETE.", &r.n.unregistered)
	count("errors_total", "Answers other than 2xx.", &r.n.errors)
	count("state_errors_total", "Writes of the state file that failed.", &r.n.saveErrors)
	count("connections_refused_total", "Connections closed at the limit.", &r.n.connsRefused)
}
