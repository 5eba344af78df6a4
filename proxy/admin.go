// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

var roleNames = map[string]role{"engine": both, "prefill": prefill, "decode": decode}

// EngineState is the state of an engine, as Admin lists it.
type EngineState struct {
	URL      string   `json:"url"`
	Role     string   `json:"role"`
	Engine   string   `json:"engine,omitempty"`   // "sglang" for an engine of SGLang
	Reason   string   `json:"reason,omitempty"`   // why an engine of SGLang gets no requests
	Registry string   `json:"registry,omitempty"` // registry of a Mooncake P, or bootstrap server of a P of SGLang
	Well     bool     `json:"well"`
	Draining bool     `json:"draining"`
	Requests int      `json:"requests"`
	Models   []string `json:"models"`
	Ranks    int      `json:"ranks,omitempty"` // data-parallel ranks that its registry lists
}

// Admin returns a handler of /engines for callers with the token: GET lists engines, POST adds an engine, DELETE removes one. After
// POST to /engines/drain an engine gets no new requests; after POST to /engines/undrain it gets them again. Requests in progress always
// go on.
//
// A request that a gate in front of the handler has allowed (auth.Allows) needs no token.
func (p *Proxy) Admin(token string) http.Handler {
	want := sha256.Sum256([]byte(token))
	mux := http.NewServeMux()
	handle := func(pattern string, f func(w http.ResponseWriter, r *http.Request) error) {
		scope := auth.Admin
		if strings.HasPrefix(pattern, "GET ") {
			scope = auth.Read
		}
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			secret, ok := bearer(r)
			got := sha256.Sum256([]byte(secret))
			if hasToken := ok && token != "" && subtle.ConstantTimeCompare(got[:], want[:]) == 1; !hasToken && !auth.Allows(r, scope) {
				w.Header().Set("WWW-Authenticate", "Bearer")
				fail(w, &refusal{status: http.StatusUnauthorized, kind: "AuthenticationError", text: "the token is missing or wrong"})
				return
			}
			if err := f(w, r); err != nil {
				failWith(w, err)
			}
		})
	}
	handle("GET /engines", func(w http.ResponseWriter, _ *http.Request) error {
		w.Header().Set("Content-Type", "application/json")
		return json.NewEncoder(w).Encode(map[string]any{"engines": p.states()})
	})
	handle("POST /engines", func(w http.ResponseWriter, r *http.Request) error {
		var e struct{ URL, Role, Registry string }
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 64<<10)).Decode(&e); err != nil {
			return badAdmin("body is not {\"url\": \"http://HOST:PORT\", \"role\": …}: %v", err)
		}
		role, ok := roleNames[e.Role]
		if !ok {
			return badAdmin("role %.40q is not engine, prefill or decode", e.Role)
		}
		added := Prefill{URL: e.URL, Registry: e.Registry}
		if role == prefill && e.Registry == "" && p.o.Detect {
			added = added.guess()
		}
		if err := p.checkEngine(role, added.URL, added.Registry); err != nil {
			return badAdmin("%v", err)
		}
		if err := p.add(role, added); err != nil {
			return &refusal{status: http.StatusConflict, kind: "ConflictError", text: err.Error()}
		}
		p.o.Log.Info("an engine was added", "engine", e.URL, "role", e.Role)
		w.WriteHeader(http.StatusCreated)
		return nil
	})
	one := func(pattern string, f func(b *backend)) {
		handle(pattern, func(_ http.ResponseWriter, r *http.Request) error {
			url := r.URL.Query().Get("url")
			if !p.each(url, r.URL.Query().Get("role"), f) {
				return &refusal{status: http.StatusNotFound, kind: "NotFoundError", text: fmt.Sprintf("no engine %.200q", url)}
			}
			return nil
		})
	}
	one("DELETE /engines", p.remove)
	one("POST /engines/drain", func(b *backend) { b.draining.Store(true) })
	one("POST /engines/undrain", func(b *backend) { b.draining.Store(false) })
	return mux
}

// each calls f with every engine that has that URL and that role; an empty role matches all. found is false if there is no such engine.
func (p *Proxy) each(url, role string, f func(b *backend)) (found bool) {
	of, known := roleNames[role]
	if role != "" && !known {
		return false
	}
	for _, b := range p.fleet.engines() {
		if b.url == trimURL(url) && (role == "" || of == b.role) {
			found = true
			f(b)
		}
	}
	if found {
		p.fleet.dispatch()
	}
	return found
}

// Engines returns the state of all engines, as Admin lists it.
func (p *Proxy) Engines() []EngineState { return p.states() }

// DrainEngine stops new requests to the engines with that URL and role, or, if on is false, allows them again. An empty role matches
// all. It reports whether there is such an engine.
func (p *Proxy) DrainEngine(url, role string, on bool) bool {
	return p.each(url, role, func(b *backend) { b.draining.Store(on) })
}

func badAdmin(format string, args ...any) error {
	return &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: fmt.Sprintf(format, args...)}
}

// checkEngine returns an error if an engine of the role r cannot have this url, or this registry (only for prefill engines), for example
// because it is no URL.
func (p *Proxy) checkEngine(r role, url, registry string) error {
	o := Options{Dialect: p.o.Dialect}
	switch r {
	case both:
		o.Engines = []string{url}
	case prefill:
		o.Prefill, o.Decode = []Prefill{{URL: url, Registry: registry}}, []string{"http://any"}
	case decode:
		o.Prefill, o.Decode = []Prefill{{URL: "http://any", Registry: "http://any"}}, []string{url}
	}
	return o.Validate()
}

func (p *Proxy) states() []EngineState {
	out := []EngineState{}
	for _, b := range p.fleet.engines() {
		s := EngineState{URL: b.url, Well: b.well.Load(), Draining: b.draining.Load(), Requests: p.fleet.inFlight(b), Models: []string{}}
		for name, r := range roleNames {
			if r == b.role {
				s.Role = name
			}
		}
		s.Reason = b.problem()
		switch of := b.sglang.Load(); {
		case of != nil:
			if s.Engine = "sglang"; b.role == prefill {
				host, port := b.bootstrapAt()
				s.Registry, s.Ranks = "http://"+net.JoinHostPort(host, strconv.Itoa(port)), of.ranks
			}
		case b.registry != nil:
			s.Registry = b.registry.Base()
			b.mu.Lock()
			s.Ranks = len(b.mu.ranks)
			b.mu.Unlock()
		}
		if list := b.models.Load(); list != nil {
			for _, m := range *list {
				s.Models = append(s.Models, m.id)
			}
		}
		out = append(out, s)
	}
	return out
}

// remove removes an engine: it gets no further requests and no health checks. Its requests in progress go on.
func (p *Proxy) remove(b *backend) {
	b.draining.Store(true)
	p.fleet.remove(b)
	b.stop()
	b.client.Close() // closes idle connections
	for _, f := range b.events {
		f.Close()
	}
	p.o.Log.Info("an engine was removed", "engine", b.url, "role", b.role.String())
	if b.registry != nil {
		// Requests in progress may still query the registry.
		p.goBackground(func() {
			<-p.ctx.Done()
			_ = b.registry.Close() // the error is always nil
		})
	}
}
