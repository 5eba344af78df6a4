// SPDX-License-Identifier: Apache-2.0

package vllm_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

func hello() vllm.Hello {
	return vllm.Hello{Protocol: vllm.Protocol, VLLM: "0.32.0", EngineID: "e1", Model: "m", Namespace: "{}", RowBytes: 4096, Rows: 4, Groups: 2, ChunkTokens: 16}
}

// A frame that is written is read again as it was.
func TestMessagesRoundTrip(t *testing.T) {
	a := vllm.Ask{ID: 7, Tenant: []byte("team-a"), Request: []byte("cmpl-1"), Keys: []vllm.Key{{Hash: kv.Hash{1, 2}, Group: 1}, {Hash: kv.Hash{3}, Group: 70000}}}
	for _, size := range []int{16, 32} {
		got, err := vllm.DecodeAsk(vllm.AppendAsk(nil, &a, size), nil)
		if err != nil || got.ID != 7 || string(got.Tenant) != "team-a" || string(got.Request) != "cmpl-1" || len(got.Keys) != 2 || got.Keys[0] != a.Keys[0] || got.Keys[1] != a.Keys[1] {
			t.Errorf("with hashes of %d bytes: %+v, %v", size, got, err)
		}
	}
	places := []vllm.Place{{1 << 40, 4096}, {vllm.NoPlace, 0}}
	if id, got, err := vllm.DecodePlaces(vllm.AppendPlaces(nil, 9, places)); err != nil || id != 9 || len(got) != 2 || got[0] != places[0] || got[1] != places[1] {
		t.Errorf("places: %d, %v, %v", id, got, err)
	}
	if got, err := vllm.DecodeReleased(vllm.AppendReleased(vllm.AppendReleased(nil, vllm.Released{ID: 1, Loaded: 2}), vllm.Released{ID: 3})); err != nil || len(got) != 2 || got[0].Loaded != 2 || got[1].ID != 3 {
		t.Errorf("released: %v, %v", got, err)
	}
	if id, ok, err := vllm.DecodeCommit(vllm.AppendCommit(nil, 5, true)); err != nil || id != 5 || !ok {
		t.Errorf("commit: %d, %v, %v", id, ok, err)
	}
	h := hello()
	if got, err := vllm.DecodeHello(h.Append(nil)); err != nil || got != h {
		t.Errorf("hello: %+v, %v", got, err)
	}
}

// Validate refuses a Hello with a wrong field, and its error gives the reason.
func TestHelloIsChecked(t *testing.T) {
	f := func(change func(*vllm.Hello), want string) {
		t.Helper()
		h := hello()
		change(&h)
		if err := h.Validate(); err == nil || !errors.Is(err, vllm.ErrHello) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", h, err, want)
		}
	}
	f(func(h *vllm.Hello) { h.Protocol = 2 }, "kvasir vllm-tier")
	for _, id := range []string{"", ".", "..", "a/b", "../x", "a..b", "x\x00", "x\n", strings.Repeat("x", 129)} {
		f(func(h *vllm.Hello) { h.EngineID = id }, "engine id")
	}
	f(func(h *vllm.Hello) { h.Model = "" }, "model name")
	f(func(h *vllm.Hello) { h.Namespace = "" }, "namespace is empty")
	f(func(h *vllm.Hello) { h.RowBytes = 0 }, "rows of 0 bytes")
	f(func(h *vllm.Hello) { h.RowBytes = 1 << 33 }, "bytes")
	f(func(h *vllm.Hello) { h.Rows = 1 << 60 }, "rows")
	f(func(h *vllm.Hello) { h.Groups = 0 }, "groups")
	f(func(h *vllm.Hello) { h.ChunkTokens = -1 }, "tokens")
}

// Rows that mean other bytes have another fingerprint: another group, another length, another configuration.
func TestFingerprintsTellRowsApart(t *testing.T) {
	h := hello()
	longer, other, canonical := h, h, h
	longer.RowBytes, other.Namespace, canonical.Canonical = 8192, `{"tp_size":2}`, true
	seen := map[string]bool{h.Fingerprint(0): true}
	for _, p := range []string{h.Fingerprint(1), longer.Fingerprint(0), other.Fingerprint(0), canonical.Fingerprint(0)} {
		if seen[p] {
			t.Errorf("%q is twice", p)
		}
		seen[p] = true
	}
	wider := canonical
	wider.RowBytes *= 2
	if canonical.Fingerprint(0) != wider.Fingerprint(0) {
		t.Error("rows of a canonical layout depend on their length")
	}
}

// FuzzMessages reads arbitrary bodies: nothing panics, and a message that was read can be written with the same bytes.
func FuzzMessages(f *testing.F) {
	a := vllm.Ask{ID: 7, Tenant: []byte("t"), Request: []byte("r"), Keys: []vllm.Key{{Hash: kv.Hash{1}}}}
	h := hello()
	f.Add(vllm.AppendAsk(nil, &a, 32))
	f.Add(vllm.AppendPlaces(nil, 1, []vllm.Place{{1, 2}}))
	f.Add(vllm.AppendReleased(nil, vllm.Released{ID: 1, Loaded: 1}))
	f.Add(vllm.AppendCommit(nil, 1, false))
	f.Add(h.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if got, err := vllm.DecodeAsk(b, nil); err == nil {
			if len(got.Keys) > vllm.MaxKeys || len(got.Request) > vllm.MaxRequest {
				t.Errorf("%d keys, a request of %d bytes", len(got.Keys), len(got.Request))
			}
			size := int(b[8+1+len(got.Tenant)+2+len(got.Request)]) - 4
			if again := vllm.AppendAsk(nil, &got, size); !bytes.Equal(again, b) {
				t.Errorf("%x is written as %x", b, again)
			}
		}
		if id, places, err := vllm.DecodePlaces(b); err == nil && !bytes.Equal(vllm.AppendPlaces(nil, id, places), b) {
			t.Errorf("places %x", b)
		}
		if id, ok, err := vllm.DecodeCommit(b); err == nil && !bytes.Equal(vllm.AppendCommit(nil, id, ok), b) {
			t.Errorf("commit %x", b)
		}
		if list, err := vllm.DecodeReleased(b); err == nil {
			var again []byte
			for _, r := range list {
				again = vllm.AppendReleased(again, r)
			}
			if !bytes.Equal(again, b) {
				t.Errorf("release %x", b)
			}
		}
		if h, err := vllm.DecodeHello(b); err == nil {
			if _, err := vllm.RegionName(h.EngineID); err != nil {
				t.Errorf("%+v: %v", h, err)
			}
		}
	})
}
