// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/seal"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// contains reports whether a file below a directory has some bytes.
func contains(t *testing.T, dir string, what []byte) (found bool) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		found = found || bytes.Contains(b, what)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

func TestSealed(t *testing.T) {
	tiertest.Sealed(t, func(t *testing.T) (tier.Tier, func([]byte) bool) {
		dir := t.TempDir()
		o := small(dir)
		o.SegmentBytes, o.Sealed, o.VerifySealed = 4<<20, true, tiertest.Keys(t, 1).Verify
		return open(t, o), func(b []byte) bool { return contains(t, dir, b) }
	})
}

// marker returns the version of a directory's marker.
func marker(t *testing.T, dir string) uint32 {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, markName))
	if err != nil {
		t.Fatal(err)
	}
	return le.Uint32(b[8:])
}

// The marker of a directory says that it has encrypted objects before the first one is written, so that an older build refuses it.
// The marker of a directory without encrypted objects stays as it was.
func TestSealedDirectoryIsMarked(t *testing.T) {
	dir := t.TempDir()
	life := func(sealed bool, f func(x tier.Tier)) {
		t.Helper()
		o := small(dir)
		var keys *seal.Keys
		if o.Sealed = sealed; sealed {
			keys = tiertest.Keys(t, 1)
			o.VerifySealed = keys.Verify
		}
		d := open(t, o)
		f(seal.New(d, keys, seal.Options{Name: "disk"}))
		closeDisk(t, d)
	}
	life(false, func(x tier.Tier) { put(t, x, 1, 5000) })
	if got := marker(t, dir); got != version {
		t.Fatalf("a plain directory has version %d", got)
	}
	// A marker that was being replaced when the process was killed.
	if err := os.WriteFile(filepath.Join(dir, markName+newSuffix), make([]byte, 100), 0o600); err != nil {
		t.Fatal(err)
	}
	life(true, func(x tier.Tier) {
		if got := marker(t, dir); got != sealedVersion {
			t.Errorf("before the first object the version is %d", got)
		}
		if err := get(t, x, 1, 5000, 0); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("a plain object: %v", err)
		}
		put(t, x, 2, 5000)
		need(t, x, 2, 5000)
	})
	life(false, func(x tier.Tier) { // without the key nothing is lost, and nothing is served wrongly
		need(t, x, 1, 5000)
		if err := get(t, x, 2, 5000, 0); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("an encrypted object without a key: %v", err)
		}
	})
	if got := marker(t, dir); got != sealedVersion {
		t.Errorf("after a life without keys the version is %d", got)
	}
	life(true, func(x tier.Tier) { need(t, x, 2, 5000) })
	b, err := os.ReadFile(filepath.Join(dir, markName))
	if err != nil {
		t.Fatal(err)
	}
	putMarkAs(b, dirMagic, sealedVersion+1, 7, wear{})
	if err := os.WriteFile(filepath.Join(dir, markName), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(small(dir)); !errors.Is(err, ErrNewer) {
		t.Errorf("a newer version: %v", err)
	}
}

// asFiles opens one directory in memory.
func asFiles(f *memFiles) func(string) (files, error) {
	return func(string) (files, error) { return f, nil }
}

// Encrypted objects survive a kill, and objects torn by a power cut are misses. The scrub finds changed objects, and leaves objects alone
// whose key is missing.
func TestSealedLives(t *testing.T) {
	keys := tiertest.Keys(t, 1)
	const objects, size = 30, 30_000
	for seed := range uint64(8) {
		first := newMemFiles(seed, 64<<20)
		o := Options{Dirs: []Dir{{"mem", 8 << 20}}, SegmentBytes: minSegment, MinFree: 1, FirstTouch: true, ScrubRate: 1 << 30, Sealed: true, VerifySealed: keys.Verify}
		begin := func(f *memFiles) (*Disk, tier.Tier) {
			d, err := openWith(o, asFiles(f), time.Now)
			if err != nil {
				t.Fatal(err)
			}
			<-d.Opened()
			return d, seal.New(d, keys, seal.Options{})
		}
		d, x := begin(first)
		for i := range objects {
			put(t, x, i, size)
		}
		next := first.kill()
		if seed%2 == 1 {
			next = first.cut()
		}
		_ = d.Close()
		d, x = begin(next)
		for i := range objects {
			if err := get(t, x, i, size, 0); err != nil && (seed%2 == 0 || !errors.Is(err, tier.ErrMissing)) {
				t.Errorf("seed %d, object %d: %v", seed, i, err)
			}
		}
		if n := x.(*seal.Tier).Stats().Misses["damaged"]; n > 0 {
			t.Errorf("seed %d: %d torn objects were found", seed, n)
		}
		for i := range objects {
			put(t, x, i, size)
			need(t, x, i, size)
		}
		closeDisk(t, d)
	}
}

// Only a server with the key of a record finds that its bytes changed.
func TestSealedRecordsAreCompared(t *testing.T) {
	o := small(t.TempDir())
	o.Sealed, o.VerifySealed = true, tiertest.Keys(t, 1).Verify
	d := open(t, o)
	defer closeDisk(t, d)
	for _, seed := range []byte{1, 2} {
		x := seal.New(d, tiertest.Keys(t, seed), seal.Options{})
		b, m := object(int(seed), 9000, 0)
		if err := x.Write(t.Context(), tiertest.Key(int(seed)), m, b); err != nil {
			t.Fatal(err)
		}
		raw := make([]byte, 9000+64+16)
		k := tiertest.Key(int(seed))
		meta, err := d.Read(t.Context(), k, raw)
		if err != nil {
			t.Fatal(err)
		}
		raw[5000] ^= 1
		if err := errors.Join(d.Delete(t.Context(), []kv.Key{k}), d.Write(t.Context(), k, meta, raw)); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	v := d.volumes[0]
	for _, s := range v.sealedSegments() {
		v.scrubSegment(s, func(int) error { return nil })
	}
	metas := make([]tier.Meta, 2)
	if err := d.Stat(t.Context(), []kv.Key{tiertest.Key(1), tiertest.Key(2)}, metas); err != nil || metas[0].Len != 0 || metas[1].Len == 0 {
		t.Errorf("%+v, %v", metas, err)
	}
}
