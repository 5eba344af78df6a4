package transfer

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// spinTime is how long a connection looks for input before it sleeps. To
	// wake a sleeping process costs up to 50 µs, most where its processor is
	// idle, and a single small request pays that at both ends. Where the host of
	// virtual processors is busy it is 200 µs and more, so each spin in vain makes
	// the next one twice as long, up to maxSpin.
	spinTime = 120 * time.Microsecond
	maxSpin  = 8 * spinTime

	// quickWait is the longest wait after which looking may have met the input:
	// where both ends sleep, it holds two wake-ups.
	quickWait = 600 * time.Microsecond

	// Spinning begins after minQuick quick waits in a row. It goes on through a
	// few spins in vain, for the machine interrupts even the busiest peer: one
	// costs what vainCost good ones have earned, up to maxCredit. Without credit
	// it pauses for twice its length of quick waits, then twice as long as before,
	// and so on up to maxPause, where less than a hundredth of the time is spun in
	// vain. A good spin halves the next pause.
	minQuick  = 2
	maxCredit = 16
	vainCost  = 4
	maxPause  = 128 * maxSpin
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
	credit int           // above 0: spins
	pause  time.Duration // of quick waits, before the next spin without credit
	next   time.Duration // the pause after the next spin in vain, at least
	limit  time.Duration // of a spin; below spinTime: spinTime
	since  time.Duration // epoch to the begin of the wait in progress; 0: none
	spins  bool
	yields bool // there is one processor
}

// again is called when nothing is there to read. It says whether to look again.
func (w *spinner) again() bool {
	switch {
	case w.since == 0:
		w.since = time.Since(epoch)
		w.spins = (w.credit > 0 || w.quick >= minQuick && w.pause <= 0) && w.begin()
		return w.spins
	case !w.spins:
		return false
	case time.Since(epoch)-w.since < max(w.limit, spinTime):
		if w.yields {
			runtime.Gosched()
		}
		return true
	}
	w.end()
	if w.credit -= vainCost; w.credit <= 0 {
		w.calm()
		limit := max(w.limit, spinTime)
		w.pause = max(w.next, 2*limit)
		w.next = min(2*w.pause, maxPause)
		w.limit = min(2*limit, maxSpin)
	}
	return false
}

// done ends a wait, if there was one.
func (w *spinner) done() {
	if w.since == 0 {
		return
	}
	waited := time.Since(epoch) - w.since
	switch {
	case w.spins:
		w.end()
		w.credit = min(w.credit+1, maxCredit)
		w.next /= 2
		w.limit -= w.limit / 16
	case waited < quickWait:
		w.quick++
		w.pause -= waited
	default:
		w.quick = 0
	}
	w.since = 0
}

// calm makes it sleep until quick waits come in a row again.
func (w *spinner) calm() { w.quick, w.credit = 0, 0 }

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
