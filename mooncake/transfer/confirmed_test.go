// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"testing"
	"time"
)

type waitingWriter struct{ begun, goOn chan struct{} }

func (w *waitingWriter) WriteAt(b []byte, off int64) (int, error) {
	select {
	case w.begun <- struct{}{}:
		<-w.goOn
	case <-w.goOn:
	}
	return len(b), nil
}

// Two writes that are given up while the peer takes their bytes: the one that the
// peer confirms in time has not failed, the other has.
func TestGivenUpWriteThatIsConfirmed(t *testing.T) {
	for _, confirmed := range []bool{true, false} {
		target, err := Listen(TargetOptions{}, NewTable())
		if err != nil {
			t.Fatal(err)
		}
		defer target.Close()
		w := &waitingWriter{make(chan struct{}), make(chan struct{})}
		if _, err := target.Table().RegisterFunc(Range{1 << 30, 4096}, nil, w); err != nil {
			t.Fatal(err)
		}
		o := Options{SettleTimeout: 20 * time.Second}
		if !confirmed {
			o.SettleTimeout = 50 * time.Millisecond
		}
		c := New(o)
		defer c.Close()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- c.Write(ctx, target.Name(), []Entry{{Local: make([]byte, 4096), Remote: 1 << 30}}) }()
		<-w.begun
		cancel()
		if confirmed {
			time.Sleep(50 * time.Millisecond) // the client has begun to wait
			close(w.goOn)
		}
		if err := <-done; (err == nil) != confirmed {
			t.Errorf("confirmed %v: %v", confirmed, err)
		}
		if !confirmed {
			close(w.goOn)
		}
	}
}
