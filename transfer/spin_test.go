package transfer

import (
	"runtime"
	"testing"
)

// A connection spins only after quick answers, for a bounded time, and after a
// spin in vain not soon again.
func TestSpinner(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	w := spinner{on: true}
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
	answered(4 * minQuick)
	spins()
	other := spinner{on: true, quick: minQuick}
	if other.again() {
		t.Error("both processors spin")
	}
	w.done()

	runtime.GOMAXPROCS(1)
	if w.again() {
		t.Error("the only processor spins")
	}
	w.done()
	off := spinner{quick: maxQuick}
	if off.again() {
		t.Error("one that is off spins")
	}
}
