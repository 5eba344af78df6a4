// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/connector"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestValidate(t *testing.T) {
	testkit.CheckNumbers[connector.Options](t)
	if (connector.Options{ObjectBytes: []int64{1}}).Validate() == nil {
		t.Error("a length without a group")
	}
}

func layout(t *testing.T, text string) coordinator.Layout {
	t.Helper()
	l, err := coordinator.ParseLayout(text)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func scheduler(t *testing.T, o connector.Options) *connector.Scheduler {
	t.Helper()
	s, err := connector.NewScheduler(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// prompt has units digests of 4 bytes.
func prompt(units int) *connector.Prompt {
	p := &connector.Prompt{Size: 4}
	for i := range units {
		p.Digests = append(p.Digests, 0xab, 0, byte(i>>8), byte(i))
	}
	return p
}

// Keys are vLLM's, of both generations: up to 0.23 a block's hash is that of all its units, later the last one's.
func TestKeys(t *testing.T) {
	l := layout(t, "full,bs=32 swa,bs=16,win=64")
	f := func(release coordinator.Release, prefix, model string, b connector.Block, rank int, want string) {
		t.Helper()
		s := scheduler(t, connector.Options{Layout: l, Release: release, Prefix: prefix, Model: model, Ranks: 2})
		if got, ok := s.Key(prompt(6), b, rank); got != want || !ok {
			t.Errorf("%s, want %s", got, want)
		}
	}
	f(0, "", "Qwen/Qwen2.5-7B", connector.Block{Group: 0, Index: 1}, 0, "Qwen2.5-7B@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@ab000003")
	f(coordinator.VLLM033, "blue", "/models/m/", connector.Block{Group: 1, Index: 2}, 1, "blue@m@tp_rank:1@pcp0@dcp0@pp_rank:0@group:1@ab000002")
	f(coordinator.VLLM023, "", "m", connector.Block{Group: 0, Index: 1}, 1, "m@tp_rank:1@pcp0@dcp0@pp_rank:0@group:0@ab000002ab000003")
	if _, ok := scheduler(t, connector.Options{Layout: l, Model: "m"}).Key(prompt(6), connector.Block{Group: 0, Index: 3}, 0); ok {
		t.Error("a key beyond the digests")
	}
}

// directory has objects of 100 bytes, or of other lengths.
type directory struct {
	has   map[string]uint64
	fails int // calls fail from this number on
	calls int
}

func (d *directory) Replicas(_ context.Context, keys []string) ([]store.Found, error) {
	if d.calls++; d.fails > 0 && d.calls >= d.fails {
		return nil, errors.New("away")
	}
	out := make([]store.Found, len(keys))
	for i, k := range keys {
		n, ok := d.has[k]
		if !ok {
			out[i].Err = store.NotFound
			continue
		}
		out[i] = store.Found{Lease: time.Second, Replicas: []store.Replica{{Complete: true, Pieces: []store.Piece{{Bytes: n}}}}}
	}
	return out, nil
}

// A hit is what every group can load from objects of every rank that can be read: compared with a search of every
// length. Loads and stores meet: what was stored of a prompt is loaded again.
func TestLookup(t *testing.T) {
	for _, text := range []string{"full,bs=16", "full,bs=16 swa,bs=16,win=40", "full,bs=32 swa,bs=16,win=33 mamba,bs=32", "full,bs=16 mamba,bs=16"} {
		for _, release := range []coordinator.Release{0, coordinator.VLLM023} {
			l := layout(t, text)
			s := scheduler(t, connector.Options{Layout: l, Release: release, Model: "m", Ranks: 2, ObjectBytes: slices.Repeat([]int64{100}, len(l.Groups))})
			p := prompt(24)
			d := &directory{has: map[string]uint64{}}
			blocks, upto, err := s.Stores(nil, 0, 24*16, 24*16)
			if err != nil || upto != 24*16 {
				t.Fatal(upto, err)
			}
			for _, b := range blocks {
				for rank := range 2 {
					k, _ := s.Key(p, b, rank)
					d.has[k] = 100
				}
			}
			check := func(what string, most, want int) {
				t.Helper()
				h, err := s.Lookup(t.Context(), d, p, most)
				if err != nil || h.Tokens != want {
					t.Errorf("%s, release %v, %s: %d tokens, want %d, %v", text, release, what, h.Tokens, want, err)
				}
				loads, err := s.Loads(nil, p, 0, h.Tokens)
				if err != nil {
					t.Fatal(err)
				}
				for _, b := range loads {
					for rank := range 2 {
						if k, _ := s.Key(p, b, rank); d.has[k] != 100 {
							t.Errorf("%s, %s: %v is loaded and not there", text, what, b)
						}
					}
				}
			}
			check("all", 24*16, 24*16)
			unit := l.Scheduler
			check("a repeat", 24*16-1, (24*16-1)/unit*unit)
			k, _ := s.Key(p, connector.Block{Group: 0, Index: 0}, 1)
			delete(d.has, k)
			check("without a rank's first block", 24*16, 0)
			d.has[k] = 99
			check("with a first block of another length", 24*16, 0)
		}
	}
}

// When the store fails during a lookup, the lookup returns the error, and never a longer hit than the store has confirmed.
func TestLookupOfAStoreThatFails(t *testing.T) {
	s := scheduler(t, connector.Options{Layout: layout(t, "full,bs=16"), Model: "m", Batch: 16})
	p, d := prompt(200), &directory{has: map[string]uint64{}, fails: 2}
	for i := range 200 {
		k, _ := s.Key(p, connector.Block{Index: i}, 0)
		d.has[k] = 5
	}
	h, err := s.Lookup(t.Context(), d, p, 200*16)
	if err == nil || h.Tokens != 16*16 {
		t.Errorf("%d tokens, %v", h.Tokens, err)
	}
}

// Stores continue where they ended, and decide on each block once, whatever the steps are.
func TestStoresContinue(t *testing.T) {
	ret := "ret=128"
	for _, text := range []string{"full,bs=16 swa,bs=16,win=40", "full,bs=32 swa,bs=16,win=33", "full,bs=16 swa,bs=16,win=40 " + ret} {
		s := scheduler(t, connector.Options{Layout: layout(t, text), Model: "m"})
		const prompt = 517
		once, _, err := s.Stores(nil, 0, prompt, prompt)
		if err != nil {
			t.Fatal(err)
		}
		var all []connector.Block
		from := 0
		for at := 0; at < prompt+50; {
			at += 7 + at%41
			if all, from, err = s.Stores(all, from, at, prompt); err != nil {
				t.Fatal(err)
			}
		}
		order := func(a, b connector.Block) int {
			return bytes.Compare(fmt.Appendf(nil, "%d %6d", a.Group, a.Index), fmt.Appendf(nil, "%d %6d", b.Group, b.Index))
		}
		slices.SortFunc(once, order)
		slices.SortFunc(all, order)
		if !slices.Equal(once, all) {
			t.Errorf("%s:\n%v\n%v", text, once, all)
		}
		if strings.Contains(text, ret) && len(once) >= 2*(prompt/16) {
			t.Errorf("%s stores %d blocks", text, len(once))
		}
	}
}

// The connector stores Mamba states only at positions where the engine has them: at the end of the computed tokens, and where a repeated
// prompt resumes.
func TestStatesAreKeptWhereTheyAre(t *testing.T) {
	s := scheduler(t, connector.Options{Layout: layout(t, "full,bs=16 mamba,bs=16"), Model: "m"})
	states := func(from, computed, prompt int) (at []int) {
		blocks, _, err := s.Stores(nil, from, computed, prompt)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range blocks {
			if b.Group == 1 {
				at = append(at, b.Index)
			}
		}
		return at
	}
	if got := states(0, 160, 160); !slices.Equal(got, []int{8, 9}) {
		t.Error(got)
	}
	if got := states(0, 100, 165); !slices.Equal(got, []int{5}) {
		t.Error(got)
	}
	if got := states(96, 165, 165); !slices.Equal(got, []int{9}) {
		t.Error(got)
	}
}
