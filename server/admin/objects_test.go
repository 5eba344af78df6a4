// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/admin"
)

type page struct {
	Adapter string
	Entries []struct {
		Key struct {
			Chunk string `json:"chunk_hash_hex"`
			Model string `json:"model_name"`
			Rank  uint32 `json:"kv_rank"`
			Salt  string `json:"cache_salt"`
		}
		Bytes int64 `json:"size_bytes"`
	}
	Next *string `json:"next_page_token"`
}

// Objects are listed page by page, and those that a body names are dropped, but for what is pinned.
func TestObjects(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{Flags: map[string]string{"port": "1"}})
	list := func(query string) (p page) {
		t.Helper()
		code, body := ask(h, "GET", "http://localhost/cache/objects"+query, "")
		if err := json.Unmarshal([]byte(body), &p); code != 200 || err != nil {
			t.Fatalf("%s: %d %s", query, code, body)
		}
		return p
	}
	hashes := kv.ChunkHashes(make([]uint32, 32), 16)
	var got []string
	for token := ""; ; {
		p := list("?tier=l1&page_size=1&page_token=" + token)
		for _, e := range p.Entries {
			got = append(got, e.Key.Chunk)
			if e.Key.Model != "m" || e.Key.Rank != 0x01000100 || e.Key.Salt != "" || e.Bytes != 4096 {
				t.Errorf("%+v", e)
			}
		}
		if p.Next == nil {
			break
		}
		token = *p.Next
	}
	want := []string{hashes[0].String(), hashes[1].String()}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("listed %v, want %v", got, want)
	}
	if p := list("?model_name=other"); len(p.Entries) != 0 || p.Next != nil {
		t.Errorf("of another model: %+v", p)
	}
	refused := func(method, query, body, contains string) {
		t.Helper()
		if code, got := ask(h, method, "http://localhost/cache/objects"+query, body, "Content-Type", "application/json"); code != 400 || !strings.Contains(got, contains) {
			t.Errorf("%s %s %.80s: %d %s", method, query, body, code, got)
		}
	}
	refused("GET", "?tier=l2", "", "only tier")
	refused("GET", "?page_size=5001", "", "1 to 5000")
	refused("GET", "?page_size=0", "", "1 to 5000")
	refused("GET", "?page_token=-1", "", "page_token")
	refused("DELETE", "", "{", "body is not")
	refused("DELETE", "", `{"keys": [], "tier": "l3"}`, "unknown tier")
	refused("DELETE", "", `{"tier": "l1", "keys": [{"chunk_hash_hex": "ab"}]}`, "keys[0]")
	refused("DELETE", "", `{"tier": "l1", "keys": [`+strings.Repeat("{},", 10_000)+`{}]}`, "keys: more than 10000")

	drop := func(model, salt string, h2 kv.Hash, want string) {
		t.Helper()
		body := fmt.Sprintf(`{"tier": "l1", "keys": [{"chunk_hash_hex": %q, "model_name": %q, "cache_salt": %q, "kv_rank": %d}]}`, h2, model, salt, 0x01000100)
		if code, got := ask(h, "DELETE", "http://localhost/cache/objects", body, "Content-Type", "application/json"); code != 200 || !strings.Contains(got, want) {
			t.Errorf("delete of %s, %q: %d %s", model, salt, code, got)
		}
	}
	drop("other", "", hashes[0], `"deleted":0`)
	drop("m", "green", hashes[0], `"deleted":0`)
	key := lmcache.Key{Model: "m", WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: make([]uint32, 16), End: 16, RequestID: "q", Readers: 1}
	s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpLookup), key.Append(nil), lmcache.AppendInt(nil, 1)})
	drop("m", "", hashes[0], `"deleted":0,"ok":true,"skipped":1`) // the lookup has pinned it
	drop("m", "", hashes[1], `"deleted":1,"ok":true,"skipped":0`)
	drop("m", "", hashes[1], `"deleted":0,"ok":true,"skipped":0`)
	if n := s.Status().Pool.ResidentChunks; n != 1 {
		t.Errorf("%d chunks are left, want 1", n)
	}
	for _, method := range []string{"GET", "DELETE"} {
		if code, _ := ask(h, method, "http://attacker.example/cache/objects", `{"tier":"l1"}`, "Content-Type", "application/json"); code != 403 {
			t.Errorf("%s under a foreign name: %d", method, code)
		}
	}
	if code, body := ask(h, "GET", "http://localhost/config", ""); code != 200 || body != "{\"port\":\"1\"}\n" {
		t.Errorf("config: %d %s", code, body)
	}
}
