// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/store/pool"
)

// What lies in a folder is listed pool by pool, with who serves it, what memory it takes
// and why it cannot be used, and nothing is listed that may be another program's.
func TestListNamesEachPool(t *testing.T) {
	dir := t.TempDir()
	create := func(name string) *pool.Pool {
		t.Helper()
		p, err := pool.Open(pool.Options{Name: name, Bytes: 16 * 4096, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	began := time.Now()
	served, left, damaged := create("served"), create("left"), create("damaged")
	defer served.Close()
	if err := errors.Join(left.Populate(0, 16*4096, false), left.SetNote([]byte("workers")), left.Close(), damaged.Close()); err != nil {
		t.Fatal(err)
	}
	past := began.Add(-time.Hour)
	path := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, content string) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path(name), []byte(content), 0o600), os.Chtimes(path(name), past, past)); err != nil {
			t.Fatal(err)
		}
	}
	write("damaged.kvasir", strings.Repeat("x", 8192))
	write("kvasir_1", "a segment without its index")
	write("lmcache_l1_pool_kvasir_2.workers", "a note alone")
	write("lmcache_l1_pool_3", "LMCache's own")
	write("other", "somebody's")
	write("note.workers.new-1", "of no pool")
	if err := errors.Join(os.Mkdir(path("folder.kvasir"), 0o700), os.Symlink(path("left.kvasir"), path("link.kvasir"))); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		write("theirs.kvasir", "")
		if err := os.Chown(path("theirs.kvasir"), 4242, 4242); err != nil {
			t.Fatal(err)
		}
	}
	found, err := pool.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]pool.Found{}
	var names []string
	for _, f := range found {
		got[f.Name], names = f, append(names, f.Name)
	}
	want := "damaged kvasir_1 left lmcache_l1_pool_kvasir_2 served"
	if os.Geteuid() == 0 {
		want += " theirs"
		if f := got["theirs"]; f.Ours || f.Owner != "uid 4242" {
			t.Errorf("another user's: %+v", f)
		}
	}
	if strings.Join(names, " ") != want {
		t.Fatalf("listed are %v, want %s", names, want)
	}
	if f := got["served"]; f.Server != os.Getpid() || !f.InUse() || f.Bytes != 16*4096 || f.Trouble != "" || !f.Ours || f.Since.Before(began) {
		t.Errorf("served: %+v", f)
	}
	if f := got["left"]; f.Server != 0 || f.InUse() || f.Bytes != 16*4096 || f.Taken < 16*4096 || f.Trouble != "" || f.Since.Before(began) || time.Since(f.Since) < 0 {
		t.Errorf("left: %+v", f)
	}
	if f := got["damaged"]; f.Trouble == "" || f.InUse() || f.Bytes != 16*4096 || !f.Ours {
		t.Errorf("damaged: %+v", f)
	}
	for _, name := range []string{"kvasir_1", "lmcache_l1_pool_kvasir_2"} {
		if f := got[name]; f.Trouble != "" || f.InUse() || !f.Ours || !f.Since.Equal(past) || f.Taken == 0 {
			t.Errorf("%s: %+v, want since %v", name, f, past)
		}
	}
	if _, err := pool.List(filepath.Join(dir, "none")); err == nil {
		t.Error("a folder that is not there is listed")
	}
}
