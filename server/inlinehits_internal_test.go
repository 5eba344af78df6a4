// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"io"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// A lookup finds no more than one message carries where chunks pass through the socket: a hit that cannot be loaded fails its request.
func TestHitsThatPassThroughTheSocketFitAMessage(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 4<<20, Options{ChunkTokens: 16, Pickle: PickleOnly, PickleBytes: 3*(128+1024) + 1024})
	c := newClient57(t, s)
	c.negotiate(8)
	if got := c.register(1); got.ShmName != "" {
		t.Fatalf("%+v", got)
	}
	p := prompt57(96)
	layout := (&lmcache.EngineDriven{Layers: 1, Hidden: 2, DType: "float16"}).Layout(16)
	for from := 0; from < 96; from += 32 {
		e := &lmcache.Envelope{Groups: []lmcache.EnvelopeGroup{{Chunks: []int{0, 1}, Data: [][]byte{bytes.Repeat([]byte{byte(from)}, 128), bytes.Repeat([]byte{byte(from + 16)}, 128)}}}}
		data := lmcache.AppendInline(nil, func(b []byte) []byte { return lmcache.AppendEnvelope(b, []kv.Layout{layout}, e) })
		if ok, err := lmcache.DecodeBool(c.call(lmcache.OpCommitStore, c.key(p, from, from+32, 0, "s"), lmcache.AppendInt(nil, 1), data)); err != nil || !ok {
			t.Fatal(from, ok, err)
		}
	}
	for start, want := range map[int]int{0: 3, 32: 5, 80: 6} {
		c.call(lmcache.OpLookup, c.key(p, start, 96, lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 1))
		n, err := lmcache.DecodeInt(c.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, "r")))
		if err != nil || int(n) != want {
			t.Errorf("from token %d: a hit of %d chunks, %v, want %d", start, n, err, want)
			continue
		}
		got, err := lmcache.DecodePrepareRetrieve(c.call(lmcache.OpPrepareRetrieve, c.key(p, start, want*16, 0, "r"), lmcache.AppendInt(nil, 1)))
		if err != nil || !got.Success || len(got.Data) == 0 {
			t.Errorf("from token %d: %+v, %v", start, got, err)
		}
		c.call(lmcache.OpEndSession, lmcache.AppendString(nil, "r"))
	}
}

// An engine that maps the pool finds more than a message carries, beside one of another host that does not.
func TestHitsBesideAnEngineWithoutThePool(t *testing.T) {
	s, _ := newBareServerWith(t, io.Discard, 4<<20, Options{ChunkTokens: 16, PickleBytes: 3*(128+1024) + 1024})
	c := newClient57(t, s)
	c.negotiate(8)
	c.register(1)
	p := prompt57(96)
	if n := c.store(1, p, 96, "a"); n != 6 {
		t.Fatal(n)
	}
	far := c.over(s, 0, 4242) // another user: it may not open the pool
	far.negotiate(8)
	if got := far.register(2); got.ShmName != "" {
		t.Fatalf("%+v", got)
	}
	if a, b := c.lookup(p, 0, 96, "b"), far.lookup(p, 0, 96, "c"); a != 6 || b != 3 {
		t.Errorf("hits of %d and %d chunks, want 6 and 3", a, b)
	}
}
