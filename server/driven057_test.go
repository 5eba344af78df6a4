// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// recorded057 returns a recording of a real client and server of 0.5.7rc2.
func recorded057(t *testing.T, name string) testkit.Recording {
	t.Helper()
	var all struct{ Recordings map[string]testkit.Recording }
	testkit.ReadVector(t, "lmcache-mp/generation-0.5.7rc2.json", &all)
	rec := all.Recordings[name]
	if len(rec.Steps) == 0 {
		t.Fatalf("no recording %s", name)
	}
	return rec
}

var segmentName = regexp.MustCompile(`lmcache_kv_\d+_\d+`)

// segmentsOf makes the segments that a recorded client lent, in dir, and returns their bytes in the order of their first mention.
func segmentsOf(t *testing.T, rec *testkit.Recording, dir string, size int64) (segments [][]byte) {
	t.Helper()
	made := make(map[string]bool)
	for _, step := range rec.Steps {
		for _, f := range step.Frames {
			for _, name := range segmentName.FindAllString(string(bytes.Join(testkit.Frames(f.Hex), nil)), -1) {
				if made[name] {
					continue
				}
				made[name] = true
				seg, err := shm.Create(filepath.Join(dir, name), size)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { seg.Close() })
				segments = append(segments, seg.Bytes(0, size))
			}
		}
	}
	return segments
}

// The whole recorded life of workers of 0.5.7 whose KV the server copies, with lookups that start above 0, a range that a lookup
// left behind, and clears between them: replies equal the reference's, and the bytes are where they belong.
func TestRecordedLMCacheDriven057(t *testing.T) {
	rec := recorded057(t, "lmcache_driven_cpu_shm")
	dir := t.TempDir()
	const blocks, blockBytes = 12, 64 // of a plane
	segs := segmentsOf(t, &rec, dir, 2*blocks*blockBytes)
	if len(segs) != 4 { // two workers of two layers
		t.Fatalf("%d segments", len(segs))
	}
	for i, b := range segs {
		for j := range b {
			b[j] = byte(j*7 + j>>6*13 + i*50)
		}
	}
	before := [][]byte{slices.Clone(segs[2]), slices.Clone(segs[3])}
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 1 << 20, Dir: dir, ChunkTokens: rec.Meta.ChunkTokens})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	s := server.New(st, server.Options{ChunkTokens: rec.Meta.ChunkTokens, ShmDir: dir})
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	}()
	block := func(layer []byte, plane, id int) []byte { return layer[(plane*blocks+id)*blockBytes:][:blockBytes] }
	cases := 0
	for _, step := range rec.Steps {
		for i, f := range step.Frames {
			if f.Direction != "client_to_server" {
				continue
			}
			cases++
			compareReply(t, step.Step, f.Hex[1], s.Answer(testkit.Frames(f.Hex)), testkit.Frames(step.Frames[i+1].Hex))
		}
		first, last := -1, 9 // blocks that were read
		switch step.Step {
		case "retrieve_all": // but for the first 8 tokens
			first = 3
		case "retrieve_tail":
			first = 6
		default:
			continue
		}
		for layer := range 2 {
			for plane := range 2 {
				for id := range blocks {
					want := block(before[layer], plane, id)
					if id >= first && id <= last {
						want = block(segs[layer], plane, id)
					}
					if !bytes.Equal(block(segs[2+layer], plane, id), want) {
						t.Errorf("%s: layer %d, plane %d, block %d: wrong bytes", step.Step, layer, plane, id)
					}
				}
			}
			copy(segs[2+layer], before[layer])
		}
	}
	if cases < 44 {
		t.Errorf("%d cases", cases)
	}
	if now := st.Stats(); now.Resident != 0 || now.Sessions != 0 {
		t.Errorf("after the recording: %d objects, %d sessions", now.Resident, now.Sessions)
	}
}
