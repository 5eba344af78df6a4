// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Idle connections, and callers that wait for a peer, cost no processor: not
// even on connections that were quick until the peer stopped.
func TestIdleCostsNothing(t *testing.T) {
	target, _ := listen(t, 1<<20, TargetOptions{})
	for range 64 {
		c := dialData(t, target)
		c.Write(append(header{1, testBase, opWrite | opAcked}.appendTo(nil), 1))
		if _, err := io.ReadFull(c, make([]byte, statusBytes)); err != nil {
			t.Fatal(err)
		}
	}
	peer := fakeTarget(t, 2)
	let := make(chan struct{})
	var stall atomic.Bool
	var waiting, done, served sync.WaitGroup
	waiting.Add(4)
	for range 4 {
		served.Go(func() {
			peer.once(func(c *net.TCPConn) {
				for b := make([]byte, headerBytes+8); ; {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if stall.Load() {
						waiting.Done()
						<-let
					}
					c.Write(ackFrame)
				}
			})
		})
	}
	c := New(Options{})
	write := func() {
		if err := c.Write(timeout(t, 60*time.Second), peer.name, []Entry{{make([]byte, 8), testBase}}); err != nil {
			t.Error(err)
		}
	}
	for range 500 {
		write()
	}
	stall.Store(true)
	for range 4 { // all connections wait for an answer
		done.Go(write)
	}
	waiting.Wait()
	runtime.GC() // of what earlier tests left, not during the measurement
	// A polling goroutine uses the processor in every second; goroutines of earlier tests may run in some.
	used := time.Hour
	for i := 0; i < 10 && used > 100*time.Millisecond; i++ {
		before := processorTime(t)
		time.Sleep(time.Second)
		used = min(used, processorTime(t)-before)
	}
	close(let)
	done.Wait()
	c.Close()
	served.Wait()
	if used > 100*time.Millisecond {
		t.Errorf("%v of processor time in a second of waiting", used)
	}
	t.Logf("%v of processor time in a second of waiting", used)
}

func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
