package mooncake

import (
	"fmt"

	"golang.org/x/sync/semaphore"
)

const (
	// MaxPullBytes bounds a message of the side channel: some 100 requests of a
	// million tokens fit.
	MaxPullBytes = 8 << 20
	// MaxPendingBytes bounds the messages of all pulls in progress at one worker.
	MaxPendingBytes = 256 << 20
)

// Gate bounds the pulls in progress at one side channel: their number, and the bytes
// of their messages, MaxPendingBytes. Its methods are safe for concurrent use.
type Gate struct {
	pulls chan struct{} // one per pull
	bytes *semaphore.Weighted
}

// NewGate returns a Gate for so many pulls.
func NewGate(pulls int) *Gate {
	return &Gate{pulls: make(chan struct{}, pulls), bytes: semaphore.NewWeighted(MaxPendingBytes)}
}

// Enter lets a pull in, whose message has size bytes, or says why not. It never
// waits. The caller calls leave once, when the pull has ended.
func (g *Gate) Enter(size int) (leave func(), err error) {
	if !g.bytes.TryAcquire(int64(size)) {
		return nil, fmt.Errorf("mooncake: pulls of %d bytes at once, no more are taken", int64(MaxPendingBytes))
	}
	select {
	case g.pulls <- struct{}{}:
	default:
		g.bytes.Release(int64(size))
		return nil, fmt.Errorf("mooncake: %d pulls at once, no more are taken", cap(g.pulls))
	}
	return func() { <-g.pulls; g.bytes.Release(int64(size)) }, nil
}

// Len returns how many pulls are in.
func (g *Gate) Len() int { return len(g.pulls) }
