// SPDX-License-Identifier: Apache-2.0

package lent_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	blocks = 8
	bytes  = blocks * 2 * 4 * 16 * 2 // blocks of 2 planes, 4 tokens, 16 elements of 2 bytes
)

// registration describes two layers in segments of dir that exist.
func registration(t *testing.T, dir string, groups ...lmcache.EngineGroup) *lmcache.KVCache {
	t.Helper()
	reg := &lmcache.KVCache{InstanceID: 7, Model: "m", WorldSize: 1, KVLayout: "NHD", Groups: groups}
	for _, name := range []string{"lmcache_kv_1_0", "lmcache_kv_1_1"} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, bytes), 0o600); err != nil {
			t.Fatal(err)
		}
		reg.Descriptors = append(reg.Descriptors, lmcache.Descriptor{
			Type: lmcache.CPUShm, ShmName: "/" + name, Bytes: bytes, DType: "float16", Device: "cpu",
			Shape: []int64{2, blocks, 4, 2, 8}, Stride: []int64{blocks * 64, 64, 16, 8, 1},
		})
	}
	return reg
}

func open(t *testing.T, reg *lmcache.KVCache, o lent.Options) (*lent.KV, error) {
	t.Helper()
	self := access.Self()
	kv, err := lent.Open(reg, o, &self)
	if err == nil {
		t.Cleanup(func() {
			if err := kv.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return kv, err
}

// Two workers share chunks exactly when their objects mean the same bytes.
func TestFingerprints(t *testing.T) {
	full := lmcache.EngineGroup{Layers: []int{0, 1}, WindowTokens: -1}
	apart := []lmcache.EngineGroup{{Layers: []int{0}, WindowTokens: -1}, {ID: 1, Layers: []int{1}, WindowTokens: 5}}
	of := func(separate bool, groups ...lmcache.EngineGroup) string {
		t.Helper()
		dir := t.TempDir()
		kv, err := open(t, registration(t, dir, groups...), lent.Options{ChunkTokens: 16, Separate: separate, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		return kv.Fingerprint()
	}
	if a, b := of(false), of(false, full); a != b {
		t.Errorf("no groups %q, one of all layers %q", a, b)
	}
	seen := map[string]bool{of(false, full): true, of(false, apart...): true, of(true, apart...): true}
	if len(seen) != 3 {
		t.Errorf("layouts of unlike bytes are alike: %v", seen)
	}
	turned := lmcache.EngineGroup{Layers: []int{1, 0}, WindowTokens: -1}
	if of(false, turned) == of(false, full) {
		t.Error("layers in another order are the same bytes")
	}
}

// What an engine described is checked before anything is copied.
func TestOpenRefuses(t *testing.T) {
	f := func(want string, is error, change func(reg *lmcache.KVCache)) {
		t.Helper()
		dir := t.TempDir()
		reg := registration(t, dir)
		change(reg)
		_, err := open(t, reg, lent.Options{ChunkTokens: 16, Dir: dir})
		if !errors.Is(err, lent.ErrRegistration) || !strings.Contains(err.Error(), want) || is != nil && !errors.Is(err, is) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("does not begin with", lent.ErrMemory, func(r *lmcache.KVCache) { r.Descriptors[1].ShmName = "/other" })
	f("same host", lent.ErrMemory, func(r *lmcache.KVCache) { r.Descriptors[1].ShmName = "/lmcache_kv_1_9" })
	f("announced", lent.ErrMemory, func(r *lmcache.KVCache) { r.Descriptors[1].Bytes = bytes + 1 })
	f("does not exist or is in two groups", nil, func(r *lmcache.KVCache) { r.Groups = []lmcache.EngineGroup{{Layers: []int{0, 0}, WindowTokens: -1}} })
	f("world_size 0", nil, func(r *lmcache.KVCache) { r.WorldSize = 0 })
	f("unknown dtype", nil, func(r *lmcache.KVCache) { r.Descriptors[0].DType = "int3" })
	f("cannot be opened here", nil, func(r *lmcache.KVCache) { r.Descriptors[0].Type = "cuda" })
}

// Blocks are copied out and in again, but for those that the engine has skipped, and
// only while the memory is mapped.
func TestBlocks(t *testing.T) {
	dir := t.TempDir()
	kv, err := open(t, registration(t, dir), lent.Options{ChunkTokens: 8, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][][]int{{}, {{0}}, {{0, blocks}}, {{1, 1}}, {{0, 1}, {2, 3}}} {
		if _, err := kv.Blocks(bad, 1); !errors.Is(err, paged.ErrBlocks) {
			t.Errorf("blocks %v: %v", bad, err)
		}
	}
	f, err := os.OpenFile(filepath.Join(dir, "lmcache_kv_1_0"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("block 3"), 3*128); err != nil {
		t.Fatal(err)
	}
	run := func(lists []int, load bool, skip int, chunk []byte) {
		t.Helper()
		b, err := kv.Blocks([][]int{lists}, 1)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := b.Plan([]store.Part{{Bytes: chunk}}, load, skip)
		if err != nil {
			t.Fatal(err)
		}
		if !kv.Use(func() { err = plan.Run(1, func(f func()) error { return shm.Guard(f) }) }) || err != nil {
			t.Fatal(err)
		}
	}
	chunk := make([]byte, kv.Bytes)
	run([]int{3, 2}, false, 0, chunk)
	if !strings.HasPrefix(string(chunk), "block 3") {
		t.Errorf("copied %q", chunk[:8])
	}
	run([]int{5, 6}, true, 0, chunk)
	run([]int{7, 1}, true, 4, chunk) // block 7 is skipped
	got, err := os.ReadFile(filepath.Join(dir, "lmcache_kv_1_0"))
	if err != nil {
		t.Fatal(err)
	}
	if string(got[5*128:5*128+7]) != "block 3" || got[7*128] != 0 {
		t.Errorf("block 5 is %q, block 7 %q", got[5*128:5*128+7], got[7*128:7*128+7])
	}
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	if kv.Use(func() { t.Error("memory is used after its end") }) {
		t.Error("memory is mapped after its end")
	}
}

// Of two segments that engines left, only that of the process that ended goes, and
// only while it is the same file.
func TestLeftovers(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Skip("no sleep to run: ", err)
	}
	dead, ok := peercred.Running(cmd.Process.Pid)
	if !ok {
		t.Fatal("the process is not seen")
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	living, _ := peercred.Running(os.Getpid())
	segment := func(name string, owner peercred.Process) lent.Segment {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("kv"), 0o600); err != nil {
			t.Fatal(err)
		}
		inode, err := shm.InodeOf(path)
		if err != nil {
			t.Fatal(err)
		}
		return lent.Segment{Name: name, Inode: inode, Owner: owner}
	}
	gone, used := segment("lmcache_kv_1_0", dead), segment("lmcache_kv_1_4", dead)
	other := segment("lmcache_kv_1_3", dead)
	other.Inode++ // another file has the name by now
	var l lent.Leftovers
	l.Add([]lent.Segment{gone, segment("lmcache_kv_1_1", living), segment("precious", dead), segment("lmcache_kv_1_2", peercred.Process{}), other, used})
	var removed []string
	if !l.Sweep(dir, func(s lent.Segment) bool { return s == used }, func(s lent.Segment) { removed = append(removed, s.Name) }) {
		t.Error("the list did not change")
	}
	if len(removed) != 1 || removed[0] != gone.Name {
		t.Errorf("removed %v", removed)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(left) != 5 {
		t.Errorf("left are %v", left)
	}
	if got := l.All(); len(got) != 2 {
		t.Errorf("still watched: %+v", got)
	}
}
