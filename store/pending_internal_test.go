// SPDX-License-Identifier: Apache-2.0

package store

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/store/lease"
)

// A session that ends between the search and the grant gets nothing: the pins of its
// result come back, also where there are none since the lookup began at its hit's end.
func TestResultOfASessionThatEndedMeanwhile(t *testing.T) {
	for name, end := range map[string]func(s *Store){
		"ended":          func(s *Store) { s.EndSession([]byte("r"), lease.Owner{}) },
		"another lookup": func(s *Store) { s.NoHit([]byte("r"), lease.Owner{}) },
	} {
		for from := range 5 {
			s := crowdStore(t, 8, Options{WorkerShare: 1, PeerShare: 1})
			place(t, s, 1, 4, crowdChunk, false)
			h := crowdPrompt(1, 4)
			pf := &prefetch{cancel: func() {}, query: query{session: []byte("r"), shard: crowdShard, prompt: Hashed(h), readers: 1}}
			pf.prompt.From = from
			open := func() {
				s.lock()
				defer s.unlock()
				pf.sess, _ = s.openLocked(pf.session, lease.Owner{}, time.Now())
				pf.sess.Note = lastLookup{state: Pending, pending: pf}
			}
			open()
			f := found{rows: 1, readyOnly: true}
			l, hit := s.pinHit(&pf.query, &f, s.find(crowdShard, pf.prompt, &f))
			if hit != 4 {
				t.Fatal(hit)
			}
			end(s)
			given := s.grantPrefetch(pf, h, l, hit, false)
			if len(given) != 1 {
				t.Errorf("%s, from %d: %d leases come back", name, from, len(given))
			}
			s.giveBack(given)
			if err := s.CheckIdle(); err != nil {
				t.Errorf("%s, from %d: %v", name, from, err)
			}
			if got := s.Result([]byte("r"), lease.Owner{}); got.Hit != 0 || got.State == Pending {
				t.Errorf("%s, from %d: %+v", name, from, got)
			}
		}
	}
}
