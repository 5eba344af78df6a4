// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

func TestParallel(t *testing.T) {
	f := func(p lmcache.Parallel, shards, shard, readers int, stores bool) {
		t.Helper()
		got, err := p.Check()
		if err != nil {
			t.Fatalf("%+v: %v", p, err)
		}
		if got.Shards() != shards || got.Shard() != shard || got.Readers() != readers || got.Stores() != stores {
			t.Errorf("%+v: shard %d of %d, %d readers, stores %v, want %d of %d, %d, %v",
				p, got.Shard(), got.Shards(), got.Readers(), got.Stores(), shard, shards, readers, stores)
		}
	}
	f(lmcache.Parallel{}, 1, 0, 1, true)
	f(lmcache.Parallel{World: 8, TP: 4, Rank: 5}, 8, 5, 1, true)
	f(lmcache.Parallel{World: 8, TP: 4, Rank: 5, MLA: true}, 2, 1, 4, false)
	f(lmcache.Parallel{World: 8, TP: 4, Rank: 4, MLA: true}, 2, 1, 4, true)
	f(lmcache.Parallel{World: 8, TP: 4, Rank: 5, MLA: true, EveryRankStores: true}, 2, 1, 4, true)
	f(lmcache.Parallel{World: 8, TP: 8, DCP: 4, Rank: 6, MLA: true}, 4, 2, 2, false)
	f(lmcache.Parallel{World: 8, TP: 8, DCP: 4, Rank: 2, MLA: true}, 4, 2, 2, true)
	f(lmcache.Parallel{World: 8, TP: 8, Servers: 2, Rank: 5}, 4, 1, 1, true)
	f(lmcache.Parallel{World: 8, TP: 8, Servers: 2, Rank: 4, MLA: true}, 1, 0, 4, true) // the first of its server
	f(lmcache.Parallel{World: 8, TP: 8, Servers: 2, Rank: 5, MLA: true}, 1, 0, 4, false)
	f(lmcache.Parallel{World: 8, TP: 8, Servers: 2, Rank: 2, MLA: true}, 1, 0, 4, false)
	f(lmcache.Parallel{World: 8, TP: 8, DCP: 2, Servers: 2, Rank: 5, MLA: true}, 2, 1, 2, true)
	f(lmcache.Parallel{World: 8, TP: 8, DCP: 2, Servers: 2, Rank: 6, MLA: true}, 2, 0, 2, false)
	f(lmcache.Parallel{TP: kv.MaxWorldSize, World: kv.MaxWorldSize}, kv.MaxWorldSize, 0, 1, true)
	for _, p := range []lmcache.Parallel{
		{World: kv.MaxWorldSize + 1},
		{World: -1},
		{World: 2, Rank: 2},
		{World: 2, Rank: -1},
		{World: 4, TP: 3},
		{World: 4, TP: 2, DCP: 3},
		{World: 4, Servers: 3},
		{World: 4, TP: 2, Servers: 4, MLA: true},
		{World: 1 << 20},
	} {
		if _, err := p.Check(); !errors.Is(err, lmcache.ErrParallel) {
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// On each server every shard of an MLA model has exactly one rank that stores it
// and Readers ranks that read it; without MLA the ranks are the shards.
func TestParallelCovers(t *testing.T) {
	for _, stages := range []int{1, 2} {
		for _, tp := range []int{1, 2, 4, 8} {
			for dcp := 1; dcp <= tp; dcp *= 2 {
				for _, mla := range []bool{true, false} {
					writers, readers := map[int]int{}, map[int]int{}
					var p lmcache.Parallel
					for rank := range stages * tp {
						var err error
						if p, err = (lmcache.Parallel{World: stages * tp, TP: tp, DCP: dcp, Rank: rank, MLA: mla}).Check(); err != nil {
							t.Fatal(err)
						}
						readers[p.Shard()]++
						if p.Stores() {
							writers[p.Shard()]++
						}
					}
					for s := range p.Shards() {
						if writers[s] != 1 || readers[s] != p.Readers() {
							t.Errorf("%+v: shard %d has %d writers, %d of %d readers", p, s, writers[s], readers[s], p.Readers())
						}
					}
				}
			}
		}
	}
}

// The heartbeat's states: down on an error or on a failed recovery, up after
// recovery, at once after a false; the context ends with the health.
func TestHealthStates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			mu                         sync.Mutex
			known, changes, recoveries = true, 0, 0
			pingErr, recoverErr        error
		)
		set := func(k bool, ping, recovery error) {
			mu.Lock()
			defer mu.Unlock()
			known, pingErr, recoverErr = k, ping, recovery
		}
		h := lmcache.NewHealth(lmcache.HealthOptions{
			Interval: time.Second,
			Ping:     func(context.Context) (bool, error) { mu.Lock(); defer mu.Unlock(); return known, pingErr },
			Recover:  func(context.Context) error { mu.Lock(); defer mu.Unlock(); recoveries++; return recoverErr },
			Changed:  func(bool, error) { mu.Lock(); defer mu.Unlock(); changes++ },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { h.Run(ctx); close(done) }()
		time.Sleep(time.Second / 2) // so that beats fall between what follows
		f := func(what string, healthy bool, wantChanges, wantRecoveries int) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if h.Healthy() != healthy || changes != wantChanges || recoveries != wantRecoveries {
				t.Errorf("%s: healthy %v, %d changes, %d recoveries", what, h.Healthy(), changes, recoveries)
			}
		}
		f("well", true, 0, 0)
		up := h.Context()
		set(false, nil, nil)
		f("not known: recovers at once", true, 0, 1)
		set(true, errors.New("silent"), nil)
		f("silent", false, 1, 1)
		if !errors.Is(context.Cause(up), lmcache.ErrUnhealthy) {
			t.Errorf("context ended with %v", context.Cause(up))
		}
		set(true, nil, errors.New("refused"))
		f("back, but registration fails", false, 1, 2)
		set(true, nil, nil)
		f("back", true, 2, 3)
		if h.Context().Err() != nil {
			t.Error("the new context has ended")
		}
		set(false, nil, errors.New("refused"))
		h.Poke()
		synctest.Wait()
		if h.Healthy() {
			t.Error("Poke did not beat")
		}
		cancel()
		<-done
	})
}
