// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// errMoved means that a worker has another side channel now: the pull goes there.
var errMoved = errors.New("the worker has another address")

const (
	// lookAgain is how often the registry is asked while a worker's side channel refuses connections.
	lookAgain = 250 * time.Millisecond

	// freshFor is how long a new connection to P may go by what the registry said. Each P registers before it answers pulls, so a P that
	// was started again, with other ranks or in another place, is met by its new workers.
	freshFor = time.Second

	// askWithin bounds the question before a new connection: without an answer the pull goes by what is known.
	askWithin = time.Second
)

// moved asks the registry where the worker is, after its side channel has refused a connection or was silent: a P with a fixed engine id that
// was started again has other side channels. The error is errMoved where the worker has another address, which t then has, and an ErrNoEngine
// where the engine has other ranks. Nothing may have been sent.
func (t *pullConn) moved(ctx context.Context) error {
	if t.r.o.Dialect != nil || t.resent || time.Since(t.looked) < lookAgain {
		return nil
	}
	t.looked = time.Now()
	t.r.forgetEngine(t.from)
	now, err := t.r.workers(ctx, t.from)
	if err != nil {
		return nil
	}
	return t.follow(now)
}

// confirmPlace asks the registry where the worker is before a new connection to it, unless that is known since freshFor and no connection has
// ended since. Another process may have the worker's address by now. Errors are those of moved.
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
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	e, err := r.askEngine(ctx, t.from)
	if err != nil {
		return nil
	}
	now, err := r.pair(t.from, e)
	if err != nil {
		return err
	}
	return t.follow(now)
}

// follow compares where P's workers are with where the pull goes.
func (t *pullConn) follow(now *pairing) error {
	if !now.alike(t.workers) { // the worker of the same place fills another part of D's blocks
		return fmt.Errorf("%w: engine %s at %s has other ranks than when the pull began", ErrNoEngine, t.from.EngineID, t.from.Bootstrap)
	}
	if now.addrs[t.index] == t.addr {
		return nil
	}
	t.r.log.Info("mooncake: P has moved", "engine", t.from.EngineID, "from", t.addr, "to", now.addrs[t.index])
	t.addr = now.addrs[t.index]
	return errMoved
}

// forgetEngine makes the next pull ask the bootstrap server again.
func (r *Receiver) forgetEngine(from Source) {
	r.mu.Lock()
	delete(r.mu.engines, from)
	r.mu.Unlock()
	r.windows.retire(from)
}
