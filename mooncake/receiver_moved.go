// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"errors"
	"time"
)

// errMoved means that a worker has another side channel now: the pull goes there.
var errMoved = errors.New("the worker has another address")

// lookAgain is how often the registry is asked while a worker's side channel refuses connections.
const lookAgain = 250 * time.Millisecond

// moved asks the registry where the worker is, after its side channel has refused a connection: a P with a fixed engine id that was started
// again has other side channels. It reports whether the worker has another address, which t then has. Nothing may have been sent.
func (t *pullConn) moved(ctx context.Context) bool {
	if t.r.o.Dialect != nil || t.resent || time.Since(t.looked) < lookAgain {
		return false
	}
	t.looked = time.Now()
	t.r.forgetEngine(t.from)
	addrs, err := t.r.workers(ctx, t.from)
	if err != nil || t.index >= len(addrs) || addrs[t.index] == t.addr {
		return false
	}
	t.r.log.Info("mooncake: P has moved", "engine", t.from.EngineID, "from", t.addr, "to", addrs[t.index])
	t.addr = addrs[t.index]
	return true
}

// forgetEngine makes the next pull ask the bootstrap server again.
func (r *Receiver) forgetEngine(from Source) {
	r.mu.Lock()
	delete(r.mu.engines, from)
	r.mu.Unlock()
	r.windows.retire(from)
}
