// SPDX-License-Identifier: Apache-2.0

package events

import (
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Readers that ask for all that is there and then read nothing hold what their queues hold, not each a copy of all.
func TestReadersThatDoNotReadHoldLittle(t *testing.T) {
	const readers, chunks, tokens = 24, 200, 1<<16 - 1
	for _, request := range []string{snapshotRequest, string(sequenceFrame(0))} {
		n := newNode(t, 2*chunks, Options{})
		n.book.catchUp()
		p := NewPublisher(n.book, PublisherOptions{ChunkTokens: tokens, BatchEvents: 1, Replay: 1, QueueBytes: 32 << 10})
		at := "ipc://" + filepath.Join(t.TempDir(), "replay")
		if _, _, err := p.Listen(t.Context(), "ipc://"+filepath.Join(t.TempDir(), "events"), at); err != nil {
			t.Fatal(err)
		}
		long := prompt{model: "m", world: 1, tokens: make([]uint32, chunks*chunkTokens)}
		text := &Text{Head: event.AppendTokens(nil, make([]int64, tokens))[:3]}
		for i := range chunks {
			text.Tokens = append(text.Tokens, make([]byte, tokens)...)
			text.Ends = append(text.Ends, (i+1)*tokens)
		}
		sh := long.shard(0)
		n.book.Announce([]byte(long.model), nil, &sh, long.hashes(), 0, text)
		n.storeAll(long)
		n.book.catchUp()
		if got := n.book.Stats().Bytes; got < chunks*tokens {
			t.Fatalf("%d bytes of tokens", got)
		}
		p.publish()
		before, end := heap(), make(chan struct{})
		var dealers []*zmtp.Dealer
		for range readers {
			d := zmtp.NewDealer(at, zmtp.DealerOptions{Handler: func(zmtp.Message) { <-end }})
			if err := d.Start(); err != nil {
				t.Fatal(err)
			}
			if err := d.Send(nil, []byte(request)); err != nil {
				t.Fatal(err)
			}
			dealers = append(dealers, d)
		}
		for until := time.Now().Add(routerWait); p.Stats().Snapshots+p.Stats().Replays < readers; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%+v", p.Stats())
			}
		}
		if grown, most := heap()-before, int64(readers*1<<20); grown > most {
			t.Errorf("%q: %d bytes for %d readers, want %d at most", request, grown, readers, most)
		}
		close(end)
		for _, d := range dealers {
			_ = d.Close()
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
