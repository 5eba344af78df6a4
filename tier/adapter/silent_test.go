// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier/adapter"
)

// overS3 is a server's store over an empty bucket, which does not answer while silent is
// set.
type overS3 struct {
	*store.Store
	shard  object.Shard
	silent atomic.Bool
	asked  atomic.Int64
	speak  chan struct{} // closed when the waiting requests are answered
	last   atomic.Int64  // session
}

const chunkBytes = 4096

func newOverS3(t testing.TB) *overS3 {
	s := &overS3{speak: make(chan struct{})}
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.asked.Add(1)
		if s.silent.Load() {
			select {
			case <-s.speak:
			case <-r.Context().Done():
			}
		}
		w.WriteHeader(http.StatusNotFound)
	}))
	a, err := adapter.Parse(fmt.Sprintf(`{"type":"s3_native","s3_endpoint":%q,"s3_bucket":"kv","aws_access_key_id":"i","aws_secret_access_key":"s","request_timeout":2}`, web.URL))
	if err != nil {
		t.Fatal(err)
	}
	set, err := adapter.Open(adapter.Options{Adapters: []adapter.Adapter{a}})
	if err != nil {
		t.Fatal(err)
	}
	p, err := pool.Open(pool.Options{Name: "silent", Bytes: 1024 * chunkBytes, Align: chunkBytes, Dir: t.TempDir(), ChunkTokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	s.Store = store.New(p, store.Options{Below: set.Tier, LoadTimeout: 200 * time.Millisecond, Write: store.WriteNever, WorkerShare: 1, PeerShare: 1})
	s.shard = object.Shard{Namespace: kv.NamespaceOf("model", "", "layout"), World: 1, Groups: object.FullAttention(256, chunkBytes)}
	t.Cleanup(func() {
		if s.silent.Swap(false) {
			close(s.speak)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		web.Close()
	})
	return s
}

func prompt(seed, chunks int) []kv.Hash {
	h := make([]kv.Hash, chunks)
	for i := range h {
		binary.LittleEndian.PutUint64(h[i][:], uint64(seed))
		binary.LittleEndian.PutUint64(h[i][8:], uint64(i)+1)
	}
	return h
}

// put stores a prompt in RAM.
func (s *overS3) put(t testing.TB, h []kv.Hash) {
	t.Helper()
	tr := &store.Transfer{Own: true}
	if _, err := s.BeginStore(hold.Transfer{Instance: 1, Shard: s.shard, To: len(h), Last: h[len(h)-1]}, []byte("put"), h, tr); err != nil || len(tr.Parts) != len(h) {
		t.Fatalf("%d places, %v", len(tr.Parts), err)
	}
	tr.Done(h, true)
}

func (s *overS3) lookup(h []kv.Hash) (id []byte, r store.LookupResult) {
	id = strconv.AppendInt(nil, s.last.Add(1), 10)
	return id, s.Lookup(id, s.shard, store.Hashed(h), 1)
}

// ram looks up a prompt that is all in RAM, and checks that the store answers at once.
func (s *overS3) ram(t testing.TB, h []kv.Hash) {
	id, r := s.lookup(h)
	if r.State == store.Pending || r.Hit != len(h) {
		t.Fatalf("a lookup that is all in RAM: %+v", r)
	}
	s.EndSession(id, lease.Owner{})
}

// wait looks up a prompt and waits until its lookup ends.
func (s *overS3) wait(t testing.TB, h []kv.Hash) {
	id, r := s.lookup(h)
	if r.State == store.Pending {
		s.Await(t.Context(), id, lease.Owner{})
	}
	s.EndSession(id, lease.Owner{})
}

// keepAsking begins lookups that wait for the bucket, as many as the store allows.
func (s *overS3) keepAsking(seed int) (waiting [][]byte) {
	for i := range 64 {
		if id, r := s.lookup(prompt(seed+i, 20)); r.State == store.Pending {
			waiting = append(waiting, id)
		}
	}
	return waiting
}

// A silent bucket costs only the objects that no other place has. Lookups that are all in RAM are answered
// at once, also while others wait for the bucket. Those others end without it. After a few failures the
// store pauses its calls to the bucket, and tries it again later.
func TestSilentStoreSparesRAM(t *testing.T) {
	s := newOverS3(t)
	h := prompt(1, 100)
	s.put(t, h)
	s.silent.Store(true)
	waiting := s.keepAsking(1000)
	if len(waiting) == 0 {
		t.Fatal("no lookup waits for the bucket")
	}
	testkit.Eventually(t, "the bucket is asked", func() bool { return s.asked.Load() > 0 })
	for range 1000 {
		s.ram(t, h)
	}
	for _, id := range waiting {
		if r := s.Await(t.Context(), id, lease.Owner{}); r.Hit != 0 {
			t.Errorf("%+v", r)
		}
		s.EndSession(id, lease.Owner{})
	}
	seed := 5000
	asks := func() bool { // whether a lookup of what is not in RAM asks the bucket
		seed++
		before := s.asked.Load()
		s.wait(t, prompt(seed, 20))
		s.ram(t, h)
		return s.asked.Load() > before
	}
	testkit.Eventually(t, "it is left alone", func() bool { return !asks() })
	s.silent.Store(false)
	close(s.speak)
	testkit.Eventually(t, "it is asked again", asks)
}

// The median and p99 of lookups of 100 chunks that are all in RAM: over a bucket that answers, and over a silent
// one for which other lookups wait all the time.
func BenchmarkRAMOverStore(b *testing.B) {
	for _, silent := range []bool{false, true} {
		b.Run(map[bool]string{false: "answers", true: "silent"}[silent], func(b *testing.B) {
			s := newOverS3(b)
			h := prompt(1, 100)
			s.put(b, h)
			s.silent.Store(silent)
			var took [1 << 16]time.Duration // the last ones
			var others sync.WaitGroup
			ctx, end := context.WithCancel(b.Context())
			for i := range 4 {
				others.Go(func() {
					for seed := 1_000_000 * (i + 1); ctx.Err() == nil; seed++ {
						s.wait(b, prompt(seed, 20))
						time.Sleep(100 * time.Millisecond)
					}
				})
			}
			n := 0
			for b.Loop() {
				n++
				began := time.Now()
				s.ram(b, h)
				took[n%len(took)] = time.Since(began)
			}
			end()
			others.Wait()
			all := took[:]
			slices.Sort(all)
			all = all[len(all)-min(n, len(all)):]
			b.ReportMetric(float64(all[len(all)/2]), "p50-ns")
			b.ReportMetric(float64(all[len(all)*99/100]), "p99-ns")
		})
	}
}
