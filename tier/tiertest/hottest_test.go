// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// heated is a memory that knows the heat of its objects.
type heated struct {
	*tier.Memory
	heat map[int]int64 // by seed
}

func (h heated) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	hot := tier.NewHot(n)
	for seed, heat := range h.heat {
		hot.Add(tiertest.Key(seed), heat)
	}
	return hot.Each(ctx, h.Memory, f)
}

func hottest(t *testing.T, x tier.Tier, n, most int) (out []kv.Key) {
	t.Helper()
	if err := tier.Hottest(t.Context(), x, n, func(k kv.Key, m tier.Meta) bool {
		if m.Len != 10 {
			t.Errorf("%s: %+v", k, m)
		}
		out = append(out, k)
		return len(out) < most
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

// away is a tier that does not answer.
type away struct{ tier.Tier }

func (away) Hottest(context.Context, int, func(kv.Key, tier.Meta) bool) error {
	return errors.New("connection refused")
}

// A tier that does not answer does not hide the hottest objects of another tier.
func TestHottestWithoutOne(t *testing.T) {
	h := heated{memory(), map[int]int64{1: 5, 2: 7}}
	put(t, h, 1, 10)
	put(t, h, 2, 10)
	for _, of := range [][]tier.Tier{{away{memory()}, h}, {h, away{memory()}}, {memory(), away{memory()}, h}} {
		for _, x := range []tier.Tier{tier.Cascade(tier.CascadeOptions{}, of...), tier.Route(func(kv.Key) int { return 0 }, of...)} {
			if got := hottest(t, x, 10, 10); !slices.Equal(got, []kv.Key{tiertest.Key(2), tiertest.Key(1)}) {
				t.Errorf("%v", got)
			}
		}
	}
	none := tier.Cascade(tier.CascadeOptions{}, away{memory()}, memory())
	if err := tier.Hottest(t.Context(), none, 10, nil); err == nil || errors.Is(err, tier.ErrNoList) {
		t.Error(err)
	}
}

// Every wrapper returns the hottest of many objects, in order, without objects that are gone.
func TestHottest(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	h := heated{memory(), map[int]int64{}}
	for k := range 600 {
		h.heat[k] = int64(k)*1000 + int64(rnd.IntN(1000))
		if k%3 != 0 {
			put(t, h, k, 10)
		}
	}
	order := slices.SortedFunc(slices.Values(rnd.Perm(600)), func(a, b int) int { return cmp.Compare(h.heat[b], h.heat[a]) })
	want := func(n, most int) (keys []kv.Key) {
		for _, k := range order[:n] {
			if k%3 != 0 && len(keys) < most {
				keys = append(keys, tiertest.Key(k))
			}
		}
		return keys
	}
	for _, c := range []struct{ n, most int }{{600, 1000}, {300, 1000}, {10, 1000}, {600, 7}, {1, 5}} {
		for name, x := range map[string]tier.Tier{
			"itself": h, "bounded": tier.Bounded(h, tier.Limits{}), "counted": tier.Counted(h, "h"), "admitted": tier.Admitted(h, tier.Admission{}),
			"remembered": tier.Remembered(h, tier.Absence{}), "cascade": tier.Cascade(tier.CascadeOptions{}, memory(), h),
			"route": tier.Route(func(kv.Key) int { return 1 }, memory(), h),
		} {
			if got := hottest(t, x, c.n, c.most); !slices.Equal(got, want(c.n, c.most)) {
				t.Errorf("seed %d: %s, %d of them: %d are named, %d are right", seed, name, c.n, len(got), len(want(c.n, c.most)))
			}
		}
	}
	for _, x := range []tier.Tier{memory(), tier.Bounded(memory(), tier.Limits{}), tier.Cascade(tier.CascadeOptions{}, memory(), memory())} {
		if err := tier.Hottest(t.Context(), x, 5, nil); !errors.Is(err, tier.ErrNoList) {
			t.Errorf("%T: %v", x, err)
		}
	}
}

// Of two objects of equal heat the one that was added first is hotter.
func TestHottestOfEqual(t *testing.T) {
	m := memory()
	hot := tier.NewHot(3)
	for seed := range 5 {
		put(t, m, seed, 10)
		hot.Add(tiertest.Key(seed), 7)
	}
	var got []kv.Key
	if err := hot.Each(t.Context(), m, func(k kv.Key, _ tier.Meta) bool { got = append(got, k); return true }); err != nil || !slices.Equal(got, []kv.Key{tiertest.Key(0), tiertest.Key(1), tiertest.Key(2)}) {
		t.Errorf("%v, %v", got, err)
	}
}
