// SPDX-License-Identifier: Apache-2.0

package relay

// Waiting returns how many requests of D wait for their answer, and how many loads from P go on.
func (r *Relay) Waiting() (requests, loads int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.mu.requests {
		requests += a.users
	}
	for k := range r.mu.loading {
		if !k.endingLocked() {
			loads++
		}
	}
	return requests, loads
}

// Watched says whether the relay is connected to all workers of an engine of P.
func (r *Relay) Watched(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.mu.engines[id]
	return e != nil && e.watchedLocked()
}
