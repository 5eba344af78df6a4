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

// fleet holds all engines, and the requests that wait for room at an engine.
type fleet struct {
	o     *Options
	store store
	rooms atomic.Bool // there is, or was, an engine of SGLang

	mu struct {
		sync.Mutex
		all    []*backend        // a change replaces the slice
		taken  uint64            // number of places taken so far; see backend.turns
		queues map[string]*queue // by model; none is empty
	}
}

// queue holds the requests that wait for a model. Requests of the same need are served in the order of their arrival.
type queue struct {
	waiters []*waiter
	shares  fair.Shares // how much of the queue each client has
	doubt   bool        // an engine of the model was in doubt: then waiters are refused when no engine is well
}

// has reports whether a request of the need n waits.
func (q *queue) has(n need) bool {
	return slices.ContainsFunc(q.waiters, func(w *waiter) bool { return w.want.need() == n })
}

type waiter struct {
	want *needs
	got  chan grant // gets at most one grant
}

// grant gives a waiter its places, or the reason why it gets none.
type grant struct {
	choice choice
	err    error
}

// needs is what a request needs from engines.
type needs struct {
	model  string
	alone  bool          // one engine must compute prompt and answer: it is no completion, or has several sequences
	many   bool          // a completion of several prompts or answers
	ready  bool          // D needs no P, because a relay has the KV
	noRoom bool          // P and D of SGLang cannot serve it, so other engines do
	marks  []prefix.Mark // marks of the prompt's beginning
	seen   []prefix.Seen // which engines have seen how much of marks
	bytes  int           // length of the prompt
	stored stored        // what the cache server's events report about the prompt
	who    string        // client whose share of the queue it uses

	kind    kind     // kind of the engines that have the path; anyKind: all have it
	only    *backend // the engine that stores the response which the request continues; nil: any
	session string   // session that the client names; "": none
	tried   []*backend
}

// need is that part of needs which decides which engines can take a request. A request waits behind others of the same need, but not
// behind those of another need.
type need struct {
	kind                 kind
	only                 *backend
	alone, ready, noRoom bool
}

func (w *needs) need() need { return need{w.kind, w.only, w.alone, w.ready, w.noRoom} }

// of reports whether the engine b has the role r, the model and the path.
func (w *needs) of(b *backend, r role) bool {
	return b.role == r && b.serves(w.model) && (w.kind == anyKind || w.kind == b.kind())
}

// choice holds the engines of one request, which has a place at each.
type choice struct {
	engine  *backend // engine that answers
	prefill *backend // nil: there is no P
	rank    rank     // DP rank of prefill
	lacks   [2]int   // prompt bytes that engine and prefill do not have
	spared  spared   // why there is no P
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

// hasDecode reports whether a decode engine of vLLM, well or not, serves a model.
func (f *fleet) hasDecode(model string) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool { return b.role == decode && b.kind() == vllmKind && b.serves(model) })
}

// shares reports whether another engine uses the same registry as b, so that only a part of the registry's ranks may be b's.
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

// availability says whether engines of a role can take a request. Of several engines, the best one counts.
type availability uint8

const (
	absent availability = iota // no engine serves the model
	unwell
	doubtful // a call failed, and the health check after it has not ended
	full
	ready
)

// pickLocked returns the engine of role r that matches like and has the least cost for the request w; lacks is how many bytes of the prompt
// it has not seen. Engines that were tried or are paused, and D's without a matching P, come last. Among engines of equal cost it returns
// the one whose last request for the model is oldest; if there are several, the one whose last request for any model is oldest.
func (f *fleet) pickLocked(r role, w *needs, like fit) (best *backend, lacks int, how availability) {
	bestTried, bestCost, bestTurn := false, 0.0, turn{}
	now := time.Now()
	home := f.homeLocked(r, w)
	if home != nil && f.overloadedLocked(home, r, w) {
		home = nil
	}
	var few [8]fit
	pairs := few[:0]
	if r == decode && f.rooms.Load() { // without SGLang every D matches every P
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

// maxTurns bounds the models for which engines remember their turns. When it is reached, all turns start anew.
const maxTurns = 1024

// turnOf returns the model under which an engine counts a turn: model, or "" if the engine has not listed its models.
func (b *backend) turnOf(model string) string {
	if b.models.Load() == nil {
		return "" // it may accept any name
	}
	return model
}

// turn says when an engine last got a request, for one model and for any model, as numbers of places taken in the fleet.
type turn struct{ model, any uint64 }

func (t turn) before(o turn) bool { return t.model < o.model || t.model == o.model && t.any < o.any }

func (b *backend) lastTurnLocked(model string) turn { return turn{b.turns[b.turnOf(model)], b.turn} }

// takeEngineLocked takes a place at an engine for a request of a model. lacks are the prompt bytes that the engine has to compute for
// it.
func (f *fleet) takeEngineLocked(b *backend, model string, lacks int) {
	b.inFlight++
	b.pending += lacks
	if b.circuit.pause > 0 && !b.circuit.open(time.Now()) {
		b.circuit.probe = true
	}
	f.mu.taken++
	if len(b.turns) >= maxTurns { // of all engines: an engine that alone forgot its turns would come first for each model
		for _, other := range f.mu.all {
			clear(other.turns)
		}
	}
	b.turn, b.turns[b.turnOf(model)] = f.mu.taken, f.mu.taken
	b.recent, b.recentAt = b.recently(f.mu.taken)+1, f.mu.taken
}

// recentTakes is the number of places taken in the whole fleet after which a request counts only half in backend.recent.
const recentTakes = 512

// recently returns how many requests the engine got recently, each weighted by its age. taken is the current number of places taken in
// the fleet.
func (b *backend) recently(taken uint64) float64 {
	return b.recent * math.Exp2(-float64(taken-b.recentAt)/recentTakes)
}

// aboveMean bounds the recent requests of an engine that stays the home of unseen prompts while requests are in progress: that many
// times the mean of the engines.
const aboveMean = 1.08

// overloadedLocked reports whether a request should not go to its home: the home got more recent requests than aboveMean times the mean
// of the engines that could take this request, and one of these has a request in progress.
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

// requestCost is what a request in progress costs for its decoding beside others, as bytes of prompt to compute.
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
	return 0 // all costs are equal: turns decide
}

// homeLocked returns the engine to which all proxies send a prompt that they have not seen; nil: this proxy has seen the prompt. The
// home follows from the session that the client names, or else from the prompt's first mark, which is the same in each turn of a
// conversation.
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

// takeLocked takes the places of a choice at its engines.
func (f *fleet) takeLocked(c choice, model string) {
	f.takeEngineLocked(c.engine, model, c.lacks[0])
	if c.prefill != nil {
		f.takeEngineLocked(c.prefill, model, c.lacks[1])
		if c.prefill.registry != nil { // the ranks of P take turns; see nextRank
			c.prefill.rankTurn.Add(1)
		}
	}
}

// computed records that an engine has computed `lacks` bytes of a prompt: they no longer count as its pending bytes.
func (f *fleet) computed(b *backend, lacks int) {
	if lacks > 0 {
		f.mu.Lock()
		defer f.mu.Unlock()
		b.pending -= lacks
	}
}

// doubt marks an engine as unwell until the next health check. It returns true if the engine was well before; then the caller must call
// certain after that check.
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

// certain ends a doubt. The requests that waited for it get places, or are refused.
func (f *fleet) certain(b *backend) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.doubts--
	f.dispatchLocked()
}

// leave gives the place of a request at an engine back; a waiting request may then get it. lacks is how many prompt bytes the engine was
// given for the request and is not known to have computed.
func (f *fleet) leave(b *backend, lacks int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.inFlight--
	b.pending -= lacks
	b.circuit.probe = false // whatever the result was, another request may test the engine now
	f.dispatchLocked()
}

// dispatch gives places to waiting requests, as far as there is room. It refuses those for which no engine is well any more.
func (f *fleet) dispatch() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dispatchLocked()
}

func (f *fleet) dispatchLocked() {
	for name, q := range f.mu.queues {
		var full []need // needs for which engines have no room
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

// queued returns how many requests wait for room.
func (f *fleet) queued() (n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.mu.queues {
		n += int64(len(q.waiters))
	}
	return n
}

// take takes places for a request. If there is no room, it waits, at most for Options.QueueTimeout; if the client already has its share
// of Options.MaxQueue waiting requests, take refuses this one at once. The error is a *refusal, or the error of ctx.
func (f *fleet) take(ctx context.Context, w *needs) (choice, error) {
	f.mu.Lock()
	q := f.mu.queues[w.model]
	if q == nil || !q.has(w.need()) { // requests of other needs do not wait for the same engines
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
	if !dropped { // it got a grant at this moment
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

// takeOtherDecode takes a place at a decode engine that was not tried, and returns that engine; nil: there is none.
func (f *fleet) takeOtherDecode(w *needs) *backend {
	f.mu.Lock()
	defer f.mu.Unlock()
	b, _, how := f.pickLocked(decode, w, fit{kind: vllmKind}) // a D of SGLang cannot take over a room
	if how != ready || slices.Contains(w.tried, b) {
		return nil
	}
	f.takeEngineLocked(b, w.model, 0)
	return b
}

// refuseLocked returns the refusal of a request that gets no places, from the results `how` and `of` of chooseLocked; nil if how is ready.
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
			if b.well.Load() { // if one engine is well, the models are known
				return noModel(w.model, lacks)
			}
		}
		return unavailable("no engine is well")
	}
	return unavailable("no " + of.String() + " is well")
}

// state returns the reason why a request for a model would be refused now; nil: it would be accepted.
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

// noModel returns vLLM's refusal of an unknown model. lacks is the role whose engines lack the model while engines of the other role
// have it; "": no engine has it.
func noModel(name, lacks string) *refusal {
	text := fmt.Sprintf("The model `%.128s` does not exist.", name)
	if lacks != "" {
		text = fmt.Sprintf("The model `%.128s` does not exist at the %s engines: prefill and decode engines must both have it.", name, lacks)
	}
	return &refusal{status: http.StatusNotFound, kind: "NotFoundError", param: "model", text: text, outcome: "bad_request", model: true}
}
