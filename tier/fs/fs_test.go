// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestValidate(t *testing.T) { testkit.CheckNumbers[fs.Options](t) }

// folder is a directory that keeps extended attributes, and where direct I/O may work.
func folder(t *testing.T) string {
	dir := t.TempDir()
	if unix.Setxattr(dir, "user.kvasir.test", []byte{1}, 0) == nil {
		return dir
	}
	dir, err := os.MkdirTemp(".", "testdata-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := unix.Setxattr(dir, "user.kvasir.test", []byte{1}, 0); err != nil {
		t.Skip("no file system with extended attributes: ", err)
	}
	return dir
}

func open(t *testing.T, o fs.Options) *fs.Dir {
	t.Helper()
	if o.Names == nil {
		o.Names = tiertest.Names()
	}
	d, err := fs.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func TestTier(t *testing.T) {
	for name, o := range map[string]fs.Options{
		"fs": {}, "temporary files apart": {TempDir: "tmp/kvasir"}, "checksums only": {Trust: fs.TrustChecksum}, "with a limit": {Limit: 1 << 30, EvictAt: 0.9, EvictShare: 0.1},
		"direct": {Direct: true}, "padded": {Pad: true}, "direct and padded": {Direct: true, Pad: true},
	} {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				o.Path, o.Names = folder(t), tiertest.Names()
				d, err := fs.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				for o.Limit > 0 && !counted(t, d) {
					time.Sleep(time.Millisecond)
				}
				return d
			})
		})
	}
}

// counted reports whether the directory has counted its files; before that it takes no objects.
func counted(t *testing.T, d *fs.Dir) bool {
	b, m := tiertest.Object(900, 10)
	err := d.Write(t.Context(), tiertest.Key(900), m, b)
	if err == nil {
		err = d.Delete(t.Context(), []kv.Key{tiertest.Key(900)})
	}
	if err != nil && !errors.Is(err, tier.ErrResting) {
		t.Fatal(err)
	}
	return err == nil
}

func put(t *testing.T, d *fs.Dir, seed, n int) ([]byte, tier.Meta) {
	t.Helper()
	b, m := tiertest.Object(seed, n)
	if err := d.Write(t.Context(), tiertest.Key(seed), m, b); err != nil {
		t.Fatal(err)
	}
	return b, m
}

func keysOf(seed int) []kv.Key { return []kv.Key{tiertest.Key(seed)} }

func stat(t *testing.T, d *fs.Dir, seed int) tier.Meta {
	t.Helper()
	metas := make([]tier.Meta, 1)
	if err := d.Stat(t.Context(), []kv.Key{tiertest.Key(seed)}, metas); err != nil {
		t.Fatal(err)
	}
	return metas[0]
}

func pathOf(dir string, seed int) string {
	name, _ := fs.FileName(tier.Name{Model: "org/model"}, tiertest.Key(seed))
	return filepath.Join(dir, name)
}

// The file has the name and the bytes that LMCache gives it, and nothing else is left.
func TestFilesAreLMCaches(t *testing.T) {
	for _, c := range []struct {
		pad   bool
		bytes int
		file  int
	}{{false, 5000, 5000}, {true, 5000, 8192}, {true, 8192, 8192}, {true, 1, 4096}} {
		dir := folder(t)
		d := open(t, fs.Options{Path: dir, Pad: c.pad})
		b, _ := put(t, d, 7, c.bytes)
		got, err := os.ReadFile(filepath.Join(dir, "org-SEP-model@0x00000007@2@0700010000000000000000000000000000000000000000000000000000000000.data"))
		if err != nil {
			t.Fatal(err)
		}
		if len(got) != c.file || !bytes.Equal(got[:c.bytes], b) || len(bytes.Trim(got[c.bytes:], "\x00")) > 0 {
			t.Errorf("%d bytes, padded %v: the file has %d", c.bytes, c.pad, len(got))
		}
		if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
			t.Errorf("%d files are left", len(all))
		}
	}
}

// Names are those that LMCache 0.5.6 was seen to give.
func TestNamesAreLMCaches(t *testing.T) {
	var v struct {
		Variants map[string]struct {
			Adapter struct {
				Direct bool `json:"use_odirect"`
			}
			Objects []struct {
				Name   string
				Salt   string
				Hash   string `json:"chunk_hash_hex"`
				Length int64
				Bytes  int64 `json:"logical_length"`
			}
		}
	}
	testkit.ReadVector(t, "lmcache-mp/l2_file_variants.json", &v)
	seen := 0
	for kind, variant := range v.Variants {
		for _, o := range variant.Objects {
			seen++
			k := kv.Key{Rank: 0x01000100}
			if _, err := hex.Decode(k.Chunk[:], []byte(o.Hash)); err != nil {
				t.Fatal(err)
			}
			if got, ok := fs.FileName(tier.Name{Model: "org/model-7b", Salt: o.Salt}, k); !ok || got != o.Name {
				t.Errorf("%s: %s, LMCache has %s", kind, got, o.Name)
			}
			if m := (tier.Meta{Len: o.Length, NoSum: true}); !m.Fits(o.Bytes) {
				t.Errorf("%s: a file of %d bytes is not taken for one of %d", kind, o.Length, o.Bytes)
			}
		}
	}
	if seen == 0 {
		t.Error("nothing was recorded")
	}
	k := kv.Key{Rank: 0x02010201, Group: 10, Chunk: kv.Hash{0xab}}
	f := func(n tier.Name, want string) {
		t.Helper()
		name, ok := fs.FileName(n, k)
		if !ok || name != want {
			t.Errorf("%+v: %s, %v, want %s", n, name, ok, want)
		}
		back, key, ok := fs.ParseFileName(name)
		if !ok || back != n || key != k {
			t.Errorf("%s is read as %+v, %+v, %v", name, back, key, ok)
		}
	}
	hash := "ab" + strings.Repeat("0", 62)
	f(tier.Name{Model: "Qwen/Qwen2.5-7B"}, "Qwen-SEP-Qwen2.5-7B@0x02010201@a@"+hash+".data")
	f(tier.Name{Model: "m", Salt: "tenantA"}, "m@0x02010201@a@"+hash+"@tenantA.data")
	refuse := func(n tier.Name) {
		t.Helper()
		if name, ok := fs.FileName(n, k); ok {
			t.Errorf("%+v has the name %s", n, name)
		}
	}
	refuse(tier.Name{})
}

// If an object's name is too long for a file name, or has characters that may not be in one, the file name has a digest instead. Two models,
// salts or generations have different digests. Such an object is written, read, listed and removed like any other.
func TestNamesThatCannotBeFilesBecomeDigests(t *testing.T) {
	names := tier.NewNames()
	d, err := fs.Open(fs.Options{Path: t.TempDir(), Names: names})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	long := strings.Repeat("m", 200)
	list := []tier.Name{
		{Model: long},
		{Model: long + "n"},
		{Model: long, Salt: "a"},
		{Model: "a@b"},
		{Model: "a", Salt: "b@c"},
		{Model: "m", Salt: "a/../../b"},
		{Model: strings.Repeat("m", 90), Salt: strings.Repeat("s", 128)},
		{Model: long, Revision: "r1"},
		{Model: long + "~1.1786ab34cd56ef78"},
	}
	files := map[string]bool{}
	for i, n := range list {
		k := tiertest.Key(i)
		k.Namespace[3] = byte(i)
		names.Add(k.Namespace, tier.Revised(n.Model, n.Revision), []byte(n.Salt))
		b, m := tiertest.Object(i, 100)
		if err := d.Write(t.Context(), k, m, b); err != nil {
			t.Fatalf("%+v: %v", n, err)
		}
		got := make([]byte, 100)
		if read, err := d.Read(t.Context(), k, got); err != nil || read != m || string(got) != string(b) {
			t.Errorf("%+v: %+v, %v", n, read, err)
		}
		name, ok := fs.FileName(n, k)
		if _, back, parsed := fs.ParseFileName(name); !ok || !parsed || back.Chunk != k.Chunk || !strings.HasPrefix(name, "sha256-") {
			t.Errorf("%+v has the name %s", n, name)
		}
		files[strings.Split(name, "@")[0]] = true
	}
	if len(files) != len(list) {
		t.Errorf("%d names of %d: %v", len(files), len(list), files)
	}
	if !files["sha256-"+fmt.Sprintf("%x", sha256.Sum256([]byte(list[8].Model+"\x00")))+"~1.1786ab34cd56ef78"] {
		t.Errorf("no name tells its generation: %v", files)
	}
	n, err := tier.RemoveIf(t.Context(), d, func(c tier.Content) bool { return strings.HasPrefix(c.Model, "sha256-") }, func(context.Context, int) error { return nil })
	if err != nil || n != len(list) {
		t.Errorf("removed %d of %d, %v", n, len(list), err)
	}
}

// A file is a miss after it was cut, emptied or padded, or replaced by a file of another layout, a folder, a
// pipe or a link. The next write replaces it if it is a file.
func TestDamagedFilesAreMisses(t *testing.T) {
	const n = 10000
	for name, harm := range map[string]func(path string) error{
		"half":    func(p string) error { return os.Truncate(p, n/2) },
		"empty":   func(p string) error { return os.Truncate(p, 0) },
		"one off": func(p string) error { return os.Truncate(p, n-1) },
		"longer":  func(p string) error { return os.Truncate(p, n+100) },
		"foreign and short": func(p string) error {
			return errors.Join(os.Remove(p), os.WriteFile(p, make([]byte, n-1), 0o600))
		},
		"a link": func(p string) error {
			to := p + ".elsewhere"
			return errors.Join(os.WriteFile(to, make([]byte, n), 0o600), os.Remove(p), os.Symlink(to, p))
		},
		"a pipe": func(p string) error { return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o600)) },
		"gone":   os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			dir := folder(t)
			d := open(t, fs.Options{Path: dir})
			b, m := put(t, d, 1, n)
			if err := harm(pathOf(dir, 1)); err != nil {
				t.Fatal(err)
			}
			if got := stat(t, d, 1); got.Fits(n) {
				t.Errorf("Stat: %+v", got)
			}
			_, err := d.Read(t.Context(), tiertest.Key(1), make([]byte, n))
			if _, corrupt := errors.AsType[*tier.CorruptError](err); !corrupt && !errors.Is(err, tier.ErrMissing) {
				t.Errorf("Read: %v", err)
			}
			put(t, d, 1, n)
			dst := make([]byte, n)
			if got, err := d.Read(t.Context(), tiertest.Key(1), dst); err != nil || got != m || !bytes.Equal(dst, b) {
				t.Errorf("after it was written again: %+v, %v", got, err)
			}
		})
	}
}

// A file of another server has no checksum. The tier trusts its length, padded or not; otherwise the object is
// a miss. If the tier trusts only checksums, its own write replaces the file.
func TestForeignFiles(t *testing.T) {
	const n = 5000
	for _, size := range []int{n, 8192} {
		dir := folder(t)
		b, m := tiertest.Object(1, n)
		if err := os.WriteFile(pathOf(dir, 1), append(bytes.Clone(b), make([]byte, size-n)...), 0o600); err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, n)
		byLength := open(t, fs.Options{Path: dir})
		if got := stat(t, byLength, 1); got != (tier.Meta{Len: int64(size), NoSum: true}) || !got.Fits(n) {
			t.Errorf("by length, %d bytes: %+v", size, got)
		}
		if got, err := byLength.Read(t.Context(), tiertest.Key(1), dst); err != nil || got != (tier.Meta{Len: n, NoSum: true}) || !bytes.Equal(dst, b) {
			t.Errorf("by length, %d bytes: %+v, %v", size, got, err)
		}
		strict := open(t, fs.Options{Path: dir, Trust: fs.TrustChecksum})
		if got := stat(t, strict, 1); got.Len != 0 {
			t.Errorf("by checksum: %+v", got)
		}
		if _, err := strict.Read(t.Context(), tiertest.Key(1), dst); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("by checksum: %v", err)
		}
		put(t, strict, 1, n)
		if got := stat(t, strict, 1); got != m {
			t.Errorf("written again: %+v", got)
		}
	}
}

// Objects of two layouts of one model have the same name. No read returns the other layout's bytes, although
// the lengths are equal.
func TestTwoLayoutsOfOneModel(t *testing.T) {
	dir := folder(t)
	n := tier.NewNames()
	one, two := tiertest.Key(1), tiertest.Key(1)
	two.Namespace[0]++
	n.Add(one.Namespace, "m", nil)
	n.Add(two.Namespace, "m", nil)
	d := open(t, fs.Options{Path: dir, Names: n})
	b, m := tiertest.Object(1, 100)
	if err := d.Write(t.Context(), one, m, b); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Read(t.Context(), two, make([]byte, 100)); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("the other layout reads: %v", err)
	}
	if err := d.Delete(t.Context(), []kv.Key{two}); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Read(t.Context(), one, make([]byte, 100)); err != nil || got != m {
		t.Errorf("after the other layout's delete: %+v, %v", got, err)
	}
}

// A file of another server does not name its layout. If its model has two layouts, the file is a miss, and our own write replaces it.
func TestForeignFilesOfTwoLayouts(t *testing.T) {
	dir := folder(t)
	n := tier.NewNames()
	k := tiertest.Key(1)
	n.Add(k.Namespace, "m", nil)
	d := open(t, fs.Options{Path: dir, Names: n})
	b, m := tiertest.Object(1, 100)
	name, ok := fs.FileName(tier.Name{Model: "m"}, k)
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil || !ok {
		t.Fatal(err)
	}
	if _, err := d.Read(t.Context(), k, make([]byte, 100)); err != nil {
		t.Errorf("one layout: %v", err)
	}
	n.Mix("m")
	if _, err := d.Read(t.Context(), k, make([]byte, 100)); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("two layouts: %v", err)
	}
	if err := d.Write(t.Context(), k, m, b); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Read(t.Context(), k, make([]byte, 100)); err != nil || got != m {
		t.Errorf("its own file: %+v, %v", got, err)
	}
}

// A full file system and a full budget are no failures, and leave nothing behind.
func TestNoRoom(t *testing.T) {
	testkit.SmallFS(t, 1<<20, func(t *testing.T, dir string) {
		d := open(t, fs.Options{Path: dir})
		b, m := tiertest.Object(1, 4<<20)
		if err := d.Write(t.Context(), tiertest.Key(1), m, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("on a full file system: %v", err)
		}
		if all, err := os.ReadDir(dir); err != nil || len(all) != 0 {
			t.Errorf("%d files are left", len(all))
		}
		put(t, d, 2, 1000)
		keeps := open(t, fs.Options{Path: dir, MinFree: 1 << 30})
		if err := keeps.Write(t.Context(), tiertest.Key(3), m, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("with bytes to be left free: %v", err)
		}
	})
}

// While the directory is gone, or the one for temporary files, each write returns an error that asks to try again, and
// reads miss. When it is back, the tier takes both objects.
func TestDirectoryThatIsGoneAndBack(t *testing.T) {
	for _, temp := range []string{"", "tmp"} {
		dir := filepath.Join(folder(t), "kv")
		d := open(t, fs.Options{Path: dir, TempDir: temp})
		put(t, d, 1, 5000)
		away := dir + "-away"
		if temp != "" {
			dir, away = filepath.Join(dir, temp), filepath.Join(dir, "away")
		}
		if err := os.Rename(dir, away); err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			b, m := tiertest.Object(2+i%2, 5000)
			if err := d.Write(t.Context(), tiertest.Key(2+i%2), m, b); !errors.Is(err, tier.ErrResting) || errors.Is(err, tier.ErrNotKept) {
				t.Fatalf("temporary files in %q, write %d: %v", temp, i, err)
			}
			if got := stat(t, d, 2); got != (tier.Meta{}) {
				t.Fatalf("temporary files in %q: %+v is there", temp, got)
			}
		}
		if err := os.Rename(away, dir); err != nil {
			t.Fatal(err)
		}
		for seed := 1; seed <= 3; seed++ {
			want, m := put(t, d, seed, 5000)
			got := make([]byte, len(want))
			if read, err := d.Read(t.Context(), tiertest.Key(seed), got); err != nil || read != m || !bytes.Equal(got, want) {
				t.Errorf("temporary files in %q, object %d: %+v, %v", temp, seed, read, err)
			}
		}
	}
}
