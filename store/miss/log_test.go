// SPDX-License-Identifier: Apache-2.0

package miss_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// TestLogKeepsTheLast asks for lookups by their request and for the last ones.
func TestLogKeepsTheLast(t *testing.T) {
	var l miss.Log
	if l.Len() != 0 || len(l.Last(5)) != 0 || len(l.Of("r1", 5)) != 0 {
		t.Fatal("a new log has something")
	}
	at := time.Unix(1000, 5)
	full := miss.Ended{
		At: at, Request: "first", Model: "m", Salt: "s", Asked: 512, Hit: 256, Why: miss.Evicted, Missing: kv.Key{Chunk: kv.Hash{7}, Group: 3}, Shard: 1, Tier: "disk",
		Detail: "d", Tags: "t", GoneAt: at.Add(-time.Second), GoneBy: "uid 1", GoneModel: "gm", GoneSalt: "gs", OtherModel: "om", OtherSalt: "os", OtherWorld: 2,
	}
	l.Add(&full)
	if got := l.Of("first", 5); len(got) != 1 || got[0] != full {
		t.Errorf("%+v, want %+v", got, full)
	}
	for i := range miss.MaxEnded + 10 {
		l.Add(&miss.Ended{At: at, Request: fmt.Sprint("r", i%4), Asked: i})
	}
	if got := l.Of("first", 5); len(got) != 0 || l.Len() != miss.MaxEnded {
		t.Errorf("%d kept, the oldest is %+v", l.Len(), got)
	}
	last := miss.MaxEnded + 9
	if got := l.Last(2); len(got) != 2 || got[0].Asked != last || got[1].Asked != last-1 || !got[0].GoneAt.IsZero() {
		t.Errorf("last: %+v", got)
	}
	if got := l.Of(fmt.Sprint("r", last%4), miss.MaxEnded); len(got) != miss.MaxEnded/4 || got[0].Asked != last || got[1].Asked != last-4 {
		t.Errorf("%d of a request", len(got))
	}
}

// TestMemoryIsBounded measures what explanations take once they are full.
func TestMemoryIsBounded(t *testing.T) {
	f := func(what string, limit int64, fill func() any) {
		t.Helper()
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		kept := fill()
		runtime.GC()
		runtime.ReadMemStats(&after)
		got := int64(after.HeapAlloc) - int64(before.HeapAlloc)
		t.Logf("%s: %d bytes", what, got)
		if got > limit || got < limit/4 {
			t.Errorf("%s takes %d bytes, said are %d", what, got, limit)
		}
		runtime.KeepAlive(kept)
	}
	long := strings.Repeat("x", 2000)
	f("a full log", 5<<20, func() any {
		l := new(miss.Log)
		for range 3 * miss.MaxEnded {
			l.Add(&miss.Ended{Request: long, Model: long, Salt: long, Tier: long, Detail: long, Tags: long, GoneBy: long, GoneModel: long, GoneSalt: long, OtherModel: long, OtherSalt: long})
		}
		return l
	})
	f("65,536 keys that went", 65536*112, func() any {
		m := miss.NewMemory(65536)
		for i := range 3 * 65536 {
			m.Add(&kv.Key{Chunk: kv.Hash{byte(i), byte(i >> 8), byte(i >> 16)}}, miss.Gone{Why: miss.Evicted, At: time.Unix(1, 0), By: "uid 1000"})
		}
		return m
	})
	f("the chunks of a million slots", 1<<20+1_000_000*8+1<<17, func() any {
		c := new(miss.Chunks)
		for i := range uint32(1_000_000) {
			c.Add(i, &kv.Hash{8: byte(i), 9: byte(i >> 8), 10: byte(i >> 16)})
		}
		return c
	})
}

// TestAddingAllocatesNothing once the pages of the log are there.
func TestAddingAllocatesNothing(t *testing.T) {
	l := new(miss.Log)
	e := &miss.Ended{Request: "r", Model: "m"}
	for range miss.MaxEnded {
		l.Add(e)
	}
	if n := testing.AllocsPerRun(100, func() { l.Add(e) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestChunksAgainstAMap plays random additions and removals.
func TestChunksAgainstAMap(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var c miss.Chunks
	of := map[uint32]kv.Hash{}
	for range 20_000 {
		slot := uint32(r.IntN(300))
		h := kv.Hash{byte(r.IntN(2)), 8: byte(r.IntN(4))} // many with the same bits
		if old, ok := of[slot]; ok {
			c.Remove(slot, &old)
			delete(of, slot)
			c.Remove(slot, &old) // twice is once
		} else {
			c.Add(slot, &h)
			of[slot] = h
		}
		ask := kv.Hash{byte(r.IntN(2)), 8: byte(r.IntN(4))}
		var got, want []uint32
		c.Each(&ask, func(slot uint32) bool {
			if of[slot] == ask {
				got = append(got, slot)
			}
			return true
		})
		for slot, h := range of {
			if h == ask {
				want = append(want, slot)
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	stopped := 0
	c.Each(&kv.Hash{}, func(uint32) bool { stopped++; return false })
	if stopped > 1 {
		t.Error("it goes on")
	}
}
