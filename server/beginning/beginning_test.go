// SPDX-License-Identifier: Apache-2.0

package beginning_test

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/beginning"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
)

const chunk = 16 // tokens

// node stores every prompt that it looks up, and never drops a chunk.
type node struct {
	t      testing.TB
	f      *beginning.Finder
	memo   *lmcache.Memo
	stored map[kv.Key]bool
	packed bool
	missed int // tokens
}

func newNode(t testing.TB) *node {
	return &node{t: t, f: beginning.New(), memo: lmcache.NewMemo(chunk, 1<<20), stored: map[kv.Key]bool{}}
}

// text returns a prompt as a lookup brings it.
func (n *node) text(tokens []uint32) lookup.Text {
	n.t.Helper()
	k := new(lmcache.KeyView)
	key := lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens, End: len(tokens), RequestID: "r", Readers: 1, Packed: n.packed}
	if err := n.memo.DecodeKey(key.Append(nil), k); err != nil {
		n.t.Fatal(err)
	}
	return lookup.Text{Memo: n.memo, Key: k}
}

// ask looks a prompt up in a namespace.
func (n *node) ask(ns byte, tokens []uint32) lookup.Outcome {
	n.t.Helper()
	text := n.text(tokens)
	o := lookup.Outcome{Searched: true, ChunkTokens: chunk, Text: text}
	o.LookupResult = store.LookupResult{State: store.Ready, Asked: text.Key.Chunks, Tokens: chunk, Namespace: kv.Namespace{ns}}
	hashes := text.Hashes(text.Key.Chunks)
	for o.Hit < o.Asked && n.stored[kv.Key{Namespace: o.Namespace, Chunk: hashes[o.Hit]}] {
		o.Hit++
	}
	if o.Hit < o.Asked {
		o.Why = miss.NeverStored
	}
	return o
}

func (n *node) store(o *lookup.Outcome) {
	for _, h := range o.Text.Hashes(o.Asked) {
		n.stored[kv.Key{Namespace: o.Namespace, Chunk: h}] = true
	}
}

// request looks a prompt up and stores it.
func (n *node) request(ns byte, tokens []uint32) {
	n.t.Helper()
	o := n.ask(ns, tokens)
	n.missed += (o.Asked - o.Hit) * chunk
	n.f.Lookup(&o)
	n.store(&o)
}

// texts returns random tokens.
func texts(r *rand.Rand, tokens int) []uint32 {
	out := make([]uint32, tokens)
	for i := range out {
		out[i] = r.Uint32N(150_000)
	}
	return out
}

func join(parts ...[]uint32) []uint32 { return slices.Concat(parts...) }

// Text behind a beginning that changes is found, whatever changes and however long that is.
func TestChangingBeginningsAreFound(t *testing.T) {
	f := func(name string, packed bool, share, differ float64, prompts func(r *rand.Rand, i int) []uint32) {
		t.Helper()
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 1))
		n := newNode(t)
		n.packed = packed
		for i := range 30 {
			n.request(1, prompts(r, i))
		}
		got := n.f.Found()
		if is := float64(got.LostTokens) / float64(n.missed); is < share-0.1 || is > share+0.04 {
			t.Errorf("%s: %.2f of what missed is lost, want %.2f: %+v; seed %d", name, is, share, got, seed)
		}
		// Up to the first anchor, one in 32 tokens. Of the first tokens of a window few bits count: the first one by 4 bits, the second one by 8.
		// So a window that begins one or two tokens before the common text may count as common.
		if d := float64(got.DifferTokens); d < differ-2 || d > differ+250 {
			t.Errorf("%s: %v tokens differ, want %v: %+v; seed %d", name, d, differ, got, seed)
		}
	}
	fixed := rand.New(rand.NewPCG(1, 2))
	body, system := texts(fixed, 3000), texts(fixed, 640)
	for _, packed := range []bool{false, true} {
		f("a date", packed, 29./30*3000/3106, 6, func(r *rand.Rand, _ int) []uint32 { return join(texts(r, 6), body, texts(r, 100)) })
	}
	f("some chunks of unlike lengths", false, 29./30*3000/3900, 780, func(r *rand.Rand, _ int) []uint32 { return join(texts(r, 780+r.IntN(40)), body, texts(r, 100)) })
	f("a date behind what is found", false, 27./30*3000/3016, 10, func(r *rand.Rand, _ int) []uint32 { return join(system, texts(r, 10), body) })
	f("two bodies", false, 28./30*3000/3106, 6, func(r *rand.Rand, i int) []uint32 {
		return join(texts(r, 6), [][]uint32{body, body[1500:]}[i%2], [][]uint32{nil, system, system}[i%2], texts(r, 100))
	})
	f("more than is compared", false, 29./30*30000/30006, 6, func() func(r *rand.Rand, _ int) []uint32 {
		long := texts(fixed, 30000)
		return func(r *rand.Rand, _ int) []uint32 { return join(texts(r, 6), long) }
	}())
}

// Prompts of which nothing is lost to their beginnings.
func TestNoFalseAlarms(t *testing.T) {
	f := func(name string, play func(n *node, r *rand.Rand)) {
		t.Helper()
		seed := rand.Uint64()
		n := newNode(t)
		play(n, rand.New(rand.NewPCG(seed, 1)))
		if got := n.f.Found(); got.Changed != 0 || got.LostTokens != 0 || got.Compared == 0 {
			t.Errorf("%s: %+v; seed %d", name, got, seed)
		}
	}
	f("conversations", func(n *node, r *rand.Rand) {
		system := texts(r, 500)
		for range 6 {
			talk := slices.Clone(system)
			for range 8 {
				talk = append(talk, texts(r, 50+r.IntN(400))...)
				n.request(1, talk)
				talk = append(talk, texts(r, 50+r.IntN(400))...) // the answer
			}
		}
	})
	f("unlike prompts", func(n *node, r *rand.Rand) {
		for range 20 {
			n.request(1, texts(r, 2000))
		}
	})
	f("one closing text", func(n *node, r *rand.Rand) {
		closing := texts(r, 600)
		for range 20 {
			n.request(1, join(texts(r, 1500), closing))
		}
	})
	f("a short common text", func(n *node, r *rand.Rand) {
		common := texts(r, 200)
		for range 20 {
			n.request(1, join(texts(r, 10), common, texts(r, 40)))
		}
	})
	f("one text deep in unlike conversations", func(n *node, r *rand.Rand) {
		file := texts(r, 1000)
		for range 10 {
			talk := texts(r, 2000+r.IntN(500))
			n.request(1, talk)
			n.request(1, join(talk, texts(r, 20), file))
		}
	})
	f("one prompt many times at once", func(n *node, r *rand.Rand) {
		prompt := texts(r, 2000)
		for range 5 {
			o := n.ask(1, prompt) // nothing of it is stored yet
			n.f.Lookup(&o)
		}
	})
	f("one prompt that goes on in many ways, within a chunk", func(n *node, r *rand.Rand) {
		prompt := texts(r, 2000)
		n.request(1, prompt)
		for range 5 {
			n.request(1, join(prompt, texts(r, 900)))
		}
	})
	f("prompts of which no chunk was stored, and longer ones later", func(n *node, r *rand.Rand) {
		prompt := texts(r, 3000)
		for tokens := 1000; tokens <= len(prompt); tokens += 500 {
			o := n.ask(1, prompt[:tokens])
			n.f.Lookup(&o)
		}
	})
	f("two tenants", func(n *node, r *rand.Rand) {
		body := texts(r, 3000)
		for ns := range byte(10) {
			n.request(ns, join(texts(r, 6), body))
		}
	})
	f("text that repeats itself", func(n *node, r *rand.Rand) {
		for i := range uint32(10) {
			n.request(1, slices.Repeat([]uint32{7 + i}, 3000))
			n.request(1, slices.Repeat(texts(r, 40), 80))
		}
	})
}

// A sample says what all lost: of prompts of several lengths, some of which begin with a date.
func TestTheSampleStandsForAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 1))
		n := newNode(t)
		bodies := make([][]uint32, 5)
		for i := range bodies {
			bodies[i] = texts(r, 500+250*i)
		}
		lost := 0
		const prompts = 8_000
		for range prompts {
			if r.IntN(3) == 0 {
				body := bodies[r.IntN(len(bodies))]
				lost += len(body)
				n.request(1, join(texts(r, 6), body, texts(r, 100)))
			} else {
				n.request(1, texts(r, 64+r.IntN(1500)))
			}
			clear(n.stored) // an endless memory has no part in this
			time.Sleep(5 * time.Millisecond)
		}
		got := n.f.Found()
		if off := float64(got.LostTokens)/float64(lost) - 1; math.Abs(off) > 0.35 || got.Compared > prompts/3 || got.Compared < 100 {
			t.Errorf("%.2f of the lost tokens are missing or too many, from %d of %d prompts; seed %d", off, got.Compared, prompts, seed)
		}
		t.Logf("%+v of %d lost", got, lost)
	})
}

// A lookup that was pending was compared when it began. What hit in the end is not lost.
func TestPendingLookups(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	body := texts(r, 80*chunk)
	n := newNode(t)
	var got *lookup.Repeated
	ask := func(why miss.Reason, hit int) beginning.Found {
		t.Helper()
		o := n.ask(1, join(texts(r, 4*chunk), body))
		got = n.f.Compare(o.Namespace, o.Text, o.Hit, o.Asked)
		if got == nil {
			t.Fatal("it is not in the sample")
		}
		n.f.Lookup(&lookup.Outcome{Searched: true, ChunkTokens: chunk, Repeated: got, LookupResult: store.LookupResult{Asked: o.Asked, Hit: hit, Why: why, Waited: true, Namespace: o.Namespace}})
		return n.f.Found()
	}
	if f := ask(miss.NeverStored, 0); got.Tokens != 0 || f.Compared != 1 || f.Changed != 0 {
		t.Errorf("the first one: %+v, %+v", got, f)
	}
	if f := ask(miss.BelowSlow, 0); got.Tokens < 1000 || f.Compared != 1 {
		t.Errorf("one that misses for another reason: %+v, %+v", got, f)
	}
	f := ask(miss.NeverStored, 0)
	if f.Changed != 1 || f.LostTokens < 1000 || f.LostTokens > uint64(len(body)+4*chunk) {
		t.Errorf("%+v, %+v", got, f)
	}
	if g := ask(miss.NeverStored, 60); g.Changed != 2 || g.LostTokens-f.LostTokens > 24*chunk {
		t.Errorf("most of it hit: %+v, %+v after %+v", got, g, f)
	}
	if g := ask(miss.None, 84); g.Compared != 3 {
		t.Errorf("all of it hit: %+v", g)
	}
}

// Of lookups that bring hashes alone nothing is known. Lookups that ended for other reasons do not count.
func TestWhatIsNotCompared(t *testing.T) {
	n := newNode(t)
	r := rand.New(rand.NewPCG(5, 6))
	o := n.ask(1, texts(r, 10*chunk))
	o.HashesOnly = true
	n.f.Lookup(&o)
	if got := n.f.Found(); got.UnknownTokens != 10*chunk || got.Compared != 0 {
		t.Errorf("%+v", got)
	}
	o.HashesOnly, o.Text = false, lookup.Text{}
	n.f.Lookup(&o)
	o = n.ask(1, texts(r, 10*chunk))
	o.Others = []kv.Key{{}}
	n.f.Lookup(&o)
	o.Others, o.Why = nil, miss.Evicted
	n.f.Lookup(&o)
	o.Why, o.Searched = miss.NeverStored, false
	n.f.Lookup(&o)
	if got := n.f.Found(); got.UnknownTokens != 10*chunk || got.Compared != 0 {
		t.Errorf("%+v", got)
	}
}

// However many prompts come, at once, what is kept stays within a mebibyte, and comparing within its budget.
func TestBounds(t *testing.T) {
	n := newNode(t)
	r := rand.New(rand.NewPCG(7, 8))
	var list []lookup.Outcome
	for range 64 {
		list = append(list, n.ask(1, texts(r, 9000)))
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	began := time.Now()
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for k := range 500 {
				o := list[(i*16+k)%len(list)]
				o.Text = lookup.Text{Memo: o.Text.Memo, Key: &lmcache.KeyView{}}
				*o.Text.Key = *list[(i*16+k)%len(list)].Text.Key
				n.f.Lookup(&o)
			}
		})
	}
	all.Wait()
	for range 3 { // the buffers of a sync.Pool go with the second collection
		runtime.GC()
	}
	runtime.ReadMemStats(&after)
	if got := int64(after.HeapAlloc) - int64(before.HeapAlloc); got > 1<<20 || got < 1<<19 {
		t.Errorf("%d bytes are kept", got)
	}
	// 64 Ki tokens at the start and 8,192 a second; so many has a prompt.
	if got, most := n.f.Found().Compared, 8+uint64(time.Since(began).Seconds())+1; got < 8 || got > most {
		t.Errorf("%d prompts were compared, want 8 to %d", got, most)
	}
	runtime.KeepAlive(list)
}

// A lookup of 16 chunks of 256 tokens that finds nothing, with its share of the comparisons.
func BenchmarkLookup(b *testing.B) {
	f := beginning.New()
	memo := lmcache.NewMemo(256, 64<<20)
	r := rand.New(rand.NewPCG(1, 2))
	var list []lookup.Outcome
	for range 256 {
		k := new(lmcache.KeyView)
		if err := memo.DecodeKey((&lmcache.Key{Model: "m", WorldSize: 1, Tokens: texts(r, 4096), End: 4096, RequestID: "r", Readers: 1}).Append(nil), k); err != nil {
			b.Fatal(err)
		}
		list = append(list, lookup.Outcome{
			Searched: true, ChunkTokens: 256, Text: lookup.Text{Memo: memo, Key: k},
			LookupResult: store.LookupResult{Asked: 16, Tokens: 256, Why: miss.NeverStored},
		})
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		f.Lookup(&list[i%len(list)])
		i++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/16, "ns/chunk")
	b.ReportMetric(float64(f.Found().Compared)/float64(b.N), "compared/op")
}

// One comparison of 8,192 tokens.
func BenchmarkCompare(b *testing.B) {
	memo := lmcache.NewMemo(256, 64<<20)
	r := rand.New(rand.NewPCG(1, 2))
	k := new(lmcache.KeyView)
	if err := memo.DecodeKey((&lmcache.Key{Model: "m", WorldSize: 1, Tokens: texts(r, 8192), End: 8192, RequestID: "r", Readers: 1}).Append(nil), k); err != nil {
		b.Fatal(err)
	}
	text := lookup.Text{Memo: memo, Key: k}
	var took time.Duration
	for b.Loop() {
		f := beginning.New()
		for i := range 8 {
			began := time.Now()
			if f.Compare(kv.Namespace{1}, text, 0, 32) == nil {
				b.Fatal("not in the sample")
			}
			if i > 0 { // the first one takes the memory
				took += time.Since(began)
			}
		}
	}
	b.ReportMetric(float64(took.Nanoseconds())/float64(b.N)/7/8192, "ns/token")
}
