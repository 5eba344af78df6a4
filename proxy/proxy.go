// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/proxy/blocks"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// Proxy is an http.Handler in front of engines.
type Proxy struct {
	o           Options
	client      *http.Client // for health checks, and for small requests that are passed on
	relayClient *http.Client // asks relays what they have
	ctx         context.Context
	stop        context.CancelFunc
	wg          sync.WaitGroup
	// background is held while a goroutine is added to wg, and while Close ends ctx.
	background sync.Mutex

	fleet       fleet
	index       *prefix.Index         // nil: not needed
	instanceIDs atomic.Uint32         // source of ids for engines and the cache server in the index
	relays      atomic.Bool           // there is a relay
	prompts     prefix.RelayedPrompts // prompts whose KV relays have
	transfers   transferlog.Log       // log of the transfers from P to D
	known       *blocks.Prompts       // blocks at the marks of prompts; nil: no KV events are followed
	tokenizing  chan struct{}         // holds a token for each prompt that an engine tokenizes now
	draining    atomic.Bool
	inFlight    atomic.Int64
	bodies      bodyMemory
	frees       frees
	budget      budget
	responses   responses
	passes      map[string]bool // Options.PassHeaders, immutable
	looks       modelLooks
	paramless   [openai.Other + 1]atomic.Bool // APIs whose answers of P do not say where its KV is
	n           *counters
}

// New returns a Proxy and begins to check the health of its engines. The engines need not be running yet.
func New(o Options) (*Proxy, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	p := &Proxy{o: o, n: newCounters()}
	p.fleet.o = &p.o
	p.passes = make(map[string]bool)
	for _, name := range o.PassHeaders {
		p.passes[http.CanonicalHeaderKey(name)] = true
	}
	p.bodies.limit = o.BodyMemory
	p.fleet.mu.queues = make(map[string]*queue)
	if o.indexed() {
		p.index = prefix.New(o.IndexEntries)
		if o.EventsPort != 0 {
			p.known = blocks.NewPrompts(max(1, o.IndexEntries/8))
		}
		if o.StoreEvents != "" {
			p.fleet.store.known = blocks.NewPrompts(max(1, o.IndexEntries/8))
		}
		p.tokenizing = make(chan struct{}, maxTokenizing)
	}
	client := func(c *tls.Config) *http.Client {
		return &http.Client{
			Transport: &http.Transport{
				DialContext: (&net.Dialer{Timeout: o.DialTimeout}).DialContext, TLSClientConfig: c,
				MaxIdleConnsPerHost: 16, IdleConnTimeout: upstreamIdle, DisableCompression: true,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	p.client, p.relayClient = client(o.EngineTLS), client(o.Registry.TLS)
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.fleet.store.instanceIDs = &p.instanceIDs
	if o.SharedStore {
		p.fleet.store.begin()
	}
	if o.Store != "" {
		p.goBackground(func() { p.watchStore(p.ctx) })
	}
	err := p.fleet.store.follow(&o)
	for _, e := range o.Engines {
		err = errors.Join(err, p.add(both, Prefill{URL: e}))
	}
	for _, e := range o.Prefill {
		err = errors.Join(err, p.add(prefill, e))
	}
	for _, e := range o.Decode {
		err = errors.Join(err, p.add(decode, Prefill{URL: e}))
	}
	for _, source := range o.Sources {
		f, ferr := newFinder(source, o.Dialect, o.Registry)
		if ferr == nil && f.registry != nil && o.EngineKey != "" && !o.EngineKeyToFound {
			p.o.Log.Warn("engines of a registry get no API key: whoever can register would learn it", "registry", f.registry.Base())
		}
		if ferr == nil {
			p.goBackground(func() { p.discover(p.ctx, f) })
		}
		err = errors.Join(err, ferr)
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// add adds an engine and begins to check its health.
func (p *Proxy) add(r role, e Prefill) error {
	return p.addBackend(&backend{role: r, url: trimURL(e.URL), guessed: e.Guessed, turns: make(map[string]uint64)}, e.Registry)
}

func (p *Proxy) addBackend(b *backend, registry string) (err error) {
	if u, err := url.Parse(b.url); err == nil {
		b.host = u.Hostname()
	}
	b.mu.Lock()
	b.bearLocked()
	b.mu.Unlock()
	b.bootstrap = trimURL(registry)
	if p.o.Dialect == SGLang {
		b.sglang.Store(&sglang{})
		p.fleet.rooms.Store(true)
	}
	if b.client, err = http1.New(b.url, http1.Options{DialTimeout: p.o.DialTimeout, IdleTimeout: upstreamIdle, TLS: p.o.EngineTLS}); err != nil {
		return err
	}
	if b.role == prefill && p.o.Dialect == Mooncake {
		if b.registry, err = bootstrap.NewClient(trimURL(registry), bootstrap.ClientOptions{Attempts: 1, Token: p.o.Registry.Token, TLS: p.o.Registry.TLS}); err != nil {
			return err
		}
	}
	var ctx context.Context
	ctx, b.stop = context.WithCancel(p.ctx)
	if p.known != nil {
		err = p.followEvents(b)
	}
	if err == nil {
		err = p.fleet.add(b)
	}
	if err != nil {
		return errors.Join(err, b.close())
	}
	if !p.goBackground(func() { p.watch(ctx, b) }) {
		return errors.New("proxy: closed")
	}
	return nil
}

// goBackground runs f in a goroutine, for which Close waits. If the proxy is closed, it does not run f and returns false.
func (p *Proxy) goBackground(f func()) bool {
	p.background.Lock()
	defer p.background.Unlock()
	if p.ctx.Err() != nil {
		return false
	}
	p.wg.Go(f)
	return true
}

func (b *backend) close() error {
	b.stop()
	b.client.Close()
	for _, f := range b.events {
		f.Close()
	}
	if b.registry != nil {
		return b.registry.Close()
	}
	return nil
}

// Close ends the health checks of engines. It does not end requests in progress: close the HTTP server in front of the proxy first.
func (p *Proxy) Close() {
	p.background.Lock()
	p.stop()
	p.background.Unlock()
	p.wg.Wait()
	if f := p.fleet.store.events; f != nil {
		f.Close()
	}
	for _, b := range p.fleet.engines() {
		_ = b.close() // the error is always nil
	}
	p.client.CloseIdleConnections()
	p.relayClient.CloseIdleConnections()
}

// Drain makes the proxy refuse new requests; requests in progress go on. /health then fails, so that balancers choose other proxies.
func (p *Proxy) Drain() { p.draining.Store(true) }

// ServeHTTP implements http.Handler.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if p.o.CORS.headers(w, r) {
		return
	}
	switch path := r.URL.Path; path {
	case "/health", "/healthz", "/healthcheck", "/ping":
		if p.draining.Load() {
			fail(w, unavailable("the proxy is stopping"))
		} else if err := p.fleet.state(""); err != nil {
			failWith(w, err)
		}
	case "/v1/models":
		if !p.allowed(r) {
			failUnauthorized(w)
			return
		}
		p.models(w)
	default:
		route, id := routeOf(path)
		if ofSGLang[path] && !p.fleet.hasKind(sglangKind) {
			if p.o.Detect && p.fleet.noneWell() {
				fail(w, unavailable("no engine is well"))
				return
			}
			route = unknown
		}
		switch route {
		case throughPD, atOne, form:
			p.complete(w, r, route)
		case ofResponse:
			p.serveStored(w, r, id)
		case ofAnEngine:
			p.serveOfAnEngine(w, r)
		case serverInfo:
			p.serveServerInfo(w, r)
		case aborts:
			p.serveAbort(w, r)
		case refusedBy:
			fail(w, &refusal{status: http.StatusNotImplemented, kind: "NotImplementedError", text: reasons[path]})
		default:
			fail(w, &refusal{status: http.StatusNotFound, kind: "NotFoundError", text: "no such path"})
		}
	}
}

// models answers with the list of models that the engines that are well serve.
func (p *Proxy) models(w http.ResponseWriter) {
	out := bytes.NewBufferString(`{"object":"list","data":[`)
	listed := make(map[string]bool)
	for _, b := range p.fleet.engines() {
		list := b.models.Load()
		if list == nil || !b.well.Load() {
			continue
		}
		for _, m := range *list {
			if listed[m.id] || m.raw == nil {
				continue
			}
			if len(listed) > 0 {
				out.WriteByte(',')
			}
			listed[m.id] = true
			out.Write(m.raw)
		}
	}
	out.WriteString("]}")
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(out.Bytes()) // the client has gone
}

// refusal is an error answer to a client, in vLLM's form.
type refusal struct {
	status  int
	kind    string
	param   string
	text    string
	retry   int    // seconds after which the client may try again; 0: none
	outcome string // outcome for the metrics
	model   bool   // no engine lists the model
	always  bool   // written even if the client seems to have left: it may have closed only its sending side
}

func (e *refusal) Error() string { return e.text }

func (e *refusal) body() []byte {
	var param any
	if e.param != "" {
		param = e.param
	}
	b, _ := json.Marshal(map[string]any{"error": map[string]any{"message": e.text, "type": e.kind, "param": param, "code": e.status}}) // plain values
	return b
}

func fail(w http.ResponseWriter, e *refusal) {
	body := e.body()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	if e.retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.retry))
	}
	w.WriteHeader(e.status)
	_, _ = w.Write(body) // the client has gone
}

func failWith(w http.ResponseWriter, err error) {
	r, ok := errors.AsType[*refusal](err)
	if !ok {
		r = unavailable(err.Error())
	}
	fail(w, r)
}

// complete serves one request of a route that has a body, or refuses it: while the proxy drains, beyond Options.MaxInFlight, beyond the
// limits of its key, and if it is malformed.
func (p *Proxy) complete(w http.ResponseWriter, r *http.Request, route routeKind) {
	e := newExchange(p, w, r)
	e.route = route
	outcome := "bad_request"
	defer func() {
		e.end(outcome) // also when the connection is cut
	}()
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		fail(w, &refusal{status: http.StatusMethodNotAllowed, kind: "BadRequestError", text: "POST is wanted"})
		return
	}
	if refuseQuery(w, r) {
		return
	}
	if p.inFlight.Add(1); p.draining.Load() || p.inFlight.Load() > int64(p.o.MaxInFlight) {
		defer p.inFlight.Add(-1)
		w.Header().Set("Connection", "close")
		why := busy("too many requests in progress")
		if p.draining.Load() {
			why = busy("the proxy is stopping")
		}
		outcome = why.outcome
		fail(w, why)
		return
	}
	defer p.inFlight.Add(-1)
	err := e.admit()
	if err == nil {
		err = e.read()
	}
	if err != nil {
		outcome = e.refuse(err)
		return
	}
	e.want.alone = route != throughPD
	if route == throughPD {
		e.want.alone, e.want.many = e.aloneOf()
	}
	var sequences []openai.Sequence
	switch pairs := !withoutKV[r.URL.Path] && p.fleet.pairsSGLang(e.want.model); {
	case pairs && route == throughPD:
		sequences, err = e.byRooms()
	case pairs:
		sequences, err = e.withoutRoom(noRoomFor(r.URL.Path))
	case e.want.many:
		sequences, err = e.splitPrompts()
	}
	if err != nil {
		outcome = e.refuse(err)
		return
	}
	outcome = "broken_off" // the outcome if serve panics to cut the connection
	if sequences != nil {
		outcome = e.serveList(sequences)
		return
	}
	outcome = e.serve()
}

// refuseQuery refuses a query that would end the request line to an engine early; HTTP/2 allows such a query. It reports whether it
// refused.
func refuseQuery(w http.ResponseWriter, r *http.Request) bool {
	if !strings.ContainsFunc(r.URL.RawQuery, func(c rune) bool { return c <= ' ' || c == 0x7f }) {
		return false
	}
	fail(w, &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: "the query has a blank or a control character"})
	return true
}

// scanned reads from the body what the proxy needs to know about the request.
func (e *exchange) scanned() error {
	if e.route == form {
		return e.scannedForm()
	}
	q, err := openai.Scan(e.body.b)
	if err != nil {
		for _, name := range []string{"Content-Encoding", "X-Body-Compressed"} {
			if how := e.r.Header.Get(name); how != "" && how != "identity" {
				return &refusal{status: http.StatusUnsupportedMediaType, kind: "BadRequestError", text: name + ": the body must not be compressed", outcome: "bad_request"}
			}
		}
		return &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: err.Error(), outcome: "bad_request"}
	}
	name, _ := q.Text(q.Model)
	if q.Model.Has() && name == "" && string(q.Model.Of(q.Body)) != "null" {
		return &refusal{status: http.StatusBadRequest, kind: "BadRequestError", param: "model", text: "model must be a text", outcome: "bad_request"}
	}
	if ofSGLang[e.r.URL.Path] {
		e.want.kind = sglangKind
	}
	if name == "" {
		if name, err = e.p.onlyModel(e.want.kind); err != nil {
			return err
		}
	}
	if err := checkXArgs(q); err != nil {
		return err
	}
	if e.key != nil && e.p.fleet.rooms.Load() && q.Given("session_params") {
		return badArgs("session_params", "names a session of an engine, which may be another client's")
	}
	e.q, e.want.model = q, name
	if err := e.bindToResponseEngine(); err != nil {
		return err
	}
	prompt := e.promptOf()
	e.want.bytes = prompt.To - prompt.From
	e.salt = e.salted()
	if e.p.index != nil && prompt.Has() {
		salt, _ := q.Text(q.Salt)
		if e.hasSalt() {
			salt = string(e.salt[0].Value)
		}
		e.want.marks = prefix.Marks(nil, prefix.Seed(e.r.URL.Path, name, salt), prompt.Of(q.Body))
		e.want.seen = e.p.index.Lookup(nil, e.want.marks)
		e.saltText = strings.Trim(salt, `"`) // the salt of a key is quoted
		if e.p.known != nil {
			e.want.seen = e.p.byEvents(e.want.seen, e.want.marks)
		}
		e.want.stored = e.p.fleet.store.has(e.want.marks)
	}
	if e.key != nil && e.r.URL.Path == "/v1/responses" {
		e.salt = append(e.salt, openai.Edit{Key: "request_id"}) // engines know a response by request_id, and a client may send another key's
	}
	return nil
}

// checkXArgs refuses transfer parameters inside vllm_xargs. vLLM merges vllm_xargs into the same arguments as the top-level fields
// without a check, and its scheduler raises if they are no dict (vLLM 0.32, chat_completion/protocol.py). The extra_args in
// sampling_params end in the same arguments (scale_out/token_in_token_out/protocol.py), so they are checked, too.
func checkXArgs(q *openai.Request) error {
	if q.XArgs.Has() {
		if err := checkArgs("vllm_xargs", q.XArgs.Of(q.Body)); err != nil {
			return err
		}
	}
	if !q.Sampling.Has() || q.Body[q.Sampling.From] != '{' {
		return nil
	}
	sampling, err := openai.Scan(q.Sampling.Of(q.Body))
	if err != nil {
		return badArgs("sampling_params", err.Error())
	}
	sampling.Each(func(name string, value []byte) {
		if name == "extra_args" && err == nil {
			err = checkArgs("extra_args", value)
		}
	})
	return err
}

// checkArgs refuses transfer parameters in the JSON value of the named field.
func checkArgs(field string, value []byte) error {
	if value = bytes.TrimSpace(value); len(value) == 0 || value[0] != '{' {
		return nil // it is absent, or not an object, which engines refuse
	}
	args, err := openai.Scan(value)
	if err != nil {
		return badArgs(field, err.Error())
	}
	args.Each(func(name string, _ []byte) {
		if name == "kv_transfer_params" || name == "ec_transfer_params" {
			err = badArgs(field, "must not have "+name+": clients do not choose where engines load from")
		}
	})
	return err
}

func badArgs(field, text string) error {
	return &refusal{status: http.StatusBadRequest, kind: "BadRequestError", param: field, text: field + " " + text, outcome: "bad_request"}
}
