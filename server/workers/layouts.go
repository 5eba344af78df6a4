// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/server/access"
)

// modelLayouts has the layouts of one model and world size, and the workers of each. Engines with different layouts, such as a vLLM and a
// SGLang, share the model's name but no chunk.
type modelLayouts struct {
	of []*engineLayout // in the order of their first registrations
}

// engineLayout is one layout of a model: its workers, and for each shard the fingerprint of the shard's worker.
//
// A registration does not tell which shard its worker keeps; transfers do. The workers of a pipeline's stages have different numbers of
// layers, so each shard is looked up under the fingerprint of its own worker.
type engineLayout struct {
	first   string    // fingerprint of its first worker
	workers []*Worker // the newest last
	shards  []shardLayout
}

// shardLayout is the fingerprint of the newest worker that has transferred anything of a shard.
type shardLayout struct {
	fingerprint string // empty: no worker has
	seq         uint64 // of that worker's registration
}

// holding returns the layout under which a worker is registered, or nil.
func (m *modelLayouts) holding(in *Worker) *engineLayout {
	if m == nil {
		return nil
	}
	for _, l := range m.of {
		if slices.Contains(l.workers, in) {
			return l
		}
	}
	return nil
}

// joining returns the layout to which a worker belongs, or nil if that is a new one.
func (m *modelLayouts) joining(in *Worker) *engineLayout {
	for _, l := range m.of {
		if slices.ContainsFunc(l.workers, in.ofOneEngine) {
			return l
		}
	}
	return nil
}

// count returns how many workers of the model are registered.
func (m *modelLayouts) count() (n int) {
	for _, l := range m.of {
		n += len(l.workers)
	}
	return n
}

// ofOneEngine reports whether two workers of a model can belong to one engine: they have the same fingerprint, or may be stages of a
// pipeline. Stages have different numbers of layers and, if they lend their KV, different groups of KV in objects of one kind.
func (w *Worker) ofOneEngine(o *Worker) bool {
	switch a, b := &w.Layout, &o.Layout; {
	case w.Fingerprint == o.Fingerprint:
		return true
	case w.World == 1 || !w.Groups.Like(o.Groups) || w.Engine != o.Engine:
		return false
	case w.Lent != nil && o.Lent != nil && max(w.Lent.KVGroups(), o.Lent.KVGroups()) > 1:
		return true
	default:
		return a.SinglePlane == b.SinglePlane && a.Hidden == b.Hidden && a.DType == b.DType && a.Slots == b.Slots
	}
}

// vllm is the engine type in vLLM's registrations.
const vllm = "vllm"

// ofVLLM reports whether a worker is known to be vLLM's (yes), and whether it is known to be another engine's (no). A registration for
// engine_driven names no engine type. Layers with two planes are vLLM's. Layers with one plane are those of MLA, of a vLLM with K and V
// side by side, or of SGLang.
func (w *Worker) ofVLLM() (yes, no bool) {
	switch {
	case w.Engine != "":
		return w.Engine == vllm, w.Engine != vllm
	case w.Lent != nil:
		return true, false
	}
	return slices.ContainsFunc(w.Objects, func(l kv.Layout) bool { return !l.SinglePlane }), false
}

// ofVLLM is Worker.ofVLLM for a layout: yes if it holds for one of the workers, no if for all.
func (l *engineLayout) ofVLLM() (yes, no bool) {
	no = true
	for _, w := range l.workers {
		y, n := w.ofVLLM()
		yes, no = yes || y, no && n
	}
	return yes, no
}

// splits reports whether l has K and V of each layer in planes of their own, while o has them side by side: l is then SGLang's layout of
// the model. A stage of a pipeline is compared with the other engine's stage of the same number of layers.
func (l *engineLayout) splits(o *engineLayout) bool {
	return slices.ContainsFunc(l.workers, func(w *Worker) bool {
		a := &w.Layout
		return a.SinglePlane && slices.ContainsFunc(o.workers, func(w *Worker) bool {
			b := &w.Layout
			return b.SinglePlane && a.Layers == 2*b.Layers && 2*a.Hidden == b.Hidden
		})
	})
}

// newest returns the worker that registered last.
func (l *engineLayout) newest() *Worker { return l.workers[len(l.workers)-1] }

// fitting returns a registered worker with that fingerprint whose object groups follow the same rules as those of the worker `in`, so that
// both can load the same hit. It returns nil if there is none.
func (l *engineLayout) fitting(fingerprint string, in *Worker) *Worker {
	for _, o := range l.workers {
		if o.Fingerprint == fingerprint && o.Groups.Like(in.Groups) {
			return o
		}
	}
	return nil
}

// learn records that in keeps that shard. It changes nothing if a worker that registered later is known for the shard.
func (l *engineLayout) learn(in *Worker, shard int) {
	if shard < 0 || shard >= in.World {
		return
	}
	if l.shards == nil {
		l.shards = make([]shardLayout, in.World)
	}
	if in.seq >= l.shards[shard].seq {
		l.shards[shard] = shardLayout{in.Fingerprint, in.seq}
	}
}

// fingerprints returns the fingerprints of the layout's first worker and of its shards.
func (l *engineLayout) fingerprints() []string {
	out := []string{l.first}
	for _, s := range l.shards {
		if s.fingerprint != "" && !slices.Contains(out, s.fingerprint) {
			out = append(out, s.fingerprint)
		}
	}
	return out
}

// cutTwice reports whether registered workers of the same shard have different fingerprints: they belong to pipelines with different
// stages.
func (l *engineLayout) cutTwice() bool {
	first := l.workers[0].Fingerprint
	if !slices.ContainsFunc(l.workers, func(w *Worker) bool { return w.Fingerprint != first }) {
		return false
	}
	of := make(map[int]string)
	for _, w := range l.workers {
		shard := w.Shard()
		if was, known := of[shard]; known && was != w.Fingerprint {
			return true
		}
		if shard >= 0 {
			of[shard] = w.Fingerprint
		}
	}
	return false
}

// each returns a worker for each shard; a lookup names the shard's objects by the fingerprint of that worker. For a shard with a known
// fingerprint it is a registered worker with this fingerprint that fits, if there is one, otherwise the newest worker. each returns nil,
// for the newest worker in all shards, if no shard has the newest worker's fingerprint, or if none has another known one.
func (l *engineLayout) each() []*Worker {
	newest := l.newest()
	known, unlike := false, false
	for i := range l.shards {
		fp := l.shards[i].fingerprint
		known = known || fp == newest.Fingerprint
		unlike = unlike || fp != "" && fp != newest.Fingerprint
	}
	if !known || !unlike {
		return nil
	}
	out := make([]*Worker, len(l.shards))
	for i := range l.shards {
		fp := l.shards[i].fingerprint
		if i > 0 && fp == l.shards[i-1].fingerprint {
			out[i] = out[i-1]
			continue
		}
		out[i] = cmp.Or(l.fitting(fp, newest), newest)
	}
	return out
}

// Errors of lookups.
var (
	// ErrNoWorker means that no worker of a model, world size and chunk size is registered.
	ErrNoWorker = errors.New("no worker is registered for this model and world size")
	// ErrLayouts means that the workers of a model have several layouts, and that it is not known which of them a lookup is for.
	ErrLayouts = errors.New("engines of this model have several layouts, and the connection has not named its worker")
)

// Query is the model of a lookup, and who asks.
type Query struct {
	Model, Salt  []byte
	World, Chunk int
	By           access.Principal
	From         *Client // the client of its connection; nil for a request of this process
	Named        bool    // the connection has named a worker, which is Worker
	Worker       int64
}

// layoutLocked returns the layout that a lookup is for. If the model has several, it is that of the worker that the connection has named,
// and none if that worker is not registered; else that of the workers of the client's process or its relatives; else vLLM's, whose
// schedulers name no worker. If several are left the error is ErrLayouts.
//
// If the user or address q.By has a worker for each shard, only its own workers count. So a layout that another user registers under a
// model's name does not turn its lookups into misses.
func (r *Registry) layoutLocked(q *Query) (*engineLayout, error) {
	all := r.mu.byModel[modelKey{string(q.Model), q.World, q.Chunk, access.Principal{}}]
	if all == nil {
		return nil, ErrNoWorker
	}
	own := r.mu.byModel[modelKey{string(q.Model), q.World, q.Chunk, q.By}]
	if in, can := r.namedLocked(q); in != nil {
		l := own.holding(in)
		if l == nil || len(l.workers) < q.World {
			l = all.holding(in)
		}
		if l == nil { // the named worker is asleep
			return nil, ErrNoWorker
		}
		return l.onlyLayout()
	} else if !can {
		return nil, ErrNoWorker
	}
	if own != nil && own.count() >= q.World {
		all = own
	}
	if len(all.of) == 1 {
		return all.of[0].onlyLayout()
	}
	if l := all.ofClient(q.From); l != nil {
		return l.onlyLayout()
	}
	var left []*engineLayout
	for _, known := range []bool{true, false} { // first layouts that are known to be vLLM's, then those that may be
		for _, l := range all.of {
			if yes, no := l.ofVLLM(); yes || !known && !no && !slices.ContainsFunc(all.of, l.splits) {
				left = append(left, l)
			}
		}
		if len(left) > 0 {
			break
		}
	}
	if len(left) != 1 {
		return nil, fmt.Errorf("%w: %s", ErrLayouts, all)
	}
	return left[0].onlyLayout()
}

// onlyLayout returns the layout if it can be looked up without further knowledge about the asker.
func (l *engineLayout) onlyLayout() (*engineLayout, error) {
	if l.cutTwice() {
		return nil, fmt.Errorf("%w: its pipelines divide the layers in different ways", ErrLayouts)
	}
	return l, nil
}

// namedLocked returns the worker that the connection has named, if it is one of the model's. can is false if that worker could load
// nothing, because it is refused or not registered.
func (r *Registry) namedLocked(q *Query) (in *Worker, can bool) {
	if !q.Named {
		return nil, true
	}
	switch in = r.mu.instances[workerID{q.Worker, q.By}]; {
	case in == nil || in.Refused != "":
		return nil, false
	case in.World != q.World || in.Chunk != q.Chunk || in.Model != string(q.Model): // its client looks up for another worker
		return nil, true
	}
	return in, true
}

// ofClient returns the layout of those workers that are of a client's process or its relatives; nil if there is none, or several.
func (m *modelLayouts) ofClient(from *Client) (out *engineLayout) {
	if from == nil {
		return nil
	}
	own := from.process.Load()
	if own == nil {
		return nil
	}
	for _, l := range m.of {
		if !slices.ContainsFunc(l.workers, func(w *Worker) bool { f := w.family.Load(); return f != nil && own.related(f) }) {
			continue
		}
		if out != nil {
			return nil
		}
		out = l
	}
	return out
}

// String returns a text with the layouts, for people.
func (m *modelLayouts) String() string {
	var out []string
	for _, l := range m.of {
		w := l.newest()
		out = append(out, fmt.Sprintf("%v of %s (worker %d)", w.Layout.Shape(), w.Layout.DType, w.ID))
		if len(out) == 4 {
			break
		}
	}
	return strings.Join(out, ", ")
}

// Target says where a lookup searches, and how many workers can load the hit.
type Target struct {
	Shard   object.Shard
	Loaders int     // number of workers that can load it: see loaders
	Inline  *Worker // the one of them with the largest chunks, if the chunks of all of them pass through the socket; else nil
}

// Target returns the Target of a lookup that needs `need` workers. The error is ErrNoWorker or ErrLayouts if no shard is known to search
// in.
func (r *Registry) Target(q *Query, need int) (t Target, err error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	l, err := r.layoutLocked(q)
	if err != nil {
		return t, err
	}
	return Target{l.shard(q), l.loaders(q, need), l.largestInline(q.By)}, nil
}

// largestInline returns Target.Inline, among the workers of the user or address `by` if it has any.
func (l *engineLayout) largestInline(by access.Principal) (of *Worker) {
	own := slices.ContainsFunc(l.workers, func(in *Worker) bool { return in.By == by })
	for _, in := range l.workers {
		switch {
		case own && in.By != by:
		case in.Lent != nil || in.Side() != Pickle:
			return nil
		case of == nil || in.Bytes > of.Bytes:
			of = in
		}
	}
	return of
}

// EachShardsOf returns the shards of a model, one entry for each of its layouts.
func (r *Registry) EachShardsOf(q *Query) (out []object.Shard) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if m := r.mu.byModel[modelKey{string(q.Model), q.World, q.Chunk, access.Principal{}}]; m != nil {
		for _, l := range m.of {
			if l, err := l.onlyLayout(); err == nil {
				out = append(out, l.shard(q))
			}
		}
	}
	return out
}

// CountLayouts returns how many layouts a model has, including those of workers that are asleep.
func (r *Registry) CountLayouts(q *Query) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	m := r.mu.byModel[modelKey{string(q.Model), q.World, q.Chunk, access.Principal{}}]
	if m == nil {
		m = &modelLayouts{}
	}
	var others []*Worker // one worker of each layout that is all asleep
	for _, in := range r.mu.instances {
		if in.Refused == "" && in.asleep.Load() && in.Model == string(q.Model) && in.World == q.World && in.Chunk == q.Chunk &&
			m.joining(in) == nil && !slices.ContainsFunc(others, in.ofOneEngine) {
			others = append(others, in)
		}
	}
	return len(m.of) + len(others)
}

// Unlike says how the workers of a model differ.
type Unlike struct {
	Layouts  int
	Groups   bool // some have object groups with other rules
	Equal    bool // some have objects of the same length with different bytes
	Declined bool // lookups are declined if their connection has named no worker
}

// Unlike returns how the workers of the model of `in` differ from `in`. For workers that are asleep only the bytes count, because their
// next request wakes them.
func (r *Registry) Unlike(in *Worker) (u Unlike) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, o := range r.mu.instances {
		if o.Refused != "" || o.Model != in.Model || o.World != in.World || o.Chunk != in.Chunk || o.Fingerprint == in.Fingerprint {
			continue
		}
		for g := range min(in.Groups.Len(), o.Groups.Len()) {
			u.Equal = u.Equal || o.Groups.Bytes(g) == in.Groups.Bytes(g)
		}
	}
	m := r.mu.byModel[modelKey{in.Model, in.World, in.Chunk, access.Principal{}}]
	if m == nil {
		return u
	}
	for _, l := range m.of {
		for _, o := range l.workers {
			u.Groups = u.Groups || o.Engine == in.Engine && !o.Groups.Like(in.Groups)
		}
	}
	_, err := r.layoutLocked(&Query{Model: []byte(in.Model), World: in.World, Chunk: in.Chunk, By: in.By})
	u.Layouts, u.Declined = len(m.of), errors.Is(err, ErrLayouts)
	return u
}

func (l *engineLayout) shard(q *Query) object.Shard {
	in := l.newest()
	sh := object.Shard{World: q.World, Namespace: in.NamespaceOf(q.Salt), Groups: in.Groups}
	of := l.each()
	if of == nil {
		return sh
	}
	each := make(object.Layouts, q.World)
	for i := range each {
		if i > 0 && of[i] == of[i-1] {
			each[i] = each[i-1]
			continue
		}
		each[i] = object.Layout{Namespace: of[i].NamespaceOf(q.Salt), Groups: of[i].Groups}
	}
	sh.Each = &each
	return sh
}

// NoteShard records which shard a worker keeps, from the first transfer that shows it. It reports whether that was news.
func (r *Registry) NoteShard(in *Worker, shard int) bool {
	if int(in.shard.Load()) == shard+1 {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	in.shard.Store(int32(shard + 1))
	if r.mu.instances[in.who()] == in {
		for _, k := range in.modelKeys() {
			if l := r.mu.byModel[k].holding(in); l != nil {
				l.learn(in, shard)
			}
		}
	}
	return true
}

// clock measures how long workers have been silent. It uses the monotonic time of this process, so steps of the wall clock do not count as
// silence.
type clock struct {
	epoch  time.Time
	last   time.Duration // of the last Tick
	ticked bool
}

func (c *clock) at(now time.Time) time.Duration { return now.Sub(c.epoch) }

// stoodStill is the longest time between two Ticks that counts as silence of workers. After a longer one the process or the machine did not
// run.
const stoodStill = 10 * time.Second

// gap reports whether this process did not run for a while before the time `now`.
func (c *clock) gap(now time.Duration) bool {
	gap := c.ticked && now-c.last > stoodStill
	c.last, c.ticked = now, true
	return gap
}
