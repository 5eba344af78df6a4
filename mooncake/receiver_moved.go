// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// errMoved means that the worker's side channel has another address now. The pull goes to that address.
var errMoved = errors.New("the worker has another address")

const (
	// askInterval is how long a pull waits between two questions to the registry while the worker's side channel refuses connections.
	askInterval = 250 * time.Millisecond

	// freshFor is how long after the registry's last answer a pull may connect to P without asking the registry again. Each P registers
	// before it answers pulls, so the registry names the new workers of a P that was restarted with other ranks or at another place.
	freshFor = time.Second

	// askTimeout limits the registry query that precedes a new connection. Without an answer in that time, the pull goes to the address
	// it already has.
	askTimeout = time.Second
)

// moved asks the registry where the worker is now. A pull calls it after the worker's side channel refused a connection or was silent:
// a restarted P with a fixed engine id has other side channels. If the worker has another address, moved stores it in t and returns
// errMoved. If the engine has other ranks, moved returns an ErrNoEngine. The caller must not have sent anything to the worker yet.
func (t *pullConn) moved(ctx context.Context) error {
	if t.r.o.Dialect != nil || t.resent || time.Since(t.looked) < askInterval {
		return nil
	}
	t.looked = time.Now()
	t.r.forgetEngine(t.from)
	now, err := t.r.workers(ctx, t.from)
	if err != nil {
		return nil
	}
	return t.compareWorkers(now)
}

// confirmPlace asks the registry where the worker is before the pull opens a new connection to it, because another process may have the
// worker's address by now. It does not ask if the registry's last answer is younger than freshFor and no connection to a worker of the
// engine has broken since. It returns the same errors as moved.
func (t *pullConn) confirmPlace(ctx context.Context) error {
	r := t.r
	if r.o.Dialect != nil || r.o.Find != nil || t.resent {
		return nil
	}
	r.mu.Lock()
	known, ok := r.mu.engines[t.from]
	r.mu.Unlock()
	if ok && time.Since(known.asked) < freshFor && !r.sockets.brokeSince(t.addr, known.asked) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	e, err := r.askEngine(ctx, t.from)
	if err != nil {
		return nil
	}
	now, err := r.pair(t.from, e)
	if err != nil {
		return err
	}
	return t.compareWorkers(now)
}

// compareWorkers compares the workers that the registry lists now with the workers of the pull. It returns the same errors as moved.
func (t *pullConn) compareWorkers(now *pairing) error {
	if !now.sameShape(t.workers) { // the worker of the same place fills another part of D's blocks
		return fmt.Errorf("%w: engine %s at %s has other ranks than when the pull began", ErrNoEngine, t.from.EngineID, t.from.Bootstrap)
	}
	if now.addrs[t.index] == t.addr {
		return nil
	}
	t.r.log.Info("mooncake: P has moved", "engine", t.from.EngineID, "from", t.addr, "to", now.addrs[t.index])
	t.addr = now.addrs[t.index]
	return errMoved
}

// forgetEngine makes the next pull from the engine `from` ask the bootstrap server for its workers again.
func (r *Receiver) forgetEngine(from Source) {
	r.mu.Lock()
	delete(r.mu.engines, from)
	r.mu.Unlock()
	r.windows.retire(from)
}
