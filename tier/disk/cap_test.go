// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier"
)

// capObject fills b with object i: its bytes tell it from all others.
func capObject(i int64, b []byte) []byte {
	word := mix(uint64(i) + 1)
	at := 0
	for ; at+8 <= len(b); at += 8 {
		le.PutUint64(b[at:], word)
		word += 0x9e3779b97f4a7c15
	}
	for ; at < len(b); at++ {
		b[at] = byte(word)
	}
	return b
}

func smallBytes(i int64) int { return 4<<10 + int(mix(uint64(i))%(60<<10+1)) }

// A directory that is offered many times its limit never takes more than the limit and one segment, gives no wrong
// byte, and writes less than 1.3 bytes for each byte of objects. At full size the limit is 4 GiB, the keys have 16 GiB
// of objects, and there are 2,000,000 writes of 4 to 64 KiB and 100,000 of 1 MiB. CAP is the fraction of the full size to
// run, and CAP_DIR the directory. Without CAP there are fewer writes for the limit.
func TestCap(t *testing.T) {
	part, fewer := 1.0/256, 4.0
	if v, err := strconv.ParseFloat(os.Getenv("CAP"), 64); err == nil {
		part, fewer = v, 1
	}
	scaled := func(n float64) int64 { return int64(n * part) }
	dir, err := os.MkdirTemp(os.Getenv("CAP_DIR"), "kvasir-cap-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const small, large = 34 << 10, 1 << 20 // bytes of an object, on average
	limit := scaled(4<<30) / block * block
	segment := max(2<<20, limit/64/block*block)
	d := open(t, Options{Dirs: []Dir{{dir, limit}}, SegmentBytes: segment, MinFree: 1, FirstTouch: true})
	defer closeDisk(t, d)
	smalls, larges := scaled(8<<30)/small, scaled(8<<30)/large // keys of each kind
	writes := []int64{scaled(2e6 / fewer), scaled(1e5 / fewer)}
	var next, written, reads, hits, worst atomic.Int64
	look := func() {
		names, err := d.volumes[0].files.list()
		if err != nil {
			t.Error(err)
		}
		sum := int64(0)
		for _, n := range names {
			sum += n
		}
		for old := worst.Load(); sum > old && !worst.CompareAndSwap(old, sum); old = worst.Load() {
		}
	}
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, g))
			src, dst := shm.MakeAligned(large, block), shm.MakeAligned(large, block)
			for i := next.Add(1); i <= writes[0]+writes[1] && !t.Failed(); i = next.Add(1) {
				key := r.Int64N(smalls)
				n := smallBytes(key)
				if i%(writes[0]/writes[1]+1) == 0 {
					key, n = smalls+r.Int64N(larges), large
				}
				b := capObject(key, src[:n])
				err := d.Write(t.Context(), benchKey(key), tier.Meta{Len: int64(n), Sum: hashOf(b)}, b)
				if err == nil {
					written.Add(1)
				} else if !errors.Is(err, tier.ErrNotKept) {
					t.Errorf("write: %v", err)
				}
				if i%16 == 0 {
					reads.Add(1)
					key = r.Int64N(smalls)
					n = smallBytes(key)
					switch _, err := d.Read(t.Context(), benchKey(key), dst[:n]); {
					case err == nil && !bytes.Equal(dst[:n], capObject(key, src[:n])):
						t.Error("wrong bytes")
					case err == nil:
						hits.Add(1)
					case !errors.Is(err, tier.ErrMissing):
						t.Errorf("read: %v", err)
					}
				}
				if i%64 == 0 {
					look()
				}
			}
		})
	}
	wg.Wait()
	if err := d.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	look()
	s := d.Stats()
	factor := float64(s.Written["all"]) / float64(s.Written["objects"])
	t.Logf("limit %d MiB, most %d MiB; %d writes, %d kept or there; %d GiB of objects, %.3f bytes written for each; %d segments evicted, %d MiB readmitted; %d of %d reads hit; not kept %v",
		limit>>20, worst.Load()>>20, writes[0]+writes[1], written.Load(), s.Written["objects"]>>30, factor, s.Evicted, s.Readmitted>>20, hits.Load(), reads.Load(), s.NotKept)
	if worst.Load() > limit+segment {
		t.Errorf("%d bytes were used, the limit is %d and a segment %d", worst.Load(), limit, segment)
	}
	if factor >= 1.3 || s.Evicted == 0 || hits.Load() == 0 {
		t.Errorf("%.3f bytes written for each, %d segments evicted, %d hits", factor, s.Evicted, hits.Load())
	}
	if left := d.Space(); left.Objects == 0 || left.Used > limit {
		t.Errorf("%+v", left)
	}
}
