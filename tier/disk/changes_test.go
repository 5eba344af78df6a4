// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"math/rand/v2"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// follow reads changes into what each tier has.
func follow(t *testing.T, c *tier.Changes) map[uint8]map[kv.Key]bool {
	t.Helper()
	has := map[uint8]map[kv.Key]bool{}
	buffer := make([]tier.Change, 1000)
	for at := uint64(0); ; {
		n, lost := c.After(at, buffer)
		if lost {
			t.Fatal("changes are lost")
		}
		if n == 0 {
			return has
		}
		at += uint64(n)
		for _, x := range buffer[:n] {
			if has[x.Tier] == nil {
				has[x.Tier] = map[kv.Key]bool{}
			}
			if has[x.Tier][x.Key] = true; x.Removed {
				delete(has[x.Tier], x.Key)
			}
		}
	}
}

// Two directories are offered more objects than they keep, some objects again; some are read, deleted or damaged. A follower of
// the changes knows exactly what each directory has. It knows earlier objects once it asked for them.
func TestChangesMatchTheContents(t *testing.T) {
	one, two := newMemFiles(1, 1<<30), newMemFiles(2, 1<<30)
	o := Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true, Changes: tier.NewChanges(), Number: 3}
	o.Changes.Watch(1 << 18)
	d := openMem(t, o, 2<<20, newClock(), one, two)
	r := rand.New(rand.NewPCG(1, 2))
	compare := func(d *Disk, has map[uint8]map[kv.Key]bool) {
		t.Helper()
		for i, v := range d.volumes {
			v.mu.Lock()
			of := has[uint8(3+i)]
			if len(of) != v.mu.index.len() || len(of) == 0 {
				t.Errorf("directory %d: %d objects by the changes, %d are there", i, len(of), v.mu.index.len())
			}
			for k := range of {
				if _, ok := v.mu.index.get(&k); !ok {
					t.Errorf("directory %d: %s is not there", i, k)
				}
			}
			v.mu.Unlock()
		}
	}
	for i := range 1200 {
		switch k := tiertest.Key(r.IntN(i + 1)); r.IntN(12) {
		case 0:
			if err := d.Delete(t.Context(), []kv.Key{k}); err != nil {
				t.Fatal(err)
			}
		case 1:
			var metas [1]tier.Meta
			if _ = d.Stat(t.Context(), []kv.Key{k}, metas[:]); metas[0].Len > 0 {
				_, _ = d.Read(t.Context(), k, make([]byte, metas[0].Len))
			}
		case 2:
			seed := r.IntN(i + 1)
			b, m := object(seed, 5000, 0)
			_ = d.Write(t.Context(), tiertest.Key(seed), m, b) // of another length than before
		default:
			put(t, d, i, 4<<10+r.IntN(12<<10))
		}
		if i%300 == 299 { // the keeper is at rest
			for _, v := range d.volumes {
				v.list(func(part []listed) bool {
					if len(part) == 0 {
						return true
					}
					v.mu.Lock()
					s := v.mu.segs[part[0].seg]
					v.mu.Unlock()
					v.dropDamaged(s, &record{part[0].key, part[0].block, part[0].len, part[0].sum, false, 0, 0}, errDamaged)
					return false
				})
			}
		}
	}
	if d.Stats().EvictedObj == 0 {
		t.Error("nothing was evicted")
	}
	for _, v := range d.volumes {
		v.stop()
	}
	for _, v := range d.volumes {
		v.running.Wait() // nothing is evicted any more
	}
	compare(d, follow(t, o.Changes))
	var all []kv.Key
	for _, v := range d.volumes {
		v.list(func(part []listed) bool {
			for i := range part {
				all = append(all, part[i].key)
			}
			return true
		})
	}
	closeDisk(t, d)

	o.Changes = tier.NewChanges()
	o.Changes.Watch(1 << 18)
	d = openMem(t, o, 2<<20, newClock(), one, two)
	defer closeDisk(t, d)
	if has := follow(t, o.Changes); len(has) > 0 {
		t.Errorf("%d objects are told that nobody asked for", len(has[3])+len(has[4]))
	}
	if err := d.Stat(t.Context(), all, make([]tier.Meta, len(all))); err != nil {
		t.Fatal(err)
	}
	compare(d, follow(t, o.Changes))
}
