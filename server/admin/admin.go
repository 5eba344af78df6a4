// SPDX-License-Identifier: Apache-2.0

// Package admin is the HTTP interface of a node: health, status, metrics, settings and clearing the cache. Bodies that LMCache has too have
// LMCache's form.
package admin

import (
	"encoding/json"
	"net/http"
	"net/http/pprof"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/store/tenant"
	"github.com/kvasir-kv/kvasir/tier"
)

// Options configures a Handler. A zero field means its default.
type Options struct {
	AllowHosts []string                // names of this machine, besides its host name, under which requests may ask for it
	Flags      map[string]string       // the flags with which the server was started, shown in /status
	Socket     string                  // URL or address at which engines reach the server, for /readyz; empty: /readyz does not ask it
	AskSocket  lmcache.ClientOptions   // the credentials with which /readyz asks the Socket
	Profiles   bool                    // serve Go's profiles at /debug/pprof/
	Sources    map[string]string       // the source of each of the Flags
	Terms      *tenant.Terms           // settings of tenants, applied to the store; nil: none, and no file stores settings made while the server runs
	Access     auth.Options            // who may send requests; Handler sets Need and Refuse itself
	Metrics    func(*metrics.Registry) // adds the figures of other listeners; nil: none
	Parts      *Parts                  // other parts of the node that run in this process; nil: none
	Cost       Cost                    // what a hit saves, for the page
	Peers      []string                // pages of other nodes, which the page links to: CheckPeer
	History    *History                // the last hour, filled by its owner with Run; nil: one that takes points only while a client of /live or /now looks

	liveTimeout time.Duration // in tests: replaces the constant liveTimeout
}

// Cost has the figures from which the page computes what a hit saves.
type Cost struct {
	PrefillTokens float64 `json:"prefill_tokens_per_s"` // tokens per second that the GPUs of an engine compute; 0: no savings are shown
	GPUHourPrice  float64 `json:"gpu_hour_price"`       // in any currency; 0: no money is shown
}

// Handler returns the handler of the routes in docs/reference/http.md. Health, readiness, /version and /metrics answer under any name of
// the host, because they tell nothing that a web page could use.
func Handler(s *server.Server, o Options) http.Handler {
	version := s.Version()
	reg := metrics.New(version)
	metrics.Add(reg, s.Stats)
	metrics.Add(reg, s.ByModel)
	metrics.Add(reg, s.CurveStats)
	metrics.Add(reg, s.Offload().Stats)
	for _, t := range s.Tiers() {
		labels := map[string]string{"tier": t.Name()}
		metrics.AddWith(reg, labels, t.Stats)
		metrics.AddWith(reg, map[string]string{"l2_name": t.Name()}, func() usage.Tier { return usage.OfTier(t.Stats()) })
		if _, ok := t.Requests(); ok {
			metrics.AddWith(reg, labels, func() tier.Requests { r, _ := t.Requests(); return r })
		}
	}
	for _, name := range s.TierNames() {
		metrics.AddWith(reg, map[string]string{"tier": name}, func() explain.TierEnds { return s.TierEnds(name) })
	}
	if p := s.Publisher(); p != nil {
		metrics.Add(reg, p.Stats)
	}
	if l := s.Options().Lifetimes; l != nil {
		metrics.Add(reg, l.Stats)
	}
	if d := s.Disk(); d != nil {
		metrics.Add(reg, d.Stats)
	}
	for name, t := range s.Seals() {
		metrics.AddWith(reg, map[string]string{"tier": name}, t.Stats)
	}
	for name, c := range s.Clusters() {
		metrics.AddWith(reg, map[string]string{"tier": name}, c.Stats)
	}
	guard := httpserver.Guard{AllowHosts: o.AllowHosts}
	mux := http.NewServeMux()
	mux.Handle("GET /{$}", page(guard))
	if o.History == nil {
		o.History = NewHistory(s)
	}
	gate := newGate(o.Access)
	shown := &live{server: s, gate: gate, o: &o}
	mux.Handle("GET /live", guard.Handler(shown))
	mux.Handle("GET /now", guard.Handler(http.HandlerFunc(shown.serveNow)))
	mux.Handle("GET /transfers", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		writeJSON(w, http.StatusOK, o.Parts.lastTransfers())
	})))
	health := func(w http.ResponseWriter, r *http.Request) { answerHealth(s, w, r) }
	mux.HandleFunc("GET /healthcheck", health)
	mux.HandleFunc("GET /healthz", health)
	mux.Handle("GET /readyz", &readiness{server: s, url: o.Socket, as: o.AskSocket})
	mux.Handle("GET /status", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, Status{Status: s.Status(), Shape: shapeOf(s, o.Flags), Flags: o.Flags, Parts: o.Parts.figures(), Tenants: tenantsOf(s.Store()), ByModel: sharesOf(s.ByModel(), liveShares)})
	})))
	mux.Handle("GET /explain", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { explainLookups(s, w, r) })))
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, version) })
	mux.Handle("POST /cache/clear", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { clearCache(s, w, r) })))
	mux.Handle("POST /tiers/rekey", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { rekeyTier(s, w, r) })))
	mux.Handle("POST /tiers/drop", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { dropTier(s, w, r) })))
	book := o.Terms
	if book == nil {
		book, _ = tenant.OpenTerms("", nil, nil) // without a file and flags it cannot fail
		_ = book.Apply(s.Store())
	}
	metrics.Add(reg, func() tenantStats { return tenantStatsOf(s.Store(), book) })
	(&tenantRoutes{s, book}).handle(mux, guard)
	lists := newListBodies()
	handleEngines(mux, guard, o.Parts)
	handlePins(mux, guard, s, lists)
	handleObjects(mux, guard, s, lists)
	handlePrefetches(mux, guard, s, lists)
	handleChecksums(mux, guard, s)
	mux.Handle("GET /config", guard.Handler(&config{o.Flags, o.Sources, book}))
	mux.Handle("GET /metrics", limitMetrics(reg.Handler()))
	if o.Profiles {
		for path, h := range map[string]http.HandlerFunc{
			"": pprof.Index, "profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace,
		} {
			mux.Handle("GET /debug/pprof/"+path, guard.Handler(h))
		}
	}
	metrics.AddWith(reg, map[string]string{"listener": "http"}, gate.Stats)
	if o.Metrics != nil {
		o.Metrics(reg)
	}
	return gate.Handler(limitTenants(forHostAlone(gate, mux)))
}

// Status is the body of /status.
type Status struct {
	server.Status
	*Shape
	Flags map[string]string             `json:"flags,omitempty"`
	Parts map[string]map[string]float64 `json:"parts,omitempty"` // metrics, without histograms, of the parts in this process, by name

	Tenants []Tenant `json:"tenants,omitempty"` // tenants with settings of their own, by salt
	ByModel []Share  `json:"by_model"`          // hits by model and tenant, 64 at most
}

// maxModelName bounds the name of a model in bytes. A request to clear models with a longer name, or an empty one, is refused.
const maxModelName = 1024

// maxExplained bounds the lookups of one answer: a larger ?limit= is refused. defaultExplained is their number without ?limit=.
const maxExplained, defaultExplained = 4096, 20

// explainLookups answers why lookups found no more: those of ?request_id=, or else the last ?limit= lookups.
func explainLookups(s *server.Server, w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	most := defaultExplained
	if text := q.Get("limit"); text != "" {
		var err error
		if most, err = strconv.Atoi(text); err != nil || most < 1 || most > maxExplained {
			writeJSON(w, http.StatusBadRequest, map[string]string{"error": "limit is not a number from 1 to " + strconv.Itoa(maxExplained)})
			return
		}
	}
	if limit := auth.LimitOf(r); limit != nil {
		writeJSON(w, http.StatusOK, s.ExplainTo(q.Get("request_id"), most, limit))
		return
	}
	writeJSON(w, http.StatusOK, s.Explain(q.Get("request_id"), most))
}

// maxBody bounds the body of a request in bytes. A longer one is an error of the request.
const maxBody = 4096

// clearCache reads the optional body {"tier": "all", "force": false}, and clears the cache.
func clearCache(s *server.Server, w http.ResponseWriter, r *http.Request) {
	body := struct {
		Tier   string   `json:"tier"`
		Force  bool     `json:"force"`
		Models []string `json:"models"`
	}{Tier: string(server.ClearAll)}
	if r.ContentLength != 0 {
		if err := readStrict(w, r, &body); err != nil {
			writeJSON(w, http.StatusBadRequest, map[string]string{"error": "body is not {\"tier\": \"all\", \"force\": false, \"models\": [\"NAME\"]}: " + err.Error()})
			return
		}
	}
	of, err := server.ParseClearTier(body.Tier)
	if err != nil {
		badRequest(w, "%v", err)
		return
	}
	for _, model := range body.Models {
		if model == "" || len(model) > maxModelName {
			badRequest(w, "models: %.40q is no name of a model", model)
			return
		}
	}
	if body.Models != nil && len(body.Models) == 0 {
		badRequest(w, "models is an empty list: without the field all models are cleared")
		return
	}
	got, err := s.Clear(server.Clear{Tier: of, Force: body.Force, Models: body.Models, By: "POST /cache/clear from " + r.RemoteAddr})
	cleared := map[string]any{"tier": of, "chunks": got.Chunks}
	if got.Stays != "" {
		cleared["stays"] = got.Stays
	}
	if err != nil {
		writeJSON(w, http.StatusInternalServerError, map[string]any{"status": "error", "cleared": cleared, "error": err.Error()})
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"status": "ok", "cleared": cleared})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v) // the client is gone if this fails
}
