// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A lookup is acknowledged at once, although its result may be pending for up to the store's LoadTimeout. query_prefetch_status is also
// answered at once: while the lookup is pending without a result frame, which clients take as "not yet", and then once with the hit. A
// wait_prefetch_status of a pending lookup is answered later by a goroutine, while its connection continues.

// Limits on requests that wait.
const (
	maxWaits   = 1024            // requests that wait; a user or address may have half of those that others leave free; others are declined
	maxWaitFor = 5 * time.Minute // a request that asks for a longer time waits only for this one
)

// waits has the requests that are answered later.
type waits struct {
	running sync.WaitGroup

	mu struct { // a leaf
		sync.Mutex
		closed bool
		all    int
		of     map[string]int // number of waits, by user or address
		cancel map[*zmtp.Peer]map[*wait]context.CancelFunc
	}
}

// wait is a request that is answered later. It has its own copy of the parts of the request that it needs.
type wait struct {
	peer    *zmtp.Peer
	owner   lease.Owner
	uid, op []byte // frames of the reply
	request []byte
	timeout time.Duration
}

// begin adds the wait `of` and returns its context, which ends with the connection, with stop and with the wait's timeout. It reports false
// if there are too many, or after stop.
func (w *waits) begin(of *wait) (context.Context, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	own := w.mu.of[of.owner.Peer]
	if w.mu.closed || own >= max(1, (maxWaits-(w.mu.all-own))/2) || w.mu.all >= maxWaits {
		return nil, false
	}
	if w.mu.of == nil {
		w.mu.of, w.mu.cancel = make(map[string]int), make(map[*zmtp.Peer]map[*wait]context.CancelFunc)
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(of.timeout, maxWaitFor))
	if w.mu.cancel[of.peer] == nil {
		w.mu.cancel[of.peer] = make(map[*wait]context.CancelFunc)
	}
	w.mu.cancel[of.peer][of] = cancel
	w.mu.all, w.mu.of[of.owner.Peer] = w.mu.all+1, own+1
	w.running.Add(1)
	return ctx, true
}

func (w *waits) end(of *wait) {
	defer w.running.Done()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mu.cancel[of.peer][of]()
	if delete(w.mu.cancel[of.peer], of); len(w.mu.cancel[of.peer]) == 0 {
		delete(w.mu.cancel, of.peer)
	}
	w.mu.all--
	if w.mu.of[of.owner.Peer]--; w.mu.of[of.owner.Peer] == 0 {
		delete(w.mu.of, of.owner.Peer)
	}
}

// detach ends the waits of a connection.
func (w *waits) detach(p *zmtp.Peer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, cancel := range w.mu.cancel[p] {
		cancel()
	}
}

// stop ends all waits, which are then answered, and allows no more to begin.
func (w *waits) stop() {
	w.mu.Lock()
	w.mu.closed = true
	for _, of := range w.mu.cancel {
		for _, cancel := range of {
			cancel()
		}
	}
	w.mu.Unlock()
	w.running.Wait()
}

func (w *waits) stopped() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.closed
}

// prefetchStatus answers query_prefetch_status and wait_prefetch_status.
func (s *Server) prefetchStatus(sc *scratch, r *lmcache.PrefetchStatusRequest) error {
	owner := sc.caller().Owner()
	got := s.store.Result(r.RequestID, owner)
	switch {
	case got.State != store.Pending || !r.Wait || r.Timeout <= 0:
	case sc.peer != nil:
		return s.waitForLookup(sc, r)
	default: // a caller in this process waits here
		ctx, cancel := context.WithTimeout(context.Background(), min(r.Timeout, maxWaitFor))
		defer cancel()
		got = s.store.Await(ctx, r.RequestID, owner)
	}
	sc.out = s.appendHit(sc.out, r.RequestID, got)
	return nil
}

// appendHit appends the hit of a lookup, or nothing while the lookup is pending.
func (s *Server) appendHit(b, request []byte, got store.LookupResult) []byte {
	if got.State == store.Pending {
		return b
	}
	if got.Waited {
		n, known := s.names.Of(got.Namespace)
		s.lookupEnded(&lookup.Outcome{
			Request: request, Model: []byte(n.Model), Salt: []byte(n.Salt), Registered: known, LookupResult: got, Searched: true,
		})
	}
	return lmcache.AppendInt(b, int64(got.Hit))
}

// waitForLookup answers a wait_prefetch_status from a goroutine, when the lookup has its result or the client's time is over.
func (s *Server) waitForLookup(sc *scratch, r *lmcache.PrefetchStatusRequest) error {
	w := &wait{
		peer: sc.peer, owner: sc.caller().Owner(), timeout: r.Timeout,
		uid: bytes.Clone(sc.frames[0]), op: bytes.Clone(sc.frames[1]), request: bytes.Clone(r.RequestID),
	}
	ctx, ok := s.waits.begin(w)
	if !ok {
		return errWaits
	}
	sc.silent = true
	go func() {
		defer s.waits.end(w)
		var out []byte
		err := s.contain(lmcache.OpWaitPrefetchStatus, func() error {
			got := s.store.Await(ctx, w.request, w.owner)
			if got.State == store.Pending && s.waits.stopped() {
				got = store.LookupResult{} // a miss: without a result the client would ask again
			}
			out = s.appendHit(nil, w.request, got)
			return nil
		})
		if err != nil {
			s.refuse(lmcache.OpWaitPrefetchStatus, err)
			out = lmcache.AppendInt(nil, 0)
		}
		frames := [][]byte{w.uid, w.op}
		if len(out) > 0 {
			frames = append(frames, out)
		}
		s.send(w.peer, frames...)
	}()
	return nil
}

// connectionEnded releases everything of a connection that has ended: its held messages, its waits, its streams, and lookups whose results
// it did not ask for.
func (s *Server) connectionEnded(p *zmtp.Peer, _ error) {
	s.held.Take(p)
	if c := whoIs(p); c.connection().asksAsPeer {
		s.p2p.Leave(c.Name)
	}
	s.waits.detach(p)
	s.streams.end(true, func(st *stream) bool { return st.peer == p })
	s.store.Leave(whoIs(p).Owner())
}
