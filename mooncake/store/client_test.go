// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

type clusterOf struct {
	master *storetest.Master
	m      *Master
	client *Client
	nodes  []*Node
	stop   []func()
}

// newCluster runs nodes of 16 MiB over a fake master.
func newCluster(t *testing.T, nodes int, o ClientOptions) *clusterOf {
	t.Helper()
	c := &clusterOf{master: storetest.New(t)}
	c.m = masterOf(t, MasterOptions{Addresses: []string{c.master.Addr}})
	te := transfer.New(transfer.Options{})
	c.client = NewClient(c.m, te, o)
	for range nodes {
		n, err := NewNode(c.m, NodeOptions{Memory: make([]byte, segmentAlign), PingEvery: 5 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		c.nodes = append(c.nodes, n)
		c.stop = append(c.stop, sync.OnceFunc(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}))
	}
	for i := range nodes {
		settled(t, c.nodes[i])
	}
	t.Cleanup(func() {
		for _, stop := range c.stop {
			stop()
		}
		te.Close()
		c.m.Close()
	})
	return c
}

func masterOf(t *testing.T, o MasterOptions) *Master {
	t.Helper()
	m, err := NewMaster(o)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func content(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestPutAndGet(t *testing.T) {
	c := newCluster(t, 2, ClientOptions{})
	c.master.Set(func() { c.master.Copies = 2 })
	a, b := content(1, 100_000), content(2, 77)
	ctx := t.Context()
	for i, err := range c.client.Put(ctx, []Object{{"a", [][]byte{a[:10], a[10:10], a[10:]}}, {"b", [][]byte{b}}}) {
		if err != nil {
			t.Fatal(i, err)
		}
	}
	if errs := c.client.Put(ctx, []Object{{"a", [][]byte{b}}}); errs[0] != nil { // the first writer wins
		t.Fatal(errs)
	}
	got, other := make([]byte, len(a)), make([]byte, len(b))
	errs := c.client.Get(ctx, []Object{{"b", [][]byte{other}}, {"none", [][]byte{{0}}}, {"a", [][]byte{got[:99_000], got[99_000:]}}, {"b", [][]byte{make([]byte, 78)}}})
	if errs[0] != nil || errs[1] != NotFound || errs[2] != nil || !errors.Is(errs[3], ErrUnreadable) {
		t.Fatal(errs)
	}
	if !bytes.Equal(got, a) || !bytes.Equal(other, b) {
		t.Error("other bytes")
	}
	present := make([]bool, 3)
	if err := c.m.Exists(ctx, []string{"a", "x", "b"}, present); err != nil || !present[0] || present[1] || !present[2] {
		t.Error(present, err)
	}
	if s := c.client.Stats(); s.Put != 2 || s.Existed != 1 || s.Got != 2 || s.Missing != 1 || s.Unreadable != 1 {
		t.Errorf("%+v", s)
	}
}

// A put waits for room that an eviction makes, and gives up in time where none comes.
func TestNoRoom(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{RoomTimeout: time.Minute})
	c.master.Set(func() { c.master.NoRoom = 2 })
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{1}}}, {"b", [][]byte{{2}}}}); errs[0] != nil || errs[1] != nil {
		t.Fatal(errs)
	}
	c = newCluster(t, 1, ClientOptions{RoomTimeout: 200 * time.Millisecond})
	c.master.Set(func() { c.master.NoRoom = 1 << 30 })
	if errs := c.client.Put(t.Context(), []Object{{"c", [][]byte{{1}}}}); errs[0] != NoRoom {
		t.Fatal(errs)
	}
}

// A node refuses the bytes: the put fails, the client revokes it at the master, and the object is not visible. A
// later put of the object succeeds.
func TestRefusedWriteIsRevoked(t *testing.T) {
	c := newCluster(t, 2, ClientOptions{})
	c.master.Set(func() { c.master.Segments[0].Base += 1 << 40 }) // the node knows no such addresses
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{1}}}}); !errors.Is(errs[0], ErrTransfer) {
		t.Fatal(errs)
	}
	c.master.Set(func() {
		if c.master.Objects["a"] != nil || c.master.Revoked != 1 {
			t.Errorf("%d revoked", c.master.Revoked)
		}
		c.master.Segments = c.master.Segments[1:]
	})
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{1}}}}); errs[0] != nil {
		t.Fatal(errs)
	}
}

// The client does not use bytes that came after the end of the lease: the memory may belong to another object by then.
func TestLeaseThatEndsDuringTheRead(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{7}}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	c.master.Set(func() { c.master.Lease, c.master.Delay = 20*time.Millisecond, 40*time.Millisecond })
	if errs := c.client.Get(t.Context(), []Object{{"a", [][]byte{{0}}}}); errs[0] != LeaseExpired {
		t.Fatal(errs)
	}
	if c.client.Stats().Expired != 1 {
		t.Error(c.client.Stats())
	}
}

// A clock that jumps costs misses and never gives wrong bytes. After a jump forward, by hand or because the machine slept, leases
// seem to have ended. After a jump back, leases still end.
func TestClockJumps(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	get := func() ([]byte, error) {
		got := []byte{0}
		err := c.client.Get(t.Context(), []Object{{"a", [][]byte{got}}})[0]
		return got, err
	}
	// jumps makes the wall clock differ by d from its second reading on.
	jumps := func(d time.Duration) {
		var looks atomic.Int64
		c.client.now = func() twoClocks {
			m := now()
			if looks.Add(1) > 1 {
				m.wall = m.wall.Add(d)
			}
			return m
		}
	}
	jumps(time.Hour)
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{7}}}}); !errors.Is(errs[0], ErrTransfer) {
		t.Fatal(errs) // another client may have the key by now
	}
	jumps(-time.Hour)
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{7}}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	if got, err := get(); err != nil || got[0] != 7 {
		t.Error(got, err)
	}
	jumps(time.Hour)
	if _, err := get(); err != LeaseExpired {
		t.Error(err)
	}
	jumps(-time.Hour)
	c.master.Set(func() { c.master.Lease, c.master.Delay = 20*time.Millisecond, 40*time.Millisecond })
	if _, err := get(); err != LeaseExpired {
		t.Error(err)
	}
}

// Of two replicas the second is read where the first one's node is gone.
func TestSecondReplica(t *testing.T) {
	c := newCluster(t, 2, ClientOptions{})
	c.master.Set(func() { c.master.Copies = 2 })
	a := content(3, 5000)
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{a}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	first := 0
	c.master.Set(func() {
		if c.master.Segments[0].Endpoint != c.nodes[0].Stats().Endpoint {
			first = 1
		}
	})
	c.stop[first]()
	got := make([]byte, len(a))
	if errs := c.client.Get(t.Context(), []Object{{"a", [][]byte{got}}}); errs[0] != nil || !bytes.Equal(got, a) {
		t.Fatal(errs)
	}
}

// A restarted master has forgotten its nodes. The nodes mount themselves again, under other addresses. A client that still
// reads at an address from the former master gets an error, never bytes of another object.
func TestMasterStartedAgain(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	a, b := content(4, 4096), content(5, 4096)
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{a}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	was, err := c.m.Replicas(t.Context(), []string{"a"})
	if err != nil || was[0].Err != nil {
		t.Fatal(err, was)
	}
	before := c.nodes[0].Stats()
	c.master.Forget()
	testkit.Eventually(t, "mounted again", func() bool { s := c.nodes[0].Stats(); return s.Lives == 2 && s.Mounted == 1 })
	if errs := c.client.Put(t.Context(), []Object{{"b", [][]byte{b}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	got := make([]byte, 4096)
	p := was[0].Replicas[0].Pieces[0]
	for _, endpoint := range []string{p.Endpoint, c.nodes[0].Stats().Endpoint} {
		if err := c.client.te.Read(t.Context(), endpoint, []transfer.Entry{{Local: got, Remote: p.Addr}}); err == nil {
			t.Error("an address of a former life was answered")
		}
	}
	if errs := c.client.Get(t.Context(), []Object{{"b", [][]byte{got}}}); errs[0] != nil || !bytes.Equal(got, b) {
		t.Fatal(errs)
	}
	if s := c.nodes[0].Stats(); s.Endpoint == before.Endpoint {
		t.Error(s.Endpoint)
	}
}

// Without a master every call ends, with an error that says so.
func TestNoMaster(t *testing.T) {
	m := masterOf(t, MasterOptions{Addresses: []string{"127.0.0.1:1"}})
	defer m.Close()
	if _, err := m.Ping(t.Context(), NewUUID()); err == nil {
		t.Error("a ping without a master")
	}
	if _, err := masterOf(t, MasterOptions{}).Ping(t.Context(), NewUUID()); err == nil {
		t.Error("a ping of nobody")
	}
}

// Replicas share the reads: one by one and in batches each node has some of them.
func TestReplicasShareTheReads(t *testing.T) {
	c := newCluster(t, 2, ClientOptions{})
	c.master.Set(func() { c.master.Copies = 2 })
	a := content(6, 1000)
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{a}}}); errs[0] != nil {
		t.Fatal(errs)
	}
	get := func(n int) {
		t.Helper()
		before := [2]int64{c.nodes[0].Stats().BytesOut, c.nodes[1].Stats().BytesOut}
		objects := make([]Object, n)
		for i := range objects {
			objects[i] = Object{"a", [][]byte{make([]byte, len(a))}}
		}
		for range 8 / n {
			for i, err := range c.client.Get(t.Context(), objects) {
				if err != nil || !bytes.Equal(objects[i].Parts[0], a) {
					t.Fatal(err)
				}
			}
		}
		testkit.Eventually(t, "both nodes have read", func() bool {
			return c.nodes[0].Stats().BytesOut > before[0] && c.nodes[1].Stats().BytesOut > before[1]
		})
	}
	get(1)
	get(8)
}

// With ReportExisting, Put returns Exists for an object that is already in the store.
func TestReportExisting(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{ReportExisting: true})
	o := []Object{{"a", [][]byte{{1}}}}
	if errs := c.client.Put(t.Context(), o); errs[0] != nil {
		t.Fatal(errs)
	}
	if errs := c.client.Put(t.Context(), o); errs[0] != Exists || c.client.Stats().Existed != 1 {
		t.Fatal(errs)
	}
}

// A master of 0.3.14 names the length of its answers and appends fields that are skipped.
func TestAnswersWithLaterFields(t *testing.T) {
	c := newCluster(t, 2, ClientOptions{})
	c.master.Set(func() { c.master.Lengths, c.master.Copies = true, 2 })
	m := masterOf(t, MasterOptions{Addresses: []string{c.master.Addr}})
	defer m.Close()
	if v, err := m.Version(t.Context()); err != nil || v != V0_3_14 {
		t.Fatal(v, err)
	}
	a, b := content(1, 100_000), content(2, 77)
	for i, err := range c.client.Put(t.Context(), []Object{{"a", [][]byte{a}}, {"b", [][]byte{b}}}) {
		if err != nil {
			t.Fatal(i, err)
		}
	}
	gotA, gotB := make([]byte, len(a)), make([]byte, len(b))
	errs := c.client.Get(t.Context(), []Object{{"a", [][]byte{gotA}}, {"none", [][]byte{{0}}}, {"b", [][]byte{gotB}}})
	if errs[0] != nil || errs[1] != NotFound || errs[2] != nil || !bytes.Equal(gotA, a) || !bytes.Equal(gotB, b) {
		t.Fatal(errs)
	}
}

// A put of an object whose only replica is on a silent node is an error: the object can be neither read nor written.
func TestPutOfAHiddenObject(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	o := []Object{{"a", [][]byte{{1}}}, {"b", [][]byte{{2}}}}
	if errs := c.client.Put(t.Context(), o); errs[0] != nil || errs[1] != nil {
		t.Fatal(errs)
	}
	c.master.Set(func() { c.master.Hidden = map[string]bool{"a": true} })
	errs := c.client.Put(t.Context(), o)
	if !errors.Is(errs[0], NotReady) || errs[1] != nil {
		t.Fatal(errs)
	}
	if errs := c.client.Get(t.Context(), o); errs[0] != NotReady || errs[1] != nil {
		t.Fatal(errs)
	}
}

// An object exists when Put starts, and is gone when Put looks for its replicas: the master may give up a silent node meanwhile. Put
// then puts the object again, and does not count it as existing.
func TestPutOfAnObjectThatGoes(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	o := []Object{{"a", [][]byte{{1}}}, {"b", [][]byte{{2}}}}
	if errs := c.client.Put(t.Context(), o); errs[0] != nil || errs[1] != nil {
		t.Fatal(errs)
	}
	goes := sync.OnceFunc(func() { c.master.Set(func() { delete(c.master.Objects, "a") }) })
	c.master.Set(func() {
		c.master.Before = func(method string) {
			if method == "BatchGetReplicaList" {
				goes()
			}
		}
	})
	if errs := c.client.Put(t.Context(), o); errs[0] != nil || errs[1] != nil {
		t.Fatal(errs)
	}
	got := []byte{0}
	if errs := c.client.Get(t.Context(), []Object{{"a", [][]byte{got}}}); errs[0] != nil || got[0] != 1 {
		t.Errorf("%v, %d: it was said to be put", errs, got)
	}
	if n := c.client.Stats().Put; n != 3 {
		t.Errorf("%d puts", n)
	}
}
