// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// fleet is all engines, and the requests that wait for room at one.
type fleet struct {
	o     *Options
	store store
	rooms atomic.Bool // an engine of SGLang is there, or was

	mu struct {
		sync.Mutex
		all    []*backend        // replaced, never changed
		taken  uint64            // places taken so far; see backend.turns
		queues map[string]*queue // by model; none is empty
	}
}

// queue is the requests that wait for a model, first come first served among requests of one need.
type queue struct {
	waiters []*waiter
	shares  fair.Shares // of clients
	doubt   bool        // an engine of the model was in doubt: waiters are refused when no engine is well
}

// has reports whether a request of a need waits.
func (q *queue) has(n need) bool {
	return slices.ContainsFunc(q.waiters, func(w *waiter) bool { return w.want.need() == n })
}

type waiter struct {
	want *needs
	got  chan grant // one at most
}

// grant is a waiter's places, or the reason why it gets none.
type grant struct {
	choice choice
	err    error
}

// needs is what a request needs of an engine.
type needs struct {
	model  string
	alone  bool          // one engine computes the prompt and the answer: not a completion, or a request of several sequences
	many   bool          // a completion of several prompts or answers
	ready  bool          // D needs no P: a relay has the KV
	noRoom bool          // P and D of SGLang cannot serve it: other engines do
	marks  []prefix.Mark // of the prompt
	seen   []prefix.Seen // of the marks
	bytes  int           // of the prompt
	stored stored        // what the cache server reports of it
	who    string        // whose share of the queue

	kind    kind     // of the engines that have the path; anyKind: all
	only    *backend // the engine that has the response which the request continues; nil: any
	session string   // that the client names; "": none
	tried   []*backend
}

// need is the part of needs that decides which engines can take a request. Requests of one need wait for each other; requests of another
// need do not wait behind them.
type need struct {
	kind                 kind
	only                 *backend
	alone, ready, noRoom bool
}

func (w *needs) need() need { return need{w.kind, w.only, w.alone, w.ready, w.noRoom} }

// of reports whether an engine of a role has the model and the path.
func (w *needs) of(b *backend, r role) bool {
	return b.role == r && b.serves(w.model) && (w.kind == anyKind || w.kind == b.kind())
}

// choice is the engines of one request, with a place at each.
type choice struct {
	engine  *backend // that answers
	prefill *backend // nil: none
	rank    rank     // of prefill
	lacks   [2]int   // prompt bytes that engine and prefill do not have
	spared  spared   // why there is no prefill
}

// engines returns all engines; the caller must not change the slice.
func (f *fleet) engines() []*backend {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.all
}

func (f *fleet) add(b *backend) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.ContainsFunc(f.mu.all, func(o *backend) bool { return o.url == b.url && o.role == b.role }) {
		return fmt.Errorf("%s %s is there already", b.role, b.url)
	}
	f.mu.all = append(slices.Clip(f.mu.all), b)
	return nil
}

func (f *fleet) remove(b *backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.all = slices.DeleteFunc(slices.Clone(f.mu.all), func(o *backend) bool { return o == b })
}

func (f *fleet) has(b *backend) bool { return slices.Contains(f.engines(), b) }

// hasDecode reports whether a decode engine of vLLM serves a model, healthy or not.
func (f *fleet) hasDecode(model string) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool { return b.role == decode && b.kind() == vllmKind && b.serves(model) })
}

// shares reports whether another engine is in the same registry.
func (f *fleet) shares(b *backend) bool {
	return slices.ContainsFunc(f.engines(), func(o *backend) bool {
		return o != b && o.registry != nil && o.registry.Base() == b.registry.Base()
	})
}

func (f *fleet) inFlight(b *backend) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return b.inFlight
}

// availability says whether engines of a role can take a request; the best engine counts.
type availability uint8

const (
	absent availability = iota // none serves the model
	unwell
	doubtful // a call failed, and the look that follows has not ended
	full
	ready
)

// pickLocked returns the engine that a request should go to: the one of least cost. Engines that were tried or are paused, and D's without
// a fitting P, come last. Among engines of equal cost it picks the one whose last request of the model was longest ago, then the one whose
// last request of any model was.
func (f *fleet) pickLocked(r role, w *needs, like fit) (best *backend, lacks int, how availability) {
	bestTried, bestCost, bestTurn := false, 0.0, turn{}
	now := time.Now()
	home := f.homeLocked(r, w)
	if home != nil && f.overloadedLocked(home, r, w) {
		home = nil
	}
	var few [8]fit
	pairs := few[:0]
	if r == decode && f.rooms.Load() { // without SGLang every D fits every P
		pairs = f.prefillFitsLocked(pairs, w)
	}
	for _, b := range f.mu.all {
		switch {
		case !w.of(b, r) || !like.pairsWith(b.fit()):
			continue
		case !b.well.Load() || b.draining.Load():
			if how = max(how, unwell); b.doubts > 0 && !b.draining.Load() {
				how = max(how, doubtful)
			}
			continue
		case b.inFlight >= f.o.MaxPerEngine:
			how = max(how, full)
			continue
		}
		how = ready
		tried := slices.Contains(w.tried, b) || b.circuit.open(now) || len(pairs) > 0 && !slices.ContainsFunc(pairs, b.fit().pairsWith) // these come last
		short := w.bytes - w.seenBy(b.id.Load())
		cost, turn := f.cost(b, w, short, home), b.lastTurnLocked(w.model)
		if best == nil || bestTried && !tried || tried == bestTried && (cost < bestCost || cost == bestCost && turn.before(bestTurn)) {
			best, bestTried, bestCost, bestTurn, lacks = b, tried, cost, turn, short
		}
	}
	return best, lacks, how
}

// maxTurns bounds the models whose turns an engine remembers. Beyond it the turns begin anew.
const maxTurns = 1024

// turnOf returns the model under which an engine counts its turns: model, or "" if it has listed no models.
func (b *backend) turnOf(model string) string {
	if b.models.Load() == nil {
		return "" // it may serve every name
	}
	return model
}

// turn says when an engine last got a request, of one model and of any model, in places taken by the fleet.
type turn struct{ model, any uint64 }

func (t turn) before(o turn) bool { return t.model < o.model || t.model == o.model && t.any < o.any }

func (b *backend) lastTurnLocked(model string) turn { return turn{b.turns[b.turnOf(model)], b.turn} }

// takeEngineLocked takes a place at an engine for a request of a model.
func (f *fleet) takeEngineLocked(b *backend, model string, lacks int) {
	b.inFlight++
	b.pending += lacks
	if b.circuit.pause > 0 && !b.circuit.open(time.Now()) {
		b.circuit.probe = true
	}
	f.mu.taken++
	if len(b.turns) >= maxTurns { // of all: an engine that alone forgot its turns would come first for each model
		for _, other := range f.mu.all {
			clear(other.turns)
		}
	}
	b.turn, b.turns[b.turnOf(model)] = f.mu.taken, f.mu.taken
	b.recent, b.recentAt = b.recently(f.mu.taken)+1, f.mu.taken
}

// recentTakes is the number of places taken in the whole fleet after which a request counts half in backend.recent.
const recentTakes = 512

// recently returns how many requests the engine got recently, when the fleet has taken that many places.
func (b *backend) recently(taken uint64) float64 {
	return b.recent * math.Exp2(-float64(taken-b.recentAt)/recentTakes)
}

// aboveMean is the factor of the mean of recent requests up to which an engine stays the home of unseen prompts while
// requests are in progress.
const aboveMean = 1.08

// overloadedLocked reports whether a request should not go to its home: the home got more than aboveMean times as many recent requests
// as the mean of the engines that could take this one, and one of these has a request in progress.
func (f *fleet) overloadedLocked(home *backend, r role, w *needs) bool {
	sum, engines, busy := 0.0, 0, false
	for _, b := range f.mu.all {
		if w.of(b, r) && b.well.Load() && !b.draining.Load() {
			sum += b.recently(f.mu.taken)
			engines++
			busy = busy || b.inFlight > 0
		}
	}
	return busy && home.recently(f.mu.taken)*float64(engines) > aboveMean*sum
}

// requestCost is the weight of a request in progress in bytes of prompt, for its decoding beside others.
const requestCost = 1 << 10

func (f *fleet) cost(b *backend, w *needs, lacks int, home *backend) float64 {
	switch f.o.policyOf(b.role) {
	case LeastLoaded:
		return float64(b.inFlight) + float64(b.others.Load())
	case PrefixAware:
		c := float64(lacks + b.pending + requestCost*(b.inFlight+int(b.others.Load())))
		if b == home {
			c -= float64(w.bytes) / 2
		}
		return c
	}
	return 0 // all are equal: turns decide
}

// homeLocked returns the engine to which all proxies send a prompt that they have not seen; nil: this proxy
// has seen the prompt. The prompt's first mark decides, which is the same in each turn of a conversation, or
// the session that the client names.
func (f *fleet) homeLocked(r role, w *needs) (home *backend) {
	if f.o.policyOf(r) != PrefixAware || len(w.marks) == 0 || len(w.seen) > 0 {
		return nil
	}
	key := w.marks[0].Hash
	if w.session != "" {
		key = prefix.Seed(w.model, w.session)
	}
	var most uint64
	for _, b := range f.mu.all {
		if !w.of(b, r) || !b.well.Load() || b.draining.Load() {
			continue
		}
		if weight := prefix.Weight(key, b.url); home == nil || weight > most {
			home, most = b, weight
		}
	}
	return home
}

func (w *needs) seenBy(id uint32) int {
	for _, s := range w.seen {
		if s.Engine == id {
			return s.Bytes
		}
	}
	return 0
}

// takeLocked takes the places of a choice.
func (f *fleet) takeLocked(c choice, model string) {
	f.takeEngineLocked(c.engine, model, c.lacks[0])
	if c.prefill != nil {
		f.takeEngineLocked(c.prefill, model, c.lacks[1])
		if c.prefill.registry != nil { // whose ranks take turns; see nextRank
			c.prefill.rankTurn.Add(1)
		}
	}
}

// computed notes that an engine has computed what it lacked.
func (f *fleet) computed(b *backend, lacks int) {
	if lacks > 0 {
		f.mu.Lock()
		defer f.mu.Unlock()
		b.pending -= lacks
	}
}

// doubt marks an engine as unwell until the next health check. It reports whether the engine was well
// before; then the caller must call certain.
func (f *fleet) doubt(b *backend) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !b.well.Swap(false) {
		return false
	}
	b.doubts++
	for name, q := range f.mu.queues {
		q.doubt = q.doubt || b.serves(name)
	}
	return true
}

// certain ends a doubt. Requests that wait for it get places, or are refused.
func (f *fleet) certain(b *backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.doubts--
	f.dispatchLocked()
}

// leave gives a place back.
func (f *fleet) leave(b *backend, lacks int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.inFlight--
	b.pending -= lacks
	b.circuit.probe = false // whatever the result, another request may probe the engine
	f.dispatchLocked()
}

// dispatch gives places to waiting requests.
func (f *fleet) dispatch() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dispatchLocked()
}

func (f *fleet) dispatchLocked() {
	for name, q := range f.mu.queues {
		var full []need // needs whose engines have no room
		for i := 0; i < len(q.waiters); {
			w := q.waiters[i]
			if slices.Contains(full, w.want.need()) {
				i++
				continue
			}
			c, how, of := f.chooseLocked(w.want)
			if how != ready && (how >= doubtful || !q.doubt) {
				full = append(full, w.want.need())
				i++
				continue
			}
			if how == ready {
				f.takeLocked(c, name)
			}
			w.got <- grant{c, f.refuseLocked(w.want, how, of)}
			f.dropLocked(name, q, w)
		}
	}
}

func (f *fleet) dropLocked(name string, q *queue, w *waiter) bool {
	i := slices.Index(q.waiters, w)
	if i < 0 {
		return false
	}
	q.waiters = slices.Delete(q.waiters, i, i+1)
	q.shares.Add(w.want.who, fair.Amount{Count: -1})
	if len(q.waiters) == 0 {
		delete(f.mu.queues, name)
	}
	return true
}

// queued returns how many requests wait.
func (f *fleet) queued() (n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.mu.queues {
		n += int64(len(q.waiters))
	}
	return n
}

// take takes places for a request, and waits for room if there is none. The error is a *refusal, or
// ctx's.
func (f *fleet) take(ctx context.Context, w *needs) (choice, error) {
	f.mu.Lock()
	q := f.mu.queues[w.model]
	if q == nil || !q.has(w.need()) { // others do not wait for the same engines
		c, how, of := f.chooseLocked(w)
		if how != full && how != doubtful {
			defer f.mu.Unlock()
			if how == ready {
				f.takeLocked(c, w.model)
			}
			return c, f.refuseLocked(w, how, of)
		}
		if q == nil {
			q = &queue{}
			f.mu.queues[w.model] = q
		}
		q.doubt = q.doubt || how == doubtful
	}
	if !q.shares.MayCount(w.who, f.o.MaxQueue) {
		if len(q.waiters) == 0 {
			delete(f.mu.queues, w.model)
		}
		f.mu.Unlock()
		return choice{}, busy("too many requests wait for the model")
	}
	self := &waiter{w, make(chan grant, 1)}
	q.waiters = append(q.waiters, self)
	q.shares.Add(w.who, fair.Amount{Count: 1})
	f.mu.Unlock()
	late := time.NewTimer(f.o.QueueTimeout)
	defer late.Stop()
	var err error
	select {
	case g := <-self.got:
		return g.choice, g.err
	case <-ctx.Done():
		err = ctx.Err()
	case <-late.C:
		err = busy(fmt.Sprintf("no engine had room within %v", f.o.QueueTimeout))
	}
	f.mu.Lock()
	dropped := f.dropLocked(w.model, q, self)
	f.mu.Unlock()
	if !dropped { // it got an answer just now
		g := <-self.got
		if g.err != nil || ctx.Err() == nil {
			return g.choice, g.err
		}
		f.give(g.choice)
	}
	return choice{}, err
}

// give gives all places of a choice back.
func (f *fleet) give(c choice) {
	f.leave(c.engine, c.lacks[0])
	if c.prefill != nil {
		f.leave(c.prefill, c.lacks[1])
	}
}

// takeOtherDecode takes a place at a decode engine that was not tried; nil: there is none.
func (f *fleet) takeOtherDecode(w *needs) *backend {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, _, how := f.pickLocked(decode, w, fit{kind: vllmKind}) // a D of SGLang never goes on with a room
	if how != ready || slices.Contains(w.tried, b) {
		return nil
	}
	f.takeEngineLocked(b, w.model, 0)
	return b
}

// refuseLocked returns why a request gets no places; nil: it gets them.
func (f *fleet) refuseLocked(w *needs, how availability, of role) error {
	switch how {
	case ready:
		return nil
	case absent:
		lacks := ""
		for _, b := range f.mu.all {
			if b.well.Load() && b.models.Load() != nil && b.serves(w.model) && w.model != "" {
				lacks = map[role]string{prefill: "decode", decode: "prefill"}[b.role]
			}
		}
		for _, b := range f.mu.all {
			if b.well.Load() { // with one engine well, the models are known
				return noModel(w.model, lacks)
			}
		}
		return unavailable("no engine is well")
	}
	return unavailable("no " + of.String() + " is well")
}

// state returns why a request for a model would be refused now; nil: it would not.
func (f *fleet) state(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := &needs{model: name}
	_, how, of := f.chooseLocked(w)
	if how == full || how == doubtful {
		return nil
	}
	return f.refuseLocked(w, how, of)
}

func busy(text string) *refusal {
	return &refusal{status: http.StatusServiceUnavailable, kind: "ServiceUnavailable", text: text, retry: 1, outcome: "refused"}
}

func unavailable(text string) *refusal {
	return &refusal{status: http.StatusServiceUnavailable, kind: "ServiceUnavailable", text: text, retry: 1, outcome: "no_engine"}
}

// noModel is vLLM's answer. lacks is the role whose engines do not have the model while those of the other role do; "": no engine has it.
func noModel(name, lacks string) *refusal {
	text := fmt.Sprintf("The model `%.128s` does not exist.", name)
	if lacks != "" {
		text = fmt.Sprintf("The model `%.128s` does not exist at the %s engines: prefill and decode engines must both have it.", name, lacks)
	}
	return &refusal{status: http.StatusNotFound, kind: "NotFoundError", param: "model", text: text, outcome: "bad_request", model: true}
}
