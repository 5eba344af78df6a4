// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// noted returns, for each key, whether the last change says that the object is there, and the number of changes.
func noted(t *testing.T, c *tier.Changes) (has map[kv.Key]bool, words int) {
	t.Helper()
	has = map[kv.Key]bool{}
	buffer := make([]tier.Change, 100)
	for at := uint64(0); ; {
		n, lost := c.After(at, buffer)
		if lost {
			t.Fatal("changes are lost")
		}
		if n == 0 {
			return has, words
		}
		at, words = at+uint64(n), words+n
		for _, x := range buffer[:n] {
			if has[x.Key] = !x.Removed; x.Tier != 7 {
				t.Fatalf("%+v", x)
			}
		}
	}
}

// Changes note the result of a call: an object is there or is not. If that is not known, they note nothing.
func TestNoted(t *testing.T) {
	c := tier.NewChanges()
	m := memory()
	x := tier.Recorded(m, c, 7)
	put(t, x, 1, 100) // before anybody watches
	c.Watch(1000)
	want := func(words int, seed int, there bool) {
		t.Helper()
		if has, got := noted(t, c); got != words || has[tiertest.Key(seed)] != there {
			t.Fatalf("%d words, object %d: %v; want %d, %v", got, seed, has[tiertest.Key(seed)], words, there)
		}
	}
	want(0, 1, false)
	has(t, x, 1)
	want(1, 1, true)
	has(t, x, 2)
	want(2, 2, false)
	put(t, x, 2, 50)
	want(3, 2, true)
	if err := m.Delete(t.Context(), []kv.Key{tiertest.Key(2)}); err != nil { // by others
		t.Fatal(err)
	}
	want(3, 2, true)
	if _, err := x.Read(t.Context(), tiertest.Key(2), make([]byte, 50)); !errors.Is(err, tier.ErrMissing) {
		t.Fatal(err)
	}
	want(4, 2, false)
	if _, _, err := tier.ReadSummed(t.Context(), x, tiertest.Key(1), make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	want(5, 1, true)
	if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 99)); err == nil {
		t.Fatal("an object of another length was read")
	}
	want(6, 1, false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := x.Stat(ctx, []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)); err == nil {
		t.Fatal("a call that was given up has a result")
	}
	want(6, 1, false)
	if err := tier.Recorded(full{m}, c, 7).Write(t.Context(), tiertest.Key(1), tier.Meta{Len: 1}, []byte{1}); !errors.Is(err, tier.ErrNotKept) {
		t.Fatal(err)
	}
	want(6, 1, false)
	has(t, x, 1)
	if err := tier.Recorded(keeping{m}, c, 7).Delete(t.Context(), []kv.Key{tiertest.Key(1)}); !errors.Is(err, tier.ErrNotKept) {
		t.Fatal(err)
	}
	want(7, 1, true)
	if err := x.Delete(t.Context(), []kv.Key{tiertest.Key(1)}); err != nil {
		t.Fatal(err)
	}
	want(8, 1, false)
}

// keeping is a Tier that deletes nothing, as resp is.
type keeping struct{ tier.Tier }

func (keeping) Delete(context.Context, []kv.Key) error { return tier.ErrNotKept }

// held is a Tier whose calls return when a test says so.
type held struct {
	tier.Tier
	began, resume chan struct{}
}

func (h held) wait() {
	h.began <- struct{}{}
	<-h.resume
}

func (h held) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	defer h.wait()
	return h.Tier.Stat(ctx, keys, metas)
}

func (h held) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	defer h.wait()
	return h.Tier.Write(ctx, k, m, src)
}

// The results of calls that overlap may be out of date, so they are not noted as present facts: no missing object is noted as there.
func TestNotedTogether(t *testing.T) {
	key := tiertest.Key(1)
	f := func(slow func(tier.Tier) error, quick func(tier.Tier) error, before, after bool) {
		t.Helper()
		c := tier.NewChanges()
		c.Watch(100)
		m := memory()
		if before {
			put(t, tier.Recorded(m, c, 7), 1, 10)
		}
		h := held{m, make(chan struct{}), make(chan struct{})}
		n := tier.Recorded(h, c, 7)
		done := make(chan error, 2)
		go func() { done <- slow(n) }()
		<-h.began
		go func() { done <- quick(n) }()
		calls := 1 // number of held calls
		select {
		case <-h.began:
			calls++
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		}
		for range calls {
			h.resume <- struct{}{}
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if got, _ := noted(t, c); got[key] != after {
			t.Errorf("it is noted as there: %v, want %v", got[key], after)
		}
	}
	stat := func(x tier.Tier) error { return x.Stat(t.Context(), []kv.Key{key}, make([]tier.Meta, 1)) }
	forget := func(x tier.Tier) error { return x.Delete(t.Context(), []kv.Key{key}) }
	write := func(x tier.Tier) error {
		b, m := tiertest.Object(1, 10)
		return x.Write(t.Context(), key, m, b)
	}
	f(stat, forget, true, false)   // it was found, and is gone
	f(stat, write, false, true)    // it was not found, and is there
	f(write, forget, false, false) // nobody knows which was first
	f(stat, stat, true, true)
	f(write, write, false, true)
}

// After many calls at once, in whatever order, no missing object is noted as there, and one look at everything makes the notes exact.
func TestNotedUnderLoad(t *testing.T) {
	c := tier.NewChanges()
	c.Watch(1 << 20)
	m := memory()
	x := tier.Recorded(m, c, 7)
	var keys []kv.Key
	for i := range 20 {
		keys = append(keys, tiertest.Key(i))
	}
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(g, 3))
			for range 2000 {
				seed := r.IntN(len(keys))
				switch r.IntN(4) {
				case 0:
					b, meta := tiertest.Object(seed, 64)
					_ = x.Write(t.Context(), keys[seed], meta, b)
				case 1:
					_ = x.Delete(t.Context(), keys[seed:seed+1])
				case 2:
					_, _ = x.Read(t.Context(), keys[seed], make([]byte, 64))
				default:
					_ = x.Stat(t.Context(), keys, make([]tier.Meta, len(keys)))
				}
			}
		})
	}
	wg.Wait()
	metas := make([]tier.Meta, len(keys))
	if err := m.Stat(t.Context(), keys, metas); err != nil {
		t.Fatal(err)
	}
	got, _ := noted(t, c)
	for i, k := range keys {
		if got[k] && metas[i].Len == 0 {
			t.Errorf("object %d is noted and not there", i)
		}
	}
	if err := x.Stat(t.Context(), keys, metas); err != nil {
		t.Fatal(err)
	}
	got, _ = noted(t, c)
	for i, k := range keys {
		if got[k] != (metas[i].Len > 0) {
			t.Errorf("object %d: noted %v", i, got[k])
		}
	}
}
