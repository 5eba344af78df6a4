// SPDX-License-Identifier: Apache-2.0

package store

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// However much expires at once, others get the lock after dropBatch of it: in the background, when a pending
// lookup searches the pool, and when a commit looks at the chunks before its range.
func TestExpiryReleasesTheLockBetweenBatches(t *testing.T) {
	const chunks = 4096
	p, err := pool.Open(pool.Options{Name: "p", Bytes: 4 * chunks * 64, Align: 64, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s := New(p, Options{WorkerShare: 1, PeerShare: 1, TTL: time.Minute})
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	hashes := scaleHashes(chunks)
	sh := object.Shard{Namespace: kv.Namespace{1}, World: 1, Groups: object.FullAttention(1, 64)}
	name := hold.Transfer{Instance: 1, Shard: sh, To: chunks, Last: hashes[chunks-1]}
	head := name
	head.From = chunks
	for what, f := range map[string]func(){
		"the background": s.Expire,
		"a pending lookup": func() {
			keys := make([]kv.Key, chunks)
			for i := range keys {
				sh.Key(&keys[i], 0, 0, hashes[i])
			}
			places{s, nil}.InPool(keys, make([]bool, chunks))
		},
		"a commit": func() { s.touchHeads(head, hashes) },
	} {
		if got, err := s.BeginStore(name, []byte("r"), hashes, &Transfer{}); err != nil || got.NoRoom > 0 {
			t.Fatal(got, err)
		}
		if got := s.CommitStore(name, []byte("r"), hashes, true); got.Chunks != chunks {
			t.Fatal(got)
		}
		s.began = s.began.Add(-time.Hour)
		var before, most uint64
		was := s.mu.n.ExpiredChunks
		watch = func(begin bool) {
			if begin {
				before = s.mu.drops
				return
			}
			most = max(most, s.mu.drops-before)
		}
		f()
		watch = nil
		if got := s.mu.n.ExpiredChunks - was; got != chunks || most > dropBatch {
			t.Errorf("%s: %d went, %d of them in one section; want %d, at most %d in one", what, got, most, chunks, dropBatch)
		}
	}
}
