// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// full is a world whose engines have one group of full attention, and P's blocks of
// equal prefixes hold equal bytes, as they do for equal tokens.
func full(t *testing.T, o relay.Options) *world {
	w := newWorld(t, o)
	for _, c := range []*mooncake.Cache{w.p, w.d} {
		c.Kinds = c.Kinds[:1]
		for i := range c.Regions {
			c.Regions[i].Group, c.Regions[i].Shared = 0, []int{0}
		}
	}
	target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	w.target, w.receiver = target, w.newD(w.d, target)
	if o.Prefixes {
		p := strings.TrimPrefix(w.source().EngineID, "relay-")
		testkit.Eventually(t, "the relay watches P", func() bool { return w.relay.Watched(p) })
	}
	return w
}

// share copies P's blocks: the prefix of one prompt is that of another.
func (w *world) share(from, to []int) {
	for i := range from {
		for _, r := range w.p.Regions {
			copy(w.p.Bytes(r.Base+uint64(to[i])*r.Stride, r.Payload), w.p.Bytes(r.Base+uint64(from[i])*r.Stride, r.Payload))
		}
	}
}

// A prompt whose first blocks the relay has, under another transfer, takes only the
// rest from P: counted in bytes. That transfer is a prefix for the next one.
func TestPrefixFromMemory(t *testing.T) {
	w := full(t, relay.Options{Prefixes: true})
	blockBytes := int64(layers * payload)
	w.sender.Offer("p1", "A", [][]int{{1, 2, 3}})
	if err := w.pull("A", []int{31, 32, 33}); err != nil {
		t.Fatal(err)
	}
	w.share([]int{1, 2, 3}, []int{11, 12, 13})
	w.sender.Offer("p2", "B", [][]int{{11, 12, 13, 14, 15}})
	if err := w.pull("B^A:3", []int{41, 42, 43, 44, 45}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{41, 42, 43, 44, 45}, []int{11, 12, 13, 14, 15})
	w.share([]int{11, 12, 13, 14}, []int{21, 22, 23, 24})
	w.sender.Offer("p3", "C", [][]int{{21, 22, 23, 24, 25, 26}})
	if err := w.pull("C^B:4", []int{51, 52, 53, 54, 55, 56}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{51, 52, 53, 54, 55, 56}, []int{21, 22, 23, 24, 25, 26})
	s := w.relay.Stats()
	if s.PulledBytes != (3+2+2)*blockBytes || s.PrefixBytes != (3+4)*blockBytes || w.sender.Stats().Bytes != s.PulledBytes {
		t.Fatalf("%+v, P sent %d", s, w.sender.Stats().Bytes)
	}
	if got := w.sender.Finished(); len(got) != 3 {
		t.Fatalf("finished %v", got)
	}
	// The whole of it again, without P.
	if err := w.pull("C#2", []int{1, 2, 3, 4, 5, 6}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{1, 2, 3, 4, 5, 6}, []int{21, 22, 23, 24, 25, 26})
}

// The relay takes all blocks from P where it cannot know that its own blocks are the first ones of
// the prompt: this D has the first blocks itself, the D that pulled the prefix had, or the relay has
// no such prefix, a shorter one, or one of an earlier life of P.
func TestPrefixThatDoesNotFit(t *testing.T) {
	w := full(t, relay.Options{Prefixes: true})
	w.sender.Offer("p1", "A", [][]int{{1, 2, 3}})
	if err := w.pull("A", []int{31, 32, 33}); err != nil {
		t.Fatal(err)
	}
	w.sender.Offer("p2", "S", [][]int{{4, 5, 6}})
	if err := w.pull("S", []int{32, 33}); err != nil { // the first block is D's own
		t.Fatal(err)
	}
	n := 0
	f := func(suffix string, want ...int) {
		t.Helper()
		n++
		id := fmt.Sprint("T", n)
		own := []int{11, 12, 13, 14, 15}
		w.sender.Offer("p"+id, id, [][]int{own})
		if err := w.pull(id+suffix, want); err != nil {
			t.Fatalf("%s: %v", suffix, err)
		}
		w.check(0, want, own[len(own)-len(want):])
	}
	f("^A:3", 41, 42, 43, 44)     // the first block is D's own
	f("^S:2", 41, 42, 43, 44, 45) // S was pulled without its first block
	f("^none:2", 41, 42, 43, 44, 45)
	f("^A:4", 41, 42, 43, 44, 45)
	f("^A:0", 41, 42, 43, 44, 45)
	f("^A:9", 41, 42, 43, 44, 45)
	w.restart("e1")
	testkit.Eventually(t, "the relay notices", func() bool { return w.relay.Stats().Dropped > 0 })
	// It notices twice, by the registry and by the connection that broke: a pull in between fails.
	own := []int{11, 12, 13, 14, 15}
	testkit.Eventually(t, "P is pulled from in its new life", func() bool {
		n++
		id := fmt.Sprint("T", n)
		w.sender.Offer("p"+id, id, [][]int{own})
		return w.pull(id+"^A:3", []int{41, 42, 43, 44, 45}) == nil
	})
	w.check(0, []int{41, 42, 43, 44, 45}, own)
	if s := w.relay.Stats(); s.PrefixBytes != 0 {
		t.Fatalf("%+v", s)
	}
}

// Without the option the form means T alone.
func TestPrefixWithoutTheOption(t *testing.T) {
	w := full(t, relay.Options{})
	for _, id := range []string{"A", "B"} {
		w.sender.Offer("p"+id, id, [][]int{{1, 2, 3}})
	}
	if err := w.pull("A", []int{31, 32, 33}); err != nil {
		t.Fatal(err)
	}
	if err := w.pull("B^A:2", []int{41, 42, 43}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{41, 42, 43}, []int{1, 2, 3})
	if s := w.relay.Stats(); s.PrefixBytes != 0 || s.Pulled != 2 {
		t.Fatalf("%+v", s)
	}
}
