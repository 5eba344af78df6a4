package bootstrap

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Guard says which requests need the token. Stock vLLM cannot send one.
type Guard int

const (
	GuardDelete Guard = iota + 1 // DELETE
	GuardWrites                  // and POST
	GuardAll                     // and GET, but /healthz
)

// header values that every answer shares; nobody writes to them.
var (
	jsonType = []string{"application/json"}
	textType = []string{"text/plain; charset=utf-8"}
)

// ServeHTTP answers POST /register and GET /query as vLLM's server does, and
// DELETE /register, GET /healthz, GET /metrics.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	path := req.URL.Path
	switch {
	case path == "/query" && req.Method == http.MethodGet:
		if r.allowed(w, req, GuardAll) {
			r.query(w, req)
		}
	case path == "/register" && req.Method == http.MethodPost:
		if r.allowed(w, req, GuardWrites) {
			r.register(w, req)
		}
	case path == "/register" && req.Method == http.MethodDelete:
		if r.allowed(w, req, GuardDelete) {
			r.unregister(w, req)
		}
	case path == "/healthz" && (req.Method == http.MethodGet || req.Method == http.MethodHead):
		r.health(w)
	case path == "/metrics" && (req.Method == http.MethodGet || req.Method == http.MethodHead):
		if r.allowed(w, req, GuardAll) {
			r.metrics(w)
		}
	case path == "/query", path == "/healthz", path == "/metrics":
		w.Header()["Allow"] = []string{"GET"}
		r.send(w, detailAnswer(http.StatusMethodNotAllowed, "Method Not Allowed"))
	case path == "/register":
		w.Header()["Allow"] = []string{"DELETE, POST"}
		r.send(w, detailAnswer(http.StatusMethodNotAllowed, "Method Not Allowed"))
	case path == "/query/" || path == "/register/": // Starlette's redirect_slashes
		to := url.URL{Scheme: "http", Host: req.Host, Path: strings.TrimSuffix(path, "/"), RawQuery: req.URL.RawQuery}
		w.Header()["Location"] = []string{to.String()}
		w.WriteHeader(http.StatusTemporaryRedirect)
	default:
		r.send(w, detailAnswer(http.StatusNotFound, "Not Found"))
	}
}

func (r *Registry) send(w http.ResponseWriter, a answer) {
	h := w.Header()
	h["Content-Type"] = jsonType
	if a.status == http.StatusInternalServerError {
		h["Content-Type"] = textType
	}
	h["Content-Length"] = []string{strconv.Itoa(len(a.body))}
	if a.status/100 != 2 {
		r.n.errors.Add(1)
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // the client is gone if this fails
}

// allowed answers 401 or 403 itself when it returns false.
func (r *Registry) allowed(w http.ResponseWriter, req *http.Request, level Guard) bool {
	if r.o.Token == "" {
		if level == GuardDelete && fromElsewhere(req) {
			r.send(w, detailAnswer(http.StatusForbidden, "without a token DELETE is taken from this host only"))
			return false
		}
		return true
	}
	if r.o.Guard < level {
		return true
	}
	given, _ := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(r.o.Token))
	if subtle.ConstantTimeCompare(a[:], b[:]) == 1 {
		return true
	}
	w.Header()["Www-Authenticate"] = []string{"Bearer"}
	r.send(w, detailAnswer(http.StatusUnauthorized, "Not authenticated"))
	return false
}

// fromElsewhere reports whether a request came over something else than loopback.
func fromElsewhere(req *http.Request) bool {
	from, err := netip.ParseAddrPort(req.RemoteAddr)
	return err != nil || !from.Addr().Unmap().IsLoopback()
}

func (r *Registry) register(w http.ResponseWriter, req *http.Request) {
	r.n.registers.Add(1)
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, MaxBodyBytes))
	if err != nil {
		if _, tooLong := errors.AsType[*http.MaxBytesError](err); tooLong {
			r.send(w, detailAnswer(http.StatusRequestEntityTooLarge, fmt.Sprintf("body is longer than %d bytes", MaxBodyBytes)))
			return
		}
		r.send(w, detailAnswer(http.StatusBadRequest, "There was an error parsing the body"))
		return
	}
	in, refused, ok := decodeRegistration(req.Header.Get("Content-Type"), body)
	if !ok {
		r.n.invalid.Add(1)
		r.send(w, refused)
		return
	}
	err = r.Register(req.Context(), in, fromElsewhere(req))
	if re, ok := errors.AsType[*RefusedError](err); ok {
		r.send(w, detailAnswer(http.StatusBadRequest, re.Detail))
		return
	}
	if err != nil {
		w.Header()["Retry-After"] = []string{"1"}
		r.send(w, detailAnswer(http.StatusServiceUnavailable, err.Error()))
		return
	}
	r.send(w, okAnswer)
}

func (r *Registry) query(w http.ResponseWriter, req *http.Request) {
	r.n.queries.Add(1)
	d := r.current()
	if req.URL.RawQuery != "" {
		if d = r.expected(w, req); d == nil {
			return
		}
	}
	h := w.Header()
	h["Content-Type"] = jsonType
	h["Content-Length"] = d.length
	h[GenerationHeader] = d.genText
	_, _ = w.Write(d.body)
}

// expected serves the questions that vLLM's server does not know. It returns nil
// when it has answered itself: 422 for a question that makes no sense, 503 when
// the directory lacks what is expected.
func (r *Registry) expected(w http.ResponseWriter, req *http.Request) *directory {
	x, wait, known, err := r.parseExpect(req.URL.Query())
	switch {
	case err != nil:
		r.send(w, detailAnswer(http.StatusUnprocessableEntity, err.Error()))
		return nil
	case !known:
		return r.current()
	}
	if r.waiters.Load() >= int64(r.o.MaxWaiters) {
		w.Header()["Retry-After"] = []string{"1"}
		r.send(w, detailAnswer(http.StatusServiceUnavailable, fmt.Sprintf("%d requests are waiting already", r.o.MaxWaiters)))
		return nil
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(wait + writeTimeout)) // tests have none
	d, missing := r.wait(req.Context(), x, wait)
	if missing != "" {
		w.Header()["Retry-After"] = []string{"1"}
		r.send(w, detailAnswer(http.StatusServiceUnavailable, fmt.Sprintf("not ready after %v: %s", wait, missing)))
		return nil
	}
	return d
}

func (r *Registry) parseExpect(q url.Values) (x Expect, wait time.Duration, known bool, _ error) {
	var first error
	number := func(name string, limit float64) float64 {
		if !q.Has(name) {
			return 0
		}
		known = true
		f, err := strconv.ParseFloat(q.Get(name), 64)
		if (err != nil || !(f >= 0) || f > limit) && first == nil {
			first = fmt.Errorf("%s: %.40q is not a number from 0 to %.0f", name, q.Get(name), limit)
		}
		return f
	}
	size := func(name string) int {
		f := number(name, MaxSize)
		if f != math.Trunc(f) && first == nil {
			first = fmt.Errorf("%s: %.40q is not an integer", name, q.Get(name))
		}
		return int(f)
	}
	seconds := number("wait", 1e6)
	x.TP, x.PP, x.DP = size("tp"), size("pp"), size("dp")
	if q.Has("engine_id") {
		known, x.EngineID = true, q.Get("engine_id")
	}
	if text := q.Get("after"); text != "" {
		var err error
		known = true
		if x.After, err = strconv.ParseUint(text, 10, 64); err != nil && first == nil {
			first = fmt.Errorf("after: %.40q is not a generation", text)
		}
	}
	if first != nil {
		return x, 0, known, first
	}
	return x, min(time.Duration(seconds*float64(time.Second)), r.o.MaxWait), known, nil
}

// unregister serves DELETE /register?engine_id=E[&dp_rank=D][&tp_rank=T][&pp_rank=P].
func (r *Registry) unregister(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	rank := func(name string) (*int, error) {
		if !q.Has(name) {
			return nil, nil
		}
		n, err := strconv.Atoi(q.Get(name))
		if err != nil {
			return nil, fmt.Errorf("%s: %.40q is not an integer", name, q.Get(name))
		}
		return &n, nil
	}
	dp, err1 := rank("dp_rank")
	tp, err2 := rank("tp_rank")
	pp, err3 := rank("pp_rank")
	err := errors.Join(err1, err2, err3)
	if !q.Has("engine_id") && err == nil {
		err = errors.New("engine_id is required: DELETE /register?engine_id=ID[&dp_rank=N][&tp_rank=N][&pp_rank=N]")
	}
	if err != nil {
		r.send(w, detailAnswer(http.StatusUnprocessableEntity, err.Error()))
		return
	}
	if n := r.Unregister(q.Get("engine_id"), dp, tp, pp); n == 0 {
		r.send(w, detailAnswer(http.StatusNotFound, fmt.Sprintf("no such worker of engine %.100q is registered", q.Get("engine_id"))))
		return
	}
	r.send(w, okAnswer)
}

// health answers 200 also when the state file cannot be written: the registry
// works, and a restart would lose it.
func (r *Registry) health(w http.ResponseWriter) {
	d := r.current()
	r.mu.Lock()
	engines, workers := len(r.mu.engines), r.mu.workers
	r.mu.Unlock()
	b := fmt.Appendf(nil, `{"status":"ok","instance":%q,"generation":%d,"engines":%d,"workers":%d,"engines_shown":%d,"state_saved":%t}`,
		r.instance, d.gen, engines, workers, len(d.engines), !r.n.unsaved.Load())
	r.send(w, answer{http.StatusOK, b})
}

// Instance returns a word that no other registry has; GET /healthz shows it.
func (r *Registry) Instance() string { return r.instance }

// Check asks the server at base for its health and reports an error unless it is r.
func (r *Registry) Check(ctx context.Context, base string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/healthz", nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err != nil {
		return err
	}
	if !strings.Contains(string(b), r.instance) {
		return fmt.Errorf("something else answers at %s: status %d, %.100q", base, resp.StatusCode, b)
	}
	return nil
}
