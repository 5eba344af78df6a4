// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/binary"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// received is what a socket got.
type received struct {
	mu   sync.Mutex
	list []zmtp.Message
}

func (r *received) add(m zmtp.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var own zmtp.Message
	for _, frame := range m {
		own = append(own, bytes.Clone(frame))
	}
	r.list = append(r.list, own)
}

func (r *received) all() []zmtp.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// A subscriber gets topic, sequence and batch of each message. The replay socket sends the last messages again, from a sequence on.
func TestEngineEvents(t *testing.T) {
	at, replayAt := testkit.FreePort(t), testkit.FreePort(t)
	o := kvconfig.Events{Endpoint: "tcp://*:" + strconv.Itoa(at), Replay: "tcp://127.0.0.1:" + strconv.Itoa(replayAt), Topic: "kv", Buffer: 3}
	p, err := openEnginePublisher(t.Context(), o, 1, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var events, replay received
	sub := zmtp.NewSub("tcp://127.0.0.1:"+strconv.Itoa(at), zmtp.DealerOptions{Handler: events.add})
	dealer := zmtp.NewDealer("tcp://127.0.0.1:"+strconv.Itoa(replayAt), zmtp.DealerOptions{Handler: replay.add})
	defer sub.Close()
	defer dealer.Close()
	if err := sub.Subscribe("kv"); err != nil {
		t.Fatal(err)
	}
	if err := sub.Start(); err != nil {
		t.Fatal(err)
	}
	if err := dealer.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "a subscriber", func() bool { return p.pub.Subscribers() == 1 })
	for i := range 5 {
		p.publish([]event.Event{{Kind: event.Removed, Hashes: [][]byte{{byte(i)}}, Medium: event.GPU}})
	}
	testkit.Eventually(t, "five messages", func() bool { return len(events.all()) == 5 })
	for i, m := range events.all() {
		batch, err := event.Decode(m[2])
		if len(m) != 3 || string(m[0]) != "kv" || binary.BigEndian.Uint64(m[1]) != uint64(i) || err != nil {
			t.Fatal(m, err)
		}
		if e := batch.Events; len(e) != 1 || !bytes.Equal(e[0].Hashes[0], []byte{byte(i)}) || batch.Rank != 1 {
			t.Errorf("message %d: %+v", i, batch)
		}
	}
	f := func(start []byte, want ...int) {
		t.Helper()
		before := len(replay.all())
		if err := dealer.Send(nil, start); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the end of the replay", func() bool {
			all := replay.all()
			return len(all) > before && bytes.Equal(all[len(all)-1][2], bytes.Repeat([]byte{0xff}, 8))
		})
		got := replay.all()[before:]
		if len(got) != len(want)+1 {
			t.Fatalf("from %x: %d messages, want %d and the end", start, len(got), len(want))
		}
		for i, sequence := range want {
			if m := got[i]; string(m[1]) != "kv" || binary.BigEndian.Uint64(m[2]) != uint64(sequence) || !bytes.Equal(m[3], events.all()[sequence][2]) {
				t.Errorf("from %x: message %d is %v", start, i, m[:3])
			}
		}
	}
	f(nil, 2, 3, 4) // three are kept
	f([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 3}, 3, 4)
	f([]byte{5})
	f(bytes.Repeat([]byte{1}, 9))
	if _, err := openEnginePublisher(t.Context(), o, 0, nil, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("two publishers on one port")
	}
}
