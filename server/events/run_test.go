// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
)

// newsy is a script that wakes who follows it, and counts how often it is asked.
type newsy struct {
	script
	news  chan struct{}
	asked int
}

func (s *newsy) News() <-chan struct{} { return s.news }

func (s *newsy) LastEvent() uint64 {
	s.asked++
	return s.script.LastEvent()
}

// What is stored is told within a pause, whether much came before or nothing for a long time; then the Book does nothing.
func TestNewsAreTakenInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &newsy{news: make(chan struct{}, 1)}
		book := New(src, Options{})
		book.Activate()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { book.Run(ctx); close(ended) }()
		synctest.Wait()
		sh := object.Shard{Namespace: kv.NamespaceOf("m", "", "layout"), World: 1, Groups: object.FullAttention(chunkTokens, 4096)}
		for i, wait := range []time.Duration{0, time.Millisecond, runPause, 3 * runPause / 2, maxQuiet * runPause, time.Hour, runPause / 3, time.Minute} {
			time.Sleep(wait)
			hash := kv.Hash{byte(i + 1)}
			var e store.Event
			sh.Key(&e.Key, 0, 0, hash)
			src.events = append(src.events, e)
			select {
			case src.news <- struct{}{}:
			default:
			}
			book.Announce([]byte("m"), nil, &sh, []kv.Hash{hash}, 0, &Text{Head: []byte{0x91}, Tokens: []byte{1}, Ends: []int{1}})
			time.Sleep(runPause)
			synctest.Wait()
			if got := book.Last(); got != uint64(i+1) {
				t.Errorf("a pause after store %d there are %d records", i+1, got)
			}
		}
		time.Sleep(2 * maxQuiet * runPause)
		before := src.asked
		time.Sleep(time.Hour)
		if src.asked != before {
			t.Errorf("without news the store is asked %d times", src.asked-before)
		}
		cancel()
		<-ended
	})
}

// Readers wake once for changes that are applied together.
func TestReadersWakeOncePerBatch(t *testing.T) {
	n := newNode(t, 64, Options{})
	n.book.catchUp()
	changed := n.book.Changed()
	n.book.deferReaders(true)
	n.storeAll(prompt{model: "m", world: 1, tokens: make([]uint32, 3*chunkTokens)})
	told := n.book.queue.take()
	if more, lost := n.book.applyBatch(); more || lost {
		t.Fatal(more, lost)
	}
	n.book.learn(&told)
	select {
	case <-changed:
		t.Error("they are told before all is applied")
	default:
	}
	if n.book.Last() == 0 {
		t.Fatal("there is nothing to tell")
	}
	n.book.deferReaders(false)
	<-changed
}

// Messages are kept for replays only where somebody can ask for one.
func TestWithoutReplaysNothingIsKept(t *testing.T) {
	for _, replay := range []string{"", "ipc://" + filepath.Join(t.TempDir(), "replay")} {
		n := newNode(t, 64, Options{})
		n.book.catchUp()
		p := NewPublisher(n.book, PublisherOptions{ChunkTokens: chunkTokens})
		if _, _, err := p.Listen(t.Context(), "ipc://"+filepath.Join(t.TempDir(), "events"), replay); err != nil {
			t.Fatal(err)
		}
		n.storeAll(prompt{model: "m", world: 1, tokens: make([]uint32, 3*chunkTokens)})
		n.book.catchUp()
		p.publish()
		if got, want := len(p.mu.history) > 0, replay != ""; got != want || got != (p.mu.bytes > 0) || p.mu.next < 2 {
			t.Errorf("replay %q: %d messages of %d kept, %d bytes", replay, len(p.mu.history), p.mu.next, p.mu.bytes)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}
