// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"errors"
	"fmt"
)

// Send copies the frames of one message, queues it and flushes it.
//
// While the peer's handler runs, Send on any goroutine only queues messages. The
// reading goroutine flushes them when it has handled every message that it had
// received, or after the first handler call that ends 100 µs later. Call Flush to
// send at once.
//
// It returns ErrQueueFull while SendQueueBytes are queued; while the handler runs, the limit is twice that, so that a handler's first
// reply always fits unless others fill the queue. It returns an error that wraps ErrClosed once the peer is closed.
func (p *Peer) Send(frames ...[]byte) error {
	if len(frames) == 0 {
		return errNoFrames
	}
	p.mu.Lock()
	if err := p.refuseLocked(); err != nil {
		p.mu.Unlock()
		return err
	}
	p.queued.Add(int64(p.mu.q.copyFrames(frames)))
	p.unlockAndFlush()
	return nil
}

// SendOwned is like Send, for frames to which the caller never writes again: it sends frames of 8 KiB and more without a copy. Never
// give it the frames that a handler got.
func (p *Peer) SendOwned(frames ...[]byte) error {
	if len(frames) == 0 {
		return errNoFrames
	}
	p.mu.Lock()
	if err := p.refuseLocked(); err != nil {
		p.mu.Unlock()
		return err
	}
	p.queued.Add(int64(p.mu.q.ownFrames(frames)))
	p.unlockAndFlush()
	return nil
}

// SendWaiting is like Send, for many messages in a row: while the queue is full, it flushes and waits until the peer has read some, or
// is closed. Only the peer's handler may call it.
func (p *Peer) SendWaiting(frames ...[]byte) error {
	for {
		err := p.Send(frames...)
		if !errors.Is(err, ErrQueueFull) {
			return err
		}
		p.awaitRoom()
	}
}

var errNoFrames = errors.New("zmtp: a message has at least one frame")

func (p *Peer) refuseLocked() error {
	if p.mu.err != nil {
		return fmt.Errorf("%w: %w", ErrClosed, p.mu.err)
	}
	if p.mu.broken != nil { // the peer has closed its end: we still handle its last requests but cannot answer
		return fmt.Errorf("%w: %w", ErrClosed, p.mu.broken)
	}
	bound := int64(p.role.limits.queueBytes)
	if p.mu.corked {
		bound *= 2
	}
	if p.queued.Load() > bound {
		p.count.refused.Add(1)
		return ErrQueueFull
	}
	p.count.messagesOut.Add(1)
	return nil
}
