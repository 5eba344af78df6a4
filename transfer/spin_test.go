package transfer

import (
	"io"
	"net"
	"runtime"
	"testing"
	"time"
)

// A connection spins only after quick answers, for a bounded time, and after a
// spin in vain not soon again.
func TestSpinner(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	var w spinner
	// waits plays waits of d that end without a spin.
	waits := func(n int, d time.Duration) {
		t.Helper()
		for range n {
			if w.again() {
				t.Fatalf("spins after %d quick waits, pause %v, credit %d", w.quick, w.pause, w.credit)
			}
			if w.again() {
				t.Fatal("spins after it was told to sleep")
			}
			w.since = time.Since(epoch) - d
			w.done()
		}
	}
	spins := func() {
		t.Helper()
		if !w.again() || spinners.Load() != 1 {
			t.Fatalf("does not spin after %d quick waits, pause %v, credit %d, %d spinners", w.quick, w.pause, w.credit, spinners.Load())
		}
	}
	vain := func() {
		t.Helper()
		spins()
		for w.again() {
		}
		w.since = 0
		if n := spinners.Load(); n != 0 {
			t.Fatalf("%d spinners afterwards", n)
		}
	}
	const quick = 100 * time.Microsecond // far from quickWait: the machine adds some
	waits(1, quick)
	waits(1, quickWait)
	waits(minQuick, quick)
	for pause, limit := 2*spinTime, 2*spinTime; pause <= maxPause; pause, limit = 2*pause, min(2*limit, maxSpin) {
		vain()
		if w.pause != pause || w.limit != limit {
			t.Errorf("pause %v, want %v; next spin %v, want %v", w.pause, pause, w.limit, limit)
		}
		w.pause = 3 * quick
		waits(3, quick)
	}
	vain()
	if w.pause != maxPause {
		t.Errorf("pause %v, want %v", w.pause, maxPause)
	}
	w.pause = quick
	waits(minQuick, quick)
	for range 100 { // answers go on
		spins()
		w.done()
	}
	if w.next > 0 || w.credit != maxCredit || w.limit > spinTime {
		t.Errorf("pause of %v to come, credit %d, next spin %v after good spins", w.next, w.credit, w.limit)
	}
	for range maxCredit / vainCost { // interruptions
		vain()
	}
	waits(3, quick)
	spins()
	other := spinner{quick: minQuick}
	if other.again() {
		t.Error("two of two processors spin")
	}
	w.done()

	runtime.GOMAXPROCS(1)
	turn := make(chan struct{})
	go close(turn)
	for range 20 { // the machine may take the time of one
		w = spinner{quick: minQuick}
		spins()
		for w.again() {
		}
		w.done()
	}
	select {
	case <-turn:
	default:
		t.Error("the only processor was not given to another goroutine")
	}
}

// A target that serves several peers in turn does not spin for one of them.
func TestTargetSpinsForOne(t *testing.T) {
	target, _ := listen(t, 4096, TargetOptions{})
	conns := []*net.TCPConn{dialData(t, target), dialData(t, target)}
	for range 200 {
		for _, c := range conns {
			c.Write(append(header{1, testBase, opWrite | opAcked}.appendTo(nil), 1))
			if _, err := io.ReadFull(c, make([]byte, statusBytes)); err != nil {
				t.Fatal(err)
			}
		}
	}
	target.Close()
	if w := target.recent.Load().spin; w.quick >= minQuick || w.next > 0 || w.credit > 0 {
		t.Errorf("%d quick waits in a row, pause of %v to come, credit %d", w.quick, w.next, w.credit)
	}
}
