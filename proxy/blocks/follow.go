// SPDX-License-Identifier: Apache-2.0

package blocks

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Options configures a Follower. A zero field means its default.
type Options struct {
	Endpoint string // address of the publisher, tcp://host:port
	Replay   string // address of its replays; "": it has none
	Topic    string // topics to follow, by their prefix; default all

	// Cache says that the publisher is a cache server (NewCacheHeld). The model of a message then follows the second @ of its topic, as
	// in kv@HOST:PORT@MODEL.
	Cache bool

	MaxBlocks     int           // default 1<<20
	ReplayTimeout time.Duration // default 10 s

	Log *slog.Logger // nil: nothing is logged
}

// maxLate bounds the messages that wait until a replay has ended. With one more, the Follower applies all of them without the rest of
// the replay, and so may have to forget the blocks it knew.
const maxLate = 4096

// Follower applies a publisher's events to a Held, in their order and without gaps. After a gap, a lost connection or a restart of the
// publisher it asks for a replay. If there is no replay, or it does not reach back far enough, the Follower forgets all blocks it knew.
//
// A message has three frames: topic, sequence (8 bytes, big-endian), batch. A request for a replay has an empty frame and the first
// wanted sequence; each answer has an empty frame before the three frames, and the last answer has sequence -1. Source: vLLM 0.32,
// ZmqEventPublisher.
type Follower struct {
	*Held
	o      Options
	sub    *zmtp.Sub
	replay *zmtp.Dealer // nil: no replays
	resets atomic.Int64

	mu struct {
		sync.Mutex
		begun  bool
		next   uint64 // the sequence expected next
		live   uint64 // the sequence after that of the last message on this connection; replays do not count
		epoch  uint64 // the publisher's epoch; 0: it has none
		asking bool   // a replay is in progress
		from   uint64 // the first sequence of the requested replay
		first  bool   // the replay's first answer has not come yet
		asked  int    // number of replays requested so far
		late   []message
		closed bool
		timer  *time.Timer
	}
}

type message struct {
	seq   uint64
	model string
	batch event.Batch
}

// Follow begins to follow a publisher, which need not be running yet.
func Follow(o Options) (*Follower, error) {
	o.MaxBlocks, o.ReplayTimeout = cmp.Or(o.MaxBlocks, 1<<20), cmp.Or(o.ReplayTimeout, 10*time.Second)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	f := &Follower{Held: NewHeld(o.MaxBlocks), o: o}
	if o.Cache {
		f.Held = NewCacheHeld(o.MaxBlocks)
	}
	limits := zmtp.DealerOptions{HeartbeatInterval: 10 * time.Second, HeartbeatTimeout: 30 * time.Second}
	if o.Replay != "" {
		ro := limits
		ro.Handler, ro.OnState, ro.NoWaiting = f.replayed, f.replayState, true
		f.replay = zmtp.NewDealer(o.Replay, ro)
		if err := f.replay.Start(); err != nil {
			return nil, err
		}
	}
	so := limits
	so.Handler, so.OnState = f.published, f.state
	f.sub = zmtp.NewSub(o.Endpoint, so)
	err := f.sub.Subscribe(o.Topic)
	if err == nil {
		err = f.sub.Start()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Close ends the Follower.
func (f *Follower) Close() {
	_ = f.sub.Close() // nothing is waited for
	if f.replay != nil {
		_ = f.replay.Close()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.closed = true
	f.endLocked()
}

// Resets returns how often the Follower had to forget blocks it knew.
func (f *Follower) Resets() int64 { return f.resets.Load() }

// state handles a change of the connection to the publisher. Events that are published while there is no connection are lost, so state
// asks for a replay when the connection is there.
func (f *Follower) state(connected bool, _ error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !connected {
		f.endLocked()
		f.voidLocked(false)
		f.mu.begun, f.mu.live = false, 0
		return
	}
	from := uint64(0)
	if f.mu.begun {
		from = f.mu.next
	}
	f.askLocked(from)
}

// replayState handles a change of the connection for replays, which may be ready later than the connection for events.
func (f *Follower) replayState(connected bool, _ error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if connected && !f.mu.begun && !f.mu.asking {
		f.askLocked(0)
	}
}

// voidLocked forgets all known blocks. all means that the publisher has no blocks now.
func (f *Follower) voidLocked(all bool) {
	if n, _, _ := f.Blocks(); n > 0 {
		f.resets.Add(1)
	}
	f.Reset(all)
}

// askLocked asks for a replay that begins at the sequence `from`. If it cannot ask, the Follower goes on with the next event.
func (f *Follower) askLocked(from uint64) {
	if f.replay == nil || f.mu.asking || f.mu.closed {
		return
	}
	if f.replay.Send(nil, binary.BigEndian.AppendUint64(nil, from)) != nil {
		return
	}
	f.mu.asking, f.mu.from, f.mu.first = true, from, true
	f.mu.asked++
	n := f.mu.asked
	f.mu.timer = time.AfterFunc(f.o.ReplayTimeout, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.mu.asking && f.mu.asked == n {
			f.o.Log.Warn("a publisher of KV events does not answer a request for missed events: they stay unknown", "endpoint", f.o.Replay)
			f.goOnLocked()
		}
	})
}

// endLocked ends the replay in progress, if any, and drops the messages that wait for its end.
func (f *Follower) endLocked() {
	if f.mu.timer != nil {
		f.mu.timer.Stop()
	}
	f.mu.asking, f.mu.late = false, nil
}

// goOnLocked ends the replay and applies the messages that came meanwhile, except those that the replay has brought.
func (f *Follower) goOnLocked() {
	late := f.mu.late
	f.endLocked()
	for i := range late {
		if m := &late[i]; !f.knownLocked(m) {
			f.takeLocked(m)
		}
	}
}

// knownLocked reports whether a replay has already brought the message m, which must then not be applied again.
func (f *Follower) knownLocked(m *message) bool {
	return f.mu.begun && m.seq < f.mu.next && !f.restartedLocked(&m.batch)
}

// published handles a message from the publisher.
func (f *Follower) published(m zmtp.Message) {
	got, ok := f.decode(m)
	if !ok {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	// On one connection sequences ascend: one below the last means that the publisher has started again.
	again := got.seq < f.mu.live
	f.mu.live = got.seq + 1
	switch {
	case f.mu.asking && !again && len(f.mu.late) < maxLate:
		f.mu.late = append(f.mu.late, got)
		return
	case f.mu.asking: // too many messages wait, or the publisher restarted and the replay is from its earlier life
		f.goOnLocked()
	case !again && f.knownLocked(&got): // the replay has already brought this message
		return
	case f.mu.begun && got.seq > f.mu.next && !f.restartedLocked(&got.batch):
		if f.askLocked(f.mu.next); f.mu.asking {
			f.mu.late = append(f.mu.late, got)
			return
		}
	}
	f.takeLocked(&got)
}

func (f *Follower) restartedLocked(b *event.Batch) bool { return f.mu.begun && b.Epoch != f.mu.epoch }

// takeLocked applies a message. If the message does not follow the last one, takeLocked first forgets the known blocks.
func (f *Follower) takeLocked(m *message) {
	if !f.mu.begun || m.seq != f.mu.next || f.restartedLocked(&m.batch) {
		f.voidLocked(m.seq == 0)
	}
	f.mu.begun, f.mu.next, f.mu.epoch = true, m.seq+1, m.batch.Epoch
	f.Apply(&m.batch, m.model)
}

// replayed handles an answer to a request for a replay.
func (f *Follower) replayed(m zmtp.Message) {
	if len(m) != 4 || len(m[0]) != 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.mu.asking {
		return
	}
	if len(m[2]) == 8 && binary.BigEndian.Uint64(m[2]) == math.MaxUint64 {
		f.goOnLocked()
		return
	}
	got, ok := f.decode(m[1:])
	if !ok || got.seq < f.mu.from || f.mu.begun && !f.mu.first && got.seq < f.mu.next {
		return
	}
	f.mu.first = false
	f.takeLocked(&got)
}

// decode decodes a message. The result shares no memory with m.
func (f *Follower) decode(m zmtp.Message) (out message, ok bool) {
	if len(m) != 3 || len(m[1]) != 8 {
		return out, false
	}
	var err error
	if out.batch, err = event.Decode(append([]byte(nil), m[2]...)); err != nil {
		f.o.Log.Warn("a message is no batch of KV events", "endpoint", f.o.Endpoint, "err", err)
		return out, false
	}
	if parts := bytes.SplitN(m[0], []byte("@"), 3); len(parts) == 3 {
		out.model = string(parts[2])
	}
	out.seq = binary.BigEndian.Uint64(m[1])
	return out, true
}
