// Package events tells others what a store has: which chunks became resident and which
// went, with their tokens, so that routers can send a prompt where its beginning is.
//
// A Book follows the events of a store, which name objects, and turns them into records about
// chunks: a chunk counts as stored while every object that a hit needs is resident and its
// tokens are known. Readers follow the records by number, each at its own speed: none
// keeps the store or another reader waiting. A Publisher is such a reader that
// speaks vLLM's ZMQ format.
package events

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/objects"
	"github.com/kvasir-kv/kvasir/store"
)

// Source is what a Book follows; *store.Store is one.
type Source interface {
	Watch(size int)
	News() <-chan struct{}
	Events(after uint64, dst []store.Event) (n int, lost bool)
	LastEvent() uint64
	Residents(from int, dst []kv.Key) (keys []kv.Key, next int, more bool)
}

// Chunk is one chunk of tokens that is in memory. It never changes.
type Chunk struct {
	Model, Salt string
	Hash        kv.Hash
	Parent      kv.Hash // of the chunk before it; not of the first one
	Index       int     // of the chunk in its prompt
	Tokens      []byte  // a msgpack array of shortest-form integers
}

// Record says that a chunk became available, or went. Seq counts from 1.
type Record struct {
	Seq     uint64
	Removed bool
	// OfModel says that no other salt of the model has the chunk: readers that do not
	// know salts look at these records only.
	OfModel bool
	*Chunk
}

// Book knows which chunks are resident. Its methods are safe for concurrent use. Its mutex is
// taken before the store's.
type Book struct {
	source Source
	o      Options
	active atomic.Bool
	start  chan struct{} // closed by Activate
	once   sync.Once

	unbound  atomic.Int64 // resident chunks whose tokens are not known
	nameless atomic.Int64 // spaces that are in no family

	mu struct {
		sync.Mutex
		after    uint64 // number of the last event of the store that was applied
		scanning bool   // after is not yet known
		scan     uint32 // number of the last scan
		early    early
		buffer   []store.Event

		spaces   map[kv.Namespace]*space
		tenants  map[tenantKey]*tenant
		models   map[string]map[kv.Hash]int // of how many tenants a chunk is
		bindings map[kv.Hash]*binding
		bytes    int64 // of the bindings' tokens

		records []Record // a ring
		last    uint64   // number of the newest record
		news    bool     // since the mutex was locked
		changed chan struct{}
		n       Counters
	}
}

// Counters count since the start.
type Counters struct {
	Records uint64 // about chunks that became available, or went
	Unbound uint64 // times that tokens of a chunk were not kept, because Options.TokenBytes are used
	Scans   uint64 // of the whole store, because its events were lost or at the start
}

// binding is what a chunk's hash stands for. It lives while an object of the chunk is resident.
type binding struct {
	parent kv.Hash
	index  int
	tokens []byte // nil: not known
	spaces []*space
}

type tenantKey struct{ model, salt string }

// tenant is what of one model and salt is available.
type tenant struct {
	tenantKey
	shown    map[kv.Hash]*shown
	families int
}

type shown struct {
	*Chunk
	families int // in which the chunk is complete
}

// space is one namespace: what has one layout, model and salt.
type space struct {
	name     kv.Namespace
	chunks   map[kv.Hash][]object
	families []*family
}

// object is one that is resident.
type object struct {
	code uint32 // see codeOf
	scan uint32 // in which it was last seen
}

func codeOf(world, rank, group int) uint32 {
	return uint32(world)<<24 | uint32(rank)<<16 | uint32(group)&0xffff
}

// family is the shards that a lookup asks for together.
type family struct {
	tenant *tenant
	world  int
	each   []*space // by rank
	groups []int    // that every hit needs
	shown  map[kv.Hash]struct{}
}

// New returns a Book that does nothing before Activate.
func New(source Source, o Options) *Book {
	b := &Book{source: source, o: o.withDefaults(), start: make(chan struct{})}
	b.mu.spaces, b.mu.tenants = make(map[kv.Namespace]*space), make(map[tenantKey]*tenant)
	b.mu.models, b.mu.bindings = make(map[string]map[kv.Hash]int), make(map[kv.Hash]*binding)
	b.mu.changed = make(chan struct{})
	return b
}

// Activate begins to follow the store. What is stored before has no tokens until a prompt
// with it comes again.
func (b *Book) Activate() {
	b.once.Do(func() {
		b.source.Watch(b.o.StoreEvents)
		b.mu.Lock()
		b.mu.scanning = true
		b.mu.records = make([]Record, b.o.Records)
		b.mu.Unlock()
		b.active.Store(true)
		close(b.start)
	})
}

// Active reports whether there may be readers: only then is it worth to tell the Book anything.
func (b *Book) Active() bool { return b.active.Load() }

// Wonders reports whether there are resident chunks of which tokens, model or salt are not known.
func (b *Book) Wonders() bool { return b.unbound.Load() > 0 || b.nameless.Load() > 0 }

// Run follows the store until ctx ends.
func (b *Book) Run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-b.start:
	}
	for {
		b.catchUp()
		select {
		case <-ctx.Done():
			return
		case <-b.source.News():
		}
	}
}

// early is what was told of during a scan and not found yet.
type early struct {
	hashes []kv.Hash
	spaces []*space
}

// catchUp applies all events of the store, after a scan where some were lost.
func (b *Book) catchUp() {
	for more := true; more; {
		var lost bool
		if more, lost = b.some(); lost {
			b.rescan()
			more = true
		}
	}
	b.forgetEarly()
}

// forgetEarly forgets what was told of and is not there.
func (b *Book) forgetEarly() {
	b.mu.Lock()
	defer b.unlock()
	if b.mu.scanning { // others have lost events since
		return
	}
	for _, h := range b.mu.early.hashes {
		if bound := b.mu.bindings[h]; bound != nil && len(bound.spaces) == 0 {
			b.unbindLocked(h, bound)
		}
	}
	for _, s := range b.mu.early.spaces {
		if b.mu.spaces[s.name] == s && len(s.chunks) == 0 {
			b.dropLocked(s)
		}
	}
	b.mu.early = early{}
}

func (b *Book) some() (more, lost bool) {
	b.mu.Lock()
	defer b.unlock()
	if b.mu.scanning {
		return false, true
	}
	return b.applyLocked(eventBatch)
}

// eventBatch is how many events are applied while others wait for the mutex.
const eventBatch = 1024

// applyLocked applies some events of the store.
func (b *Book) applyLocked(limit int) (more, lost bool) {
	if len(b.mu.buffer) < limit {
		b.mu.buffer = make([]store.Event, limit)
	}
	n, lost := b.source.Events(b.mu.after, b.mu.buffer[:limit])
	if lost {
		b.mu.scanning = true
		return false, true
	}
	for _, e := range b.mu.buffer[:n] {
		b.setLocked(&e.Key, !e.Removed)
	}
	b.mu.after += uint64(n)
	return n == limit, false
}

// unlock ends a section that may have made records, and tells the readers.
func (b *Book) unlock() {
	var tell chan struct{}
	if b.mu.news {
		b.mu.news, tell, b.mu.changed = false, b.mu.changed, make(chan struct{})
	}
	b.mu.Unlock()
	if tell != nil {
		close(tell)
	}
}

// rescan compares the Book with all that is resident. What changes meanwhile is in the
// store's events after the number that was asked for first.
func (b *Book) rescan() {
	after := b.source.LastEvent()
	scan := b.beginScan()
	var keys []kv.Key
	for next, more := 0, true; more; {
		keys, next, more = b.source.Residents(next, keys[:0])
		b.seen(keys)
	}
	for _, s := range b.listSpaces() {
		b.forget(s, scan)
	}
	b.mu.Lock()
	defer b.unlock()
	b.mu.after, b.mu.scanning = after, false
}

func (b *Book) beginScan() uint32 {
	b.mu.Lock()
	defer b.unlock()
	b.mu.scan++
	b.mu.n.Scans++
	return b.mu.scan
}

func (b *Book) seen(keys []kv.Key) {
	b.mu.Lock()
	defer b.unlock()
	for i := range keys {
		b.setLocked(&keys[i], true)
	}
}

func (b *Book) listSpaces() (out []*space) {
	b.mu.Lock()
	defer b.unlock()
	for _, s := range b.mu.spaces {
		out = append(out, s)
	}
	return out
}

// forget removes what the scan did not see.
func (b *Book) forget(s *space, scan uint32) {
	b.mu.Lock()
	defer b.unlock()
	for hash, list := range s.chunks {
		left := slices.DeleteFunc(list, func(o object) bool { return o.scan != scan })
		if len(left) != len(list) {
			s.chunks[hash] = left
			b.changedLocked(s, hash)
		}
	}
}

// setLocked notes that an object is resident, or is not.
func (b *Book) setLocked(k *kv.Key, resident bool) {
	s := b.mu.spaces[k.Namespace]
	if s == nil {
		if !resident {
			return
		}
		s = b.newSpaceLocked(k.Namespace)
	}
	code := uint32(k.Rank)>>16<<16 | k.Group&0xffff // the world and the rank are its upper bytes
	list := s.chunks[k.Chunk]
	i := slices.IndexFunc(list, func(o object) bool { return o.code == code })
	switch {
	case resident && i >= 0:
		list[i].scan = b.mu.scan
		return
	case resident:
		s.chunks[k.Chunk] = append(list, object{code, b.mu.scan})
	case i < 0:
		return
	default:
		s.chunks[k.Chunk] = slices.Delete(list, i, i+1)
	}
	b.changedLocked(s, k.Chunk)
}

func (b *Book) newSpaceLocked(name kv.Namespace) *space {
	s := &space{name: name, chunks: make(map[kv.Hash][]object)}
	b.mu.spaces[name] = s
	b.nameless.Add(1)
	return s
}

func (b *Book) newBindingLocked(hash kv.Hash) *binding {
	bound := &binding{}
	b.mu.bindings[hash] = bound
	b.unbound.Add(1)
	return bound
}

func (b *Book) unbindLocked(hash kv.Hash, bound *binding) {
	b.mu.bytes -= int64(len(bound.tokens))
	delete(b.mu.bindings, hash)
	if bound.tokens == nil {
		b.unbound.Add(-1)
	}
}

// changedLocked looks again at a chunk of which an object came or went.
func (b *Book) changedLocked(s *space, hash kv.Hash) {
	bound := b.mu.bindings[hash]
	if bound == nil {
		bound = b.newBindingLocked(hash)
	}
	if !slices.Contains(bound.spaces, s) {
		bound.spaces = append(bound.spaces, s)
	}
	for _, f := range s.families {
		b.judgeLocked(f, hash, bound)
	}
	if len(s.chunks[hash]) > 0 {
		return
	}
	delete(s.chunks, hash)
	bound.spaces = slices.DeleteFunc(bound.spaces, func(o *space) bool { return o == s })
	if len(bound.spaces) == 0 {
		b.unbindLocked(hash, bound)
	}
	if len(s.chunks) == 0 {
		b.dropLocked(s)
	}
}

// dropLocked forgets a space that has nothing; the next store names it again.
func (b *Book) dropLocked(s *space) {
	delete(b.mu.spaces, s.name)
	if len(s.families) == 0 {
		b.nameless.Add(-1)
	}
	for _, f := range s.families {
		for _, o := range f.each {
			if o == s || !slices.Contains(o.families, f) {
				continue
			}
			o.families = slices.DeleteFunc(o.families, func(g *family) bool { return g == f })
			if len(o.families) == 0 {
				b.nameless.Add(1)
			}
		}
		if f.tenant.families--; f.tenant.families == 0 {
			delete(b.mu.tenants, f.tenant.tenantKey)
		}
	}
}

// judgeLocked finds out whether a family has a whole chunk, and makes a record if that has changed.
func (b *Book) judgeLocked(f *family, hash kv.Hash, bound *binding) {
	_, was := f.shown[hash]
	is := bound.tokens != nil && f.complete(hash)
	t := f.tenant
	switch {
	case is == was:
	case is:
		f.shown[hash] = struct{}{}
		if s := t.shown[hash]; s != nil {
			s.families++
			return
		}
		c := &Chunk{Model: t.model, Salt: t.salt, Hash: hash, Parent: bound.parent, Index: bound.index, Tokens: bound.tokens}
		t.shown[hash] = &shown{c, 1}
		of := b.mu.models[t.model]
		if of == nil {
			of = make(map[kv.Hash]int)
			b.mu.models[t.model] = of
		}
		of[hash]++
		b.recordLocked(Record{Chunk: c, OfModel: of[hash] == 1})
	default:
		delete(f.shown, hash)
		s := t.shown[hash]
		if s.families--; s.families > 0 {
			return
		}
		delete(t.shown, hash)
		of := b.mu.models[t.model]
		if of[hash]--; of[hash] == 0 {
			delete(of, hash)
		}
		b.recordLocked(Record{Chunk: s.Chunk, Removed: true, OfModel: of[hash] == 0})
		if len(of) == 0 {
			delete(b.mu.models, t.model)
		}
	}
}

func (f *family) complete(hash kv.Hash) bool {
	for rank, s := range f.each {
		list := s.chunks[hash]
		for _, g := range f.groups {
			code := codeOf(f.world, rank, g)
			if !slices.ContainsFunc(list, func(o object) bool { return o.code == code }) {
				return false
			}
		}
	}
	return true
}

func (b *Book) recordLocked(r Record) {
	b.mu.last++
	b.mu.n.Records++
	r.Seq = b.mu.last
	b.mu.records[r.Seq%uint64(len(b.mu.records))] = r
	b.mu.news = true
}

// Named tells whose chunks a shard's are, and which shards a lookup asks for together. Only
// what has resident chunks is remembered.
func (b *Book) Named(model, salt []byte, sh *objects.Shard) {
	b.mu.Lock()
	defer b.unlock()
	b.namedLocked(model, salt, sh)
}

func (b *Book) namedLocked(model, salt []byte, sh *objects.Shard) {
	each := make([]*space, sh.World)
	for rank := range each {
		name := sh.Namespace
		if sh.Each != nil {
			name = (*sh.Each)[rank].Namespace
		}
		if each[rank] = b.mu.spaces[name]; each[rank] != nil {
			continue
		}
		if !b.mu.scanning {
			return // nothing of this shard is there, so nothing is whole
		}
		each[rank] = b.newSpaceLocked(name)
		b.mu.early.spaces = append(b.mu.early.spaces, each[rank])
	}
	for _, f := range each[0].families {
		if f.world == sh.World && slices.Equal(f.each, each) {
			return
		}
	}
	key := tenantKey{string(model), string(salt)}
	t := b.mu.tenants[key]
	if t == nil {
		t = &tenant{tenantKey: key, shown: make(map[kv.Hash]*shown)}
		b.mu.tenants[key] = t
	}
	t.families++
	f := &family{tenant: t, world: sh.World, each: each, groups: needed(sh.Groups), shown: make(map[kv.Hash]struct{})}
	for rank, s := range each {
		if slices.Contains(each[:rank], s) {
			continue
		}
		if len(s.families) == 0 {
			b.nameless.Add(-1)
		}
		s.families = append(s.families, f)
	}
	hashes := slices.AppendSeq(make([]kv.Hash, 0, len(each[0].chunks)), maps.Keys(each[0].chunks))
	slices.SortFunc(hashes, func(x, y kv.Hash) int { return cmp.Compare(b.mu.bindings[x].index, b.mu.bindings[y].index) })
	for _, hash := range hashes { // chunks after those that they follow
		b.judgeLocked(f, hash, b.mu.bindings[hash])
	}
}

// needed are the groups whose objects every hit needs: those of full attention, or all where there are none.
func needed(groups *objects.Groups) (out []int) {
	for g := range groups.Len() {
		if groups.Full(g) {
			out = append(out, g)
		}
	}
	if out == nil {
		for g := range groups.Len() {
			out = append(out, g)
		}
	}
	return out
}

// Lacks applies what the store has done so far, and reports whether one of these chunks is
// resident and its tokens are not known.
func (b *Book) Lacks(hashes []kv.Hash) bool {
	b.mu.Lock()
	defer b.unlock()
	if !b.mu.scanning {
		for more := true; more; {
			more, _ = b.applyLocked(eventBatch) // when some were lost, Run scans
		}
	}
	for _, h := range hashes {
		if bound := b.mu.bindings[h]; bound != nil && bound.tokens == nil || bound == nil && b.mu.scanning {
			return true
		}
	}
	return false
}

// Learn tells what the chunks with these hashes are, which begin a prompt: tokens returns the msgpack
// array of chunk i, and is called for those that are wanted, in order.
func (b *Book) Learn(hashes []kv.Hash, tokens func(i int) []byte) {
	b.mu.Lock()
	defer b.unlock()
	for i, h := range hashes {
		bound := b.mu.bindings[h]
		if bound == nil && b.mu.scanning {
			bound = b.newBindingLocked(h)
			b.mu.early.hashes = append(b.mu.early.hashes, h)
		}
		if bound == nil || bound.tokens != nil {
			continue
		}
		t := tokens(i)
		if b.mu.bytes+int64(len(t)) > b.o.TokenBytes {
			b.mu.n.Unbound++
			continue
		}
		b.mu.bytes += int64(len(t))
		b.unbound.Add(-1)
		bound.tokens, bound.index = t, i
		if i > 0 {
			bound.parent = hashes[i-1]
		}
		for _, s := range bound.spaces {
			for _, f := range s.families {
				b.judgeLocked(f, h, bound)
			}
		}
	}
}
