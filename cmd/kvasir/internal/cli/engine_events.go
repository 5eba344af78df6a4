// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// enginePublisher publishes an engine's KV events in the form of vLLM's ZmqEventPublisher: topic, sequence and payload on a PUB socket.
// It repeats the last messages on a ROUTER socket.
type enginePublisher struct {
	o      kvconfig.Events
	rank   int // data-parallel rank, which each batch names
	pub    *zmtp.Pub
	replay *zmtp.Router

	mu struct {
		sync.Mutex
		next  uint64
		bytes int
		last  []engineMessage // oldest first
	}
}

type engineMessage struct {
	sequence uint64
	payload  []byte
}

// replayBytes bounds the payloads that are kept to be repeated; beyond it the oldest ones are dropped, but the newest one always stays.
const replayBytes = 64 << 20

// openEnginePublisher opens the sockets for the KV events of the data-parallel rank; Close closes them. `from` are the networks from which
// subscribers may connect.
func openEnginePublisher(ctx context.Context, o kvconfig.Events, rank int, from *auth.Networks, log *slog.Logger) (*enginePublisher, error) {
	p := &enginePublisher{o: o, rank: rank, pub: zmtp.NewPub(zmtp.PubOptions{HeartbeatInterval: 30 * time.Second, Networks: from, Log: log})}
	at, err := p.pub.Listen(ctx, o.Endpoint)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	log.Info("the engine publishes KV events", "address", at.String(), "topic", o.Topic)
	if o.Replay == "" {
		return p, nil
	}
	p.replay = zmtp.NewRouter(p.answer, zmtp.RouterOptions{MaxFrameBytes: 64 << 10, MaxMessageBytes: 64 << 10, HeartbeatInterval: 30 * time.Second, Networks: from, Log: log})
	if _, err = p.replay.Listen(ctx, o.Replay); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// publish sends one batch of events. It does not wait.
func (p *enginePublisher) publish(events []event.Event) {
	payload := event.Encoding{}.Append(nil, &event.Batch{Time: float64(time.Now().UnixMicro()) / 1e6, Events: events, Rank: p.rank})
	p.mu.Lock()
	m := engineMessage{p.mu.next, payload}
	p.mu.next++
	if p.replay != nil {
		p.mu.last = append(p.mu.last, m)
		p.mu.bytes += len(payload)
		for len(p.mu.last) > p.o.Buffer || p.mu.bytes > replayBytes && len(p.mu.last) > 1 {
			p.mu.bytes -= len(p.mu.last[0].payload)
			p.mu.last[0] = engineMessage{}
			p.mu.last = p.mu.last[1:]
		}
	}
	p.mu.Unlock()
	p.pub.Publish([]byte(p.o.Topic), binary.BigEndian.AppendUint64(nil, m.sequence), payload)
}

// answer sends the kept messages, from the requested sequence on, and then the end marker.
func (p *enginePublisher) answer(peer *zmtp.Peer, m zmtp.Message) {
	if len(m) != 2 {
		return
	}
	start := bytes.TrimLeft(m[1], "\x00")
	from := ^uint64(0)
	if len(start) <= 8 {
		var full [8]byte
		copy(full[8-len(start):], start)
		from = binary.BigEndian.Uint64(full[:])
	}
	p.mu.Lock()
	kept := slices.Clone(p.mu.last)
	p.mu.Unlock()
	delimiter := bytes.Clone(m[0])
	for _, k := range kept {
		if k.sequence >= from && peer.SendWaiting(delimiter, []byte(p.o.Topic), binary.BigEndian.AppendUint64(nil, k.sequence), k.payload) != nil {
			return
		}
	}
	_ = peer.SendWaiting(delimiter, nil, bytes.Repeat([]byte{0xff}, 8), nil) // a peer that is gone needs none
}

// Close ends the sockets.
func (p *enginePublisher) Close() error {
	err := p.pub.Close()
	if p.replay != nil {
		err = errors.Join(err, p.replay.Close())
	}
	return err
}
