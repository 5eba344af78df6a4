// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const chunkTokens = 4

// node is a store with its Book. Nothing runs in the background: a test applies what happened when it wants to.
type node struct {
	t     testing.TB
	pool  pool.Options
	o     Options
	store *store.Store
	book  *Book
	last  int64 // request

	places []tier.Tier // below the pool, each recorded as number 1 and so on
	noted  []tier.Tier // the same as the store has them
	ended  chan struct{}
	end    context.CancelFunc
}

func newNode(t testing.TB, chunks int64, o Options) *node {
	t.Helper()
	n := &node{t: t, o: o, pool: pool.Options{Name: "kvasir_events", Bytes: chunks * 4096, Dir: t.TempDir(), ChunkTokens: chunkTokens}}
	n.open()
	t.Cleanup(func() { _ = n.store.Close() })
	return n
}

func (n *node) open() {
	n.t.Helper()
	p, err := pool.Open(n.pool)
	if err != nil {
		n.t.Fatal(err)
	}
	so := store.Options{}
	if len(n.places) > 0 {
		n.o.Tiers, n.noted = tier.NewChanges(), nil
		for i, place := range n.places {
			n.noted = append(n.noted, tier.Recorded(kept{place}, n.o.Tiers, uint8(i+1)))
		}
		so.WorkerShare, so.PeerShare = 1, 1
		so.Below = tier.Cascade(tier.CascadeOptions{}, n.noted...)
	}
	n.store = store.New(p, so)
	n.book = New(n.store, n.o)
	n.book.Activate()
	if len(n.places) > 0 {
		var ctx context.Context
		ctx, n.end = context.WithCancel(context.Background())
		n.ended = make(chan struct{})
		go func() { n.store.Run(ctx); close(n.ended) }()
	}
}

// kept is a place that outlives the store's.
type kept struct{ tier.Tier }

func (kept) Close() error { return nil }

// stop ends the store.
func (n *node) stop() {
	n.t.Helper()
	if n.end != nil {
		n.end()
		<-n.ended
		n.end = nil
	}
	if err := n.store.Close(); err != nil {
		n.t.Error(err)
	}
}

// restart has another process take the pool over.
func (n *node) restart() {
	n.t.Helper()
	n.stop()
	n.open()
}

// prompt is tokens of one tenant, and who computes them.
type prompt struct {
	model, salt string
	world       int
	each        bool // ranks have unlike layouts
	tokens      []uint32
}

func (p prompt) shard(index int) object.Shard {
	layout := fmt.Sprint("layout of ", p.world)
	if p.each {
		layout = fmt.Sprint("layout of rank ", index)
	}
	return object.Shard{Namespace: kv.NamespaceOf(p.model, p.salt, layout), World: p.world, Index: index, Groups: object.FullAttention(chunkTokens, 4096)}
}

// all is the shard that a lookup asks for.
func (p prompt) all() object.Shard {
	sh := p.shard(0)
	if p.each {
		var each object.Layouts
		for i := range p.world {
			each = append(each, object.Layout{Namespace: p.shard(i).Namespace, Groups: sh.Groups})
		}
		sh.Each = &each
	}
	return sh
}

func (p prompt) hashes() []kv.Hash { return kv.ChunkHashes(p.tokens, chunkTokens) }

// encoded returns the tokens of chunk i.
func (p prompt) encoded(i int) []byte {
	var tokens []int64
	for _, t := range p.tokens[i*chunkTokens : (i+1)*chunkTokens] {
		tokens = append(tokens, int64(t))
	}
	return event.AppendTokens(nil, tokens)
}

// text is the tokens of all chunks, as a server has them.
func (p prompt) text() *Text {
	x := &Text{Head: p.encoded(0)[:1]}
	for i := range p.hashes() {
		x.Tokens = append(x.Tokens, p.encoded(i)[1:]...)
		x.Ends = append(x.Ends, len(x.Tokens))
	}
	return x
}

// announce announces to the Book, as a server does, a prompt whose chunks from number from on were stored.
func (n *node) announce(p prompt, sh object.Shard, from int) {
	n.book.Announce([]byte(p.model), []byte(p.salt), &sh, p.hashes(), from, p.text())
}

// storeRank has one rank store a prompt.
func (n *node) storeRank(p prompt, rank int) {
	n.t.Helper()
	if sh := p.shard(rank); n.storeQuietly(p, rank) {
		n.announce(p, sh, 0)
	}
}

// storeQuietly stores what nobody announces. It reports whether something was stored.
func (n *node) storeQuietly(p prompt, rank int) bool {
	n.t.Helper()
	hashes, sh := p.hashes(), p.shard(rank)
	n.last++
	request := fmt.Append(nil, n.last)
	name := hold.Transfer{Instance: int64(1 + rank), Shard: sh, To: len(hashes), Last: hashes[len(hashes)-1]}
	var place store.Transfer
	if _, err := n.store.BeginStore(name, request, hashes, &place); err != nil {
		n.t.Fatal(err)
	}
	if len(place.Offsets) == 0 {
		return false
	}
	return n.store.CommitStore(name, request, hashes, true).Chunks > 0
}

func (n *node) storeAll(p prompt) {
	n.t.Helper()
	for rank := range p.world {
		n.storeRank(p, rank)
	}
}

// lookup has a scheduler look a prompt up.
func (n *node) lookup(p prompt) {
	n.last++
	request := fmt.Append(nil, n.last)
	n.store.Lookup(request, p.all(), store.Hashed(p.hashes()), 1)
	n.store.EndSession(request, lease.Owner{})
	if n.book.HasUnannounced() || p.each {
		n.announce(p, p.all(), len(p.hashes()))
	}
}

// settle has the Book know all that happened, and what its scans found by the prompts' lookups.
func (n *node) settle(prompts []prompt) {
	n.book.catchUp()
	for _, p := range prompts {
		n.lookup(p)
	}
	n.book.catchUp()
}

// id is a chunk in a medium as routers tell them apart.
type id struct {
	model, salt string
	hash        kv.Hash
	medium      Medium
}

// truth is what a lookup of these prompts could hit, chunk by chunk.
func (n *node) truth(prompts []prompt) map[id]bool {
	out := n.truthOf(prompts, InPool, n.resident())
	maps.Copy(out, n.truthOf(prompts, Below, n.inTiers(prompts)))
	return out
}

func (n *node) resident() map[kv.Key]bool {
	resident := map[kv.Key]bool{}
	for next, more := 0, true; more; {
		var keys []kv.Key
		keys, next, more = n.store.Residents(next, nil)
		for _, k := range keys {
			resident[k] = true
		}
	}
	return resident
}

// inTiers asks the places themselves.
func (n *node) inTiers(prompts []prompt) map[kv.Key]bool {
	there := map[kv.Key]bool{}
	for _, place := range n.places {
		for _, p := range prompts {
			keys := p.keys()
			metas := make([]tier.Meta, len(keys))
			if err := place.Stat(n.t.Context(), keys, metas); err != nil {
				n.t.Fatal(err)
			}
			for i, k := range keys {
				there[k] = there[k] || metas[i].Len > 0
			}
		}
	}
	return there
}

// keys are those of all shards of all chunks.
func (p prompt) keys() (out []kv.Key) {
	sh := p.all()
	for _, h := range p.hashes() {
		for rank := range p.world {
			var k kv.Key
			sh.Key(&k, rank, 0, h)
			out = append(out, k)
		}
	}
	return out
}

func (n *node) truthOf(prompts []prompt, m Medium, there map[kv.Key]bool) map[id]bool {
	out := map[id]bool{}
	for _, p := range prompts {
		sh := p.all()
		for _, h := range p.hashes() {
			whole := true
			for rank := range p.world {
				var k kv.Key
				sh.Key(&k, rank, 0, h)
				whole = whole && there[k]
			}
			if whole {
				out[id{p.model, p.salt, h, m}] = true
			}
		}
	}
	return out
}

// reader follows a Book's records as a router does.
type reader struct {
	t       testing.TB
	book    *Book
	cursor  uint64
	has     map[id]bool
	ofModel map[id]bool // by readers that do not know salts
	lost    int
}

func (n *node) reader() *reader {
	r := &reader{t: n.t, book: n.book}
	r.resync()
	return r
}

func (r *reader) resync() {
	r.has, r.ofModel = map[id]bool{}, map[id]bool{}
	chunks, last := r.book.Everything()
	pooled, pooledOnce := 0, map[id]bool{}
	for i, c := range chunks {
		if i > 0 && chunks[i-1].Model == c.Model && chunks[i-1].Medium == c.Medium && chunks[i-1].Index > c.Index {
			r.t.Fatal("a chunk stands before those it follows")
		}
		if r.has[id{c.Model, c.Salt, c.Hash, c.Medium}] {
			r.t.Fatalf("%+v is there twice", c)
		}
		r.has[id{c.Model, c.Salt, c.Hash, c.Medium}] = true
		r.ofModel[id{c.Model, "", c.Hash, c.Medium}] = true
		if c.Medium == InPool {
			pooled++
			pooledOnce[id{c.Model, "", c.Hash, InPool}] = true
		}
	}
	if all, _ := r.book.Snapshot("", false); len(all) != pooled {
		r.t.Fatalf("%d chunks in the pool, want %d", len(all), pooled)
	}
	if once, _ := r.book.Snapshot("", true); len(once) != len(pooledOnce) {
		r.t.Fatalf("%d chunks, by model %d", len(once), len(pooledOnce))
	}
	r.cursor = last
}

// follow reads up to limit records.
func (r *reader) follow(limit int) {
	records, next, lost := r.book.Read(r.cursor, limit, nil, nil)
	if lost {
		r.lost++
		r.resync()
		return
	}
	for _, rec := range records {
		if rec.Seq != r.cursor+1 {
			r.t.Fatalf("record %d after %d", rec.Seq, r.cursor)
		}
		r.cursor = rec.Seq
		set := func(of map[id]bool, k id) {
			if of[k] == !rec.Removed {
				r.t.Fatalf("removed %v twice, or without the other: %v", rec.Removed, k)
			}
			if of[k] = true; rec.Removed {
				delete(of, k)
			}
		}
		set(r.has, id{rec.Model, rec.Salt, rec.Hash, rec.Medium})
		if rec.OfModel {
			set(r.ofModel, id{rec.Model, "", rec.Hash, rec.Medium})
		}
	}
	if next != r.cursor {
		r.t.Fatalf("next is %d, the last record %d", next, r.cursor)
	}
}

func (r *reader) followAll() {
	for r.cursor != r.book.Last() {
		r.follow(1 << 20)
	}
}

func (r *reader) wantAll(want map[id]bool) {
	r.t.Helper()
	r.followAll()
	if !maps.Equal(r.has, want) {
		for k := range want {
			if !r.has[k] {
				r.t.Logf("missing %v", k)
			}
		}
		for k := range r.has {
			if !want[k] {
				r.t.Logf("gone %v", k)
			}
		}
		r.t.Fatalf("the reader has %d chunks, the store %d: %+v", len(r.has), len(want), r.book.Stats())
	}
	models := map[id]bool{}
	for k := range want {
		models[id{k.model, "", k.hash, k.medium}] = true
	}
	if !maps.Equal(r.ofModel, models) {
		r.t.Fatalf("a reader without salts has %d chunks, the store %d", len(r.ofModel), len(models))
	}
}

// Over random stores, evictions, clears and restarts, with rings that overrun and
// readers at any speed, each reader's view becomes what the store has.
func TestReadersSeeWhatTheStoreHas(t *testing.T) {
	seed := rand.Uint64()
	for round := range max(8, testkit.Volume(30)) {
		rnd := rand.New(rand.NewPCG(seed, uint64(round)))
		t.Logf("seed %d, round %d", seed, round)
		o := Options{StoreEvents: 1 << (2 + rnd.IntN(8)), Records: 1 + rnd.IntN(200)}
		n := newNode(t, int64(8+rnd.IntN(60)), o)
		var prompts []prompt
		for range 12 {
			p := prompt{model: fmt.Sprint("m", rnd.IntN(2)), salt: []string{"", "a", "b"}[rnd.IntN(3)], world: 1 + rnd.IntN(2)}
			p.each = p.world > 1 && rnd.IntN(2) == 0
			for range chunkTokens * (1 + rnd.IntN(6)) {
				p.tokens = append(p.tokens, uint32(rnd.IntN(2))*70000)
			}
			prompts = append(prompts, p)
		}
		quick, slow := n.reader(), n.reader()
		for range 150 {
			p := prompts[rnd.IntN(len(prompts))]
			switch rnd.IntN(12) {
			case 0:
				n.store.Clear(rnd.IntN(2) == 0)
			case 1:
				n.restart()
				n.storeAll(p) // before the first scan
				n.book.catchUp()
				for _, p := range prompts {
					n.lookup(p)
				}
				quick, slow = n.reader(), n.reader() // its connection was lost
			case 2:
				n.lookup(p)
			case 3:
				n.storeRank(p, rnd.IntN(p.world))
				n.lookup(p)
			default:
				n.storeAll(p)
				n.lookup(p)
			}
			slow.follow(1 + rnd.IntN(3))
			if rnd.IntN(3) > 0 {
				continue // the Book lags behind
			}
			n.settle(prompts)
			quick.wantAll(n.truth(prompts))
		}
		n.settle(prompts)
		slow.wantAll(n.truth(prompts))
	}
}

// Chunks are announced after their parents, also for a tenant that has the prompt of another one: there the tenant of the chunks is known
// only when all are stored.
func TestChunksAreAnnouncedAfterTheirParents(t *testing.T) {
	n := newNode(t, 256, Options{})
	tokens := make([]uint32, 40*chunkTokens)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	for i, salt := range []string{"", "a", "b", "", "a", "b"} { // the second time their tenants are known, and for some their tokens
		if i == 3 {
			tokens = slices.Clone(tokens)
			tokens[0]++
		}
		p := prompt{model: "m", salt: salt, world: 1, tokens: tokens}
		from := n.book.Last()
		n.storeAll(p)
		n.settle([]prompt{p})
		records, _, lost := n.book.Read(from, 1000, nil, nil)
		if lost || len(records) != 40 {
			t.Fatalf("salt %q: %d records, lost %v", salt, len(records), lost)
		}
		for i, rec := range records {
			if rec.Index != i || rec.Salt != salt {
				t.Errorf("salt %q: record %d is of chunk %d of salt %q", salt, i, rec.Index, rec.Salt)
			}
		}
	}
}

// Chunks whose tokens find no memory are not announced; others are, and those too once there is room.
func TestTokenMemoryIsBounded(t *testing.T) {
	a := prompt{model: "m", world: 1, tokens: make([]uint32, 3*chunkTokens)}
	b := prompt{model: "m", world: 1, tokens: append(make([]uint32, 3*chunkTokens-1), 1, 2, 3, 4, 5)}
	each := len(a.encoded(0))
	n := newNode(t, 64, Options{TokenBytes: int64(4 * each)})
	n.book.catchUp()
	n.storeAll(a)
	n.storeAll(b) // shares two chunks and has two of its own
	n.book.catchUp()
	if s := n.book.Stats(); s.Bytes != int64(4*each) || s.Unbound != 1 || len(n.reader().has) != 4 {
		t.Errorf("%+v", s)
	}
	n.store.Clear(false)
	n.storeAll(b)
	n.book.catchUp()
	r := n.reader()
	r.wantAll(n.truth([]prompt{b}))
	if s := n.book.Stats(); s.Bytes != int64(4*each) || len(r.has) != 4 {
		t.Errorf("%+v", s)
	}
}
