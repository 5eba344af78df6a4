// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

func tableKey(n uint32) *kv.Key {
	var h kv.Hash
	x := rand.NewPCG(uint64(n), 1)
	binary.LittleEndian.PutUint64(h[:], x.Uint64())
	binary.LittleEndian.PutUint32(h[8:], n)
	return &kv.Key{Chunk: h}
}

// Keys are found, and only those that are there, while the table grows under
// insertions and removals.
func TestTableAgainstMap(t *testing.T) {
	p, err := Open(Options{Name: "p", Bytes: 64 << 14, Align: 64, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	rnd := rand.New(rand.NewPCG(3, 4))
	there := map[uint32]Slot{}
	midway := 0
	for step := range 60_000 {
		n := rnd.Uint32N(20_000)
		if s, ok := there[n]; ok && rnd.IntN(3) > 0 {
			p.Drop(s)
			p.Unhold(s)
			delete(there, n)
		} else if !ok {
			s, err := p.Reserve(tableKey(n), 64, Writer{})
			if errors.Is(err, ErrIndexMemory) {
				if err = p.BackIndex(); err == nil {
					s, err = p.Reserve(tableKey(n), 64, Writer{})
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			there[n] = s
		}
		if p.table.former.len > 0 {
			midway++
		}
		if step%2000 != 0 {
			continue
		}
		for n := range uint32(20_000) {
			got, st := p.Find(tableKey(n))
			want, ok := there[n]
			if (st != Free) != ok || ok && got != want {
				t.Fatalf("step %d, key %d: slot %d in state %d, want %d, %v", step, n, got, st, want, ok)
			}
		}
	}
	if midway < 1000 {
		t.Errorf("only %d steps ran while the table was growing", midway)
	}
	if p.table.len != len(there) {
		t.Errorf("%d keys, want %d", p.table.len, len(there))
	}
}

// BenchmarkTableGrowth fills a pool with a million chunks and reports the slowest
// insertion: one that had to grow the whole table at once would show.
func BenchmarkTableGrowth(b *testing.B) {
	for b.Loop() {
		p, err := Open(Options{Name: "p", Bytes: 64 << 20, Align: 64, Dir: b.TempDir()})
		if err != nil {
			b.Fatal(err)
		}
		worst := time.Duration(0)
		for n := range uint32(1 << 20) {
			k := tableKey(n)
			begin := time.Now()
			if _, err := p.Reserve(k, 64, Writer{}); err != nil {
				b.Fatal(err)
			}
			worst = max(worst, time.Since(begin))
		}
		b.ReportMetric(float64(worst.Microseconds()), "worst-us")
		if err := p.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
