// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/tier"
)

// newTiered is a node with two places below its pool.
func newTiered(t testing.TB, chunks int64, o Options) *node {
	t.Helper()
	n := &node{t: t, o: o, places: []tier.Tier{tier.NewMemory(1 << 30), tier.NewMemory(1 << 30)}}
	n.pool.Name, n.pool.Bytes, n.pool.Dir, n.pool.ChunkTokens = "kvasir_events", chunks*4096, t.TempDir(), chunkTokens
	n.open()
	n.book.catchUp() // what comes and goes before the first scan is not known
	return n
}

// fetch has a scheduler look a prompt up and wait for the tiers.
func (n *node) fetch(p prompt) {
	n.last++
	request := fmt.Append(nil, n.last)
	n.store.Lookup(request, p.all(), store.Hashed(p.hashes()), 1)
	n.announce(p, p.all(), len(p.hashes()))
	time.Sleep(10 * time.Second)
	n.store.EndSession(request, lease.Owner{})
	synctest.Wait()
}

// settleTiers has the Book know all that happened; what was loaded into an empty space is named by the next lookup.
func (n *node) settleTiers(prompts []prompt) {
	time.Sleep(time.Minute)
	synctest.Wait()
	n.book.catchUp()
	for _, p := range prompts {
		n.announce(p, p.all(), len(p.hashes()))
		n.book.catchUp()
	}
}

// some are some objects of a prompt.
func (p prompt) some(rnd *rand.Rand) (out []kv.Key) {
	for _, k := range p.keys() {
		if rnd.IntN(2) == 0 {
			out = append(out, k)
		}
	}
	return out
}

// Over random stores, evictions, writes to two tiers, evictions there, loads, and what others delete there once somebody asks, a
// reader's view becomes what the pool and the tiers have, each medium apart, by records and by snapshots.
func TestReadersSeeWhatTiersHave(t *testing.T) {
	seed := rand.Uint64()
	for round := range 8 {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, uint64(round)))
			t.Logf("seed %d, round %d", seed, round)
			n := newTiered(t, int64(6+rnd.IntN(30)), Options{StoreEvents: 1 << 14, Records: 1 + rnd.IntN(200)})
			defer n.stop()
			prompts := randomPrompts(rnd)
			quick, slow := n.reader(), n.reader()
			belowOnly := 0
			for range 120 {
				p, step := prompts[rnd.IntN(len(prompts))], rnd.IntN(10)
				if step == 2 || step == 3 {
					synctest.Wait() // what is written while it is deleted counts as gone, whichever comes first
				}
				switch step {
				case 0:
					n.store.Clear(rnd.IntN(2) == 0)
				case 1:
					n.fetch(p)
				case 2: // as a disk evicts
					if err := n.noted[rnd.IntN(2)].Delete(t.Context(), p.some(rnd)); err != nil {
						t.Fatal(err)
					}
				case 3: // somebody else deletes, and a lookup asks
					i := rnd.IntN(2)
					if err := n.places[i].Delete(t.Context(), p.some(rnd)); err != nil {
						t.Fatal(err)
					}
					keys := p.keys()
					if err := n.noted[i].Stat(t.Context(), keys, make([]tier.Meta, len(keys))); err != nil {
						t.Fatal(err)
					}
				default:
					n.storeAll(p)
				}
				if rnd.IntN(3) == 0 {
					time.Sleep(10 * time.Second) // what is to be written is
					synctest.Wait()
				}
				slow.follow(1 + rnd.IntN(3))
				if rnd.IntN(3) > 0 {
					continue
				}
				n.settleTiers(prompts)
				want := n.truth(prompts)
				quick.wantAll(want)
				n.reader().wantAll(want)
				for k := range want {
					k.medium = InPool
					if !want[k] {
						belowOnly++
					}
				}
			}
			n.settleTiers(prompts)
			slow.wantAll(n.truth(prompts))
			if belowOnly == 0 {
				t.Error("nothing was ever in a tier alone")
			}
		})
	}
}

// What an earlier server left in tiers is announced once lookups have found it; nothing is before, and what only tiers have goes
// first where tokens find no room.
func TestTiersOfAnEarlierLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTiered(t, 8, Options{})
		defer func() { n.stop() }()
		prompts := make([]prompt, 4) // four chunks each
		for i := range prompts {
			prompts[i] = prompt{model: "m", world: 1, tokens: make([]uint32, 4*chunkTokens)}
			for j := range prompts[i].tokens {
				prompts[i].tokens[j] = uint32(20*i + j)
			}
		}
		each := len(prompts[0].encoded(0))
		settle := func() { // each alone, so that it is in the pool when its tokens are told
			t.Helper()
			for _, p := range prompts {
				n.fetch(p)
				n.book.catchUp()
				n.fetch(p)
				n.book.catchUp()
			}
		}
		for _, p := range prompts {
			n.storeAll(p)
			time.Sleep(time.Minute)
			synctest.Wait()
			n.book.catchUp()
		}
		r := n.reader()
		r.wantAll(n.truth(prompts))
		if len(r.has) != 16+8 {
			t.Fatalf("%d chunks, want 16 in tiers and 8 in the pool", len(r.has))
		}
		n.restart()
		n.book.catchUp()
		if got := n.reader(); len(got.has) != 0 {
			t.Errorf("%d chunks are announced whose tokens nobody told", len(got.has))
		}
		settle()
		n.reader().wantAll(n.truth(prompts))

		n.o.TokenBytes = int64(10 * each) // eight in the pool, and two more
		n.restart()
		n.book.catchUp()
		settle()
		r = n.reader()
		want, below := n.truth(prompts), 0
		for k := range r.has {
			if !want[k] {
				t.Errorf("%v is announced and is not there", k)
			}
		}
		for k := range want {
			if k.medium == InPool && !r.has[k] {
				t.Errorf("%v is in the pool and not announced", k)
			}
			if k.medium == Below && r.has[k] {
				below++
			}
		}
		if s := n.book.Stats(); below != 10 || s.Bytes != int64(10*each) || s.Unbound != 0 {
			t.Errorf("%d chunks of tiers are announced, want 10: %+v", below, s)
		}
	})
}

// Where changes of the tiers were lost, nothing is said to be in a tier until it is seen there again.
func TestLostChangesOfTiers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTiered(t, 64, Options{StoreEvents: 64})
		defer n.stop()
		p := prompt{model: "m", world: 1, tokens: make([]uint32, 4*chunkTokens)}
		n.storeAll(p)
		time.Sleep(time.Minute)
		synctest.Wait()
		n.book.catchUp()
		r := n.reader()
		r.wantAll(n.truth([]prompt{p}))
		for i := range 200 { // strangers, more than are kept
			k := p.keys()[0]
			k.Chunk[0], k.Chunk[1] = byte(i), byte(i>>8)
			if err := n.noted[0].Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
				t.Fatal(err)
			}
		}
		n.book.catchUp()
		r.wantAll(n.truthOf([]prompt{p}, InPool, n.resident()))
		keys := p.keys()
		if err := n.noted[1].Stat(t.Context(), keys, make([]tier.Meta, len(keys))); err != nil {
			t.Fatal(err)
		}
		n.book.catchUp()
		r.wantAll(n.truth([]prompt{p}))
	})
}

// When a tier was emptied, nothing is said to be in it until it is seen there again; the other tier's chunks stay.
func TestEmptiedTier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTiered(t, 64, Options{})
		defer n.stop()
		p := prompt{model: "m", world: 1, tokens: make([]uint32, 4*chunkTokens)}
		n.storeAll(p)
		keys := p.keys()
		for _, place := range n.noted {
			for _, k := range keys {
				if err := place.Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
					t.Fatal(err)
				}
			}
		}
		n.book.catchUp()
		r := n.reader()
		r.wantAll(n.truth([]prompt{p}))
		if _, err := tier.RemoveIf(t.Context(), n.places[0], func(tier.Content) bool { return true }, func(context.Context, int) error { return nil }); err != nil {
			t.Fatal(err)
		}
		n.o.Tiers.ForgetTier(1, "")
		n.book.catchUp()
		r.wantAll(n.truth([]prompt{p}))
		if err := n.noted[0].Write(t.Context(), keys[0], tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
		n.book.catchUp()
		r.wantAll(n.truth([]prompt{p}))
	})
}

// When a model was removed from a tier, nothing of it is said to be in that tier; other models stay there, and all stay in the
// other tier.
func TestModelRemovedFromATier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTiered(t, 64, Options{})
		defer n.stop()
		prompts := make([]prompt, 3)
		for i := range prompts {
			prompts[i] = prompt{model: []string{"m", "m", "other"}[i], salt: []string{"", "tenant", ""}[i], world: 1, tokens: make([]uint32, 4*chunkTokens)}
			prompts[i].tokens[0] = uint32(i)
			n.storeAll(prompts[i])
		}
		n.settleTiers(nil)
		for _, p := range prompts[1:] { // these are in the first one alone
			if err := n.noted[1].Delete(t.Context(), p.keys()); err != nil {
				t.Fatal(err)
			}
		}
		n.settleTiers(nil)
		r := n.reader()
		r.wantAll(n.truth(prompts))
		for _, p := range prompts[:2] {
			if err := n.places[0].Delete(t.Context(), p.keys()); err != nil {
				t.Fatal(err)
			}
		}
		n.o.Tiers.ForgetTier(1, "m")
		n.book.catchUp()
		want := n.truth(prompts)
		r.wantAll(want)
		below := 0
		for k, there := range want {
			if there && k.medium == Below {
				below++
			}
		}
		if below != 8 {
			t.Errorf("%d chunks are in tiers, want the four of one prompt of m and the four of the other model", below)
		}
	})
}

// Routers are told of tiers as STORAGE, with the tokens, and of what is there when they come.
func TestTiersAreAnnouncedAsStorage(t *testing.T) {
	changes := tier.NewChanges()
	place := tier.NewMemory(1 << 20)
	noted := tier.Recorded(place, changes, 1)
	n := newPublishing(t, 128, Options{Tiers: changes}, PublisherOptions{Interval: time.Millisecond})
	n.places = []tier.Tier{place}
	rnd := rand.New(rand.NewPCG(3, 3))
	prompts := randomPrompts(rnd)
	early := newRouter(t, n)
	write := func(p prompt) {
		for _, k := range p.keys() {
			if err := noted.Write(t.Context(), k, tier.Meta{Len: 1}, []byte{1}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, p := range prompts[:6] {
		n.storeAll(p)
		early.until(n, prompts[:i+1])
		write(p)
		early.until(n, prompts[:i+1])
	}
	late := newRouter(t, n)
	late.until(n, prompts[:6])
	n.store.Clear(false)
	late.until(n, prompts[:6])
	storage := 0
	for k := range late.has {
		if k[len(k)-len(event.Storage):] == event.Storage {
			storage++
		}
	}
	if storage == 0 || storage != len(late.has) {
		t.Errorf("%d of %d are in tiers after the pool was cleared", storage, len(late.has))
	}
	late.snapshot()
	late.until(n, prompts[:6])
	if err := noted.Delete(t.Context(), prompts[0].keys()); err != nil {
		t.Fatal(err)
	}
	early.until(n, prompts[:6])
	late.until(n, prompts[:6])
}
