// SPDX-License-Identifier: Apache-2.0

package blocks_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/proxy/blocks"
	"github.com/kvasir-kv/kvasir/proxy/blocks/blockstest"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// The follower ignores an event with fewer tokens than its blocks have, or with blocks of no tokens.
func TestEventsWithoutTheirTokensDoNotCount(t *testing.T) {
	h := blocks.NewHeld(100)
	for _, spoil := range []func(*event.Event){
		func(ev *event.Event) { ev.Tokens = ev.Tokens[:len(ev.Tokens)-1] },
		func(ev *event.Event) { ev.Tokens = nil },
		func(ev *event.Event) { ev.BlockTokens = 0 },
		func(ev *event.Event) { ev.BlockTokens = -1 },
		func(ev *event.Event) { ev.BlockTokens = 1 << 40 },
	} {
		ev := stored("a", ada, 0, 3)
		spoil(&ev)
		h.Apply(&event.Batch{Events: []event.Event{ev}}, "")
		if n, _, _ := h.Blocks(); n != 0 {
			t.Errorf("%d blocks of %d tokens with %d tokens are held", n, ev.BlockTokens, len(ev.Tokens))
		}
	}
}

// A block that is stored under two hashes is there until both are removed.
func TestBlockOfTwoHashesIsThereUntilBothAreRemoved(t *testing.T) {
	v, h := view{blocks.NewPrompts(1000)}, blocks.NewHeld(100)
	v.p.Learn(marks(ada), "", size, tokens(ada))
	apply := func(want int, ev ...event.Event) {
		t.Helper()
		h.Apply(&event.Batch{Events: ev}, "")
		if got := v.longest(h, ada); got != want {
			t.Errorf("%d bytes, want %d", got, want)
		}
	}
	apply(len(ada), stored("a", ada, 0, 10), stored("b", ada, 0, 10))
	apply(len(ada), removed("a", ada, 0), removed("b", ada, 9))
	apply(0, removed("b", ada, 0))
}

// The follower skips messages that no publisher of KV events sends, and keeps its state.
func TestMalformedMessagesArePassedOver(t *testing.T) {
	pub := zmtp.NewPub(zmtp.PubOptions{})
	defer pub.Close()
	addr, err := pub.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	f, err := blocks.Follow(blocks.Options{Endpoint: "tcp://" + addr.String()})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	testkit.Eventually(t, "it follows", func() bool { return pub.Subscribers() > 0 })
	seq := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	batch := func(ev event.Event) []byte {
		return event.Encoding{}.Append(nil, &event.Batch{Events: []event.Event{ev}, Rank: -1})
	}
	pub.Publish([]byte{}, seq(0), batch(stored("a", ada, 0, 3)))
	wants(t, f, "what was published", 3, true)
	for _, m := range [][][]byte{{{}}, {{}, seq(1)}, {{}, seq(1)[:7], batch(stored("a", ada, 0, 1))}, {{}, seq(1), []byte("none")}, {{}, seq(1), {}, {}}} {
		pub.Publish(m...)
	}
	pub.Publish([]byte{}, seq(1), batch(stored("a", ada, 3, 5)))
	wants(t, f, "what came after messages that are none", 5, true)
	if f.Resets() != 0 {
		t.Errorf("%d times void", f.Resets())
	}
}

// A publisher is asked for replays at the start, once for each of the two connections at most, and for no other while no message is missing.
func TestNoReplayIsAskedForWhileNothingIsMissing(t *testing.T) {
	p := blockstest.Start(t, "127.0.0.1", 0, 0)
	p.Publish(false, stored("a", ada, 0, 2))
	f := follow(t, p, true)
	wants(t, f, "what was before", 2, true)
	for i := 2; i < 8; i++ {
		p.Publish(false, stored("a", ada, i, i+1))
		wants(t, f, "what comes", i+1, true)
	}
	if n := p.Replays(); n > 2 {
		t.Errorf("%d replays were asked for", n)
	}
}

// Replays that can be asked for only after the publisher's connection is there are asked for then.
func TestReplaysThatComeLater(t *testing.T) {
	pub := zmtp.NewPub(zmtp.PubOptions{})
	defer pub.Close()
	addr, err := pub.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	replays := "tcp://" + free.Addr().String()
	_ = free.Close()
	f, err := blocks.Follow(blocks.Options{Endpoint: "tcp://" + addr.String(), Replay: replays, ReplayTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	testkit.Eventually(t, "it follows", func() bool { return pub.Subscribers() > 0 })
	payload := event.Encoding{}.Append(nil, &event.Batch{Events: []event.Event{stored("a", ada, 0, 4)}, Rank: -1})
	router := zmtp.NewRouter(func(peer *zmtp.Peer, m zmtp.Message) {
		if len(m) == 2 && bytes.Equal(m[1], make([]byte, 8)) {
			_ = peer.Send(nil, nil, make([]byte, 8), payload)
			_ = peer.Send(nil, nil, binary.BigEndian.AppendUint64(nil, math.MaxUint64), nil)
			peer.Flush()
		}
	}, zmtp.RouterOptions{})
	defer router.Close()
	testkit.Eventually(t, "its replays listen", func() bool {
		_, err := router.Listen(context.Background(), replays)
		return err == nil
	})
	wants(t, f, fmt.Sprint("what was before, from ", replays), 4, true)
}
