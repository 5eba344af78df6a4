package transfer

import (
	"io"
	"net"
	"runtime"
	"testing"
)

// A connection spins only after quick answers, for a bounded time, and after a
// spin in vain not soon again.
func TestSpinner(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	var w spinner
	// answered plays waits that end at once until n in a row were quick: the
	// machine may make some of them slow.
	answered := func(n int) {
		t.Helper()
		for w.quick < n {
			if w.again() {
				t.Fatalf("spins after %d quick waits, not %d", w.quick, n)
			}
			if w.again() {
				t.Fatal("spins after it was told to sleep")
			}
			w.done()
		}
	}
	spins := func() {
		t.Helper()
		if !w.again() || spinners.Load() != 1 {
			t.Fatalf("does not spin after %d quick waits, %d spinners", w.quick, spinners.Load())
		}
	}
	answered(minQuick)
	for range 100 { // answers go on
		spins()
		w.done()
	}
	spins()
	for w.again() { // no answer: it ends
	}
	w.done()
	if n := spinners.Load(); n != 0 {
		t.Fatalf("%d spinners afterwards", n)
	}
	answered(2 * minQuick)
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
	if w := target.recent.Load().spin; w.quick >= minQuick || w.need > 0 {
		t.Errorf("%d quick waits in a row, %d needed", w.quick, w.need)
	}
}
