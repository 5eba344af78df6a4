// SPDX-License-Identifier: Apache-2.0

package verify_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/verify"
)

func verified(t *testing.T, o verify.Options) (*verify.Report, *verify.Kept) {
	t.Helper()
	o.Rate = 1e6
	r, kept, err := verify.Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return r, kept
}

func stepOf(t *testing.T, r *verify.Report, name string) verify.Step {
	t.Helper()
	for _, s := range r.Steps {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no step %q in %+v", name, r.Steps)
	return verify.Step{}
}

// Engines that restore what was stored pass, every time, also where log-probabilities of cold runs differ.
func TestHealthyEnginesPass(t *testing.T) {
	for i := range 20 {
		c := newToyCache()
		a, b := newToy(c), newToy(c)
		a.noise = float64(i%4) * 0.01
		b.noise = a.noise
		r, _ := verified(t, verify.Options{URL: a.start(t), SecondURL: b.start(t), SingleURL: newToy(nil).start(t), Tolerance: 0.05})
		if r.Verdict != verify.Passed || r.Model != "toy" {
			t.Fatalf("run %d: %+v", i, r)
		}
		for _, name := range []string{"warm, the same engine", "another salt, the same engine", "restored by a second engine", "another salt, a second engine", "prefill and decode engines against one engine"} {
			if s := stepOf(t, r, name); s.Status != verify.Passed {
				t.Errorf("run %d: %+v", i, s)
			}
		}
		for _, name := range []string{"restored from a tier", "restored after the engine's eviction"} {
			if s := stepOf(t, r, name); s.Status != verify.NotTested || s.Why == "" {
				t.Errorf("run %d: %+v", i, s)
			}
		}
	}
}

// Each corruption of restored KV is found, below every checksum: the step says what differed.
func TestCorruptionsAreFound(t *testing.T) {
	for name, plant := range corruptions {
		c := newToyCache()
		plant(c)
		r, _ := verified(t, verify.Options{URL: newToy(c).start(t), SecondURL: newToy(c).start(t)})
		if r.Verdict != verify.Failed || r.ExitCode() != 1 {
			t.Errorf("%s is not found: %+v", name, r)
			continue
		}
		if name == "wrong salt" {
			if s := stepOf(t, r, "another salt, the same engine"); s.Status != verify.Failed || !strings.Contains(s.Why, "never sent") {
				t.Errorf("%s: %+v", name, s)
			}
			continue
		}
		if s := stepOf(t, r, "restored by a second engine"); s.Status != verify.Failed || len(s.Differences) == 0 {
			t.Errorf("%s: %+v", name, s)
		}
		if s := stepOf(t, r, "another salt, a second engine"); s.Status != verify.Passed {
			t.Errorf("%s is found where nothing was restored: %+v", name, s)
		}
	}
}

// Where no KV was restored, or the engine does not report cached tokens, no step passes.
func TestWhatCannotBeTestedDoesNotPass(t *testing.T) {
	r, _ := verified(t, verify.Options{URL: newToy(newToyCache()).start(t), SecondURL: newToy(newToyCache()).start(t)}) // two caches
	if s := stepOf(t, r, "restored by a second engine"); s.Status != verify.NotTested || r.Verdict != verify.NotTested || r.ExitCode() != 3 {
		t.Errorf("%+v", r)
	}
	c := newToyCache()
	a, b := newToy(c), newToy(c)
	a.silent, b.silent = true, true
	r, _ = verified(t, verify.Options{URL: a.start(t), SecondURL: b.start(t)})
	if s := stepOf(t, r, "restored by a second engine"); s.Status != verify.NotTested || r.Verdict != verify.NotTested || !strings.Contains(s.Why, "cached_tokens") {
		t.Errorf("%+v", r)
	}
	r, _ = verified(t, verify.Options{URL: newToy(newToyCache()).start(t)})
	if s := stepOf(t, r, "warm, the same engine"); s.Status != verify.Passed || r.Verdict != verify.NotTested {
		t.Errorf("the engine's own cache alone was tested: %+v", r)
	}
}

// Engines whose computed answers differ from run to run cannot be verified: no step passes, and none fails.
func TestEnginesThatAreNotSteady(t *testing.T) {
	c := newToyCache()
	noisy := newToy(c)
	noisy.noise = 1
	r, _ := verified(t, verify.Options{URL: noisy.start(t), SecondURL: newToy(c).start(t)})
	if s := stepOf(t, r, "restored by a second engine"); s.Status != verify.NotTested || !strings.Contains(s.Why, "cold runs") || r.Verdict != verify.NotTested {
		t.Errorf("noise: %+v", r)
	}
	c = newToyCache()
	random := newToy(c)
	r, _ = verified(t, verify.Options{SecondURL: newToy(c).start(t), URL: startHandler(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		random.mu.Lock()
		random.weights++ // each request is answered in another way
		random.mu.Unlock()
		random.ServeHTTP(w, r)
	}))})
	if s := stepOf(t, r, "restored by a second engine"); s.Status != verify.NotTested || r.Verdict != verify.NotTested {
		t.Errorf("other tokens: %+v", r)
	}
}

// Kept prompts are checked after a restart. KV of earlier weights that is still served is found; KV that is gone is not tested.
func TestKeptPrompts(t *testing.T) {
	c := newToyCache()
	r, kept := verified(t, verify.Options{URL: newToy(c).start(t), Keep: true})
	if kept == nil || r.Left != "" {
		t.Fatalf("%+v", r)
	}
	text, err := json.Marshal(kept)
	if err != nil {
		t.Fatal(err)
	}
	kept = new(verify.Kept)
	if err := json.Unmarshal(text, kept); err != nil {
		t.Fatal(err)
	}
	const name = "kept prompts, restored"
	restarted := newToy(c)
	if r, _ := verified(t, verify.Options{URL: restarted.start(t), Kept: kept}); r.Verdict != verify.Passed || stepOf(t, r, name).Cached == 0 {
		t.Errorf("after a restart: %+v", r)
	}
	stale := newToy(c)
	stale.weights = 2
	if r, _ := verified(t, verify.Options{URL: stale.start(t), Kept: kept}); r.Verdict != verify.Failed || !strings.Contains(stepOf(t, r, name).Why, "other weights") {
		t.Errorf("stale weights: %+v", r)
	}
	cleared := newToy(newToyCache())
	cleared.weights = 2
	if r, _ := verified(t, verify.Options{URL: cleared.start(t), Kept: kept}); r.Verdict != verify.NotTested || !strings.Contains(stepOf(t, r, name).Why, "change of weights") {
		t.Errorf("new weights after a clear: %+v", r)
	}
	if _, _, err := verify.Run(t.Context(), verify.Options{URL: cleared.start(t), Kept: &verify.Kept{}}); err == nil {
		t.Error("an empty file is taken")
	}
}

// fakeServer is a server over a toy's cache, with a pool and a tier.
type fakeServer struct {
	cache           *toyCache
	retrieves, hits int
	removed         []string // tiers of each request
	salts           map[string]bool
	refuse          bool
	tiers           int
}

func (s *fakeServer) Ask(_ context.Context, method, path string, body any) ([]byte, error) {
	switch {
	case path == "/status":
		s.cache.mu.Lock()
		defer s.cache.mu.Unlock()
		var tiers []any
		for i := range s.tiers {
			tiers = append(tiers, map[string]any{"name": fmt.Sprint("tier", i), "hits": s.hits * (1 - i)})
		}
		return json.Marshal(map[string]any{"lookup": map[string]any{"retrieves": s.retrieves}, "l2": map[string]any{"tiers": tiers}})
	case method == http.MethodGet:
		entries := []any{map[string]any{"key": map[string]any{"cache_salt": "of somebody"}}}
		for salt := range s.salts {
			entries = append(entries, map[string]any{"key": map[string]any{"cache_salt": salt}})
		}
		return json.Marshal(map[string]any{"entries": entries, "next_page_token": nil})
	}
	if s.refuse {
		return nil, fmt.Errorf("the token has not the scope admin")
	}
	b, _ := json.Marshal(body)
	var q struct {
		Tier string
		Keys []struct {
			Salt string `json:"cache_salt"`
		}
	}
	if err := json.Unmarshal(b, &q); err != nil {
		return nil, err
	}
	s.removed = append(s.removed, q.Tier)
	for _, k := range q.Keys {
		if !s.salts[k.Salt] {
			return nil, fmt.Errorf("an object of the salt %q would be removed", k.Salt)
		}
	}
	return json.Marshal(map[string]any{"deleted": len(q.Keys)})
}

// With a server, verify restores KV from the server's tiers and after the engine's own eviction. At the end it removes the KV of the run's
// salts alone.
func TestTiersAndEviction(t *testing.T) {
	for _, broken := range []bool{false, true} {
		c := newToyCache()
		s := &fakeServer{cache: c, salts: map[string]bool{}, tiers: 2}
		a, b := newToy(c), newToy(c)
		c.keyOf = func(salt string, prefix []string) string {
			s.salts[salt] = true
			return salt + "\x00" + strings.Join(prefix, "\x00")
		}
		c.load = func(c *toyCache, key string, _ int) (chunkKV, bool) {
			kv, ok := c.chunks[key]
			if ok {
				s.retrieves++
			}
			if ok && len(s.removed) > 0 { // from the tier
				s.hits++
				if broken {
					kv[3][31]++
				}
			}
			return kv, ok
		}
		// The engine evicts its own cache once it was filled.
		evicting := startHandler(t, &evictingToy{toy: a, after: 3 * 6})
		r, _ := verified(t, verify.Options{URL: evicting, SecondURL: b.start(t), Server: s, FillTokens: 3000})
		want := verify.Passed
		if broken {
			want = verify.Failed
		}
		if got := stepOf(t, r, "restored from the tier tier0"); got.Status != want {
			t.Errorf("broken %v: %+v", broken, got)
		}
		if got := stepOf(t, r, "restored from the tier tier1"); got.Status != verify.NotTested {
			t.Errorf("broken %v: %+v", broken, got)
		}
		if got := stepOf(t, r, "restored by a second engine"); got.Status != verify.Passed {
			t.Errorf("broken %v: %+v", broken, got)
		}
		if got := stepOf(t, r, "restored after the engine's eviction"); got.Status != want { // from the tier, too
			t.Errorf("broken %v: %+v", broken, got)
		}
		if r.Left != "" || len(s.removed) < 2 || s.removed[0] != "l1" || s.removed[len(s.removed)-1] != "all" {
			t.Errorf("left %q, removed %v", r.Left, s.removed)
		}
	}
	s := &fakeServer{cache: newToyCache(), salts: map[string]bool{}, refuse: true}
	s.cache.keyOf = func(salt string, prefix []string) string {
		s.salts[salt] = true
		return salt + strings.Join(prefix, " ")
	}
	r, _ := verified(t, verify.Options{URL: newToy(s.cache).start(t), Server: s})
	if !strings.Contains(r.Left, "scope admin") {
		t.Errorf("what stays is not said: %+v", r)
	}
}

// evictingToy forgets its own cache after some requests.
type evictingToy struct {
	*toy
	after int
}

func (e *evictingToy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.toy.ServeHTTP(w, r)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.asked >= e.after {
		clear(e.own)
	}
}

// A step fails when an engine fails requests for restored KV, as kvasir engine does with wrong bytes. The run ends when an engine computes
// nothing. verify never trusts the form of an engine's answer.
func TestEnginesThatFail(t *testing.T) {
	c := newToyCache()
	b := newToy(c)
	failing := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/completions" {
			http.Error(w, "wrong KV bytes\x1b[31m", http.StatusInternalServerError)
			return
		}
		b.ServeHTTP(w, r)
	})
	bad := startHandler(t, failing)
	r, _ := verified(t, verify.Options{URL: newToy(c).start(t), SecondURL: bad})
	if s := stepOf(t, r, "restored by a second engine"); s.Status != verify.Failed || !strings.Contains(s.Why, "wrong KV bytes") || strings.Contains(s.Why, "\x1b") {
		t.Errorf("%+v", s)
	}
	for _, answer := range []string{`{}`, `x`, `{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[null]}}]}`, `{"choices":[{"logprobs":{"tokens":["a"],"token_logprobs":[]}}]}`} {
		url := startHandler(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) }))
		if _, _, err := verify.Run(t.Context(), verify.Options{URL: url, Model: "m", Rate: 1e6}); err == nil {
			t.Errorf("%s is taken", answer)
		}
	}
	if _, _, err := verify.Run(t.Context(), verify.Options{URL: bad, Rate: 1e6}); err == nil {
		t.Error("an engine that fails every prompt is verified")
	}
}

// The report shows the differences, and shows an engine's output as plain text in the page.
func TestReportShowsDifferences(t *testing.T) {
	r := &verify.Report{Verdict: verify.Failed, Model: "<script>", Steps: []verify.Step{{Name: "s", Status: verify.Failed, Differences: []verify.Difference{{Prompt: 1, Token: 2, What: "another token", Want: "<b>", Got: "\x1b[2J"}}}}}
	var text, html, js bytes.Buffer
	if err := r.Write(&text); err != nil || !strings.Contains(text.String(), "prompt 1, token 2: another token") || strings.Contains(text.String(), "\x1b") {
		t.Errorf("%v: %s", err, text.String())
	}
	if err := r.WriteHTML(&html); err != nil || strings.Contains(html.String(), "<script>") || strings.Contains(html.String(), "<b>") || !strings.Contains(html.String(), "another token") {
		t.Errorf("%v: %s", err, html.String())
	}
	if err := r.WriteJSON(&js); err != nil || !json.Valid(js.Bytes()) {
		t.Errorf("%v: %s", err, js.String())
	}
}
