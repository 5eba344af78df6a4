// SPDX-License-Identifier: Apache-2.0

package usage_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// found is the end of a lookup that was searched for.
func found(chunkTokens int, r store.LookupResult) *lookup.Outcome {
	return &lookup.Outcome{Searched: true, ChunkTokens: chunkTokens, LookupResult: r}
}

// declined is the end of a lookup without a search.
func declined(why miss.Reason) *lookup.Outcome {
	return &lookup.Outcome{LookupResult: store.LookupResult{Why: why}}
}

// What lookups found is counted for their model and salt, by where it came from.
func TestLookups(t *testing.T) {
	c := usage.New()
	ended := func(model, salt string, registered bool, o *lookup.Outcome) {
		o.Model, o.Salt, o.Registered = []byte(model), []byte(salt), registered
		c.Lookup(o)
	}
	ended("m", "s", true, found(10, store.LookupResult{Asked: 5, Hit: 3, Below: 1, Objects: 12, BelowObjects: 4}))
	ended("m", "s", true, found(10, store.LookupResult{Asked: 1, Objects: 1, BelowObjects: 3})) // more were loaded than the hit needs
	ended("m", "s", false, declined(miss.Short))
	ended("x", "", false, declined(miss.Unregistered))
	got := c.Stats()
	p := [2]string{"m", "s"}
	if got.Lookups[p] != 3 || got.Asked[p] != 60 || got.Hit[p] != 30 || got.HitL1[p] != 20 || got.HitL2[p] != 10 || got.KeysL1[p] != 8 || got.KeysL2[p] != 5 {
		t.Errorf("%+v", got)
	}
	if got.EarlyExits[[3]string{"m", "s", "empty_chunk_hashes"}] != 1 || got.EarlyExits[[3]string{usage.Other, usage.Other, "no_gpu_context"}] != 1 {
		t.Errorf("early: %v", got.EarlyExits)
	}
}

// Names that clients make up take a bounded number of places, and none that is no text: what
// has no place of its own is counted all the same.
func TestNamesAreBounded(t *testing.T) {
	c := usage.New()
	for i := range 3 * usage.MaxPairs {
		o := declined(miss.Short)
		o.Model, o.Salt, o.Registered = []byte("m"), fmt.Append(nil, i), true
		c.Lookup(o)
	}
	o := declined(miss.Short)
	o.Model, o.Registered = []byte("\xff"), true
	c.Lookup(o)
	for i := range int64(3 * usage.MaxLoads) {
		c.Loaded("m", nil, i, 2)
	}
	c.Loaded("\xff", []byte("\xff"), 1, 2)
	got := c.Stats()
	if len(got.Lookups) != usage.MaxPairs+2 || got.Lookups[[2]string{usage.Other, usage.Other}] != 2*usage.MaxPairs+1 {
		t.Errorf("%d pairs, %d of others", len(got.Lookups), got.Lookups[[2]string{usage.Other, usage.Other}])
	}
	if len(got.Loaded) > usage.MaxLoads+2 || got.Loaded[[3]string{usage.Other, usage.Other, usage.Other}] != 2*(2*usage.MaxLoads+1) {
		t.Errorf("%d workers, %d of others", len(got.Loaded), got.Loaded[[3]string{usage.Other, usage.Other, usage.Other}])
	}
	if err := metrics.Write(&strings.Builder{}, got); err != nil {
		t.Error(err)
	}
}

// A model that is called as what has no place keeps the figures of each of its workers.
func TestAModelCalledOther(t *testing.T) {
	c := usage.New()
	c.Loaded(usage.Other, nil, 1, 2)
	c.Loaded(usage.Other, nil, 2, 3)
	got := c.Stats().Loaded
	if got[[3]string{usage.Other, "", "1"}] != 2 || got[[3]string{usage.Other, "", "2"}] != 3 {
		t.Errorf("%v", got)
	}
}

// Transfers are counted by who copies.
func TestTransfers(t *testing.T) {
	var n usage.Transfers
	n.Add(true)
	n.Add(false)
	n.Add(false)
	if got := n.ByDevice(); n.Sum() != 3 || got["cpu"] != 1 || got["engine"] != 2 {
		t.Errorf("%d, %v", n.Sum(), got)
	}
}

// The speed of each copy is counted by model and worker; later workers share one place.
func TestCopied(t *testing.T) {
	c := usage.New()
	c.Copied(false, "m", 7, 2e9, time.Second)
	c.Copied(true, "m", 7, 5e8, time.Second)
	c.Copied(true, "m", 7, 5e8, 0) // nothing was copied
	for i := range int64(2 * usage.MaxPairs) {
		c.Copied(true, "n", 100+i, 1, time.Second)
	}
	c.Copied(true, "\xff", 1, 1, time.Second)
	st := c.Stats()
	store, load := st.StoreRates[[3]string{"m", "7", "cpu"}], st.LoadRates[[3]string{"m", "7", "cpu"}]
	if store.Total() != 1 || load.Total() != 1 || float64(store.Sum)*store.Unit != 2 || float64(load.Sum)*load.Unit != 0.5 {
		t.Errorf("%+v, %+v", store, load)
	}
	all, other := uint64(0), st.LoadRates[[3]string{usage.Other, usage.Other, "cpu"}]
	for _, r := range st.LoadRates {
		all += r.Total()
	}
	if len(st.LoadRates) != usage.MaxPairs || all != 2*usage.MaxPairs+2 || other.Total() != 2*usage.MaxPairs+2-1-(usage.MaxPairs-2) {
		t.Errorf("%d places, %d in all, %d of others", len(st.LoadRates), all, other.Total())
	}
}

// Whenever the figures are read, no part is more than its whole: hits are at most what was asked for, and hits of pool and tiers at most all
// hits.
func TestPartsAreNeverMoreThanTheWhole(t *testing.T) {
	c := usage.New()
	tags := c.Tagged("uid 1", []lmcache.Tag{{Name: []byte("team"), Value: []byte("a")}})
	o := found(16, store.LookupResult{Asked: 4, Hit: 4, Below: 2, Objects: 4, BelowObjects: 2, Note: tags})
	o.Model, o.Registered = []byte("m"), true
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range 20_000 {
				c.Lookup(o)
			}
		})
	}
	ended := make(chan struct{})
	go func() { wg.Wait(); close(ended) }()
	p, team := [2]string{"m", ""}, [2]string{"team", "a"}
	for {
		st := c.Stats()
		if st.Hit[p] > st.Asked[p] || st.HitL1[p]+st.HitL2[p] > st.Hit[p] || st.Asked[p] > 64*st.Lookups[p] || st.TagHit[team] > st.TagAsked[team] || st.TagAsked[team] > 64*st.TagLookups[team] {
			t.Fatalf("%d of %d tokens hit in %d lookups, %d in the pool, %d from tiers; by tag %d of %d in %d", st.Hit[p], st.Asked[p], st.Lookups[p], st.HitL1[p], st.HitL2[p], st.TagHit[team], st.TagAsked[team], st.TagLookups[team])
		}
		select {
		case <-ended:
			return
		default:
		}
	}
}
