// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// One client puts a key twice. The first put is so late that the master gave the key to the second. The
// end of the first put must neither make the second's unfinished object visible nor revoke it.
func TestLatePutEndsNoOtherPut(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	come, gates := make(chan bool), []chan bool{make(chan bool), make(chan bool)}
	var n atomic.Int64
	c.master.Set(func() {
		c.master.Before = func(method string) {
			if i := n.Load(); method == "BatchPutEnd" && int(i) < len(gates) {
				n.Add(1)
				come <- true
				<-gates[i]
			}
		}
	})
	put := func(b byte) chan error {
		done := make(chan error, 1)
		go func() { done <- c.client.Put(t.Context(), []Object{{"k", [][]byte{{b}}}})[0] }()
		<-come
		return done
	}
	first := put(1)
	c.master.Set(func() { delete(c.master.Objects, "k") }) // the master's timeout for the put has ended
	second := put(2)
	close(gates[0])
	if err := <-first; err == nil {
		t.Error("the late put succeeded")
	}
	c.master.Set(func() {
		if o := c.master.Objects["k"]; o == nil || o.Complete {
			t.Errorf("the second put's object is %+v", o)
		}
	})
	close(gates[1])
	if err := <-second; err != nil {
		t.Error(err)
	}
	got := make([]byte, 1)
	if errs := c.client.Get(t.Context(), []Object{{"k", [][]byte{got}}}); errs[0] != nil || got[0] != 2 {
		t.Error(got, errs)
	}
}

// The master carried out the start of a put but its answer was lost. The client then revokes the put: else no client
// could put the key until the master's timeout for the put ends.
func TestPutWithoutAnAnswerGivesItsPlaceBack(t *testing.T) {
	for name, answer := range map[string]func(cancel func(), frame []byte) []byte{
		"lost":    func(func(), []byte) []byte { return nil },
		"garbage": func(_ func(), b []byte) []byte { clear(b[responseHeader:]); return b },
		"late":    func(cancel func(), _ []byte) []byte { cancel(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 1, ClientOptions{})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var once atomic.Bool
			c.master.Set(func() {
				c.master.Answered = func(method string, b []byte) []byte {
					if method == "BatchPutStart" && once.CompareAndSwap(false, true) {
						b = answer(cancel, b)
					}
					return b
				}
			})
			if errs := c.client.Put(ctx, []Object{{"a", [][]byte{{1}}}, {"b", [][]byte{{2}}}}); errs[0] == nil || errs[1] == nil {
				t.Fatal(errs)
			}
			got := make([]byte, 1)
			for _, errs := range [][]error{
				c.client.Put(t.Context(), []Object{{"a", [][]byte{{3}}}}), c.client.Get(t.Context(), []Object{{"a", [][]byte{got}}}),
			} {
				if errs[0] != nil {
					t.Fatal(errs)
				}
			}
			if got[0] != 3 {
				t.Error(got)
			}
		})
	}
}

// hang makes the node of a replica one that never answers.
func hang(t *testing.T, master *storetest.Master, key string, replica int) {
	addr := peer(t, "")
	master.Set(func() { master.Objects[key].Pieces[replica].Endpoint = addr })
}

// severalTimes calls f until it returns true, four times at most: f must be fast, and the machine may be busy.
func severalTimes(t *testing.T, f func() bool) {
	t.Helper()
	for range 4 {
		if f() {
			return
		}
	}
	t.Error("never")
}

// Where a node never answers, only reads of objects without another replica fail. Other objects of
// the same batch are read, and so is an object with another replica.
func TestSilentNodeCostsItsOwnObjects(t *testing.T) {
	c := newCluster(t, 2, ClientOptions{})
	te := transfer.New(transfer.Options{HandshakeTimeout: time.Minute})
	defer te.Close()
	c.client.te = te
	a, b, d := content(1, 1000), content(2, 1000), content(3, 1000)
	put := func(o ...Object) {
		for _, err := range c.client.Put(t.Context(), o) {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	put(Object{"a", [][]byte{a}}, Object{"b", [][]byte{b}})
	c.master.Set(func() { c.master.Copies = 2 })
	put(Object{"d", [][]byte{d}})
	c.master.Set(func() { c.master.Lease = 2 * time.Second })
	hang(t, c.master, "b", 0)
	hang(t, c.master, "d", 0)
	severalTimes(t, func() bool {
		got := [][]byte{make([]byte, 1000), make([]byte, 1000), make([]byte, 1000)}
		errs := c.client.Get(t.Context(), []Object{{"a", got[:1]}, {"b", got[1:2]}, {"d", got[2:]}})
		if errs[1] == nil {
			t.Fatal("bytes of a node that never answered")
		}
		return errs[0] == nil && errs[2] == nil && bytes.Equal(got[0], a) && bytes.Equal(got[2], d)
	})
}

// A read of a node that never answers ends with the lease, counted from when the master was asked.
func TestReadEndsWithItsLease(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	te := transfer.New(transfer.Options{HandshakeTimeout: time.Hour})
	defer te.Close()
	c.client.te = te
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{7}}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	hang(t, c.master, "a", 0)
	c.master.Set(func() { c.master.Lease = 10 * time.Minute })
	var looks atomic.Int64
	c.client.now = func() twoClocks { // the answer of the master left 50 ms of the lease
		m := now()
		if looks.Add(1) > 1 {
			took := 10*time.Minute - 50*time.Millisecond
			m = twoClocks{m.steady.Add(took), m.wall.Add(took)}
		}
		return m
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if errs := c.client.Get(ctx, []Object{{"a", [][]byte{{0}}}}); errs[0] != LeaseExpired || ctx.Err() != nil {
		t.Errorf("%v, %v", errs, ctx.Err())
	}
}

// A batch has objects of the limit's bytes together, and one at least.
func TestBatchesAreBounded(t *testing.T) {
	var objects []Object
	for _, n := range []int{5, 5, 11, 4, 4, 2, 1} {
		objects = append(objects, Object{"", [][]byte{make([]byte, n)}})
	}
	var got []int
	for from := 0; from < len(objects); {
		to := batch(objects, from, 10)
		if to <= from {
			t.Fatalf("an empty batch at %d", from)
		}
		got, from = append(got, to), to
	}
	if want := []int{2, 3, 6, 7}; !slices.Equal(got, want) {
		t.Errorf("batches end at %v, want %v", got, want)
	}
}

// A master whose descriptors have no kind of place is refused.
func TestReplicasWithoutKindsAreRefused(t *testing.T) {
	for _, kinds := range [][]*sp.Type{nil, {{Kind: sp.KindFixed, Size: 1}}} {
		status := &sp.Type{Kind: sp.KindFixed, Size: 4}
		list := &sp.Type{Kind: sp.KindVector, Parts: []*sp.Type{{Kind: sp.KindStruct, Parts: []*sp.Type{{Kind: sp.KindVariant, Parts: kinds}, status}}}}
		if r, err := replicas(new(sp.Reader), list); err == nil && (len(kinds) == 0 || len(r) > 0) {
			t.Errorf("%d kinds: %v", len(kinds), r)
		}
	}
}

// Replicas of lengths that are right only together, past the end of all numbers, are no replicas.
func TestReplicaWhoseLengthWraps(t *testing.T) {
	parts := [][]byte{make([]byte, 10)}
	for _, sizes := range [][]uint64{{1<<64 - 1, 11}, {11, 1<<64 - 1}, {1 << 63, 1 << 63, 10}} {
		r := &Replica{Complete: true}
		for _, n := range sizes {
			r.Pieces = append(r.Pieces, Piece{Addr: 1, Bytes: n, Endpoint: "127.0.0.1:1"})
		}
		if newPlan(false, now).add(0, parts, 10, r) {
			t.Error(sizes)
		}
	}
}

// A master that answers a batch with more or fewer results than it was asked for is not believed in any of them.
func TestOtherNumberOfResults(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{1}}}, {"b", [][]byte{{2}}}}); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	var other []byte
	c.master.Set(func() {
		c.master.Answered = func(method string, b []byte) []byte {
			if method == "BatchGetReplicaList" {
				if other == nil {
					other = bytes.Clone(b)
				}
				return bytes.Clone(other)
			}
			return b
		}
	})
	get := func(keys ...string) (errs []error) {
		var o []Object
		for _, k := range keys {
			o = append(o, Object{k, [][]byte{make([]byte, 1)}})
		}
		return c.client.Get(t.Context(), o)
	}
	if errs := get("a", "b"); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	for _, keys := range [][]string{{"a"}, {"a", "b", "c"}} {
		for _, err := range get(keys...) {
			if err == nil {
				t.Error(keys)
			}
		}
	}
}

// The time for a put counts from before its start: a start that was answered late leaves less for the writes,
// since the master counts too.
func TestLateStartShortensTheTimeout(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	c.client.times.writes = 50 * time.Millisecond
	c.master.Set(func() {
		c.master.Answered = func(method string, b []byte) []byte {
			if method == "BatchPutStart" {
				time.Sleep(100 * time.Millisecond)
			}
			return b
		}
	})
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{1}}}}); !errors.Is(errs[0], ErrTransfer) {
		t.Fatal(errs)
	}
	c.master.Set(func() {
		if c.master.Objects["a"] != nil || c.master.Revoked != 1 {
			t.Error("its place was not given back")
		}
	})
}
