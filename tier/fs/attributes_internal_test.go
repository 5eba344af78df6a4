// SPDX-License-Identifier: Apache-2.0

package fs

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// none are the attributes of a file system that has none.
var none = attrs{
	set: func(int, []byte) error { return unix.ENOTSUP },
	of:  func(int, []byte) (int, error) { return -1, unix.ENOTSUP },
	at:  func(string, []byte) (int, error) { return -1, unix.ENOTSUP },
}

// bare opens a directory and returns its log.
func bare(t *testing.T, o Options, a attrs) (*Dir, *bytes.Buffer) {
	t.Helper()
	var said bytes.Buffer
	o.Log = slog.New(slog.NewTextHandler(&said, nil))
	if o.Names == nil {
		o.Names = tier.NewNames()
		o.Names.Add(tiertest.Key(0).Namespace, "m", nil)
	}
	d, err := openWith(o, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d, &said
}

func put(t *testing.T, d *Dir, seed, n int) ([]byte, tier.Meta) {
	t.Helper()
	b, m := tiertest.Object(seed, n)
	if err := d.Write(t.Context(), tiertest.Key(seed), m, b); err != nil {
		t.Fatal(err)
	}
	return b, m
}

func stat(t *testing.T, d *Dir, seed int) tier.Meta {
	t.Helper()
	metas := make([]tier.Meta, 1)
	if err := d.Stat(t.Context(), []kv.Key{tiertest.Key(seed)}, metas); err != nil {
		t.Fatal(err)
	}
	return metas[0]
}

// withoutAttributes checks what docs/operate/fs.md promises for a file system without extended attributes: one warning, objects
// are checked by their length alone, and torn objects are misses and replaced, also with two directories.
func withoutAttributes(t *testing.T, dir string, a attrs) {
	for name, o := range map[string]Options{"plain": {}, "padded": {Pad: true}, "direct": {Direct: true, Pad: true}} {
		o.Path = filepath.Join(dir, name)
		d, said := bare(t, o, a)
		const n = 10_000
		for seed := range 3 {
			b, _ := put(t, d, seed, n)
			m := stat(t, d, seed)
			if !m.NoSum || !m.Fits(n) {
				t.Errorf("%s: Stat: %+v", name, m)
			}
			dst := make([]byte, n)
			if got, err := d.Read(t.Context(), tiertest.Key(seed), dst); err != nil || got != (tier.Meta{Len: n, NoSum: true}) || !bytes.Equal(dst, b) {
				t.Errorf("%s: Read: %+v, %v", name, got, err)
			}
		}
		if got := strings.Count(said.String(), "keeps no extended attributes"); got != 1 {
			t.Errorf("%s: %d warnings of it:\n%s", name, got, said)
		}
		file, _ := FileName(tier.Name{Model: "m"}, tiertest.Key(1))
		torn := filepath.Join(o.Path, file)
		if err := os.Truncate(torn, n/2); err != nil {
			t.Fatal(err)
		}
		_, err := d.Read(t.Context(), tiertest.Key(1), make([]byte, n))
		if _, corrupt := errors.AsType[*tier.CorruptError](err); !corrupt || stat(t, d, 1).Fits(n) {
			t.Errorf("%s: a torn file: %v", name, err)
		}
		b, _ := put(t, d, 1, n)
		dst := make([]byte, n)
		if _, err := d.Read(t.Context(), tiertest.Key(1), dst); err != nil || !bytes.Equal(dst, b) {
			t.Errorf("%s: a torn file that was written again: %v", name, err)
		}
		if err := d.Delete(t.Context(), []kv.Key{tiertest.Key(1)}); err != nil || stat(t, d, 1).Len != 0 || stat(t, d, 2).Len == 0 {
			t.Errorf("%s: after a delete: %v", name, err)
		}
		o.Trust, o.Names = TrustChecksum, d.o.Names
		if _, err := openWith(o, a); !errors.Is(err, ErrNoChecksums) {
			t.Errorf("by checksums alone: %v", err)
		}
	}
}

func TestNoExtendedAttributes(t *testing.T) { withoutAttributes(t, t.TempDir(), none) }

func TestAFileSystemWithoutExtendedAttributes(t *testing.T) {
	testkit.PlainFS(t, func(t *testing.T, dir string) { withoutAttributes(t, dir, kernel) })
}

// A file system has no room for an attribute when the directory is opened, and has room later. From then on files get their
// checksums. An object whose attribute found no room is not kept.
func TestAttributesThatFindNoRoomAtFirst(t *testing.T) {
	full := true
	kept := map[uint64][]byte{} // by inode
	get := func(st *unix.Stat_t, err error, b []byte) (int, error) {
		if v, ok := kept[st.Ino]; ok && err == nil {
			return copy(b, v), nil
		}
		return -1, unix.ENODATA
	}
	a := attrs{
		set: func(fd int, b []byte) error {
			if full {
				return unix.ENOSPC
			}
			var st unix.Stat_t
			err := unix.Fstat(fd, &st)
			kept[st.Ino] = bytes.Clone(b)
			return err
		},
		of: func(fd int, b []byte) (int, error) {
			var st unix.Stat_t
			err := unix.Fstat(fd, &st)
			return get(&st, err, b)
		},
		at: func(path string, b []byte) (int, error) {
			var st unix.Stat_t
			err := unix.Lstat(path, &st)
			return get(&st, err, b)
		},
	}
	for _, trust := range []Trust{TrustLength, TrustChecksum} {
		full = true
		d, said := bare(t, Options{Path: t.TempDir(), Trust: trust}, a)
		b, m := tiertest.Object(1, 5000)
		if err := d.Write(t.Context(), tiertest.Key(1), m, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("without room: %v", err)
		}
		full = false
		if _, m := put(t, d, 1, 5000); stat(t, d, 1) != m {
			t.Errorf("with room: %+v, want %+v", stat(t, d, 1), m)
		}
		if said.Len() > 0 {
			t.Errorf("it says %s", said)
		}
	}
}

// With direct I/O whole pages pass it, and only the rest of the last page passes the page cache.
func TestWholePagesAreReadDirectly(t *testing.T) {
	d, said := bare(t, Options{Path: t.TempDir(), Direct: true}, none)
	if warned := bytes.Contains(said.Bytes(), []byte("queues no reads")); warned != (d.queue == nil) {
		t.Errorf("a queue of reads: %v, log:\n%s", d.queue != nil, said)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	f := func(n int, direct bool, want ...string) {
		t.Helper()
		var got []string
		moved, err := d.inPieces(t.Context(), int(file.Fd()), direct, make([]byte, n), func(b []byte, off int64, direct bool) (int, error) {
			got = append(got, fmt.Sprint(off, len(b), direct))
			return len(b), nil
		})
		if err != nil || moved != int64(n) || !slices.Equal(got, want) {
			t.Errorf("%d bytes, direct %v: %d moved, %v; %q, want %q", n, direct, moved, err, got, want)
		}
	}
	f(2*tier.Page, true, fmt.Sprint(0, 2*tier.Page, true))
	f(2*tier.Page+10, true, fmt.Sprint(0, 2*tier.Page, true), fmt.Sprint(2*tier.Page, 10, false))
	f(10, true, "0 10 false")
	f(piece+tier.Page, true, fmt.Sprint(0, piece, true), fmt.Sprint(piece, tier.Page, true))
	f(2*tier.Page, false, fmt.Sprint(0, 2*tier.Page, false))
}
