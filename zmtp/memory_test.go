package zmtp

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
)

// What others queue while the reading goroutine waits for room, after the
// writer had finished, is written too: they leave the flush to it.
func TestRefillWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		r := NewRouter(echo, RouterOptions{SendQueueBytes: 1000, Logger: quietLog})
		p := newPeer(1, ours, &r.role)
		defer func() {
			p.fail(ErrClosed)
			p.writers.Wait()
			_ = theirs.Close()
		}()
		p.mu.corked = true // as while a handler runs
		if err := p.Send(make([]byte, 2000)); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			p.awaitRoom()
			close(done)
		}()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		synctest.Wait()
		select {
		case <-done:
		default:
			t.Fatal("it waits, and nobody writes")
		}
	})
}
