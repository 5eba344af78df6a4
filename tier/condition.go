// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// Reasons why a tier does not take an object; errors wrap them together with ErrNotKept or ErrResting.
var (
	ErrFull     = errors.New("tier: no room")
	ErrBudget   = errors.New("tier: its write budget is used up")
	ErrReadOnly = errors.New("tier: read-only")
	ErrName     = errors.New("tier: the layout has no name for the object")

	// ErrNotReady, together with ErrResting, says that the tier is still starting and nothing is wrong.
	ErrNotReady = errors.New("tier: not ready yet")
)

// State is what a tier can do now.
type State string

// The states of a tier.
const (
	Works       State = "ok"
	Unreachable State = "unreachable" // its calls fail, or take too long
	Full        State = "full"
	OverBudget  State = "over_budget"
	ReadOnly    State = "read_only"
	Nameless    State = "nameless" // it has no name for the objects of a model
)

// States lists all states.
var States = []State{Works, Unreachable, Full, OverBudget, ReadOnly, Nameless}

// Condition is the state of a tier, the time at which this state began, and the error that showed it.
type Condition struct {
	State State
	Since time.Time
	Err   string
}

const (
	// A tier counts as unreachable after failuresInARow failures in a row. Before its first success one failure is enough.
	failuresInARow = 3

	// stateHold is how long a tier must not have refused a write before a successful write sets its state back to Works. A tier that evicts
	// refuses a write now and then.
	stateHold = 10 * time.Second
)

// conditions derives the state of a tier from the results of its calls. Its mutex is a leaf.
type conditions struct {
	mu       sync.Mutex
	log      *slog.Logger // nil: changes are not logged
	name     string
	now      Condition
	worked   bool
	failures int       // failed calls in a row
	failed   string    // text of the last failure
	refuses  Condition // why it last refused a write; zero once it takes writes again
	refused  time.Time // time of that refusal
	nameless Condition // set when the tier had no name for an object; zero after stateHold without such an object
	unnamed  time.Time // when the tier last had no name for an object
}

// reasonOf returns the state that the error of a refused write shows; empty if it shows none.
func reasonOf(err error) State {
	switch {
	case errors.Is(err, ErrFull):
		return Full
	case errors.Is(err, ErrBudget):
		return OverBudget
	case errors.Is(err, ErrReadOnly):
		return ReadOnly
	case errors.Is(err, ErrName):
		return Nameless
	}
	return ""
}

// recordCall records how a call ended. rests is true if a wrapper answered because the tier rests after failures.
func (c *conditions) recordCall(write, rests bool, err error) {
	if rests && err == nil || errors.Is(err, context.Canceled) || errors.Is(err, ErrNotReady) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now()
	_, corrupt := errors.AsType[*CorruptError](err)
	switch reason := reasonOf(err); {
	case reason == Nameless:
		c.unnamed = at
		if c.nameless.State == "" {
			c.nameless = Condition{Nameless, at, err.Error()}
		}
	case reason != "":
		c.failures, c.worked, c.refused = 0, true, at
		if c.refuses.State != reason {
			c.refuses = Condition{reason, at, err.Error()}
		}
	case err == nil, corrupt, errors.Is(err, ErrMissing), errors.Is(err, ErrNotKept):
		c.failures, c.worked = 0, true
		if err == nil && write && at.Sub(c.refused) >= stateHold {
			c.refuses = Condition{}
		}
		if err == nil && write && at.Sub(c.unnamed) >= stateHold {
			c.nameless = Condition{}
		}
	default:
		c.failures++
		c.failed = err.Error()
	}
	c.changeLocked(at)
}

func (c *conditions) changeLocked(at time.Time) {
	next := Condition{State: Works, Since: at}
	switch {
	case c.failures >= failuresInARow, c.failures > 0 && !c.worked:
		next = Condition{Unreachable, at, c.failed}
	case c.refuses.State != "":
		next = c.refuses
	case c.nameless.State != "":
		next = c.nameless
	}
	was := c.now
	if was.State == next.State || was.State == "" && next.State == Works {
		if was.State == "" {
			c.now = next
		}
		return
	}
	c.now = next
	if c.log != nil {
		c.log.Warn("the state of a tier changed", "tier", c.name, "state", string(next.State), "before", string(was.State), "err", next.Err)
	}
}

// get returns the condition; before the first call the tier works.
func (c *conditions) get() Condition {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now.State == "" {
		return Condition{State: Works}
	}
	return c.now
}

// gauge returns 1 for the state of now and 0 for the others.
func (c *conditions) gauge() map[string]int {
	now := c.get().State
	out := make(map[string]int, len(States))
	for _, s := range States {
		out[string(s)] = 0
	}
	out[string(now)] = 1
	return out
}

// Watch logs changes of the tier's state to log.
func (c *Counting) Watch(log *slog.Logger) {
	c.conditions.mu.Lock()
	defer c.conditions.mu.Unlock()
	c.conditions.log = log
}

// Condition returns the tier's state.
func (c *Counting) Condition() Condition { return c.conditions.get() }

// Probe calls ask, which asks the tier once, and records the result. The state of the tier is then known before a request needs the tier.
func (c *Counting) Probe(ctx context.Context, ask func(context.Context) error) {
	c.conditions.recordCall(false, false, ask(ctx))
}

// observe sets f to be called with the end of each call that reaches the tier below its wrappers. It reports whether a wrapper of t can do
// that. A wrapper that answers from memory, or while the tier rests, says nothing about the tier.
func observe(t Tier, f func(write bool, err error)) bool {
	switch w := t.(type) {
	case *Bounding:
		w.observe(f)
		return true
	case *Remembering:
		return w.observe(f)
	}
	return false
}

// rests reports whether a tier rests after failures, so that a wrapper answers for it.
func rests(t Tier) bool {
	r, ok := t.(interface{ Resting() bool })
	return ok && r.Resting()
}
