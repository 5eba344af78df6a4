// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

// tokenList returns n tokens, as a body has them.
func tokenList(n int) string { return strings.TrimSuffix(strings.Repeat("0,", n), ",") }

// postPrefetch asks for a prefetch and returns the answer, whose code is want.
func postPrefetch(t *testing.T, h http.Handler, body string, want int) (got map[string]any) {
	t.Helper()
	code, text := ask(h, "POST", "http://localhost/cache/prefetches", body, "Content-Type", "application/json")
	if code != want || json.Unmarshal([]byte(text), &got) != nil {
		t.Fatalf("%.100s: %d %s", body, code, text)
	}
	return got
}

// endOfPrefetch waits for a prefetch and returns its end.
func endOfPrefetch(t *testing.T, h http.Handler, id any) map[string]any {
	t.Helper()
	for limit := time.Now().Add(90 * time.Second); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		code, text := ask(h, "GET", fmt.Sprintf("http://localhost/cache/prefetches/%v", id), "")
		var got map[string]any
		if code != http.StatusOK || json.Unmarshal([]byte(text), &got) != nil {
			t.Fatalf("%d %s", code, text)
		}
		if got["status"] != "pending" {
			return got
		}
	}
	t.Fatal("it does not end")
	return nil
}

// A prefetch ends with as many objects as the pool has then, and its end is reported once.
func TestPrefetches(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{})
	post := func(body string, want int) map[string]any { t.Helper(); return postPrefetch(t, h, body, want) }
	for n, want := range map[int][3]float64{32: {2, 2, 2}, 63: {3, 2, 3}} {
		got := post(`{"model_name": "m", "world_size": 1, "token_ids": [`+tokenList(n)+`]}`, http.StatusAccepted)
		if got["chunks"] != want[0] || got["status"] != "submitted" {
			t.Errorf("%d tokens: %v", n, got)
		}
		done := endOfPrefetch(t, h, got["request_id"])
		if done["status"] != "completed" || done["found_keys"] != want[1] || done["total_keys"] != want[2] || done["request_id"] != got["request_id"] {
			t.Errorf("%d tokens: %v", n, done)
		}
		if code, _ := ask(h, "GET", fmt.Sprintf("http://localhost/cache/prefetches/%v", got["request_id"]), ""); code != http.StatusNotFound {
			t.Errorf("told again: %d", code)
		}
	}
	if st := s.Status(); st.Sessions != 0 || st.Pool.EvictableChunks != 2 || st.Lookup.AskedTokens != 0 {
		t.Errorf("prefetches leave %d sessions, %d evictable chunks, %d tokens asked for", st.Sessions, st.Pool.EvictableChunks, st.Lookup.AskedTokens)
	}
	if got := post(`{"model_name": "m", "world_size": 1, "token_ids": [1]}`, http.StatusAccepted); got["status"] != "noop" || got["chunks"] != 0.0 {
		t.Errorf("less than a chunk: %v", got)
	}
	for body, want := range map[string]int{
		`{`:                                    http.StatusUnprocessableEntity,
		`{"model_name": "m", "world_size": 1}`: http.StatusUnprocessableEntity,
		`{"model_name": "m", "world_size": 1, "token_ids": [-1]}`:                                                  http.StatusUnprocessableEntity,
		`{"model_name": "n", "world_size": 1, "token_ids": [1]}`:                                                   http.StatusServiceUnavailable,
		`{"model_name": "m", "world_size": 2, "token_ids": [1]}`:                                                   http.StatusServiceUnavailable,
		`{"model_name": "m", "world_size": 1, "token_ids": [1], "source_tier": "l1"}`:                              http.StatusBadRequest,
		`{"model_name": "m", "world_size": 1, "token_ids": [` + tokenList(1_000_001) + `]}`:                        http.StatusBadRequest,
		`{"model_name": "m", "world_size": 1, "token_ids": [1], "cache_salt": "` + strings.Repeat("x", 129) + `"}`: http.StatusBadRequest,
	} {
		if got := post(body, want); got["detail"] == nil {
			t.Errorf("%.100s: %v", body, got)
		}
	}
	if code, _ := ask(h, "POST", "http://attacker.example/cache/prefetches", `{"model_name": "m", "world_size": 1, "token_ids": [1]}`, "Content-Type", "application/json"); code != http.StatusForbidden {
		t.Errorf("under a foreign name: %d", code)
	}
}

// Of 256 prefetches whose ends no client asks for, the one that ended first makes room.
func TestFirstEndedPrefetchMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := admin.Handler(newServer(t), admin.Options{})
		one := `{"model_name": "m", "world_size": 1, "token_ids": [` + tokenList(16) + `]}`
		begin := func() any {
			t.Helper()
			id := postPrefetch(t, h, one, http.StatusAccepted)["request_id"]
			time.Sleep(time.Second)
			synctest.Wait() // it has ended
			return id
		}
		first, second := begin(), begin()
		for range 254 {
			begin()
		}
		endOfPrefetch(t, h, begin())
		if code, _ := ask(h, "GET", fmt.Sprint("http://localhost/cache/prefetches/", first), ""); code != http.StatusNotFound {
			t.Errorf("the prefetch that ended first is still known: %d", code)
		}
		endOfPrefetch(t, h, second)
	})
}

// A prefetch of a model whose engines have unlike chunk sizes loads the prompt in each of them.
func TestPrefetchInEachChunkSize(t *testing.T) {
	s := newServer(t) // with a worker of 16 tokens
	addr, err := s.ListenChunks(t.Context(), "tcp://127.0.0.1:*", 24)
	if err != nil {
		t.Fatal(err)
	}
	c, err := lmcache.NewClient("tcp://" + addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if n, err := c.ChunkTokens(ctx); err != nil || n != 24 {
		t.Fatal(n, err)
	}
	reg := lmcache.EngineDriven{InstanceID: 8, Model: "m", WorldSize: 1, BlockSize: 24, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 24}
	if _, err := c.RegisterEngineDriven(ctx, &reg); err != nil {
		t.Fatal(err)
	}
	h := admin.Handler(s, admin.Options{})
	for tokens, want := range map[int]string{48: `"chunks":5`, 23: `"chunks":1`, 15: `"noop"`} {
		body := `{"model_name": "m", "world_size": 1, "token_ids": [` + strings.TrimSuffix(strings.Repeat("0,", tokens), ",") + `]}`
		code, text := ask(h, "POST", "http://localhost/cache/prefetches", body, "Content-Type", "application/json")
		if code != http.StatusAccepted || !strings.Contains(strings.ReplaceAll(text, " ", ""), want) {
			t.Errorf("%d tokens: %d %s, want %s", tokens, code, text, want)
		}
	}
}

// A server that ends waits for the prefetches that were begun.
func TestPrefetchesEndWithTheirServer(t *testing.T) {
	body := `{"model_name": "m", "world_size": 1, "token_ids": [` + strings.TrimSuffix(strings.Repeat("0,", 100_000), ",") + `]}`
	for i := range max(2, testkit.Volume(8)) {
		t.Run(fmt.Sprint(i), func(t *testing.T) { // its store is closed, and its pool unmapped, at its end
			h := admin.Handler(newServer(t), admin.Options{})
			for range 4 {
				if code, text := ask(h, "POST", "http://localhost/cache/prefetches", body, "Content-Type", "application/json"); code != http.StatusAccepted {
					t.Fatalf("%d %s", code, text)
				}
			}
		})
	}
}

// A request for checksums that cannot be made says why.
func TestChecksumsRefused(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{})
	for body, want := range map[string]int{
		`{"block_ids": "x"}`: http.StatusUnprocessableEntity,
		`{"instance_id": 1, "block_ids": [0], "chunk_size": 1}`: http.StatusNotFound,
		`{"instance_id": 7, "block_ids": [0], "chunk_size": 1}`: http.StatusNotImplemented, // it copies itself
	} {
		if code, got := ask(h, "POST", "http://localhost/cache/checksums", body, "Content-Type", "application/json"); code != want || !strings.Contains(got, `"detail"`) {
			t.Errorf("%s: %d %s", body, code, got)
		}
	}
}

// /status has LMCache's fields beside ours.
func TestShape(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{Flags: map[string]string{"eviction-policy": "lru", "session-ttl-seconds": "7"}})
	_, body := ask(h, "GET", "http://localhost/status", "")
	var st admin.Status
	if err := json.Unmarshal([]byte(body), &st); err != nil {
		t.Fatal(err)
	}
	l1 := st.Storage.L1
	if !st.IsHealthy || l1.Objects != 2 || l1.Used != 2*4096 || l1.ReadLocked != 0 || l1.ReadTTL != 7 || l1.WriteTTL != 600 || st.Storage.Evict.Policy != "lru" {
		t.Errorf("%+v", st.Storage)
	}
	if len(st.Others) != 1 || st.Others[0] != 7 || st.OtherMeta["7"] != (admin.OtherShape{Model: "m", World: 1, Slots: 16, UseMLA: true}) || st.Liveness.Instances != 1 || len(st.LenderMeta) != 0 {
		t.Errorf("%+v %+v", st.OtherMeta, st.Liveness)
	}
}

// A prefetch brings the chunks of its own tenant alone into the pool, and finds no chunk of another tenant.
func TestPrefetchesAreOfOneTenant(t *testing.T) {
	below := tier.NewMemory(1 << 20)
	open := func() *server.Server {
		t.Helper()
		p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		st := store.New(p, store.Options{Below: below, LoadTimeout: time.Minute})
		s := server.New(st, server.Options{ChunkTokens: 16, Lifetimes: evict.NewLifetimes(), Log: slog.New(slog.DiscardHandler)})
		t.Cleanup(func() { _, _ = s.Close(), st.Close() })
		ctx, stop := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { s.Run(ctx) })
		t.Cleanup(func() { stop(); wg.Wait() })
		reg := lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16}
		s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpRegisterEngineDriven), reg.Append(nil)})
		return s
	}
	first := open()
	for _, salt := range []string{"team-a", "team-b"} {
		key := lmcache.Key{Model: "m", Salt: salt, WorldSize: 1, Tokens: make([]uint32, 32), End: 32, RequestID: salt, Readers: 1}
		first.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpPrepareStore), key.Append(nil), lmcache.AppendInt(nil, 7)})
		first.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpCommitStore), key.Append(nil), lmcache.AppendInt(nil, 7), lmcache.AppendBytes(nil, nil)})
	}
	testkit.Eventually(t, "all chunks are below", func() bool { return first.Stats().BelowWritten == 4*4096 })
	s := open()
	h := admin.Handler(s, admin.Options{})
	for i, step := range []struct {
		salt            string
		found, resident int
	}{{"team-c", 0, 0}, {"", 0, 0}, {"team-a", 2, 2}, {"team-b", 2, 4}} {
		body := fmt.Sprintf(`{"model_name": "m", "world_size": 1, "token_ids": [%s], "cache_salt": %q}`, strings.TrimSuffix(strings.Repeat("0,", 32), ","), step.salt)
		code, text := ask(h, "POST", "http://localhost/cache/prefetches", body, "Content-Type", "application/json")
		var got struct {
			ID     string `json:"request_id"`
			Status string `json:"status"`
			Found  int    `json:"found_keys"`
		}
		if code != http.StatusAccepted || json.Unmarshal([]byte(text), &got) != nil {
			t.Fatal(code, text)
		}
		testkit.Eventually(t, "the prefetch ends", func() bool {
			_, text := ask(h, "GET", "http://localhost/cache/prefetches/"+got.ID, "")
			return json.Unmarshal([]byte(text), &got) == nil && got.Status == "completed"
		})
		if resident := s.Status().Pool.ResidentChunks; got.Found != step.found || resident != step.resident {
			t.Errorf("step %d, %q: %d found, %d resident; want %d, %d", i, step.salt, got.Found, resident, step.found, step.resident)
		}
	}
}
