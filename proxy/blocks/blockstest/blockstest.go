// SPDX-License-Identifier: Apache-2.0

// Package blockstest has a publisher of KV events for tests, with replays. It can lose messages, forget earlier messages, and start
// again.
package blockstest

import (
	"context"
	"encoding/binary"
	"math"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Publisher publishes KV events as vLLM does.
type Publisher struct {
	Port, ReplayPort int

	t      testing.TB
	host   string
	pub    *zmtp.Pub
	router *zmtp.Router

	mu     sync.Mutex
	seq    uint64
	past   [][]byte // payloads, beginning with that of sequence first
	first  uint64
	answer bool // replays are answered
	asked  int  // number of replays requested
}

// Start starts a Publisher that listens at host; for a port of 0 it takes any free port. It stops when the test ends.
func Start(t testing.TB, host string, port, replay int) *Publisher {
	t.Helper()
	p := &Publisher{t: t, host: host, answer: true}
	p.listen(port, replay)
	t.Cleanup(p.Stop)
	return p
}

func (p *Publisher) listen(port, replay int) {
	p.t.Helper()
	p.pub = zmtp.NewPub(zmtp.PubOptions{})
	p.router = zmtp.NewRouter(p.replay, zmtp.RouterOptions{})
	var err error
	if p.Port, err = listen(p.pub.Listen, p.host, port); err == nil {
		p.ReplayPort, err = listen(p.router.Listen, p.host, replay)
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

// Stop ends the publisher.
func (p *Publisher) Stop() {
	_ = p.pub.Close()
	_ = p.router.Close()
}

// StartAgain stops the publisher and starts another one at the same ports, whose sequence begins at 0.
func (p *Publisher) StartAgain() {
	p.t.Helper()
	p.Stop()
	p.mu.Lock()
	p.seq, p.past, p.first = 0, nil, 0
	p.mu.Unlock()
	p.listen(p.Port, p.ReplayPort)
}

// Publish sends events as one batch. If lose is true, no subscriber gets it.
func (p *Publisher) Publish(lose bool, events ...event.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	payload := event.Encoding{IntHashes: p.seq%2 == 0}.Append(nil, &event.Batch{Events: events, Rank: -1})
	p.past = append(p.past, payload)
	if !lose {
		p.pub.Publish([]byte{}, binary.BigEndian.AppendUint64(nil, p.seq), payload)
	}
	p.seq++
}

// Deliver sends the last batch again, so that subscribers get a batch that Publish lost.
func (p *Publisher) Deliver() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pub.Publish([]byte{}, binary.BigEndian.AppendUint64(nil, p.seq-1), p.past[len(p.past)-1])
}

// BeginAgain gives the next batch the sequence 0, like a restarted publisher behind a forwarder.
func (p *Publisher) BeginAgain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seq, p.past, p.first = 0, nil, 0
}

// Forget makes replays begin with the next batch.
func (p *Publisher) Forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.past, p.first = nil, p.seq
}

// Answer sets whether replays are answered.
func (p *Publisher) Answer(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = on
}

// Subscribers returns the number of subscribers.
func (p *Publisher) Subscribers() int { return p.pub.Subscribers() }

// Replays returns how many replays were requested.
func (p *Publisher) Replays() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

func (p *Publisher) replay(peer *zmtp.Peer, m zmtp.Message) {
	if len(m) != 2 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	if !p.answer {
		return
	}
	start := uint64(0)
	for _, c := range m[1] {
		start = start<<8 | uint64(c)
	}
	for i, payload := range p.past {
		if seq := p.first + uint64(i); seq >= start {
			_ = peer.Send(nil, nil, binary.BigEndian.AppendUint64(nil, seq), payload)
		}
	}
	_ = peer.Send(nil, nil, binary.BigEndian.AppendUint64(nil, math.MaxUint64), nil)
	peer.Flush()
}

func listen(f func(context.Context, string) (net.Addr, error), host string, port int) (int, error) {
	at := "*"
	if port != 0 {
		at = strconv.Itoa(port)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		addr, err := f(context.Background(), "tcp://"+net.JoinHostPort(host, at))
		if err == nil {
			return addr.(*net.TCPAddr).Port, nil
		}
		if time.Now().After(end) {
			return 0, err
		}
	}
}
