// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/blocks/blockstest"
)

// eventEngine is an engine that publishes KV events and makes a token of each byte.
type eventEngine struct {
	url       string
	events    *blockstest.Publisher
	asked     atomic.Int64
	tokenized atomic.Int64
	block     int // tokens

	mu    sync.Mutex
	known map[string]bool // prompts that were announced
	has   map[string]bool // hashes of blocks
}

const tellerBlock = 16 // tokens, at first

// startEventEngine starts such an engine at a host; ports of 0 are chosen.
func startEventEngine(t *testing.T, host string, port, replay int) *eventEngine {
	t.Helper()
	e := &eventEngine{block: tellerBlock, events: blockstest.Start(t, host, port, replay), known: map[string]bool{}, has: map[string]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	prompt := func(r *http.Request) string {
		var b struct{ Prompt any }
		if err := json.NewDecoder(r.Body).Decode(&b); err != nil {
			t.Error(err)
		}
		text, _ := b.Prompt.(string)
		return text
	}
	mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, r *http.Request) {
		e.asked.Add(1)
		e.store(prompt(r))
		fmt.Fprint(w, `{}`)
	})
	mux.HandleFunc("/tokenize", func(w http.ResponseWriter, r *http.Request) {
		tokens := bytesOf(prompt(r))
		e.tokenized.Add(1)
		_ = json.NewEncoder(w).Encode(map[string]any{"count": len(tokens), "tokens": tokens})
	})
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(mux)
	s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(s.Close)
	e.url = s.URL
	return e
}

func bytesOf(text string) (out []int64) {
	for _, c := range []byte(text) {
		out = append(out, int64(c))
	}
	return out
}

// store announces the blocks of a prompt, once.
func (e *eventEngine) store(prompt string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.known[prompt] {
		e.known[prompt] = true
		n := len(prompt) / e.block
		hashes := hashesOf(prompt, n, e.block)
		for _, h := range hashes {
			e.has[string(h)] = true
		}
		e.events.Publish(false, event.Event{
			Kind: event.Stored, Hashes: hashes, Tokens: bytesOf(prompt)[:n*e.block], BlockTokens: e.block, Medium: event.GPU,
		})
	}
}

// evict announces that the blocks of a prompt are gone.
func (e *eventEngine) evict(prompt string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.known, prompt)
	hashes := hashesOf(prompt, len(prompt)/e.block, e.block)
	for _, h := range hashes {
		delete(e.has, string(h))
	}
	e.events.Publish(false, event.Event{Kind: event.Removed, Hashes: hashes, Medium: event.GPU})
}

// blocks is how many blocks it has.
func (e *eventEngine) blocks() int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return int64(len(e.has))
}

func hashesOf(prompt string, n, block int) (out [][]byte) {
	for i := range n {
		h := uint64(i) + 1
		for _, c := range []byte(prompt[:(i+1)*block]) {
			h = h*1099511628211 + uint64(c)
		}
		out = append(out, []byte{byte(h >> 56), byte(h >> 48), byte(h >> 40), byte(h >> 32), byte(h >> 24), byte(h >> 16), byte(h >> 8), byte(h)})
	}
	return out
}

// Requests go to the engine whose KV events report the prompt's blocks. That is not an engine that evicted them, but it may be one that
// computed them for another proxy. Two prompts may go to two engines. A restarted engine has no blocks.
func TestKVEvents(t *testing.T) {
	a := startEventEngine(t, "127.0.0.1", 0, 0)
	b := startEventEngine(t, "127.0.0.2", a.events.Port, a.events.ReplayPort)
	o := proxy.Options{
		Engines: []string{a.url, b.url}, Policy: proxy.PrefixAware, HealthInterval: 50 * time.Millisecond,
		EventsPort: a.events.Port, ReplayPort: a.events.ReplayPort,
	}
	url, p := startProxy(t, o)
	for _, e := range []*eventEngine{a, b} {
		testkit.Eventually(t, "all are well and followed", func() bool { return p.Stats().Well[e.url] == 1 && e.events.Subscribers() == 1 })
		e.store(strings.Repeat("so that the size of blocks is known ", 10))
		testkit.Eventually(t, "its blocks are known", func() bool { return p.Stats().Blocks[e.url] > 0 })
	}
	prompts := []string{strings.Repeat("tell me of the sea ", 200), strings.Repeat("tell me of the hills ", 200)}
	ask := func(prompt string) (engine *eventEngine) {
		t.Helper()
		before := a.asked.Load()
		text, _ := json.Marshal(map[string]string{"prompt": prompt})
		if status, text, _ := post(t, url, string(text)); status != 200 {
			t.Fatal(status, text)
		}
		if a.asked.Load() > before {
			return a
		}
		return b
	}
	at := func(e *eventEngine) *eventEngine {
		if e == a {
			return b
		}
		return a
	}
	knows := func() { // events may come later than answers
		t.Helper()
		testkit.Eventually(t, "the proxy knows all blocks", func() bool {
			n := p.Stats().Blocks
			return n[a.url] == a.blocks() && n[b.url] == b.blocks()
		})
	}
	for i, prompt := range prompts {
		home := ask(prompt)
		other := at(home)
		testkit.Eventually(t, "its tokens are known", func() bool { return p.Stats().Tokenized == int64(2*i+1) })
		knows()
		if got := ask(prompt); got != home {
			t.Error("it goes elsewhere than before")
		}
		home.evict(prompt)
		other.store(prompt) // for another proxy
		knows()
		if got := ask(prompt + " and the sky"); got != other {
			t.Error("it goes where the KV was evicted")
		}
		testkit.Eventually(t, "its tokens are known", func() bool { return p.Stats().Tokenized == int64(2*i+2) })
	}
	if n := p.Stats().Voids; n != 0 {
		t.Errorf("%d times void", n)
	}
	// b is started again and has lost all of its blocks.
	b.events.StartAgain()
	testkit.Eventually(t, "the proxy knows", func() bool { return p.Stats().Blocks[b.url] == 0 && b.events.Subscribers() == 1 })
}

// An engine is started again with longer blocks. The proxy asks once more for the tokens of prompts that it knew with the old block
// size, and counts the events of the new blocks.
func TestOtherBlocks(t *testing.T) {
	e := startEventEngine(t, "127.0.0.1", 0, 0)
	o := proxy.Options{Engines: []string{e.url}, Policy: proxy.PrefixAware, HealthInterval: 50 * time.Millisecond, EventsPort: e.events.Port, ReplayPort: e.events.ReplayPort}
	at, p := startProxy(t, o)
	text, _ := json.Marshal(map[string]string{"prompt": strings.Repeat("tell me of the sea ", 200)})
	for life := range 3 {
		testkit.Eventually(t, "it is well and followed", func() bool { return p.Stats().Well[e.url] == 1 && e.events.Subscribers() == 1 })
		e.store(strings.Repeat("so that the size of blocks is known ", 10))
		testkit.Eventually(t, "its blocks are known", func() bool { return p.Stats().Blocks[e.url] > 0 })
		for range 2 {
			if status, text, _ := post(t, at, string(text)); status != 200 {
				t.Fatal(status, text)
			}
			testkit.Eventually(t, "the prompt's tokens are known, in blocks of this life", func() bool { return p.Stats().Tokenized == int64(life+1) })
		}
		e.events.StartAgain()
		testkit.Eventually(t, "the proxy knows", func() bool { return p.Stats().Blocks[e.url] == 0 })
		e.mu.Lock()
		e.block, e.known = 2*e.block, map[string]bool{}
		e.mu.Unlock()
	}
}

// The proxy does not ask an engine for the tokens of a prompt that is token ids or several texts.
func TestPromptsWithoutOneTextAreNotTokenized(t *testing.T) {
	e := startEventEngine(t, "127.0.0.1", 0, 0)
	o := proxy.Options{Engines: []string{e.url}, Policy: proxy.PrefixAware, HealthInterval: 50 * time.Millisecond, EventsPort: e.events.Port}
	at, p := startProxy(t, o)
	testkit.Eventually(t, "it is well and followed", func() bool { return p.Stats().Well[e.url] == 1 && e.events.Subscribers() == 1 })
	e.store(strings.Repeat("so that the size of blocks is known ", 10))
	testkit.Eventually(t, "its blocks are known", func() bool { return p.Stats().Blocks[e.url] > 0 })
	for _, prompt := range []string{`[1,2,3]`, `["a","b"]`, `"text"`} {
		if status, text, _ := post(t, at, `{"prompt":`+prompt+`}`); status != 200 {
			t.Fatal(status, text)
		}
	}
	testkit.Eventually(t, "one answer was an engine's", func() bool { return e.tokenized.Load() > 0 })
	time.Sleep(50 * time.Millisecond) // others would have come
	if n := e.tokenized.Load(); n != 1 {
		t.Errorf("%d prompts were made tokens", n)
	}
}
