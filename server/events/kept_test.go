// SPDX-License-Identifier: Apache-2.0

package events

import (
	"testing"

	kvevent "github.com/kvasir-kv/kvasir/kv/event"
)

// What is kept for replays takes as much memory as its bytes, of small events and of large ones.
func TestKeptMessagesHaveNoSpareMemory(t *testing.T) {
	p := &Publisher{keeps: true, o: PublisherOptions{Replay: 100, ReplayBytes: 1 << 20}}
	for _, e := range []kvevent.Event{
		{Kind: kvevent.Removed, Hashes: [][]byte{{1}}},
		{Kind: kvevent.Stored, Hashes: [][]byte{make([]byte, 32)}, Encoded: kvevent.AppendTokens(nil, make([]int64, 256))},
	} {
		events := make([]kvevent.Event, 200)
		for i := range events {
			events[i] = e
		}
		p.mu.Lock()
		p.keepLocked(message{payload: p.payload(events)})
		kept := p.mu.history[len(p.mu.history)-1].payload
		p.mu.Unlock()
		if cap(kept) > len(kept)*5/4 {
			t.Errorf("%v: %d bytes take %d", e.Kind, len(kept), cap(kept))
		}
	}
}
