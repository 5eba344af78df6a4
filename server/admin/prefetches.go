// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
)

// Limits of POST /cache/prefetches. LMCache's server also has the first one, but no limit on jobs. A request beyond a limit is refused.
const (
	maxPrefetchTokens = 1_000_000        // tokens of one prompt
	maxPrefetchBody   = 16 << 20         // bytes of one body
	maxPrefetches     = 256              // prefetches that run, or whose result no client has fetched; the oldest of these results goes first
	prefetchKept      = 10 * time.Minute // time for which a result is kept
	maxSaltRunes      = 128              // characters of a salt
)

// prefetches reads chunks of prompts from the tiers into the pool before an engine looks them up: LMCache's POST /cache/prefetches and GET
// /cache/prefetches/{id} (0.5.6, http_apis/cache_api.py). A prefetch is a lookup whose hit no engine loads. It waits as long as the tiers
// take, in rounds that each wait as long as a lookup may.
type prefetches struct {
	server *server.Server

	mu   sync.Mutex
	jobs map[string]*prefetchJob
}

// prefetchPart is a prompt in chunks of one size, and the layouts of its model that have this size.
type prefetchPart struct {
	layouts []object.Shard
	hashes  []kv.Hash
}

type prefetchJob struct {
	found, total int
	ended        time.Time // zero: it is still running
}

func handlePrefetches(mux *http.ServeMux, guard httpserver.Guard, s *server.Server, lists listBodies) {
	p := &prefetches{server: s, jobs: make(map[string]*prefetchJob)}
	mux.Handle("POST /cache/prefetches", guard.Handler(lists.handler(p.submit)))
	mux.Handle("GET /cache/prefetches/{id}", guard.Handler(http.HandlerFunc(p.status)))
}

// detail answers an error in the form of LMCache's routes of this kind.
func detail(w http.ResponseWriter, code int, text string) {
	writeJSON(w, code, map[string]string{"detail": text})
}

func (p *prefetches) submit(w http.ResponseWriter, r *http.Request) {
	body := struct {
		Model          *string
		World          *int
		Salt, From, To string
	}{From: "l2", To: "l1"}
	var tokens []uint32
	err := readBody(w, r, maxPrefetchBody, map[string]func(*json.Decoder) error{
		"model_name": value(&body.Model), "world_size": value(&body.World), "token_ids": list(&tokens, maxPrefetchTokens), "cache_salt": value(&body.Salt),
		"source_tier": value(&body.From), "target_tier": value(&body.To),
	})
	if _, ok := errors.AsType[*tooManyError](err); ok {
		detail(w, http.StatusBadRequest, err.Error())
		return
	}
	if err != nil || body.Model == nil || body.World == nil || tokens == nil {
		why := "model_name, world_size and token_ids are needed"
		if err != nil {
			why = err.Error()
		}
		detail(w, http.StatusUnprocessableEntity, `body is not {"model_name": "m", "world_size": 1, "token_ids": [1, 2, …]}: `+why)
		return
	}
	switch {
	case body.From != "l2" || body.To != "l1":
		detail(w, http.StatusBadRequest, "a prefetch goes from l2 to l1: leave source_tier and target_tier out")
		return
	case utf8.RuneCountInString(body.Salt) > maxSaltRunes:
		detail(w, http.StatusBadRequest, "cache_salt has more than 128 characters")
		return
	}
	if !mayUse(w, r, body.Salt) {
		return
	}
	var parts []prefetchPart
	registered, chunks, total := false, 0, 0
	for _, size := range p.server.ChunksOf(*body.Model, *body.World) {
		part := prefetchPart{layouts: p.server.ShardsOf(*body.Model, body.Salt, *body.World, size)}
		if len(part.layouts) == 0 {
			continue
		}
		registered, part.hashes = true, kv.ChunkHashes(tokens, size)
		if len(part.hashes) == 0 {
			continue
		}
		for _, sh := range part.layouts {
			total += needs(sh, len(part.hashes))
		}
		parts, chunks = append(parts, part), chunks+len(part.hashes)
	}
	if !registered {
		detail(w, http.StatusServiceUnavailable, "no worker of this model and world size is registered: its engine has to start first")
		return
	}
	if chunks == 0 {
		writeJSON(w, http.StatusAccepted, map[string]any{"chunks": 0, "status": "noop"})
		return
	}
	id, job := p.begin(total)
	if job == nil {
		detail(w, http.StatusServiceUnavailable, "256 prefetches are in progress: try again when some have ended")
		return
	}
	if !p.server.Store().Go(func() { p.run(id, job, parts) }) {
		detail(w, http.StatusServiceUnavailable, "the server is shutting down")
		return
	}
	writeJSON(w, http.StatusAccepted, map[string]any{"request_id": id, "chunks": chunks, "status": "submitted"})
}

// needs returns how many objects a hit of `chunks` chunks needs.
func needs(sh object.Shard, chunks int) (n int) {
	for g := range sh.Groups.Len() {
		span := sh.Groups.Need(g, 0, chunks)
		n += (span.End - span.Start) * sh.World
	}
	return n
}

// begin adds a prefetch of `total` objects and returns its id. If maxPrefetches are running it returns a nil job. It forgets results that
// are older than prefetchKept and, to make room, the one that ended first.
func (p *prefetches) begin(total int) (string, *prefetchJob) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, j := range p.jobs {
		if !j.ended.IsZero() && time.Since(j.ended) > prefetchKept {
			delete(p.jobs, id)
		}
	}
	if len(p.jobs) >= maxPrefetches && !p.dropOldestEnded() {
		return "", nil
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	id := hex.EncodeToString(b[:])
	p.jobs[id] = &prefetchJob{total: total}
	return id, p.jobs[id]
}

// dropOldestEnded removes the prefetch that ended first. It reports false if none has ended. The caller must have the mutex.
func (p *prefetches) dropOldestEnded() bool {
	oldest := ""
	for id, j := range p.jobs {
		if !j.ended.IsZero() && (oldest == "" || j.ended.Before(p.jobs[oldest].ended)) {
			oldest = id
		}
	}
	delete(p.jobs, oldest)
	return oldest != ""
}

// prefetchOwner is the owner of the sessions of prefetches.
var prefetchOwner = lease.Owner{Peer: "prefetches"}

func (p *prefetches) run(id string, job *prefetchJob, parts []prefetchPart) {
	found := 0
	for _, part := range parts {
		for _, sh := range part.layouts {
			found += p.load("prefetch "+id, sh, part.hashes)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	job.found, job.ended = found, time.Now()
}

// load looks up until all chunks are in the pool, or no more come. It returns how many objects a hit then needs.
func (p *prefetches) load(session string, sh object.Shard, hashes []kv.Hash) int {
	st := p.server.Store()
	defer st.EndSession([]byte(session), prefetchOwner)
	for hit := -1; ; {
		got := st.Lookup([]byte(session), sh, store.Prompt{Chunks: len(hashes), Owner: prefetchOwner, Hashes: store.Hashed(hashes).Hashes}, 1)
		if got.State == store.Pending {
			got = st.Await(context.Background(), []byte(session), prefetchOwner)
		}
		if got.Hit <= hit || got.Hit == len(hashes) || got.State != store.Ready {
			return needs(sh, max(hit, got.Hit))
		}
		hit = got.Hit
	}
}

func (p *prefetches) status(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	p.mu.Lock()
	defer p.mu.Unlock()
	job := p.jobs[id]
	switch {
	case job == nil:
		detail(w, http.StatusNotFound, "no prefetch has this request_id, or an earlier request has fetched its result")
	case job.ended.IsZero():
		writeJSON(w, http.StatusOK, map[string]any{"request_id": id, "status": "pending"})
	default:
		delete(p.jobs, id)
		writeJSON(w, http.StatusOK, map[string]any{"request_id": id, "status": "completed", "found_keys": job.found, "total_keys": job.total})
	}
}
