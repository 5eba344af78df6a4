// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// Files that were renamed to each other are misses.
func TestExchangedFilesAreMisses(t *testing.T) {
	for _, o := range []fs.Options{{}, {Trust: fs.TrustChecksum}, {Pad: true}} {
		o.Path, o.Names = folder(t), tiertest.Names()
		d := open(t, o)
		path := func(k kv.Key) string {
			n, ok := o.Names.Of(k.Namespace)
			if !ok {
				n, _ = o.Names.Of(tiertest.Key(0).Namespace)
				o.Names.Add(k.Namespace, n.Model, []byte("other"))
				n.Salt = "other"
			}
			name, ok := fs.FileName(n, k)
			if !ok {
				t.Fatal("no name")
			}
			return filepath.Join(o.Path, name)
		}
		move := func(from, to kv.Key) {
			if err := os.Rename(path(from), path(to)); err != nil {
				t.Fatal(err)
			}
		}
		unbind := func(k kv.Key) {
			b := make([]byte, 64)
			n, err := unix.Getxattr(path(k), "user.kvasir.x3", b)
			if err != nil || n != 41 || b[0] != 2 {
				t.Fatal(n, b[0], err)
			}
			b[0] = 1
			if err := unix.Setxattr(path(k), "user.kvasir.x3", b[:33], 0); err != nil {
				t.Fatal(err)
			}
		}
		tiertest.Exchanged(t, d, move, unbind)
	}
}

// A file of one revision of a model has another name than that of another one, in LMCache's layouts.
func TestRevisionIsPartOfTheName(t *testing.T) {
	k, seen := tiertest.Key(1), map[string]bool{}
	for _, revision := range []string{"", "1", "2"} {
		names := tier.NewNames()
		names.SetRevisions(map[string]string{"org/m": revision})
		names.Add(k.Namespace, "org/m", nil)
		n, _ := names.Of(k.Namespace)
		file, ok := fs.FileName(n, k)
		other, ok2 := n.LMCache(k)
		if !ok || !ok2 || seen[file] || seen[other] {
			t.Errorf("revision %q: %s, %s", revision, file, other)
		}
		if _, back, ok := fs.ParseFileName(file); !ok || back.Chunk != k.Chunk {
			t.Errorf("%s is not read back", file)
		}
		seen[file], seen[other] = true, true
	}
}
