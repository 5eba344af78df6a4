// SPDX-License-Identifier: Apache-2.0

// Package events reports the contents of a store: which chunks became resident and which were removed, with their tokens, so that routers
// can send a prompt to where its prefix is cached.
//
// A Book follows the events of a store, which are about objects, and the changes of the tiers below it, and turns both into records about
// chunks. A chunk counts as stored in a medium while every object that a hit needs is there and its tokens are known. Readers follow the
// records by number, each at its own speed: no reader makes the store or another reader wait. A Publisher is a reader that publishes the
// records in vLLM's ZMQ format.
package events

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
)

// Source is the store that a Book follows; *store.Store implements it.
type Source interface {
	Watch(size int)
	News() <-chan struct{}
	Events(after uint64, dst []store.Event) (n int, lost bool)
	LastEvent() uint64
	Residents(from int, dst []kv.Key) (keys []kv.Key, next int, more bool)
}

// Chunk is one chunk of tokens in a medium. It never changes.
type Chunk struct {
	Model, Salt string
	Hash        kv.Hash
	Parent      kv.Hash // hash of the chunk before it; not for the first chunk
	Index       int     // position of the chunk in its prompt
	Tokens      []byte  // a msgpack array of integers
	Group       int     // -1 for a chunk. For a row of vLLM's tiered offloading, which has no tokens, no parent and the index 0: its group of layers
}

// Medium says where a chunk is.
type Medium uint8

// The media.
const (
	InPool Medium = iota // in the pool
	Below                // in any tier below the pool

	media = 2
)

// Placed is a chunk and one medium that has it.
type Placed struct {
	*Chunk
	Medium Medium
}

// Record says that a chunk became available in a medium or, with Removed, that it no longer is. Seq counts from 1.
type Record struct {
	Seq     uint64
	Removed bool
	// OfModel says that no other salt of the model has the chunk in the medium. Readers that do not know salts use only these records.
	OfModel bool
	Placed
}

// Book knows which chunks are in which media. Its methods are safe for concurrent use. Its mutex is taken before the store's and the
// tiers'.
type Book struct {
	source Source
	o      Options
	active atomic.Bool
	start  chan struct{} // closed by Activate
	once   sync.Once
	queue  queue

	looked   atomic.Bool  // Run has looked at the store for the first time
	unbound  atomic.Int64 // number of chunks in the pool whose tokens are not known
	nameless atomic.Int64 // number of namespaces that are in no family

	mu struct {
		sync.Mutex
		after    uint64 // number of the last event of the store that was applied
		scanning bool   // after is not valid: the store must be scanned
		scan     uint32 // number of the last scan
		buffer   []store.Event

		tierAfter uint64 // number of the last change of the tiers that was applied
		changes   []tier.Change
		strays    tierOnly

		namespaces map[kv.Namespace]*namespaceState
		tenants    map[tenantKey]*tenant
		bindings   map[kv.Hash]*binding
		announced  map[kv.Hash]tokens // tokens of the announcements that are being applied
		below      ring               // bindings with tokens whose chunks are in no pool; the oldest are removed to make room for tokens
		bytes      int64              // sum of the tokens' bytes

		records  []Record // a ring
		last     uint64   // number of the newest record
		ordered  uint64   // records up to this number no longer move
		news     bool     // records were added since the mutex was locked
		visible  uint64   // number of the last record that readers may see
		deferred bool     // readers see new records only later
		changed  chan struct{}
		n        Counters
	}
}

// Counters has figures since the start.
type Counters struct {
	Records uint64 // records of chunks that became available or were removed
	Unbound uint64 // chunks whose tokens were not stored, because Options.TokenBytes were used up
	Scans   uint64 // scans of the whole store: at the start, and after its events were lost
}

// tokens has the tokens of a chunk and its place in its prompt.
type tokens struct {
	parent kv.Hash
	index  int
	text   []byte // nil: not known
}

// binding is a chunk, identified by its hash alone, of which the pool or a tier has some object.
type binding struct {
	tokens
	hash  kv.Hash
	in    []*holding   // one for each namespace
	whole []wholeChunk // one for each family that has the whole chunk
	pool  int          // number of its objects in the pool

	next, before *binding // neighbours in Book.mu.below; nil outside it
}

// holding has the objects of a chunk in one namespace.
type holding struct {
	binding *binding
	space   *namespaceState
	objects []keptObject
	at      int // index in space.chunks
}

// keptObject is one object of a chunk that the pool or a tier has.
type keptObject struct {
	code uint32 // see codeOf
	scan uint32 // number of the scan that last saw it in the pool
	tier uint8  // see tier.Change; 0: the pool
}

func codeOf(world, rank, group int) uint32 {
	return uint32(world)<<24 | uint32(rank)<<16 | uint32(group)&0xffff
}

// wholeChunk says that a family has all objects of a chunk that a hit needs.
type wholeChunk struct {
	family *family
	in     [media]bool
	chunk  *Chunk // one for all families of a tenant
}

type tenantKey struct {
	model, salt string
	group       int // see Chunk
}

// tenant is a model and a salt and, for rows without tokens, a group.
type tenant struct {
	tenantKey
	families int
}

// namespaceState is one namespace: the chunks of one layout, model and salt.
type namespaceState struct {
	name     kv.Namespace
	chunks   []*holding // in any order
	families []*family
}

// family is the shards that a lookup searches together.
type family struct {
	tenant *tenant
	world  int
	each   []*namespaceState // by rank
	groups []int             // groups that every hit needs
}

// New returns a Book. It does nothing before Activate.
func New(source Source, o Options) *Book {
	b := &Book{source: source, o: o.withDefaults(), start: make(chan struct{})}
	b.queue.arrived = make(chan struct{}, 1)
	b.mu.namespaces, b.mu.tenants = make(map[kv.Namespace]*namespaceState), make(map[tenantKey]*tenant)
	b.mu.bindings, b.mu.announced = make(map[kv.Hash]*binding), make(map[kv.Hash]tokens)
	b.mu.below.init()
	b.mu.changed = make(chan struct{})
	return b
}

// Activate begins to follow the store. A chunk that was stored before has no tokens until a prompt with it comes again.
func (b *Book) Activate() {
	b.once.Do(func() {
		b.source.Watch(b.o.StoreEvents)
		if b.o.Tiers != nil {
			b.o.Tiers.Watch(b.o.StoreEvents)
		}
		b.mu.Lock()
		b.mu.scanning = true
		b.mu.records = make([]Record, b.o.Records)
		b.mu.Unlock()
		b.active.Store(true)
		close(b.start)
	})
}

// Active reports whether there may be readers. While there are none, callers need not announce anything.
func (b *Book) Active() bool { return b.active.Load() }

// HasUnannounced reports whether there are chunks in the pool whose tokens, model or salt are not known. Until Run has looked at the store
// for the first time it reports true, because an earlier server may have left such chunks.
func (b *Book) HasUnannounced() bool {
	return !b.looked.Load() || b.unbound.Load() > 0 || b.nameless.Load() > 0
}

// Run follows the store until ctx ends. While there are events, it looks for more every runPause. After maxQuiet pauses without events it
// waits until an event wakes it: to wake a goroutine for each store would cost a third of the store.
func (b *Book) Run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-b.start:
	}
	var below <-chan struct{}
	if b.o.Tiers != nil {
		below = b.o.Tiers.News()
	}
	pause := time.NewTicker(runPause)
	defer pause.Stop()
	b.catchUp()
	b.looked.Store(true)
	for quiet := maxQuiet; ; quiet++ {
		if quiet >= maxQuiet {
			select {
			case <-ctx.Done():
				return
			case <-b.source.News():
			case <-below:
			case <-b.queue.arrived:
			}
			quiet = -1 // there were events
			pause.Reset(runPause)
		}
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
		news := quiet < 0
		for _, c := range []<-chan struct{}{b.source.News(), below, b.queue.arrived} {
			select {
			case <-c:
				news = true
			default:
			}
		}
		if news {
			b.catchUp()
			quiet = 0
		}
	}
}

const (
	runPause = 100 * time.Millisecond // events wait at most this long for more events
	maxQuiet = 10                     // pauses without events after which Run waits to be woken
)

// catchUp applies the announcements and all events of the store and the tiers; if events were lost, it scans the store first. It wakes
// readers once, unless there are many records.
func (b *Book) catchUp() {
	b.deferReaders(true)
	defer b.deferReaders(false)
	batch := b.queue.take() // first, so that the events of the announced chunks are there already
	b.expect(&batch)
	for more := true; more; {
		var lost bool
		if more, lost = b.applyBatch(); lost {
			b.rescan()
			more = true
		}
	}
	b.learn(&batch)
	b.queue.giveBack(&batch)
}

// deferReaders sets whether readers see new records only once there are many, an eighth of those that the Book keeps. With `on` false they
// see all of them at once again.
func (b *Book) deferReaders(on bool) {
	b.mu.Lock()
	defer b.unlock()
	b.mu.deferred = on
}

// applyBatch applies some events of the tiers and the store. It applies a tier's change of an object before the removal of the object from
// the pool that came later, because the removal alone would forget the object's tokens.
func (b *Book) applyBatch() (more, lost bool) {
	last := b.source.LastEvent()
	b.applyTierChanges()
	b.mu.Lock()
	defer b.unlock()
	if b.mu.scanning {
		return false, true
	}
	return b.applyLocked(last)
}

// eventBatch is how many events are applied under the mutex at a time.
const eventBatch = 1024

// applyLocked applies some events of the store, up to number `last`. more says that some of these are left; lost, that the store has
// dropped some before they were read, so that the pool must be scanned.
func (b *Book) applyLocked(last uint64) (more, lost bool) {
	if b.mu.buffer == nil {
		b.mu.buffer = make([]store.Event, eventBatch)
	}
	limit := min(uint64(eventBatch), max(last, b.mu.after)-b.mu.after)
	n, lost := b.source.Events(b.mu.after, b.mu.buffer[:limit])
	if lost {
		b.mu.scanning = true
		return false, true
	}
	for _, e := range b.mu.buffer[:n] {
		b.setLocked(&e.Key, 0, !e.Removed)
	}
	b.mu.after += uint64(n)
	return b.mu.after < last, false
}

// unlock ends a section that may have added records, and wakes the readers if they are to see them now.
func (b *Book) unlock() {
	var wake chan struct{}
	if b.mu.news {
		b.orderLocked()
		b.mu.news = false
	}
	if n := b.mu.last - b.mu.visible; n > 0 && (!b.mu.deferred || n >= uint64(len(b.mu.records)/8)) {
		b.mu.visible, wake, b.mu.changed = b.mu.last, b.mu.changed, make(chan struct{})
	}
	b.mu.Unlock()
	if wake != nil {
		close(wake)
	}
}

// rescan compares the Book with all resident objects. Changes during the scan are in the store's events after the number that rescan asked
// for first.
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
		b.setLocked(&keys[i], 0, true)
	}
}

func (b *Book) listSpaces() (out []*namespaceState) {
	b.mu.Lock()
	defer b.unlock()
	for _, s := range b.mu.namespaces {
		out = append(out, s)
	}
	return out
}

// forget removes the objects of a namespace that the scan did not see.
func (b *Book) forget(s *namespaceState, scan uint32) {
	b.mu.Lock()
	defer b.unlock()
	b.removeLocked(s, func(o *keptObject) bool { return o.tier == 0 && o.scan != scan })
}

// removeLocked removes the objects of a namespace for which f reports true.
func (b *Book) removeLocked(s *namespaceState, f func(*keptObject) bool) {
	for i := len(s.chunks) - 1; i >= 0; i-- { // a chunk that is removed is replaced by the last one
		h := s.chunks[i]
		changed := false
		for j := len(h.objects) - 1; j >= 0; j-- {
			if f(&h.objects[j]) {
				b.takeLocked(h, j)
				changed = true
			}
		}
		if changed {
			b.changedLocked(h)
		}
	}
}

// orderLocked sorts the records that were added since the last call, so that chunks come after those before them in a prompt, because a
// store commits tails first. It moves no record past a removal.
func (b *Book) orderLocked() {
	size := uint64(len(b.mu.records))
	at := func(seq uint64) *Record { return &b.mu.records[seq%size] }
	first := max(b.mu.ordered, b.mu.last-min(b.mu.last, size)) + 1
	b.mu.ordered = b.mu.last
	for first <= b.mu.last {
		end, sorted := first, true // of a run of records without a removal
		for ; end <= b.mu.last && !at(end).Removed; end++ {
			sorted = sorted && (end == first || at(end-1).Index <= at(end).Index)
		}
		if !sorted {
			run := make([]Record, 0, end-first)
			for seq := first; seq < end; seq++ {
				run = append(run, *at(seq))
			}
			slices.SortStableFunc(run, func(x, y Record) int { return cmp.Compare(x.Index, y.Index) })
			for i := range run {
				run[i].Seq = first + uint64(i)
				*at(run[i].Seq) = run[i]
			}
		}
		first = end + 1
	}
}

func (b *Book) recordLocked(r Record) {
	b.mu.last++
	b.mu.n.Records++
	r.Seq = b.mu.last
	b.mu.records[r.Seq%uint64(len(b.mu.records))] = r
	b.mu.news = true
}
