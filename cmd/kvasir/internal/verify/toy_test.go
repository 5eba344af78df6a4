// SPDX-License-Identifier: Apache-2.0

package verify_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// A toy is an engine whose model is a function of real KV: each layer makes a number of each token, and the next token follows from the
// numbers of all tokens and layers. Chunks of them go to a shared cache and come back, past an adapter that may change them. So a wrong
// number in restored KV changes what it answers, as it does in a model.
const (
	toyLayers = 4
	toyChunk  = 32 // tokens
	toyBlock  = 8
)

// chunkKV is the KV of a chunk: by layer, a number of each token.
type chunkKV [toyLayers][toyChunk]uint64

// toyCache is the cache that toys share.
type toyCache struct {
	mu     sync.Mutex
	chunks map[string]chunkKV
	load   func(c *toyCache, key string, chunk int) (chunkKV, bool) // nil: what was stored
	keyOf  func(salt string, prefix []string) string                // nil: the key is made of both
}

func newToyCache() *toyCache { return &toyCache{chunks: map[string]chunkKV{}} }

func (c *toyCache) key(salt string, prefix []string) string {
	if c.keyOf != nil {
		return c.keyOf(salt, prefix)
	}
	return fmt.Sprintf("%x", sha256.Sum256([]byte(salt+"\x00"+strings.Join(prefix, "\x00"))))
}

func (c *toyCache) get(key string, chunk int) (chunkKV, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.load != nil {
		return c.load(c, key, chunk)
	}
	kv, ok := c.chunks[key]
	return kv, ok
}

// toy is one engine over a cache.
type toy struct {
	cache   *toyCache // nil: none
	weights uint64
	noise   float64 // of log-probabilities
	silent  bool    // it does not report cached_tokens

	mu    sync.Mutex
	own   map[string]bool // prompts, with their salts, that are in its own cache
	asked int
	rnd   *rand.Rand
}

func newToy(c *toyCache) *toy {
	return &toy{cache: c, weights: 1, own: map[string]bool{}, rnd: rand.New(rand.NewPCG(1, 2))}
}

func (e *toy) start(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(e)
	t.Cleanup(s.Close)
	return s.URL
}

func mix(all ...uint64) (h uint64) {
	h = 0x9e3779b97f4a7c15
	for _, v := range all {
		h = (h ^ v) * 0xff51afd7ed558ccd
		h ^= h >> 32
	}
	return h
}

// compute returns the KV of tokens from from on; kv has that of the earlier ones.
func (e *toy) compute(tokens []string, kv [toyLayers][]uint64) [toyLayers][]uint64 {
	var sums [toyLayers]uint64
	for l := range kv {
		for i, v := range kv[l] {
			sums[l] += v * uint64(2*i+1)
		}
	}
	for i := len(kv[0]); i < len(tokens); i++ {
		h := sha256.Sum256([]byte(tokens[i]))
		hidden := mix(uint64(h[0])<<8|uint64(h[1]), uint64(h[2])<<8|uint64(h[3]))
		for l := range kv {
			v := mix(e.weights, uint64(l), hidden)
			kv[l] = append(kv[l], v)
			sums[l] += v * uint64(2*i+1)
			hidden = mix(hidden, sums[l])
		}
	}
	return kv
}

func (e *toy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/v1/models" {
		fmt.Fprint(w, `{"data":[{"id":"toy"}]}`)
		return
	}
	var q struct {
		Prompt string
		Max    int    `json:"max_tokens"`
		Salt   string `json:"cache_salt"`
	}
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked++
	tokens := strings.Fields(q.Prompt)
	whole := (len(tokens) - 1) / toyChunk // one token is computed always
	var kv [toyLayers][]uint64
	cached := 0
	switch own := q.Salt + "\x00" + q.Prompt; {
	case e.own[own]:
		cached = whole * toyChunk // of its own, and right
	case e.cache != nil:
		for c := range whole {
			got, ok := e.cache.get(e.cache.key(q.Salt, tokens[:(c+1)*toyChunk]), c)
			if !ok {
				break
			}
			for l := range kv {
				kv[l] = append(kv[l], got[l][:]...)
			}
			cached += toyChunk
		}
		e.own[own] = true
	}
	kv = e.compute(tokens, kv)
	if e.cache != nil && cached == 0 {
		e.cache.mu.Lock()
		for c := range whole {
			var chunk chunkKV
			for l := range kv {
				copy(chunk[l][:], kv[l][c*toyChunk:])
			}
			e.cache.chunks[e.cache.key(q.Salt, tokens[:(c+1)*toyChunk])] = chunk
		}
		e.cache.mu.Unlock()
	}
	var out []string
	var probs []float64
	for range q.Max {
		h := uint64(0)
		for l := range kv {
			for i, v := range kv[l] {
				h += mix(uint64(l), v) * uint64(2*i+1)
			}
		}
		h = mix(h)
		out = append(out, fmt.Sprintf(" t%d", h%50_000))
		probs = append(probs, -float64(h>>20%1000)/500+e.noise*(2*e.rnd.Float64()-1))
		tokens = append(tokens, out[len(out)-1])
		kv = e.compute(tokens, kv)
	}
	usage := map[string]any{"prompt_tokens": len(tokens) - len(out)}
	if !e.silent && cached > 0 { // vLLM says nothing of 0
		usage["prompt_tokens_details"] = map[string]any{"cached_tokens": cached}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"choices": []any{map[string]any{"text": strings.Join(out, ""), "logprobs": map[string]any{"tokens": out, "token_logprobs": probs, "top_logprobs": []any{}}}},
		"usage":   usage,
	})
}

// corruptions are the faults of KV that verify has to find, by their names.
var corruptions = map[string]func(c *toyCache){
	"swapped chunks": func(c *toyCache) {
		c.load = func(c *toyCache, key string, _ int) (chunkKV, bool) {
			_, ok := c.chunks[key]
			for k, kv := range c.chunks { // any other one
				if k != key {
					return kv, ok
				}
			}
			return chunkKV{}, ok
		}
	},
	"wrong layer order": changed(func(kv *chunkKV, _ int) { kv[0], kv[1] = kv[1], kv[0] }),
	"truncated tail": changed(func(kv *chunkKV, _ int) {
		for l := range kv {
			clear(kv[l][toyChunk/2:])
		}
	}),
	"off by one block": changed(func(kv *chunkKV, _ int) {
		for l := range kv {
			copy(kv[l][toyBlock:], kv[l][:toyChunk-toyBlock])
		}
	}),
	"one wrong block of one chunk": changed(func(kv *chunkKV, chunk int) {
		if chunk == 1 {
			kv[2][9]++
		}
	}),
	"wrong salt": func(c *toyCache) {
		c.keyOf = func(_ string, prefix []string) string { return strings.Join(prefix, "\x00") }
	},
}

// changed changes what a cache has stored as it is loaded.
func changed(f func(kv *chunkKV, chunk int)) func(c *toyCache) {
	return func(c *toyCache) {
		c.load = func(c *toyCache, key string, chunk int) (chunkKV, bool) {
			kv, ok := c.chunks[key]
			f(&kv, chunk)
			return kv, ok
		}
	}
}

func startHandler(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}
