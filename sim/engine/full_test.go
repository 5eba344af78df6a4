// SPDX-License-Identifier: Apache-2.0

//go:build linux

package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// An engine that lends its memory allocates all of it at the start. When others fill the file system later,
// stores at the server fail, but never the engine.
func TestLentMemoryOutlivesAFullFileSystem(t *testing.T) {
	testkit.SmallFS(t, 24<<20, func(t *testing.T, dir string) {
		n := startNodeWith(t, dir, "pool", 8<<20, server.Options{ChunkTokens: 32, ShmDir: dir, Log: testLog(t)})
		e := open(t, engine.Options{KV: geometry(2), MaxModel: 3100, ShmDir: dir}, lmcacheConfig(n.url, "lmcache_driven"), nil)
		fillFS(t, filepath.Join(dir, "others"))
		r := engine.Request{ID: "r", Tokens: prompt(3000, 1), MaxTokens: 20} // nearly all blocks
		s, err := e.Submit(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		if got, end, err := s.Wait(t.Context()); err != nil || end.Err != nil || len(got) != 20 {
			t.Fatalf("%d tokens, %+v, %v", len(got), end, err)
		}
	})
}

// fillFS writes a file until its file system is full.
func fillFS(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for b := make([]byte, 4096); err == nil; {
		_, err = f.Write(b)
	}
}
