package transfer

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// spinTime is how long a connection looks for input before it sleeps. To
	// wake a sleeping process costs up to 50 µs, most where its processor is
	// idle, and a single small request pays that at both ends.
	spinTime = 120 * time.Microsecond

	// quickWait is the longest wait, wake-up included, after which looking may
	// have met the input.
	quickWait = 2 * spinTime

	// Spinning begins after minQuick quick waits in a row. A spin in vain asks
	// for twice as many, a good one for half as many.
	minQuick = 2
	maxQuick = 1024
)

// spinners counts the goroutines of the process that spin: half of its
// processors at most. A single one gives way to other goroutines in between.
var spinners atomic.Int32

var epoch = time.Now()

// spinner decides whether a connection without input looks again instead of
// sleeping: once per wait, for a short time, and only while its peer answers
// within that. So a connection that is idle, or whose peer is slow, sleeps.
type spinner struct {
	quick  int           // quick waits in a row
	need   int           // of them to spin
	since  time.Duration // epoch to the begin of the wait in progress; 0: none
	spins  bool
	yields bool // there is one processor
}

// again is called when nothing is there to read. It says whether to look again.
func (w *spinner) again() bool {
	switch {
	case w.since == 0:
		w.since = time.Since(epoch)
		w.spins = w.quick >= max(w.need, minQuick) && w.begin()
		return w.spins
	case !w.spins:
		return false
	case time.Since(epoch)-w.since < spinTime:
		if w.yields {
			runtime.Gosched()
		}
		return true
	}
	w.end()
	w.quick, w.need = 0, min(max(w.need, minQuick)*2, maxQuick)
	return false
}

// done ends a wait, if there was one.
func (w *spinner) done() {
	if w.since == 0 {
		return
	}
	switch {
	case w.spins:
		w.end()
		w.need /= 2
	case time.Since(epoch)-w.since < quickWait:
		w.quick++
	default:
		w.quick = 0
	}
	w.since = 0
}

// begin takes a place among the spinners, if there is one.
func (w *spinner) begin() bool {
	procs := runtime.GOMAXPROCS(0)
	if runtime.NumCPU() == 1 { // the peer may need it
		return false
	}
	if spinners.Add(1) > int32(max(1, procs/2)) {
		spinners.Add(-1)
		return false
	}
	w.yields = procs == 1
	return true
}

func (w *spinner) end() {
	w.spins = false
	spinners.Add(-1)
}
