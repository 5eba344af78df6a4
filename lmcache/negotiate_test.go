// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A server that negotiates gets packed keys and the payloads of 0.5.7; one that does not, those of 0.5.6.
func TestClientSpeaksTheServersRelease(t *testing.T) {
	for _, size := range []int64{0, 48} {
		s, c := newScripted(t)
		var store zmtp.Message
		s.set(func(op Op, m zmtp.Message) [][]byte {
			result := AppendInt(nil, 32)
			switch op {
			case OpNegotiateChunkSize:
				if size == 0 {
					return [][]byte{bytes.Clone(m[0]), bytes.Clone(m[1])}
				}
				result = AppendInt(nil, size)
			case OpPrepareStore:
				for _, f := range m {
					store = append(store, bytes.Clone(f))
				}
				result = AppendPrepareStore(nil, &Slots{})
			}
			return [][]byte{bytes.Clone(m[0]), bytes.Clone(m[1]), result}
		})
		n, err := c.Negotiate(t.Context(), 16)
		if want := max(int(size), 32); err != nil || n != want {
			t.Fatalf("%d, %v, want %d", n, err, want)
		}
		if _, err := c.PrepareStore(t.Context(), &Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, n), End: n}, 1, nil); err != nil {
			t.Fatal(err)
		}
		if packed := bytes.Contains(store[2], []byte("token_bytes")); packed != (size > 0) || len(store) != 4+map[bool]int{true: 1}[packed] {
			t.Errorf("size %d: packed is %v, %d frames", size, packed, len(store))
		}
	}
}

// A chunk size that does not fit the engine's blocks is an error, and so is a lookup at a server that was started again and has
// another one.
func TestClientWithAnotherChunkSize(t *testing.T) {
	s, c := newScripted(t)
	size := int64(40)
	s.set(func(op Op, m zmtp.Message) [][]byte {
		result := AppendInt(nil, size)
		if op == OpLookup {
			return [][]byte{bytes.Clone(m[0]), bytes.Clone(m[1])}
		}
		return [][]byte{bytes.Clone(m[0]), bytes.Clone(m[1]), result}
	})
	if _, err := c.Negotiate(t.Context(), 16); err == nil || !strings.Contains(err.Error(), "no multiple of the 16") {
		t.Errorf("40 for blocks of 16: %v", err)
	}
	size = 48
	if n, err := c.Negotiate(t.Context(), 16); err != nil || n != 48 {
		t.Fatal(n, err)
	}
	size = 64
	c.announced.Store(0) // as after a new connection
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := c.Lookup(ctx, &Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, 48), End: 48, RequestID: "r"}); !errors.Is(err, ErrChunkSize) {
		t.Errorf("a lookup at a server of another size: %v", err)
	}
}

// What does not fit a message is an error, and nothing is sent: its length would wrap.
func TestEnvelopeOfFourGiB(t *testing.T) {
	_, c := newScripted(t)
	layouts := []kv.Layout{{Layers: 1, Slots: 1, Hidden: 1 << 25, DType: "uint8"}}
	e := &Envelope{Groups: []EnvelopeGroup{{}}}
	object := make([]byte, 64<<20)
	for i := range 64 {
		e.Groups[0].Chunks, e.Groups[0].Data = append(e.Groups[0].Chunks, i), append(e.Groups[0].Data, object)
	}
	if ok, err := c.CommitEnvelope(t.Context(), &Key{}, 1, layouts, e); ok || !errors.Is(err, ErrEnvelope) || !strings.Contains(err.Error(), "4 GiB") {
		t.Errorf("%v, %v", ok, err)
	}
}
