// SPDX-License-Identifier: Apache-2.0

package events

import (
	"fmt"
	"maps"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/event"
)

// Rows of vLLM that have one hash in two groups are announced one by one, without tokens and parents, and removed one by one. Readers of
// LMCache's stream get none of them.
func TestRowsWithoutTokens(t *testing.T) {
	n := newNode(t, 64, Options{})
	first, second := prompt{model: "m", world: 1, tokens: make([]uint32, 3*chunkTokens)}, prompt{}
	second = first
	second.each = true // another namespace of the model
	hashes := first.hashes()
	for group, p := range []prompt{first, second} {
		if !n.storeQuietly(p, 0) {
			t.Fatal("nothing is stored")
		}
		sh := p.shard(0)
		n.book.AnnounceRows([]byte("m"), nil, group, &sh, hashes[:2]) // the third one is known to nobody
	}
	n.book.catchUp()
	feed, has := bookFeed{n.book, chunkTokens, false}, map[string]bool{}
	cursor := uint64(0)
	read := func() {
		t.Helper()
		news, next, lost := feed.Read(cursor, 100, nil)
		if lost {
			t.Fatal("records are lost")
		}
		cursor = next
		for _, a := range news {
			e := a.Event
			if a.Model != "m" || len(e.Hashes) != 1 || e.Parent != nil || e.Encoded != nil || e.BlockTokens != 0 || e.Medium != event.CPU {
				t.Errorf("%+v", a)
			}
			name := fmt.Sprintf("%d %x", e.Group, e.Hashes[0])
			if has[name] = true; e.Kind == event.Removed {
				delete(has, name)
			}
		}
	}
	read()
	want := map[string]bool{}
	for group := range 2 {
		for _, h := range hashes[:2] {
			want[fmt.Sprintf("%d %x", group, h[:])] = true
		}
	}
	if !maps.Equal(has, want) {
		t.Errorf("announced are %v, want %v", has, want)
	}
	if all, _ := feed.Everything(); all.Len() != 4 {
		t.Errorf("%d rows are there, want 4", all.Len())
	}
	if chunks, _ := n.book.Snapshot("m", true); len(chunks) > 0 {
		t.Errorf("a stream of LMCache begins with %d rows", len(chunks))
	}
	n.store.Clear(false)
	n.book.catchUp()
	if read(); len(has) > 0 {
		t.Errorf("%v are left after a clear", has)
	}
}
