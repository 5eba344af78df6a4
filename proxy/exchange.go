// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/internal/otlp"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/proxy/keys"
	"github.com/kvasir-kv/kvasir/proxy/limits"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// upstreamIdle is how long an idle connection to an engine is kept: uvicorn closes it after 5 s.
const upstreamIdle = 4 * time.Second

// exchange is the state of one request of a client.
type exchange struct {
	p        *Proxy
	w        http.ResponseWriter
	r        *http.Request
	rc       *http.ResponseController
	body     *body
	q        *openai.Request
	want     needs
	route    routeKind
	key      *keys.Key     // of the client; nil: the proxy demands no keys
	shared   *limits.Limit // the key's limits, counted together with other proxies; nil: not counted
	salt     []openai.Edit // edits that separate the key's prefix cache and responses from those of other keys
	id       string
	start    time.Time
	attempts int
	sentID   string             // the request's id at the engines, in this attempt
	refused  bool               // in this attempt, the engine that answers sent another status than 200
	split    bool               // this attempt uses P and D
	asked    *backend           // in this attempt, the last D that was asked to load P's KV
	fields   []byte             // header fields that all legs have
	secrets  []byte             // those lines of fields that carry credentials
	saltText string             // salt of the prompt's KV
	prompt   *prefix.RelayedKey // key of the prompt; nil: there is no relay

	handed       *transferlog.Entry // log entry of this attempt: how far the KV has come from P, or a relay, to D; nil: no KV is moved
	againID      string             // transfer id by which a relay gives the prompt's KV again
	againFrom    string             // the relay's name of P, for the log
	answers      atomic.Bool        // the engine that answers has begun, so P's result does not matter any more
	prefilled    atomic.Int64       // when P had answered, in ns after start; 0: there is no P, or not yet
	cached       atomic.Int64       // prompt tokens that P found in its cache; -1: not known
	prefillEnded chan struct{}      // closed when P's leg has ended; nil: it ended before D's began, or there is no P's leg
	model        *modelCounters     // counters of the model, set when a good answer begins
	span         otlp.Context       // with Options.Spans
	parent       [8]byte            // id of the span's parent; zero: none
	answered     attempts           // answers of engines to attempts that failed
	front        front              // sends the client comments before the answer
	list         *list              // the list of prompts of which this request is a part; nil: none
	hasPlaces    bool               // this part has places at engines
	turn         bool               // it is this part's turn to ask for engines
	rooms        bool               // P and D of SGLang shall serve it
	boot         []openai.Edit      // of this attempt: fields by which P and D of SGLang find each other
	beside       *backend           // of this attempt: P or D, whichever lists its models; nil: neither does, or there is no P
	idPrefix     string             // of this attempt: prefix of the client's ids at engines of SGLang
	extended     time.Time          // when the client's write deadline was set last
}

func newExchange(p *Proxy, w http.ResponseWriter, r *http.Request) *exchange {
	e := &exchange{p: p, w: w, r: r, rc: http.NewResponseController(w), start: time.Now()}
	e.front.e = e
	e.cached.Store(-1)
	e.id = r.Header.Get("X-Request-Id")
	if e.id == "" {
		e.id = newID()
	}
	e.want.who, _, _ = net.SplitHostPort(r.RemoteAddr)
	e.want.session = r.Header.Get("X-Session-Id")
	e.traced()
	return e
}

// newID returns a unique name.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// end releases what the request holds: its body, and its places in the limits of its key. It counts and logs the outcome.
func (e *exchange) end(outcome string) {
	e.releaseBody()
	if e.key != nil {
		e.key.End()
	}
	if e.shared != nil {
		e.p.o.Limits.End(*e.shared)
	}
	e.requestEnded(outcome)
	e.p.n.outcome(outcome)
	if e.model != nil && outcome == "ok" {
		e.model.e2e.Took(time.Since(e.start))
	}
	e.p.o.Log.Debug("a request ended", "request", e.id, "model", e.want.model, "outcome", outcome, "attempts", e.attempts, "took", time.Since(e.start))
}

// refuse tells the client why its request is not answered, and returns the outcome.
func (e *exchange) refuse(err error) (outcome string) {
	r, ok := errors.AsType[*refusal](err)
	if e.r.Context().Err() != nil && (r == nil || !r.always) {
		return "client_left"
	}
	if !ok { // texts with engines' addresses are for the operator only
		e.p.o.Log.Warn("no engine answered a request", "request", e.id, "attempts", e.attempts, "err", err)
		r = &refusal{status: http.StatusServiceUnavailable, kind: "ServiceUnavailable", text: "no engine answered", retry: 1, outcome: "failed"}
		if errors.Is(err, errLate) { // a client that tries again would cause the same work again
			r = &refusal{status: http.StatusGatewayTimeout, kind: "GatewayTimeout", text: "no engine answered in time", outcome: "failed"}
		}
	}
	if r.status != 0 {
		if e.front.seal() {
			_ = e.endEarly(r.status, r.kind, r.text) // the refusal has its own outcome
			return r.outcome
		}
		e.w.Header().Set("X-Request-Id", e.id)
		e.extend(time.Now())
		fail(e.w, r)
	}
	return r.outcome
}

// errNotSent means that an engine did not get the request.
var errNotSent = errors.New("the engine cannot be reached")

// errLost means that an engine broke off before the first byte of its answer.
var errLost = errors.New("the engine broke off before its answer began")

// errFailed means that an engine answered that it cannot serve the request.
var errFailed = errors.New("the engine failed")

// errLate means that an engine did not answer in time.
var errLate = errors.New("no answer in time")

// serve makes attempts until the first byte of an answer comes, and passes the answer on to the client.
func (e *exchange) serve() (outcome string) {
	fields := e.engineFields()
	e.secrets = onlyCredentials(fields)
	e.p.budget.request(e.start)
	e.beginKeepAlive()
	defer e.front.seal()
	relayed := e.relayedParams()
	for {
		e.want.ready = relayed != nil
		c, err := e.takePlaces()
		if err != nil {
			return e.refuse(err)
		}
		e.attempts++
		e.want.tried = append(e.want.tried, c.engine)
		if c.prefill != nil {
			e.want.tried = append(e.want.tried, c.prefill)
		}
		e.recordPrefix(c)
		e.sentID = e.engineID(c)
		e.fields = append(append(append(fields[:len(fields):len(fields)], "X-Request-Id: "...), e.sentID...), "\r\n"...)
		outcome, err := e.attempt(c, relayed)
		if err == nil {
			return outcome
		}
		if !errors.Is(err, errNotSent) {
			relayed = nil
		}
		if e.r.Context().Err() != nil {
			return "client_left"
		}
		if errors.Is(err, errStopped) { // D computes the prompt itself: the stop token may be the whole answer
			e.want.alone, e.want.noRoom = true, true
			e.attempts--
			continue
		}
		e.p.o.Log.Debug("an attempt failed", "request", e.id, "attempt", e.attempts, "err", err)
		again, answer := e.mayRetry(err)
		if answer != nil {
			return e.sayAnswer(answer)
		}
		if !again {
			return e.refuse(err)
		}
		e.p.n.retries.Add(1)
	}
}

// engineID returns the id of the request at the engines, in this attempt. Where P and D name the KV by it, it must be unique: clients
// choose ids freely, and P may still hold KV of an earlier attempt.
func (e *exchange) engineID(c choice) string {
	if c.prefill == nil || e.p.o.Dialect == Mooncake || c.prefill.kind() == sglangKind {
		return e.id
	}
	return e.id + "-" + newID()
}

// recordPrefix records in the index of prefixes that the engines of c have seen the prompt. Without an index it does nothing.
func (e *exchange) recordPrefix(c choice) {
	if e.p.index == nil || len(e.want.marks) == 0 {
		return
	}
	e.p.index.Add(e.want.marks, c.engine.id.Load())
	if c.prefill != nil {
		e.p.index.Add(e.want.marks, c.prefill.id.Load())
	}
}

// attempt sends the request to the chosen engines once, and then gives their places back. If it returns an error, the client has got
// nothing yet. relayed are the params by which D alone gets the prompt's KV from a relay; nil: no relay has it.
func (e *exchange) attempt(c choice, relayed []byte) (outcome string, err error) {
	ctx, cancel := context.WithCancelCause(e.r.Context())
	defer cancel(nil)
	e.split = c.prefill != nil
	e.refused = false
	e.cached.Store(-1)
	e.prefilled.Store(0)
	e.handed, e.prefillEnded = nil, nil
	defer func() { e.endHandover(outcome, err) }()
	defer func() {
		if a, ok := errors.AsType[*refusedByP](err); ok && e.r.Context().Err() == nil {
			outcome, err = e.passRefusal(a), nil
		}
	}()
	e.boot, e.beside, e.idPrefix = nil, c.lister(), e.newIDPrefix(c)
	switch {
	case c.prefill == nil && c.engine.role == decode && relayed != nil:
		return e.fromRelay(ctx, c, relayed)
	case c.prefill == nil:
		outcome, err = e.answer(ctx, c.engine, c.lacks[0], nil, nil)
		if err == nil && c.spared != notSpared {
			e.p.n.spared[c.spared].Add(1)
		}
		return outcome, err
	case c.prefill.kind() == sglangKind:
		return e.byRoom(ctx, cancel, c)
	case e.p.o.Dialect == Mooncake && openai.APIOf(e.r.URL.Path) != openai.Messages:
		return e.together(ctx, cancel, c)
	}
	return e.oneAfterTheOther(ctx, c)
}

// leg is the result of P's leg.
type leg struct {
	params []byte // P's kv_transfer_params for D; nil: none
	cached int    // prompt tokens that P found in its cache; -1: not known
	// stopped means that P's token was a stop token. Then P gives its KV to no D: vLLM's connectors keep KV only of requests that ended
	// because of their length. With MooncakeConnector, a D that asks for the KV waits until P's limit, 480 s by default.
	stopped bool
	// answered means that P's status was 200: P has computed the prompt, even if the rest of its answer cannot be read.
	answered bool
}

// errStopped means that P has no KV for D, because P's token was a stop token.
var errStopped = errors.New("the prompt ended at P by a stop token")

// refusedByP is an answer with which P, or a D of SGLang, refuses the request itself. The client gets that answer.
type refusedByP struct {
	fields []http1.Field
	status int
	text   []byte
}

func (a *refusedByP) Error() string { return fmt.Sprintf("status %d: %.200s", a.status, a.text) }

func encode(params *wire.KVTransferParams) []byte {
	b, _ := params.MarshalJSON() // only texts and booleans
	return b
}

// prefillGrace is how long P's leg may go on after D's complete answer, so that its connection can be used again. The proxy also waits
// that long for P's answer after a failed attempt: it must know whether P has computed the prompt, because then P's KV must be freed.
const prefillGrace = 2 * time.Second

// together sends the request to P and D at the same time, under a transfer id by which D pulls P's KV. If D fails, it makes sure that P
// frees the KV.
func (e *exchange) together(ctx context.Context, cancel context.CancelCauseFunc, c choice) (outcome string, err error) {
	n, who, err := e.reach(ctx, c.prefill, c.rank)
	if err != nil {
		e.p.fleet.give(c)
		return "", err
	}
	transfer := "kvasir-" + newID()
	e.beginHandover(transfer, who.engine, c, transferlog.Computing, "P computes")
	handed := e.handed
	pieces, held := e.prefillPieces(encode(wire.RemoteDecode(transfer)))
	fields := e.legFields(c.prefill, who) // made now: P's leg may outlive this attempt, and the next attempt changes these fields
	prefilling, abort := context.WithCancel(context.WithoutCancel(ctx))
	done, started := make(chan struct{}), false
	e.prefillEnded = done
	var computed, over atomic.Bool // P has the KV; the attempt has ended
	leaveP := sync.OnceFunc(func() { e.p.fleet.leave(c.prefill, c.lacks[1]) })
	begin := func() error {
		if started {
			return nil
		}
		started = e.p.goBackground(func() {
			defer close(done)
			defer leaveP()
			defer context.AfterFunc(e.p.ctx, abort)()
			l, err := e.prefill(prefilling, n, c.prefill, fields, pieces, held)
			if err == nil && l.stopped {
				err = errStopped
			}
			computed.Store(l.answered && !l.stopped)
			switch {
			case over.Load():
			case err == nil:
				e.cached.Store(int64(l.cached))
				e.prefilled.Store(int64(time.Since(e.start)))
				handed.Next(transferlog.Waiting, untilD, nil)
			case !e.answers.Load(): // a D that answers has got all it needs from P
				cancel(err)
			}
		})
		if !started {
			return unavailable("the proxy is stopping")
		}
		return nil
	}
	params := encode(wire.RemotePrefill(c.prefill.registry.Base(), who.engine, transfer))
	defer func() {
		switch {
		case !started:
			abort()
			n.Close()
			held.release()
			leaveP()
			return
		case e.r.Context().Err() != nil: // the client left: D has got the whole request, or free makes a D take the KV
			abort()
			<-done
			if computed.Load() {
				e.freeLeft(err, func() freeing { return e.freeing(c.prefill, params) })
			}
			return
		case outcome != "ok":
			over.Store(true)
			e.abandon(done, abort, func() bool { return computed.Load() }, e.mustFree(err), e.freeing(c.prefill, params))
			return
		}
		leaveP() // D has all of the KV, so P has computed all
		select {
		case <-done:
			abort()
		default: // P's leg goes on in the background
			time.AfterFunc(e.p.o.prefillGrace, abort)
		}
	}()
	outcome, err = e.answerOf(ctx, c.engine, params, begin)
	if a, ok := errors.AsType[*refusedByP](context.Cause(ctx)); ok && err != nil {
		return e.passRefusal(a), nil
	}
	if outcome == "ok" {
		e.relayedBy(c.prefill, who, transfer)
	}
	return outcome, err
}

// reach returns a connection to P, and P's current rank. A new connection may lead to a P that was restarted under another engine id,
// so reach then asks the registry again. D must not get the engine id of an earlier P: the present P would keep the KV of a transfer
// that no D pulls.
func (e *exchange) reach(ctx context.Context, b *backend, who rank) (*http1.Conn, rank, error) {
	n, err := b.client.Conn(ctx)
	if err != nil {
		if ctx.Err() == nil {
			e.p.trouble(b, err)
		}
		return nil, who, fmt.Errorf("prefill engine %s: %w: %w", b.url, errNotSent, err)
	}
	if !n.Fresh() || !b.registered() {
		return n, who, nil
	}
	look, cancel := context.WithTimeout(ctx, 2*time.Second+e.p.o.patience)
	defer cancel()
	if !e.p.refresh(look, b) {
		n.Close()
		err := fmt.Errorf("prefill engine %s: its registry does not know it", b.url)
		if ctx.Err() == nil {
			e.p.trouble(b, err)
		}
		return nil, who, err
	}
	if who, err = b.rank(who.dp); err != nil {
		n.Close()
	}
	return n, who, err
}

// prefill runs P's leg: it sends the request, whose body is pieces, and reads P's answer. It releases `held`, the memory of pieces, when
// P has got the request or sending it has failed.
func (e *exchange) prefill(ctx context.Context, n *http1.Conn, b *backend, fields []byte, pieces [][]byte, held *body) (l leg, err error) {
	span, fields := e.legSpan(fields)
	start := time.Now()
	defer func() { e.legEnded(span, "prefill", b, start, err) }()
	defer func() {
		if _, refused := errors.AsType[*refusedByP](err); refused {
			e.judge(b, nil)
		} else if ctx.Err() == nil {
			e.judge(b, err)
		}
	}()
	resp, err := e.send(ctx, b, n, pieces, fields, start.Add(e.p.o.PrefillTimeout))
	held.release()
	if err != nil {
		return l, fmt.Errorf("prefill engine %s: %w", b.url, err)
	}
	defer resp.Close()
	text, err := resp.ReadAll(maxPrefilled)
	l.answered = resp.Status == http.StatusOK
	if l.answered && err != nil && b.kind() == sglangKind {
		if err = passOver(resp); err != nil && ctx.Err() == nil && !isTimeout(err) {
			e.p.trouble(b, err)
		}
		return leg{cached: -1, answered: true}, nil
	}
	switch {
	case err != nil:
		return l, fmt.Errorf("prefill engine %s: %w", b.url, err)
	case isEngineAnswer(resp.Status):
		return l, &engineAnswer{b, resp.Status, resp.Fields, text}
	case resp.Status != http.StatusOK:
		return l, &refusedByP{resp.Fields, resp.Status, text} // the request itself is at fault
	}
	answer, err := openai.ScanAnswer(text)
	if err != nil && b.kind() == sglangKind { // SGLang answers a list of one prompt with a list, which ScanAnswer cannot read
		return leg{cached: -1}, nil
	}
	if err != nil {
		return l, fmt.Errorf("prefill engine %s: %w", b.url, err)
	}
	return leg{answer.Params, answer.Cached, answer.Stopped, true}, nil
}

// passOver reads the rest of an answer of P that is longer than maxPrefilled: it has the logprobs of the whole prompt. D gets these
// from P, and D's own answer says how the request ended.
func passOver(resp *http1.Response) error {
	for {
		if _, err := resp.Next(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// maxPrefilled is the largest answer of P that is scanned, in bytes: with NIXL the answer lists the prompt's blocks. A longer answer is
// an error, except that of a P of SGLang, which is passed over.
const maxPrefilled = 8 << 20

// remoteDecode returns the kv_transfer_params of the request to P, for the dialects without a registry.
func remoteDecode(d Dialect) *wire.KVTransferParams {
	params := wire.RemoteDecode("")
	if d == NIXL {
		for _, key := range []string{"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"} {
			params.Set(key, nil)
		}
	}
	return params
}

// oneAfterTheOther sends the request to P, and after P's answer to D, with P's params. In the dialect Mooncake it is used only for the
// Messages API: a Messages request cannot keep P from ending with a stop token, and a D that waits for KV that P does not give holds
// its blocks for minutes.
func (e *exchange) oneAfterTheOther(ctx context.Context, c choice) (outcome string, err error) {
	n, who, err := e.reach(ctx, c.prefill, c.rank)
	if err != nil {
		e.p.fleet.give(c)
		return "", err
	}
	transfer, ask := "", remoteDecode(e.p.o.Dialect)
	if e.p.o.Dialect == Mooncake {
		transfer = "kvasir-" + newID()
		ask = wire.RemoteDecode(transfer)
	}
	e.beginHandover(transfer, who.engine, c, transferlog.Computing, "P computes")
	pieces, held := e.prefillPieces(encode(ask))
	prefilling, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(e.p.o.prefillGrace, abort) })()
	defer context.AfterFunc(e.p.ctx, abort)()
	l, err := e.prefill(prefilling, n, c.prefill, e.legFields(c.prefill, who), pieces, held)
	e.p.fleet.leave(c.prefill, c.lacks[1])
	if err != nil {
		e.p.fleet.leave(c.engine, c.lacks[0])
		if a, ok := errors.AsType[*refusedByP](err); ok && e.r.Context().Err() == nil {
			return e.passRefusal(a), nil
		}
		return "", err
	}
	switch {
	case l.stopped: // D computes the prompt, and D's own number of cached tokens is right
		l.params, l.cached = nil, -1
	case transfer != "":
		l.params = encode(wire.RemotePrefill(c.prefill.registry.Base(), who.engine, transfer))
	}
	if api := openai.APIOf(e.r.URL.Path); l.params == nil && !l.stopped && api != openai.Completions && !e.p.paramless[api].Swap(true) {
		e.p.o.Log.Warn("P does not say where its KV is: requests of this path go to D alone from now on", "path", e.r.URL.Path, "engine", c.prefill.url)
	}
	e.cached.Store(int64(l.cached))
	e.prefilled.Store(int64(time.Since(e.start)))
	e.handed.Next(transferlog.Waiting, untilD, nil)
	toFree := func() freeing { return e.freeing(c.prefill, l.params) }
	if e.p.o.Dialect == Mooncake013 {
		f := toFree() // when D answers, the request's body is gone
		toFree = func() freeing { return f }
	}
	outcome, err = e.answerOf(ctx, c.engine, l.params, nil)
	if outcome == "ok" && transfer != "" && !l.stopped {
		e.relayedBy(c.prefill, who, transfer)
	}
	switch {
	case l.params == nil:
	case e.r.Context().Err() != nil:
		e.freeLeft(err, toFree)
	case e.mustFree(err):
		e.p.free(toFree())
	}
	return outcome, err
}

// answerOf runs D's leg. If a D did not get the request, or has no room for it, answerOf asks another D: any D can take P's KV. It
// calls begin, unless that is nil, when it has a connection to D and before it sends the request.
func (e *exchange) answerOf(ctx context.Context, d *backend, params []byte, begin func() error) (outcome string, err error) {
	for {
		e.asked = d
		outcome, err = e.answer(ctx, d, 0, params, begin)
		if !errors.Is(err, errNotSent) && !errors.Is(err, errNoRoom) || ctx.Err() != nil {
			break
		}
		if a, ok := errors.AsType[*engineAnswer](err); ok && e.answered.full == nil {
			e.answered.full = a
		}
		if d = e.p.fleet.takeOtherDecode(&e.want); d == nil {
			break
		}
		e.handed.To(d.url)
		e.want.tried = append(e.want.tried, d)
		e.p.n.retries.Add(1)
	}
	return outcome, err
}

// passRefusal sends the client the answer with which P, or a D of SGLang in its first data, has refused the request.
func (e *exchange) passRefusal(a *refusedByP) (outcome string) {
	if e.front.seal() {
		return e.endEarlyAs(a.status, a.text)
	}
	e.head(a.fields, a.status, len(a.text))
	_, _ = e.w.Write(a.text) // the client has gone
	return "bad_request"
}
