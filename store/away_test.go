// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
)

// Two prompts are stored while the directory below is gone, and others are looked up there meanwhile. However long that
// takes, both are written when it is back, and come from it when the pool has lost them.
func TestStoredWhileTheDirectoryIsGone(t *testing.T) {
	for _, away := range []time.Duration{time.Second, 5 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			const n = 3
			dir, names := filepath.Join(t.TempDir(), "kv"), tier.NewNames()
			names.Add(one.Namespace, "model", nil)
			d, err := fs.Open(fs.Options{Path: dir, Names: names})
			if err != nil {
				t.Fatal(err)
			}
			b := &tiered{bench: newBench(t, t.TempDir(), 4*n, store.Options{Below: tier.Bounded(d, tier.Limits{})})}
			defer b.stop()
			defer b.run()()
			if err := os.Rename(dir, dir+"-away"); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			for i := 0; time.Since(began) < away; i++ {
				if i < 2 {
					b.put("p", prompt(i, n), 0, n, n)
				}
				if got := b.await(t, nobody, one, prompt(2, n)); got.Hit != 0 {
					t.Fatalf("%+v", got)
				}
				b.store.EndSession([]byte("r"), nobody)
				time.Sleep(away / 10)
			}
			if err := os.Rename(dir+"-away", dir); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			files, err := filepath.Glob(filepath.Join(dir, "*.data"))
			if got := b.store.Stats(); err != nil || len(files) != 2*n || got.WrittenChunks != 2*n || got.Outbox.Waiting > 0 {
				t.Errorf("gone for %v: %d files, %v, %+v", away, len(files), err, got)
			}
			b.store.Clear(true)
			for i := range 2 {
				b.load(t, prompt(i, n))
			}
			b.idle()
		})
	}
}

// More is stored than the pool holds while the directory below is gone, and what is used again and again stays. All that
// the pool has is written when it is back: what was evicted meanwhile takes nobody's place.
func TestEvictedWhileTheDirectoryIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, used = 600, 300
		dir, names := filepath.Join(t.TempDir(), "kv"), tier.NewNames()
		names.Add(one.Namespace, "model", nil)
		d, err := fs.Open(fs.Options{Path: dir, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		b := &tiered{bench: newBench(t, t.TempDir(), n, store.Options{Below: tier.Bounded(d, tier.Limits{})})}
		defer b.stop()
		defer b.run()()
		if err := os.Rename(dir, dir+"-away"); err != nil {
			t.Fatal(err)
		}
		hot := prompt(0, used)
		b.put("p", hot, 0, used, used)
		for i := range 20 {
			time.Sleep(1300 * time.Millisecond) // between two tries
			b.load(t, hot)
			synctest.Wait() // nothing is being written
			once := make([]uint32, n-used)
			once[0] = uint32(1000 + i) // no chunk of any other
			b.put("p", kv.ChunkHashes(once, 1), 0, n-used, n-used)
		}
		if err := os.Rename(dir+"-away", dir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		files, err := filepath.Glob(filepath.Join(dir, "*.data"))
		if got := b.store.Stats(); err != nil || len(files) != n || got.Outbox.Waiting > 0 {
			t.Errorf("%d files of %d chunks, %v, %+v", len(files), n, err, got)
		}
		b.idle()
	})
}
