// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// originKey is the context key under which a request carries its connection's origin.
type originKey struct{}

// originOf returns the origin of req's sender: the origin of its connection if Serve accepted it, else one made of the address.
func originOf(req *http.Request) peercred.Origin {
	if o, ok := req.Context().Value(originKey{}).(peercred.Origin); ok {
		return o
	}
	from, _ := netip.ParseAddrPort(req.RemoteAddr) // if the address has an error, the zero address is the origin
	return peercred.OriginOfAddr(from.Addr())
}

// Guard selects which requests need the token. Stock vLLM cannot send a token.
type Guard int

const (
	GuardDelete Guard = iota + 1 // DELETE
	GuardWrites                  // DELETE and POST
	GuardAll                     // DELETE, POST and GET, except /healthz
)

// ServeHTTP answers POST /register and GET /query as vLLM's server does. It also answers DELETE /register, GET /healthz and GET
// /metrics.
func (r *Registry) ServeHTTP(w http.ResponseWriter, req *http.Request) { r.web.ServeHTTP(w, req) }

// newGate returns the gate that checks every request before its route.
func (r *Registry) newGate() *auth.Gate {
	o := r.o.Access
	if r.o.Token != "" && (o.Tokens != nil || o.Authorities != nil) {
		o.Keys = append(slices.Clone(o.Keys), r.o.Token)
	}
	o.Listener, o.Need, o.Log = "registry", r.need, r.log
	o.Refuse = func(w http.ResponseWriter, status int, text string) { r.send(w, detailAnswer(status, text)) }
	return auth.New(o)
}

// need returns which right a request needs. Unless Guard says otherwise, stock vLLM registers and queries without a token.
func (r *Registry) need(req *http.Request) auth.Need {
	switch path := strings.TrimSuffix(req.URL.Path, "/"); {
	case path == "/healthz", path == "/healthcheck":
		return auth.NeedNothing
	case path == "/register" && req.Method == http.MethodPost && r.o.Guard < GuardWrites, path == "/query" && r.o.Guard < GuardAll:
		return auth.NeedPeer
	case path == "/register":
		return auth.NeedWrite
	}
	return auth.NeedRead
}

// figures returns the figures that /metrics shows.
func (r *Registry) figures() figures {
	a := r.gate.Stats()
	return figures{r.Stats(), a.Refused, a.Unaudited}
}

type figures struct {
	Stats
	AuthRefused map[string]uint64 `counter:"kvasir_auth_refused_total" label:"reason" always:"listener=http" help:"Requests and connections refused: address (HTTP from outside --allow-from), network (connections of other protocols from outside), credential (missing, unknown or ended), scope (the token does not allow it)."`
	Unaudited   uint64            `counter:"kvasir_audit_lost_total" always:"listener=http" help:"Deeds of administrators that could not be written to --audit-log; the server's log has them."`
}

func (r *Registry) serveHTTP(w http.ResponseWriter, req *http.Request) {
	path, reads := req.URL.Path, req.Method == http.MethodGet || req.Method == http.MethodHead
	switch {
	case path == "/query" && req.Method == http.MethodGet:
		if r.allowed(w, req, GuardAll) {
			r.query(w, req)
		}
	case path == "/register" && req.Method == http.MethodPost:
		if r.allowed(w, req, GuardWrites) {
			r.postRegister(w, req)
		}
	case path == "/register" && req.Method == http.MethodDelete:
		if !r.allowed(w, req, GuardDelete) {
			return
		}
		if r.o.Token != "" || auth.Allows(req, auth.Write) { // a page of another site has no token
			r.unregister(w, req)
			return
		}
		r.delete.ServeHTTP(w, req)
	case (path == "/healthz" || path == "/healthcheck") && reads:
		r.health(w, req)
	case path == "/metrics" && reads:
		if r.allowed(w, req, GuardAll) {
			r.metrics.ServeHTTP(w, req)
		}
	case path == "/route" || path == "/register_dp_rank" || path == "/query_dp_ranks":
		r.send(w, detailAnswer(http.StatusNotFound, "Not Found: this is vLLM's registry. A P of SGLang is its own bootstrap server: name P's host and its --disaggregation-bootstrap-port"))
	case path == "/query", path == "/healthz", path == "/healthcheck", path == "/metrics", path == "/register":
		w.Header().Set("Allow", map[bool]string{false: "GET", true: "DELETE, POST"}[path == "/register"])
		r.send(w, detailAnswer(http.StatusMethodNotAllowed, "Method Not Allowed"))
	case path == "/query/" || path == "/register/": // as Starlette's redirect_slashes
		to := url.URL{Scheme: "http", Host: req.Host, Path: strings.TrimSuffix(path, "/"), RawQuery: req.URL.RawQuery}
		w.Header().Set("Location", to.String())
		w.WriteHeader(http.StatusTemporaryRedirect)
	default:
		r.send(w, detailAnswer(http.StatusNotFound, "Not Found"))
	}
}

func (r *Registry) send(w http.ResponseWriter, a answer) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(a.body)))
	if a.status/100 != 2 {
		r.n.errors.Add(1)
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // the client is gone if this fails
}

// allowed reports whether req may do what Guard level `level` protects. If it returns false, it has answered 401 or 403.
func (r *Registry) allowed(w http.ResponseWriter, req *http.Request, level Guard) bool {
	if auth.Allows(req, auth.Write) || level == GuardAll && auth.Allows(req, auth.Read) {
		return true
	}
	if r.o.Token == "" {
		if level == GuardDelete && !fromLoopback(req) {
			r.send(w, detailAnswer(http.StatusForbidden, "without a token DELETE is taken from this host only"))
			return false
		}
		return true
	}
	if r.o.Guard < level || r.hasToken(req) {
		return true
	}
	w.Header().Set("WWW-Authenticate", "Bearer")
	r.send(w, detailAnswer(http.StatusUnauthorized, "Not authenticated"))
	return false
}

func (r *Registry) hasToken(req *http.Request) bool {
	given, bearer := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	a, b := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(r.o.Token))
	return bearer && subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

func fromLoopback(req *http.Request) bool {
	from, err := netip.ParseAddrPort(req.RemoteAddr)
	return err == nil && from.Addr().Unmap().IsLoopback()
}

func (r *Registry) postRegister(w http.ResponseWriter, req *http.Request) {
	r.n.registers.Add(1)
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxBodyBytes))
	if err != nil {
		if _, tooLong := errors.AsType[*http.MaxBytesError](err); tooLong {
			r.send(w, detailAnswer(http.StatusRequestEntityTooLarge, fmt.Sprintf("body is longer than %d bytes", maxBodyBytes)))
			return
		}
		r.send(w, unreadableAnswer())
		return
	}
	in, refused := decodeRegistration(req.Header.Get("Content-Type"), body)
	if refused != nil {
		r.n.invalid.Add(1)
		r.send(w, *refused)
		return
	}
	err = r.register(req.Context(), in, originOf(req))
	if re, ok := errors.AsType[refusedError](err); ok {
		r.send(w, detailAnswer(http.StatusBadRequest, string(re)))
		return
	}
	if err != nil {
		w.Header().Set("Retry-After", "1")
		r.send(w, detailAnswer(http.StatusServiceUnavailable, err.Error()))
		return
	}
	r.send(w, okAnswer)
}

func (r *Registry) query(w http.ResponseWriter, req *http.Request) {
	r.n.queries.Add(1)
	d := r.current()
	if req.URL.RawQuery != "" {
		if d = r.awaitExpected(w, req); d == nil {
			return
		}
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(d.body)))
	h.Set(generationHeader, strconv.FormatUint(d.gen, 10))
	_, _ = w.Write(d.body)
}

// generationHeader is the header in answers to GET /query that carries the directory's generation. The generation grows with every
// change; with a state file it also grows over restarts.
const generationHeader = "X-Kvasir-Generation"

// errWaiters ends the wait of a request whose origin has the most waiting requests, to make room for another origin.
var errWaiters = errors.New("too many requests are waiting: this one ended in favour of another peer")

// awaitExpected handles the parameters of GET /query that vLLM's server does not know, and returns the directory to send. It returns
// nil when it has answered itself: 422 for a bad parameter, 503 when the directory does not meet the parameters in time, or when too
// many requests wait.
func (r *Registry) awaitExpected(w http.ResponseWriter, req *http.Request) *directory {
	x, wait, known, err := r.parseExpect(req.URL.Query())
	switch {
	case err != nil:
		r.send(w, detailAnswer(http.StatusUnprocessableEntity, err.Error()))
		return nil
	case !known:
		return r.current()
	}
	ctx, leave, ok := r.waiters.Enter(req.Context(), originOf(req), errWaiters)
	if !ok {
		w.Header().Set("Retry-After", "1")
		r.send(w, detailAnswer(http.StatusServiceUnavailable, fmt.Sprintf("%d requests are waiting already", r.o.MaxWaiters)))
		return nil
	}
	defer leave()
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(wait + writeTimeout)) // tests have none
	d, missing := r.wait(ctx, x, wait)
	if missing != "" {
		w.Header().Set("Retry-After", "1")
		r.send(w, detailAnswer(http.StatusServiceUnavailable, fmt.Sprintf("not ready after %v: %s", wait, missing)))
		return nil
	}
	return d
}

// parseExpect reads the parameters wait, tp, pp, dp, engine_id and after of a query. known is false if the query has none of them. The
// returned wait is at most Options.MaxWait.
func (r *Registry) parseExpect(q url.Values) (x expectation, wait time.Duration, known bool, err error) {
	number := func(name string, limit float64, whole bool) float64 {
		if !q.Has(name) {
			return 0
		}
		known = true
		f, e := strconv.ParseFloat(q.Get(name), 64)
		if err == nil && (e != nil || !(f >= 0) || f > limit || (whole && f != math.Trunc(f))) {
			err = fmt.Errorf("%s: %.40q is not a number from 0 to %.0f, or not an integer", name, q.Get(name), limit)
		}
		return f
	}
	seconds := number("wait", 1e6, false)
	x.tp, x.pp, x.dp = int(number("tp", maxSize, true)), int(number("pp", maxSize, true)), int(number("dp", maxSize, true))
	if q.Has("engine_id") {
		known, x.engineID = true, q.Get("engine_id")
	}
	if q.Get("after") != "" {
		var e error
		if x.after, e = strconv.ParseUint(q.Get("after"), 10, 64); e != nil && err == nil {
			err = fmt.Errorf("after: %.40q is not a generation", q.Get("after"))
		}
		known = true
	}
	return x, min(time.Duration(seconds*float64(time.Second)), r.o.MaxWait), known, err
}

// unregister handles DELETE /register?engine_id=E[&dp_rank=D][&tp_rank=T][&pp_rank=P].
func (r *Registry) unregister(w http.ResponseWriter, req *http.Request) {
	q := req.URL.Query()
	var at [3]*int
	for i, name := range []string{"dp_rank", "tp_rank", "pp_rank"} {
		if n, err := strconv.Atoi(q.Get(name)); err == nil {
			at[i] = &n
		} else if q.Has(name) {
			r.send(w, detailAnswer(http.StatusUnprocessableEntity, fmt.Sprintf("%s: %.40q is not an integer", name, q.Get(name))))
			return
		}
	}
	if !q.Has("engine_id") {
		r.send(w, detailAnswer(http.StatusUnprocessableEntity, "engine_id is required: DELETE /register?engine_id=ID[&dp_rank=N][&tp_rank=N][&pp_rank=N]"))
		return
	}
	if n := r.unregisterMatching(q.Get("engine_id"), at[0], at[1], at[2]); n == 0 {
		r.send(w, detailAnswer(http.StatusNotFound, fmt.Sprintf("no such worker of engine %.100q is registered", q.Get("engine_id"))))
		return
	}
	r.send(w, okAnswer)
}

// health answers GET /healthz with 200, also when the state file cannot be written, because the registry works without it. Web pages,
// requests under foreign host names, and, if queries need the token, clients without it learn only that the registry serves.
func (r *Registry) health(w http.ResponseWriter, req *http.Request) {
	if !r.guard.Allows(req) || (r.o.Token != "" && r.o.Guard == GuardAll && !r.hasToken(req)) {
		r.send(w, okAnswer)
		return
	}
	d := r.current()
	r.mu.Lock()
	engines, workers := len(r.mu.engines), r.mu.workers
	r.mu.Unlock()
	b := fmt.Appendf(nil, `{"status":"ok","generation":%d,"engines":%d,"workers":%d,"engines_shown":%d,"state_saved":%t}`,
		d.gen, engines, workers, len(d.engines), !r.n.unsaved.Load())
	r.send(w, answer{http.StatusOK, b})
}
