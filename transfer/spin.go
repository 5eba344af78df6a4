package transfer

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// spinTime is how long an initiator looks for an answer before it sleeps. To
	// wake a sleeping process costs up to 50 µs, most where its processor is
	// idle; looking saves that at one of the two ends.
	spinTime = 120 * time.Microsecond

	// quickWait is the longest wait, wake-up included, after which looking may
	// have met the answer.
	quickWait = 2 * spinTime

	// Spinning begins after minQuick quick waits in a row. A spin in vain asks
	// for four times as many, a good one for half as many.
	minQuick = 4
	maxQuick = 1024
)

// spinners counts the goroutines of the process that spin. One processor is
// left for the others: with a single one nobody spins.
var spinners atomic.Int32

var epoch = time.Now()

// spinner decides whether a connection without input looks again instead of
// sleeping: once per wait, for a short time, and only while its peer answers
// within that. So a connection that is idle, or whose peer is slow, sleeps. The
// zero value never spins.
type spinner struct {
	on    bool          // immutable
	quick int           // quick waits in a row
	need  int           // of them to spin
	since time.Duration // epoch to the begin of the wait in progress; 0: none
	spins bool
}

// again is called when nothing is there to read. It says whether to look again.
func (w *spinner) again() bool {
	switch {
	case !w.on:
		return false
	case w.since == 0:
		w.since = time.Since(epoch)
		w.spins = w.quick >= max(w.need, minQuick) && enterSpin()
		return w.spins
	case !w.spins:
		return false
	case time.Since(epoch)-w.since < spinTime:
		return true
	}
	w.end()
	w.quick, w.need = 0, min(max(w.need, minQuick)*4, maxQuick)
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

func enterSpin() bool {
	if spinners.Add(1) < int32(runtime.GOMAXPROCS(0)) {
		return true
	}
	spinners.Add(-1)
	return false
}

func (w *spinner) end() {
	w.spins = false
	spinners.Add(-1)
}
