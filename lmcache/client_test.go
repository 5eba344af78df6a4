// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// scripted is a server whose answers a test decides.
type scripted struct {
	mu     sync.Mutex
	answer func(op Op, m zmtp.Message) [][]byte // result frames; nil: no reply
}

func (s *scripted) set(answer func(op Op, m zmtp.Message) [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = answer
}

func newScripted(t *testing.T) (*scripted, *Client) {
	t.Helper()
	s := &scripted{}
	r := zmtp.NewRouter(func(p *zmtp.Peer, m zmtp.Message) {
		op, _ := ParseOp(m[1])
		s.mu.Lock()
		answer := s.answer
		s.mu.Unlock()
		if answer == nil {
			return
		}
		if frames := answer(op, m); frames != nil {
			_ = p.Send(frames...)
		}
	}, zmtp.RouterOptions{})
	addr, err := r.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewClient(strings.TrimPrefix(addr.String(), "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), r.Close()); err != nil {
			t.Error(err)
		}
		if _, err := c.Call(context.Background(), OpNoop); !errors.Is(err, ErrClosed) {
			t.Errorf("a call after Close: %v", err)
		}
	})
	return s, c
}

// reply is an ordinary reply to m.
func reply(m zmtp.Message, result []byte) [][]byte {
	if result == nil {
		return [][]byte{m[0], m[1]}
	}
	return [][]byte{m[0], m[1], result}
}

// patience bounds what a test waits for.
func patience(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Replies that make no sense are errors of the call that they answer: numbers beyond the
// protocol's limits, another operation, no result where there must be one.
func TestClientRefusesRepliesOutOfBounds(t *testing.T) {
	s, c := newScripted(t)
	ctx := patience(t)
	key := &Key{Model: "m", WorldSize: 1, Worker: AllWorkers, RequestID: "r", Readers: 1}
	f := func(value []byte, chunks, hit int) {
		t.Helper()
		s.set(func(op Op, m zmtp.Message) [][]byte {
			if op == OpLookup {
				return reply(m, nil)
			}
			return reply(m, value)
		})
		if got, err := c.ChunkTokens(ctx); got != max(chunks, 0) || (err == nil) != (chunks >= 0) || chunks < 0 && !errors.Is(err, errReply) {
			t.Errorf("chunk size %x is taken as %d, %v", value, got, err)
		}
		if value == nil {
			return // a lookup goes on asking
		}
		if got, err := c.Lookup(ctx, key); got != max(hit, 0) || (err == nil) != (hit >= 0) || hit < 0 && !errors.Is(err, errReply) {
			t.Errorf("hit %x is taken as %d, %v", value, got, err)
		}
	}
	f(AppendInt(nil, 0), -1, 0)
	f(AppendInt(nil, 1), 1, 1)
	f(AppendInt(nil, MaxTokens), MaxTokens, MaxTokens)
	f(AppendInt(nil, MaxTokens+1), -1, -1)
	f(AppendInt(nil, -1), -1, -1)
	f(AppendString(nil, "x"), -1, -1)
	f(nil, -1, -1)

	s.set(func(_ Op, m zmtp.Message) [][]byte { return [][]byte{m[0], AppendOp(nil, OpPing), AppendInt(nil, 1)} })
	if got, err := c.ChunkTokens(ctx); !errors.Is(err, errReply) {
		t.Errorf("the reply to another operation is taken as %d, %v", got, err)
	}
}

// A message that is no reply to a call, or a second reply, ends no call. Only the call's own reply
// does.
func TestClientIgnoresForeignAndDuplicateReplies(t *testing.T) {
	s, c := newScripted(t)
	ctx := patience(t)
	strays := map[string]func(m zmtp.Message) [][]byte{
		"one frame":             func(m zmtp.Message) [][]byte { return [][]byte{m[0]} },
		"four frames":           func(m zmtp.Message) [][]byte { return [][]byte{m[0], m[1], {1}, {1}} },
		"another call's number": func(m zmtp.Message) [][]byte { return [][]byte{AppendInt(nil, 1<<40), m[1], {1}} },
	}
	for name, stray := range strays {
		s.set(func(_ Op, m zmtp.Message) [][]byte { return stray(m) })
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		if got, err := c.Call(short, OpGetChunkSize); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %x, %v", name, got, err)
		}
		cancel()
	}
	c.mu.Lock()
	left := len(c.mu.pending)
	c.mu.Unlock()
	if left != 0 {
		t.Errorf("%d calls that were given up are remembered", left)
	}
	s.set(func(_ Op, m zmtp.Message) [][]byte { return reply(m, AppendInt(nil, 256)) })
	for range 2 {
		if got, err := c.ChunkTokens(ctx); err != nil || got != 256 {
			t.Errorf("afterwards: %d, %v", got, err)
		}
	}
}

// A lookup that is not answered yet is asked for again until it is, or until the caller
// gives up.
func TestClientAsksForALookupUntilItIsReady(t *testing.T) {
	s, c := newScripted(t)
	ctx := patience(t)
	var asked atomic.Int64
	pending := func(until int64) {
		asked.Store(0)
		s.set(func(op Op, m zmtp.Message) [][]byte {
			if op == OpPing {
				return nil
			}
			if op == OpLookup {
				return reply(m, nil)
			}
			if asked.Add(1) < until {
				return reply(m, nil)
			}
			return reply(m, AppendInt(nil, 7))
		})
	}
	key := &Key{Model: "m", WorldSize: 1, Worker: AllWorkers, RequestID: "r", Readers: 1}
	pending(5)
	if got, err := c.Lookup(ctx, key); err != nil || got != 7 || asked.Load() != 5 {
		t.Errorf("%d, %v after asking %d times", got, err, asked.Load())
	}
	pending(1 << 30)
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if got, err := c.Lookup(short, key); !errors.Is(err, context.DeadlineExceeded) || got != 0 {
		t.Errorf("given up: %d, %v", got, err)
	}
}
