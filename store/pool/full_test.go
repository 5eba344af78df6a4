// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// The index grows while the pool is used. Where a full file system has no memory for
// it there is no room, before a restart and after it, and no signal; with memory
// again there is.
func TestIndexInAFullFileSystem(t *testing.T) {
	testkit.SmallFS(t, 8<<20, func(t *testing.T, dir string) {
		options := pool.Options{Name: "p", Bytes: 1 << 20, Align: 64, Dir: dir, ChunkTokens: 256} // 16,384 records
		other := filepath.Join(dir, "other")
		total := 0
		reserve := func(p *pool.Pool) (n int) {
			t.Helper()
			for {
				var k kv.Key
				binary.LittleEndian.PutUint32(k.Chunk[:], uint32(total+1))
				s, err := reserveBacked(p, &k, 64)
				if errors.Is(err, pool.ErrFull) {
					return n
				}
				if err != nil {
					t.Fatal(err)
				}
				p.Commit(s)
				n, total = n+1, total+1
			}
		}
		p, err := pool.Open(options)
		if err != nil {
			t.Fatal(err)
		}
		testkit.FillFS(t, dir, other, 0)
		if n := reserve(p); n < 512 || n == 16384 {
			t.Errorf("%d places with an index that cannot grow", n)
		}
		for life := range 2 {
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			if p, err = pool.Open(options); err != nil {
				t.Fatal(err)
			}
			if n := reserve(p); n != 0 {
				t.Errorf("life %d: %d places more without memory", life, n)
			}
		}
		defer p.Close()
		if err := os.Remove(other); err != nil {
			t.Fatal(err)
		}
		reserve(p)
		if total != 16384 {
			t.Errorf("%d places in all with memory again, want 16384", total)
		}
	})
}

// Below the limit everything is handed out, above it nothing; what is above stays,
// also over a rise and a fall of the limit.
func TestLimit(t *testing.T) {
	p := open(t, t.TempDir(), 8*4096)
	defer p.Close()
	next := byte(0)
	fill := func(limit int64) (slots []pool.Slot) {
		t.Helper()
		if err := p.BackIndexFor(limit); err != nil {
			t.Fatal(err)
		}
		p.Limit(limit)
		for {
			next++
			s, err := p.Reserve(key(next), 4096, pool.Writer{})
			if errors.Is(err, pool.ErrFull) {
				return slots
			}
			if err != nil || p.Offset(s)+4096 > limit {
				t.Fatalf("limit %d: a place at %d, %v", limit, p.Offset(s), err)
			}
			p.Commit(s)
			slots = append(slots, s)
		}
	}
	if got := fill(0); len(got) != 0 {
		t.Errorf("%d places below 0", len(got))
	}
	low := fill(3 * 4096)
	high := fill(8 * 4096)
	if len(low) != 3 || len(high) != 5 {
		t.Fatalf("%d and %d places", len(low), len(high))
	}
	p.Drop(high[4])
	p.Drop(low[1])
	if got := fill(4 * 4096); len(got) != 1 || p.Offset(got[0]) != 4096 {
		t.Errorf("%d places, one is free below the limit", len(got))
	}
	if u := p.Usage(); u.Resident != 7 || u.FreeBytes != 4096 {
		t.Errorf("%+v", u)
	}
}

// A limit rises only with memory for the index; it falls without.
func TestLimitWithoutMemoryForTheIndex(t *testing.T) {
	testkit.SmallFS(t, 8<<20, func(t *testing.T, dir string) {
		p, err := pool.Open(pool.Options{Name: "p", Bytes: 1 << 20, Align: 64, Dir: dir, ChunkTokens: 256})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		testkit.FillFS(t, dir, filepath.Join(dir, "other"), 0)
		limit := func(bytes int64, ok bool, below int64) {
			t.Helper()
			if err := p.BackIndexFor(bytes); (err == nil) != ok {
				t.Errorf("limit %d: %v", bytes, err)
			}
			p.Limit(bytes)
			if s, err := p.Reserve(key(1), below, pool.Writer{}); err != nil {
				t.Errorf("limit %d: %d bytes: %v", bytes, below, err)
			} else {
				p.Drop(s)
				p.Unhold(s)
			}
			if _, err := p.Reserve(key(2), below+64, pool.Writer{}); !errors.Is(err, pool.ErrFull) {
				t.Errorf("limit %d: %d bytes: %v", bytes, below+64, err)
			}
		}
		limit(8192, true, 8192)
		limit(1<<20, false, 8192)
		limit(4096, true, 4096)
		limit(512<<10, false, 4096)
	})
}
