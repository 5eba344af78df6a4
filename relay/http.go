package relay

import (
	"encoding/json"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
)

// ServeHTTP answers D as a bootstrap server: GET /query lists the relay's own
// engines, one for each of P's. GET /healthz says whether P's server answers. Web
// pages are refused, as are names that are not the relay's.
func (r *Relay) ServeHTTP(w http.ResponseWriter, req *http.Request) { r.web.ServeHTTP(w, req) }

func (r *Relay) serveHTTP(w http.ResponseWriter, req *http.Request) {
	answer := func(status int, body []byte) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write(body) // a client that went away needs no answer
	}
	detail := func(status int, text string) {
		body, _ := json.Marshal(map[string]string{"detail": text})
		answer(status, body)
	}
	switch {
	case req.URL.Path != "/query" && req.URL.Path != "/healthz" && req.URL.Path != "/healthcheck":
		detail(http.StatusNotFound, "Not Found")
	case req.Method != http.MethodGet:
		w.Header().Set("Allow", "GET")
		detail(http.StatusMethodNotAllowed, "Method Not Allowed")
	default:
		text, err := r.directory(req.Context())
		switch {
		case err != nil:
			detail(http.StatusServiceUnavailable, err.Error())
		case req.URL.Path == "/query":
			answer(http.StatusOK, text)
		default:
			answer(http.StatusOK, []byte(`{"status":"ok"}`))
		}
	}
}

var (
	descEngines = prometheus.NewDesc("kvasir_relay_engines", "Engines of P that are registered and relayed.", nil, nil)
	descKept    = prometheus.NewDesc("kvasir_relay_kept_transfers", "Transfers in memory.", nil, nil)
	descBytes   = prometheus.NewDesc("kvasir_relay_kept_bytes", "Memory that they take.", nil, nil)
	descPulled  = prometheus.NewDesc("kvasir_relay_pulled_total", "Transfers pulled from P.", nil, nil)
	descPBytes  = prometheus.NewDesc("kvasir_relay_pulled_bytes_total", "Bytes of KV pulled from P.", nil, nil)
	descPrefix  = prometheus.NewDesc("kvasir_relay_prefix_bytes_total", "Bytes of KV copied from a prefix instead.", nil, nil)
	descServed  = prometheus.NewDesc("kvasir_relay_served_total", "Requests of D, by where their KV came from.", []string{"from"}, nil)
	descFailed  = prometheus.NewDesc("kvasir_relay_failed_total", "Requests of D that failed.", nil, nil)
	descEvicted = prometheus.NewDesc("kvasir_relay_evicted_total", "Transfers that made room for others.", nil, nil)
	descDropped = prometheus.NewDesc("kvasir_relay_dropped_total", "Transfers dropped because their P restarted or left.", nil, nil)
)

// Describe implements prometheus.Collector.
func (r *Relay) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descEngines, descKept, descBytes, descPulled, descPBytes, descPrefix, descServed, descFailed, descEvicted, descDropped,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (r *Relay) Collect(ch chan<- prometheus.Metric) {
	s := r.Stats()
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, float64(v), labels...)
	}
	put(descEngines, prometheus.GaugeValue, s.Engines)
	put(descKept, prometheus.GaugeValue, s.Kept)
	put(descBytes, prometheus.GaugeValue, s.KeptBytes)
	put(descPulled, prometheus.CounterValue, s.Pulled)
	put(descPBytes, prometheus.CounterValue, s.PulledBytes)
	put(descPrefix, prometheus.CounterValue, s.PrefixBytes)
	put(descServed, prometheus.CounterValue, s.FromMemory, "memory")
	put(descServed, prometheus.CounterValue, s.Served-s.FromMemory, "P")
	put(descFailed, prometheus.CounterValue, s.Failed)
	put(descEvicted, prometheus.CounterValue, s.Evicted)
	put(descDropped, prometheus.CounterValue, s.Dropped)
}
