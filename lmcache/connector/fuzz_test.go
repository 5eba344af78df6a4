// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"encoding/json"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

var releases = [3]connector.Release{0, connector.VLLM018, connector.VLLM033}

// Any script, as any release, plays or is refused: a scheduler's mistakes and a
// server's hits never panic.
func FuzzScript(f *testing.F) {
	for _, file := range []string{"tracker-seed.json", "tracker-v0330.json"} {
		var doc struct{ Cases []json.RawMessage }
		testkit.ReadVector(f, "lmcache-tracker/"+file, &doc)
		for _, c := range doc.Cases[:8] {
			f.Add([]byte(c), uint8(len(c)%4))
		}
	}
	f.Add([]byte(`{"bs":4,"chunk":2,"events":[{"op":"new","req":"r","ntok":30},{"op":"lookup_result","req":"r","tok":-8},
		{"op":"match","req":"r","computed":-1},{"op":"alloc","req":"r","blocks":[1],"external":5},{"op":"step","new":["r"],"sched":{"r":-7}},
		{"op":"match","req":"r","computed":99},{"op":"finish","req":"r"}]}`), uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, mode uint8) {
		var s script
		if json.Unmarshal(b, &s) != nil {
			return
		}
		p, err := newPlayer(&s, connector.SchedulerOptions{Release: releases[mode&3%3]})
		if err != nil {
			return
		}
		for i := range s.Events {
			e := &s.Events[i]
			if e.Tokens < 0 || e.Tokens > 4096 || len(e.Blocks) > 4096 || e.Hashes < 0 || e.Hashes*s.BlockTokens > e.Tokens && e.Op == "grow" {
				return // not what a scheduler's own memory holds
			}
			_, _ = p.play(e)
		}
	})
}

// The same with scripts made from bytes: three per event.
func FuzzEvents(f *testing.F) {
	f.Add([]byte{0, 1, 40, 1, 1, 16, 2, 1, 0, 3, 1, 9, 4, 1, 8, 4, 1, 200, 6, 1, 0}, uint8(2))
	f.Add([]byte{0, 1, 40, 1, 1, 16, 2, 1, 0, 3, 1, 9, 4, 1, 8, 5, 1, 0, 2, 1, 0, 3, 1, 9, 7, 1, 3, 6, 1, 0}, uint8(3))
	f.Fuzz(func(t *testing.T, b []byte, mode uint8) {
		p, err := newPlayer(&script{BlockTokens: 1 + int(mode>>2)%5, Chunk: 1 + int(mode>>5)}, connector.SchedulerOptions{Release: releases[mode&3%3]})
		if err != nil {
			t.Fatal(err)
		}
		ids := []string{"a", "b", "c"}
		for ; len(b) >= 3; b = b[3:] {
			id, n := ids[int(b[1])%3], int(int8(b[2]))
			r := p.requests[id]
			e := event{Op: []string{"new", "lookup_result", "match", "alloc", "step", "preempt", "finish", "step"}[b[0]&7], Req: id}
			e.Tokens, e.Hit, e.Computed, e.External = max(n, 0), n*p.block, n, n
			for i := range max(n, 0) {
				e.Blocks = append(e.Blocks, i)
			}
			e.Sched = map[string]int{id: n}
			if b[0]&7 == 4 {
				e.New = []string{id}
			} else if b[0]&7 == 7 {
				e.Cached = [][4]json.RawMessage{{json.RawMessage(`"` + id + `"`), json.RawMessage(`[7,8]`), json.RawMessage(`0`), json.RawMessage(`3`)}}
			}
			if r != nil && e.Op == "new" {
				continue
			}
			_, _ = p.play(&e)
			if i, ok := p.scheduler.Info(id); ok && (i.StoredBlocks < 0 || i.VLLMHitBlocks < 0 || i.CacheHitBlocks < 0) {
				t.Fatalf("%+v", i)
			}
		}
	})
}
