// SPDX-License-Identifier: Apache-2.0

package blocks_test

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/proxy/blocks"
	"github.com/kvasir-kv/kvasir/proxy/blocks/blockstest"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const size = 4 // tokens of a block

// tokens are those of a prompt in which each byte is one.
func tokens(text string) (out []int64) {
	for _, c := range []byte(text) {
		out = append(out, int64(c))
	}
	return out
}

// hashes are an engine's own, of the blocks of a prompt.
func hashes(engine, text string) (out [][]byte) {
	for n := size; n <= len(text); n += size {
		h := sha256.Sum256([]byte(engine + text[:n]))
		out = append(out, h[:])
	}
	return out
}

// stored is the event of blocks from..to of a prompt.
func stored(engine, text string, from, to int) event.Event {
	all := hashes(engine, text)
	ev := event.Event{Kind: event.Stored, Hashes: all[from:to], Tokens: tokens(text)[from*size : to*size], BlockTokens: size, Medium: event.GPU}
	if from > 0 {
		ev.Parent = all[from-1]
	}
	return ev
}

func removed(engine, text string, block int) event.Event {
	return event.Event{Kind: event.Removed, Hashes: hashes(engine, text)[block : block+1], Medium: event.GPU}
}

// marks of a prompt lie every 8 bytes, and at its end.
func marks(text string) (out []prefix.Mark) {
	for end := 8; end < len(text); end += 8 {
		out = append(out, prefix.Mark{Hash: prefix.Seed(text[:end]), End: end})
	}
	return append(out, prefix.Mark{Hash: prefix.Seed("whole", text), End: len(text)})
}

type view struct {
	p *blocks.Prompts
}

func (v view) longest(h *blocks.Held, text string) int {
	m := marks(text)
	n, _, _ := h.Longest(m, v.p.Find(nil, m))
	return n
}

const (
	ada = "the first of two prompts, and its end...."
	eve = "the first of two prompts, but another end"
)

// Two engines with different hashes report blocks of two prompts with one beginning. A block that was stored twice must be
// removed twice. Blocks of an unknown parent, another group, medium or adapter do not count.
func TestHeld(t *testing.T) {
	v := view{blocks.NewPrompts(1000)}
	a, b := blocks.NewHeld(100), blocks.NewHeld(100)
	f := func(what string, wantA, wantB int, text string) {
		t.Helper()
		if gotA, gotB := v.longest(a, text), v.longest(b, text); gotA != wantA || gotB != wantB {
			t.Errorf("%s: %d and %d bytes, want %d and %d", what, gotA, gotB, wantA, wantB)
		}
	}
	apply := func(h *blocks.Held, events ...event.Event) { h.Apply(&event.Batch{Events: events}, "") }
	apply(a, stored("a", ada, 0, 10))
	apply(b, stored("b", ada, 0, 3), stored("b", ada, 3, 5))
	f("nobody knows the tokens", 0, 0, ada)
	v.p.Learn(marks(ada), "", size, tokens(ada))
	f("learned", len(ada), 24, ada) // a mark stands for the block before the one that ends there
	f("the same beginning", 24, 24, eve[:32])
	v.p.Learn(marks(eve), "", size, tokens(eve))
	f("another end", 24, 24, eve)
	apply(a, stored("a", ada, 0, 10), removed("a", ada, 9))
	f("stored twice, removed once", len(ada), 24, ada)
	apply(a, removed("a", ada, 9), removed("a", ada, 9))
	f("removed", 40, 24, ada)
	for i := 8; i >= 0; i-- {
		apply(a, removed("a", ada, i), removed("a", ada, i))
	}
	f("all removed", 0, 24, ada)
	if n, _, _ := a.Blocks(); n != 0 {
		t.Errorf("%d blocks are left", n)
	}
	late := stored("a", ada, 5, 10)
	other, cpu, lora, salted := stored("a", ada, 0, 10), stored("a", ada, 0, 10), stored("a", ada, 0, 10), stored("a", ada, 0, 10)
	other.Group, cpu.Medium, lora.LoRA, salted.Salt = 1, event.CPU, "x", "s"
	for _, ev := range []event.Event{late, other, cpu, lora, salted} {
		apply(a, ev)
		f("does not count", 0, 24, ada)
	}
	v.p.Learn(marks("salt"+ada), "s", size, tokens(ada))
	f("salted", 44+1, 0, "salt"+ada)
	apply(b, event.Event{Kind: event.Cleared})
	f("cleared", 0, 0, ada)
	if _, _, all := b.Blocks(); !all {
		t.Error("what was cleared is not known")
	}
	small := blocks.NewHeld(3)
	small.Reset(true)
	apply(small, stored("a", ada, 0, 10))
	if n, tokens, all := small.Blocks(); n != 3 || tokens != size || all {
		t.Errorf("%d blocks of %d, %v", n, tokens, all)
	}
}

// A cache server reports chunks of two models with the same hashes, in memory and in tiers below. Each model has its own chunks. A
// chunk counts until its last medium has removed it.
func TestCacheHeld(t *testing.T) {
	h := blocks.NewCacheHeld(100)
	apply := func(model, medium string, events ...event.Event) {
		for i := range events {
			events[i].Medium = medium
		}
		h.Apply(&event.Batch{Events: events}, model)
	}
	known := map[string]view{}
	for _, model := range []string{"a", "b"} {
		known[model] = view{blocks.NewPrompts(1000)}
		known[model].p.Learn(marks(ada), blocks.Scope(model, ""), size, tokens(ada))
	}
	f := func(what string, a, b int) {
		t.Helper()
		if gotA, gotB := known["a"].longest(h, ada), known["b"].longest(h, ada); gotA != a || gotB != b {
			t.Errorf("%s: %d and %d bytes, want %d and %d", what, gotA, gotB, a, b)
		}
	}
	apply("a", event.CPU, stored("s", ada, 0, 10))
	f("one model", len(ada), 0)
	apply("b", event.CPU, stored("s", ada, 0, 5))
	f("both", len(ada), 24)
	apply("a", event.Storage, stored("s", ada, 0, 10))
	for i := 9; i >= 0; i-- {
		apply("a", event.CPU, removed("s", ada, i))
	}
	f("below", len(ada), 24)
	for i := 9; i >= 0; i-- {
		apply("a", event.Storage, removed("s", ada, i))
	}
	f("gone", 0, 24)
	salted := stored("s", ada, 0, 10)
	salted.Salt = "x"
	apply("a", event.CPU, salted)
	f("another salt", 0, 24)
}

// A block in the middle of a prompt is removed and those behind it are not. Those behind do not count until it is stored again.
func TestHole(t *testing.T) {
	for scope, h := range map[string]*blocks.Held{"": blocks.NewHeld(100), blocks.Scope("", ""): blocks.NewCacheHeld(100)} {
		v := view{blocks.NewPrompts(1000)}
		v.p.Learn(marks(ada), scope, size, tokens(ada))
		apply := func(events ...event.Event) { h.Apply(&event.Batch{Events: events}, "") }
		f := func(what string, want int) {
			t.Helper()
			if got := v.longest(h, ada); got != want {
				t.Errorf("%s: %d bytes, want %d", what, got, want)
			}
		}
		apply(stored("s", ada, 0, 10))
		f("all", len(ada))
		apply(removed("s", ada, 4))
		f("a hole", 16)
		apply(removed("s", ada, 0))
		f("the first one is gone, too", 0)
		apply(stored("s", ada, 0, 1))
		f("the first one is back", 16)
		apply(stored("s", ada, 4, 5))
		f("all is back", len(ada))
	}
}

// A prompt without a whole block is known to have none.
func TestShortPrompt(t *testing.T) {
	p := blocks.NewPrompts(64)
	p.Learn(marks("ab"), "", size, tokens("ab"))
	if k := p.Find(nil, marks("ab"))[0]; k != (blocks.Known{Tokens: size}) {
		t.Errorf("%+v", k)
	}
}

// Marks are remembered in bounded memory: those in use stay.
func TestPrompts(t *testing.T) {
	p := blocks.NewPrompts(64)
	hot := marks(ada)
	p.Learn(hot, "", size, tokens(ada))
	for i := range 200 {
		text := fmt.Sprintf("%08d%s", i, eve)
		p.Learn(marks(text), "", size, tokens(text))
		if i < 20 {
			p.Find(nil, hot)
		}
	}
	if k := p.Find(nil, hot); slices.ContainsFunc(k, func(k blocks.Known) bool { return k.Key != 0 }) {
		t.Error("what nobody asks for stays for ever")
	}
	last := fmt.Sprintf("%08d%s", 199, eve)
	if k := p.Find(nil, marks(last)); k[len(k)-1].Key == 0 {
		t.Error("the last one is forgotten")
	}
	p.Learn(nil, "", size, nil)
	p.Learn(hot, "", 0, tokens(ada))
	p.Learn(hot, "", size, nil)
}

func follow(t *testing.T, p *blockstest.Publisher, replay bool) *blocks.Follower {
	t.Helper()
	o := blocks.Options{Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", p.Port), ReplayTimeout: time.Second}
	if replay {
		o.Replay = fmt.Sprintf("tcp://127.0.0.1:%d", p.ReplayPort)
	}
	f, err := blocks.Follow(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	testkit.Eventually(t, "it follows", func() bool { return p.Subscribers() > 0 })
	return f
}

func wants(t *testing.T, f *blocks.Follower, what string, blocks int, all bool) {
	t.Helper()
	n, complete := 0, false
	defer func() {
		if t.Failed() {
			t.Logf("%s: %d blocks, all %v; want %d, %v", what, n, complete, blocks, all)
		}
	}()
	testkit.Eventually(t, what, func() bool {
		n, _, complete = f.Blocks()
		return n == blocks && complete == all
	})
}

// With replays a follower gets the events from before its start, events that were lost on the way, and the events of a
// restarted publisher. It notices when replays do not reach back far enough.
func TestFollowerWithReplay(t *testing.T) {
	p := blockstest.Start(t, "127.0.0.1", 0, 0)
	p.Publish(false, stored("a", ada, 0, 2))
	f := follow(t, p, true)
	wants(t, f, "what was before", 2, true)
	p.Publish(false, stored("a", ada, 2, 3))
	wants(t, f, "what comes", 3, true)
	p.Publish(true, stored("a", ada, 3, 6))
	p.Publish(true, removed("a", ada, 5))
	p.Publish(false, stored("a", ada, 5, 7), removed("a", ada, 6))
	wants(t, f, "what was lost", 6, true)
	if f.Resets() != 0 {
		t.Errorf("%d times void", f.Resets())
	}
	p.Publish(true, removed("a", ada, 5))
	p.Forget()
	p.Publish(false, stored("a", eve, 0, 2))
	wants(t, f, "a replay that begins too late", 2, false)
	p.StartAgain()
	p.Publish(false, stored("a", eve, 0, 4))
	wants(t, f, "another life", 4, true)
	testkit.Eventually(t, "it follows that too", func() bool { return p.Subscribers() > 0 })
	p.Answer(false)
	p.Publish(true, stored("a", eve, 4, 5))
	p.Publish(false, stored("a", ada, 0, 8))
	wants(t, f, "a replay that never comes", 8, false)
}

// Replays have a connection of their own. A message that a replay has brought already changes nothing when it comes. A follower
// discards its state when a publisher restarts behind a forwarder, which keeps the connection.
func TestMessageAfterItsReplayChangesNothing(t *testing.T) {
	p := blockstest.Start(t, "127.0.0.1", 0, 0)
	p.Publish(false, stored("a", ada, 0, 2))
	p.Publish(true, stored("a", ada, 2, 3))
	f := follow(t, p, true)
	wants(t, f, "a replay", 3, true)
	p.Deliver()
	p.Publish(false, stored("a", ada, 3, 4))
	wants(t, f, "the last of the replay, and the next one", 4, true)
	p.Publish(true, stored("a", ada, 4, 5))
	p.Publish(false, stored("a", ada, 5, 6))
	wants(t, f, "a gap", 6, true)
	p.Deliver() // its number came on this connection before, so the publisher has begun again
	wants(t, f, "a number that came on this connection", 0, false)
	p.BeginAgain()
	p.Publish(false, stored("a", eve, 0, 2))
	wants(t, f, "another life behind a forwarder", 2, true)
	p.Publish(false, stored("a", eve, 2, 3))
	wants(t, f, "the next one", 3, true)
}

// Without replays a follower reports its state as incomplete after a gap, and when it started later than the publisher.
func TestFollowerWithoutReplay(t *testing.T) {
	p := blockstest.Start(t, "127.0.0.1", 0, 0)
	f := follow(t, p, false)
	p.Publish(false, stored("a", ada, 0, 3))
	wants(t, f, "from the first on", 3, true)
	p.Publish(true, stored("a", ada, 3, 6))
	p.Publish(false, stored("a", ada, 6, 8), stored("a", eve, 0, 1))
	wants(t, f, "after a gap", 1, false)
	p.Publish(false, event.Event{Kind: event.Cleared}, stored("a", eve, 0, 2))
	wants(t, f, "after it was cleared", 2, true)
	p.StartAgain()
	wants(t, f, "the connection is lost", 0, false)
	testkit.Eventually(t, "it follows again", func() bool { return p.Subscribers() > 0 })
	p.Publish(false, stored("a", ada, 0, 5))
	wants(t, f, "another life", 5, true)
	late := follow(t, p, false)
	testkit.Eventually(t, "both follow", func() bool { return p.Subscribers() == 2 })
	p.Publish(false, stored("a", eve, 0, 1))
	wants(t, late, "who came late", 1, false)
}
