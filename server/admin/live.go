// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// pageFiles has the files of the page at /: its text, its style and its program.
//
//go:embed page
var pageFiles embed.FS

// pageHTML is the page as it is sent. It is one text that loads nothing from other servers.
var pageHTML = joinPage()

func joinPage() []byte {
	read := func(name string) string {
		b, err := pageFiles.ReadFile("page/" + name)
		if err != nil {
			panic("BUG: admin: " + err.Error()) // it is part of the binary
		}
		return string(b)
	}
	return []byte(strings.NewReplacer("/*page.css*/", read("page.css"), "/*page.js*/", read("page.js")).Replace(read("page.html")))
}

// Limits of /live.
const (
	maxListeners = 16               // listeners at the same time; further ones get 503
	liveEvery    = time.Second      // between two events
	liveTimeout  = 10 * time.Second // longest time in which a client must accept an event
	mapEvery     = 5 * time.Second  // largest age of the pool's map and of the slow requests
	liveWorkers  = 64               // most workers in an event, and most tiers; /status has all
	mapCells     = 240              // cells of the pool's map
	liveEnded    = 8                // lookups that found less than they asked for, the newest
	liveShares   = 64               // most pairs of model and tenant, most tenants, and most engines of a proxy in an event
)

// Live is an event of GET /live: the data of the page.
type Live struct {
	AtMillis int64                         `json:"at_ms"` // Unix time
	Now      float64                       `json:"now_s"` // since the start, monotonic: rates are differences divided by differences of it
	Status   server.Status                 `json:"status"`
	Workers  int                           `json:"workers"` // number of registered workers; Status has the first 64
	Bytes    LiveBytes                     `json:"bytes"`
	Map      pool.Map                      `json:"map"`
	Slow     []server.SlowRequest          `json:"slow"`
	Ended    []explain.Lookup              `json:"ended"` // the last lookups that found less than they asked for, 8 at most
	Parts    map[string]map[string]float64 `json:"parts"`

	ByAll       int                `json:"by_in_all"`
	TenantsAll  int                `json:"tenants_in_all"`
	By          []Share            `json:"by"`           // hits by model and tenant, those that asked for most first, 64 at most
	BelowTokens uint64             `json:"below_tokens"` // of the hit tokens since the start, those from tiers below the pool
	Tenants     []Tenant           `json:"tenants"`      // tenants with settings of their own, 64 at most
	Requests    []explain.Timeline `json:"requests"`     // the last requests, 8 at most
	PD          Transfers          `json:"pd"`           // single transfers from P to D

	Owners  []PoolOwner   `json:"pool_owners"`       // the owners in the map are indices into it
	Engines []ProxyEngine `json:"engines,omitempty"` // engines of a proxy in this process, 64 at most
	Cost    Cost          `json:"cost"`
	Peers   []string      `json:"peers"`         // addresses of other nodes' pages
	May     string        `json:"may,omitempty"` // in the first event of a stream: the scope of the client, read, write or admin

	History *Points      `json:"history,omitempty"`      // an hour in the first event of a stream and in /now?history=1; otherwise the newest two points
	Hours   *TenantHours `json:"tenant_hours,omitempty"` // in the first event of a stream, in /now?history=1, and once a minute
}

// LiveBytes has counters since the start, in bytes.
type LiveBytes struct {
	Stored    uint64 `json:"stored"`
	Retrieved uint64 `json:"retrieved"`
	Below     uint64 `json:"below"` // loaded from the tiers below the pool
	Evicted   uint64 `json:"evicted"`
}

// live makes events. All listeners share each event.
type live struct {
	server *server.Server
	gate   *auth.Gate
	o      *Options

	mu        sync.Mutex
	listeners int
	event     []byte // the newest event as JSON, without its history
	number    int    // number of that event
	at        time.Time
	pool      pool.Map
	owners    []PoolOwner
	slow      []server.SlowRequest
	poolAt    time.Time
}

// latest returns an event that is younger than an interval, and its number.
func (l *live) latest() ([]byte, int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.event != nil && now.Sub(l.at) < liveEvery*9/10 {
		return l.event, l.number
	}
	l.o.History.takeDue()
	if l.poolAt.IsZero() || now.Sub(l.poolAt) >= mapEvery {
		l.pool, l.slow = l.server.Look(mapCells)
		l.owners, l.poolAt = ownersOf(l.server, &l.pool), now
	}
	n, why, by := l.server.Stats(), l.server.Explain("", liveEnded), l.server.ByModel()
	e := Live{
		AtMillis: now.UnixMilli(), Now: l.o.History.now().Seconds(), Status: l.server.Status(), Map: l.pool, Slow: l.slow, Parts: l.o.Parts.figures(),
		Ended: why.Lookups, Requests: why.Requests, By: sharesOf(by, math.MaxInt), Tenants: append([]Tenant{}, tenantsOf(l.server.Store())...), PD: l.o.Parts.lastTransfers(),
		Owners: l.owners, Cost: l.o.Cost, Peers: append([]string{}, l.o.Peers...),
		Bytes: LiveBytes{Stored: n.StoredBytes, Retrieved: n.RetrievedBytes, Below: n.BelowBytes, Evicted: n.EvictedBytes},
	}
	e.Engines, _ = l.o.Parts.proxyEngines(liveShares)
	for _, tokens := range by.HitL2 {
		e.BelowTokens += tokens
	}
	e.ByAll, e.TenantsAll = len(e.By), len(e.Tenants)
	e.By = e.By[:min(len(e.By), liveShares)]
	e.Tenants = e.Tenants[:min(len(e.Tenants), liveShares)]
	e.Workers = len(e.Status.Workers)
	e.Status.Workers = e.Status.Workers[:min(e.Workers, liveWorkers)]
	l.event, l.at = mustJSON(&e), now
	l.number++
	return l.event, l.number
}

// appendField returns a JSON object with one more field, as the last one.
func appendField(object []byte, name string, value []byte) []byte {
	out := make([]byte, 0, len(object)+len(name)+len(value)+4)
	out = append(out, object[:len(object)-1]...)
	out = append(out, `,"`+name+`":`...)
	out = append(out, value...)
	return append(out, '}')
}

// mustJSON encodes a value that has only numbers and strings.
func mustJSON(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil {
		panic("BUG: admin: " + err.Error())
	}
	return body
}

// enter counts a listener. It reports false if there are too many.
func (l *live) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listeners == maxListeners {
		return false
	}
	l.listeners++
	return true
}

func (l *live) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listeners--; l.listeners == 0 {
		l.event, l.pool, l.owners, l.poolAt = nil, pool.Map{}, nil, time.Time{} // no listener needs them
		l.o.History.forget()
	}
}

// serveNow answers with one event as JSON, for programs that look only now and then.
func (l *live) serveNow(w http.ResponseWriter, r *http.Request) {
	event, _ := l.latest()
	if r.URL.Query().Get("history") == "" {
		event = appendField(event, "history", mustJSON(l.o.History.points(recentPoints)))
	} else {
		hours, _ := l.o.History.tenantsJSON()
		event = appendField(appendField(event, "tenant_hours", hours), "history", l.o.History.json())
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(event) // the client is gone if this fails
}

// ServeHTTP sends server-sent events until the client leaves or stops reading.
func (l *live) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !l.enter() {
		writeJSON(w, http.StatusServiceUnavailable, map[string]string{"error": fmt.Sprintf("%d pages are open already: close one", maxListeners)})
		return
	}
	defer l.leave()
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Time{}) // the deadline of the request would end the stream; without a deadline this fails
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	tick := time.NewTicker(liveEvery)
	defer tick.Stop()
	for last, lastHours := 0, -1; ; {
		if event, number := l.latest(); number != last { // else a tick came early
			if hours, number := l.o.History.tenantsJSON(); number != lastHours {
				event, lastHours = appendField(event, "tenant_hours", hours), number
			}
			if last == 0 {
				event = appendField(appendField(event, "may", mustJSON(mayOf(l.gate, r).String())), "history", l.o.History.json())
			} else {
				event = appendField(event, "history", mustJSON(l.o.History.points(recentPoints)))
			}
			last = number
			_ = c.SetWriteDeadline(time.Now().Add(cmp.Or(l.o.liveTimeout, liveTimeout)))
			if _, err := fmt.Fprintf(w, "data: %s\n\n", event); err != nil || c.Flush() != nil {
				return // the client is gone
			}
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

// page answers GET /: browsers get the page, programs LMCache's answer.
func page(guard httpserver.Guard) http.Handler {
	policy := "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; script-src " +
		hashOf("script") + "; style-src " + hashOf("style")
	shown := guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-cache")
		_, _ = w.Write(pageHTML) // the client is gone if this fails
	}))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept")
		if strings.Contains(r.Header.Get("Accept"), "text/html") {
			shown.ServeHTTP(w, r)
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok", "service": "Kvasir HTTP API"})
	})
}

// hashOf returns the hash of the page's only element with that name, in the form of a Content-Security-Policy.
func hashOf(element string) string {
	_, after, _ := strings.Cut(string(pageHTML), "<"+element+">")
	text, _, _ := strings.Cut(after, "</"+element+">")
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}
