// SPDX-License-Identifier: Apache-2.0

package mooncakestore

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestValidate(t *testing.T) {
	testkit.CheckNumbers[Options](t)
	for _, o := range []Options{{Masters: []string{"host"}}, {Put: store.PutOptions{Replicas: -1}}} {
		if o.Validate() == nil {
			t.Errorf("%+v", o)
		}
	}
	for _, o := range []Options{{Names: tiertest.Names()}, {Masters: []string{"h:1"}}} {
		if _, err := Open(o); err == nil {
			t.Errorf("%+v", o)
		}
	}
}

func open(t *testing.T, o Options) *Tier {
	t.Helper()
	if o.Names == nil {
		o.Names = tiertest.Names()
	}
	x, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// cluster is a fake master with nodes of 16 MiB.
type cluster struct {
	*storetest.Master
	nodes []*store.Node
	stop  []func()
}

func newCluster(t *testing.T, nodes int) *cluster {
	t.Helper()
	c := &cluster{Master: storetest.New(t)}
	m, err := store.NewMaster(store.MasterOptions{Addresses: []string{c.Addr}, CallTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	for range nodes {
		n, err := store.NewNode(m, store.NodeOptions{Memory: make([]byte, 16<<20), PingEvery: 20 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		stop := sync.OnceFunc(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(stop)
		c.nodes, c.stop = append(c.nodes, n), append(c.stop, stop)
		testkit.Eventually(t, "a node is mounted", func() bool { return n.Stats().Mounted == 1 })
	}
	return c
}

func TestTier(t *testing.T) {
	for name, o := range map[string]Options{"one replica": {}, "two replicas": {Put: store.PutOptions{Replicas: 2}}, "one connection": {Conns: 1}} {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				o := o
				c := newCluster(t, max(1, o.Put.Replicas))
				c.Set(func() { c.Copies = max(1, o.Put.Replicas) })
				o.Masters = []string{c.Addr}
				return tiertest.WithSums(open(t, o))
			})
		})
	}
}

// Objects have the names that LMCache gives them.
func TestNamesAreLMCaches(t *testing.T) {
	var file struct {
		Keys []struct {
			Chunk string `json:"chunk_hash_hex"`
			Model string `json:"model_name"`
			Rank  uint32 `json:"kv_rank"`
			Group uint32 `json:"object_group_id"`
			Salt  string `json:"cache_salt"`
			Want  string `json:"native_key_string_redis_valkey_fs_native"`
		}
	}
	testkit.ReadVector(t, "lmcache-mp/object_keys.json", &file)
	c, known := newCluster(t, 1), tier.NewNames()
	x := open(t, Options{Masters: []string{c.Addr}, Names: known})
	defer x.Close()
	for i, v := range file.Keys {
		k := kv.Key{Namespace: kv.Namespace{byte(i), 1}, Rank: kv.Rank(v.Rank), Group: v.Group}
		if _, err := hex.Decode(k.Chunk[:], []byte(v.Chunk)); err != nil {
			t.Fatal(err)
		}
		known.Add(k.Namespace, v.Model, []byte(v.Salt))
		b, meta := tiertest.Object(i, 100+i)
		if err := x.Write(t.Context(), k, meta, b); err != nil {
			t.Fatal(err)
		}
		c.Set(func() {
			if c.Objects[v.Want] == nil || len(c.Objects) != i+1 {
				t.Errorf("no object %q among %d", v.Want, len(c.Objects))
			}
		})
	}
	if len(file.Keys) == 0 {
		t.Error("no vectors")
	}
	if err := x.Write(t.Context(), kv.Key{Namespace: kv.Namespace{0xff}}, tier.Meta{Len: 1}, []byte{1}); !errors.Is(err, tier.ErrNotKept) {
		t.Error(err)
	}
	at := kv.Namespace{0xfe}
	known.Add(at, "a@b", nil)
	if err := x.Write(t.Context(), kv.Key{Namespace: at}, tier.Meta{Len: 1}, []byte{1}); err != nil {
		t.Errorf("a model whose name has an @: %v", err)
	}
}

func key(seed int) kv.Key { return tiertest.Key(seed) }

func put(t *testing.T, x tier.Tier, seed, n int) []byte {
	t.Helper()
	b, meta := tiertest.Object(seed, n)
	if err := x.Write(t.Context(), key(seed), meta, b); err != nil {
		t.Fatal(err)
	}
	return b
}

// Another server reads the objects that one server wrote. If a node dies, only its objects are
// missing. This is no failure of the tier, and it reads the rest.
func TestNodeThatDiesCostsItsObjects(t *testing.T) {
	c := newCluster(t, 2)
	a, b := open(t, Options{Masters: []string{c.Addr}}), open(t, Options{Masters: []string{c.Addr}})
	defer a.Close()
	defer b.Close()
	want := [][]byte{put(t, a, 0, 5000), nil}
	c.Set(func() { c.Segments[0], c.Segments[1] = c.Segments[1], c.Segments[0] }) // the next one lies on the other
	want[1] = put(t, b, 1, 6000)
	for i, w := range want {
		for _, x := range []*Tier{a, b} {
			got := make([]byte, len(w))
			if m, err := x.Read(t.Context(), key(i), got); err != nil || !m.NoSum || !bytes.Equal(got, w) {
				t.Fatal(i, m, err)
			}
		}
	}
	var at string // of the first object
	chunk := key(0).Chunk
	c.Set(func() {
		for name, o := range c.Objects {
			if strings.Contains(name, hex.EncodeToString(chunk[:])) {
				at = o.Pieces[0].Endpoint
			}
		}
	})
	for i, n := range c.nodes {
		if n.Stats().Endpoint == at {
			c.stop[i]()
		}
	}
	got := make([]byte, 5000)
	if _, err := a.Read(t.Context(), key(0), got); !errors.Is(err, tier.ErrMissing) || !errors.Is(err, store.ErrTransfer) {
		t.Error(err)
	}
	got = make([]byte, 6000)
	if _, err := a.Read(t.Context(), key(1), got); err != nil || !bytes.Equal(got, want[1]) {
		t.Error(err)
	}
}

// Bytes that arrive after the lease's end are a miss.
func TestLeaseThatEndsIsAMiss(t *testing.T) {
	c := newCluster(t, 1)
	x := open(t, Options{Masters: []string{c.Addr}})
	defer x.Close()
	put(t, x, 1, 100)
	c.Set(func() { c.Lease, c.Delay = 20*time.Millisecond, 40*time.Millisecond })
	if _, err := x.Read(t.Context(), key(1), make([]byte, 100)); !errors.Is(err, tier.ErrMissing) || !errors.Is(err, store.LeaseExpired) {
		t.Error(err)
	}
	if s := x.Stats(); s.Expired != 1 {
		t.Errorf("%+v", s)
	}
}

// If the cluster has an object of another length, that one stays, since objects are immutable, and the write
// is not kept. A full cluster keeps nothing. Neither is a failure of the tier.
func TestNotKept(t *testing.T) {
	c := newCluster(t, 1)
	x := open(t, Options{Masters: []string{c.Addr}})
	defer x.Close()
	was := put(t, x, 1, 100)
	if err := x.Write(t.Context(), key(1), tier.Meta{Len: 3}, []byte{1, 2, 3}); !errors.Is(err, tier.ErrNotKept) {
		t.Error(err)
	}
	got := make([]byte, 100)
	if _, err := x.Read(t.Context(), key(1), got); err != nil || !bytes.Equal(got, was) {
		t.Error(err)
	}
	b, meta := tiertest.Object(2, 17<<20) // larger than the node
	if err := x.Write(t.Context(), key(2), meta, b); !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, store.NoRoom) {
		t.Error(err)
	}
}

// An object of a silent node is neither read nor counted as written.
func TestHiddenObjectIsNotKept(t *testing.T) {
	c := newCluster(t, 1)
	x := open(t, Options{Masters: []string{c.Addr}})
	defer x.Close()
	b := put(t, x, 1, 100)
	name, _ := x.name(key(1))
	c.Set(func() { c.Lengths, c.Hidden = true, map[string]bool{name: true} })
	if err := x.Write(t.Context(), key(1), tier.Meta{Len: 100}, b); !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, store.NotReady) {
		t.Error(err)
	}
	if _, err := x.Read(t.Context(), key(1), make([]byte, 100)); !errors.Is(err, tier.ErrMissing) {
		t.Error(err)
	}
	c.Set(func() { c.Hidden = nil })
	if err := x.Write(t.Context(), key(1), tier.Meta{Len: 100}, b); err != nil {
		t.Error(err)
	}
}

// A put finds the object, and then the object is removed before the tier asks for its place. It counts as written only once it is there
// again.
func TestObjectThatGoesIsWritten(t *testing.T) {
	c := newCluster(t, 1)
	x := open(t, Options{Masters: []string{c.Addr}})
	defer x.Close()
	b := put(t, x, 1, 100)
	name, _ := x.name(key(1))
	times := 1
	c.Set(func() {
		c.Before = func(method string) {
			if method == "BatchGetReplicaList" {
				c.Set(func() {
					if times--; times >= 0 {
						delete(c.Objects, name)
					}
				})
			}
		}
	})
	if err := x.Write(t.Context(), key(1), tier.Meta{Len: 100}, b); err != nil {
		t.Error(err)
	}
	got := make([]byte, 100)
	if _, err := x.Read(t.Context(), key(1), got); err != nil || !bytes.Equal(got, b) {
		t.Errorf("it was said to be written: %v", err)
	}
}

// If a server ended while it put its note, the others cannot write theirs until the master gives up that put, and no
// longer. They do not ask all the time meanwhile.
func TestNoteThatWasNotEndedGivesWay(t *testing.T) {
	c := newCluster(t, 1)
	x := open(t, Options{Masters: []string{c.Addr}})
	defer x.Close()
	removes := 0
	c.Set(func() {
		c.Discard = time.Second
		c.Objects[tier.NoteName] = &storetest.Object{Started: time.Now()}
		c.Before = func(method string) {
			if method == "Remove" {
				c.Set(func() { removes++ })
			}
		}
	})
	if text, err := x.Note(t.Context()); err != nil || text != nil {
		t.Errorf("%q, %v", text, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := x.SetNote(ctx, []byte("mine")); err != nil {
		t.Fatal(err)
	}
	if text, err := x.Note(t.Context()); err != nil || string(text) != "mine" {
		t.Errorf("%q, %v", text, err)
	}
	c.Set(func() {
		if removes > 30 {
			t.Errorf("the master was asked %d times", removes)
		}
	})
}

// lines is a log that a test can read while it is written.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// A master of an unknown release switches the tier off, with one line in the log: all objects are misses
// and none are kept, without errors. A master of a known release switches it on again.
func TestUnknownReleaseSwitchesOff(t *testing.T) {
	c, log := newCluster(t, 1), &lines{}
	unknown := func(on bool) {
		c.Set(func() {
			c.Answered = func(method string, b []byte) []byte {
				if on && method == "PutStart" {
					return storetest.Refusal(4)
				}
				return b
			}
		})
	}
	unknown(true)
	x := open(t, Options{Masters: []string{c.Addr}, Look: 5 * time.Millisecond, Log: slog.New(slog.NewTextHandler(log, nil))})
	defer x.Close()
	testkit.Eventually(t, "it is off", func() bool { return x.off.Load() && log.count("the tier is off") == 1 })
	b, meta := tiertest.Object(1, 100)
	for range 20 {
		metas := []tier.Meta{{Len: 7}}
		if err := x.Stat(t.Context(), []kv.Key{key(1)}, metas); err != nil || metas[0] != (tier.Meta{}) {
			t.Fatal(metas, err)
		}
		if err := x.Write(t.Context(), key(1), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Fatal(err)
		}
		if _, err := x.Read(t.Context(), key(1), b); !errors.Is(err, tier.ErrMissing) {
			t.Fatal(err)
		}
		if err := x.Delete(t.Context(), []kv.Key{key(1)}); !errors.Is(err, tier.ErrNotKept) { // it deletes nothing
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	if n := log.count("the tier is off"); n != 1 {
		t.Errorf("%d lines", n)
	}
	unknown(false)
	testkit.Eventually(t, "it is on again", func() bool { return !x.off.Load() })
	put(t, x, 1, 100)
}

// With an address that is not a master, or where nobody listens, calls fail, and the log has one line.
func TestNoMaster(t *testing.T) {
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := web.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))
			c.Close()
		}
	})
	defer serving.Wait()
	defer web.Close()
	for name, address := range map[string]string{"nobody": "127.0.0.1:1", "a web server": web.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			log := &lines{}
			x := open(t, Options{Masters: []string{address}, Look: 5 * time.Millisecond, Log: slog.New(slog.NewTextHandler(log, nil))})
			defer x.Close()
			testkit.Eventually(t, "it is said", func() bool { return log.count("does not answer") == 1 })
			b, meta := tiertest.Object(1, 100)
			if x.Stat(t.Context(), []kv.Key{key(1)}, make([]tier.Meta, 1)) == nil || x.Write(t.Context(), key(1), meta, b) == nil || x.Delete(t.Context(), []kv.Key{key(1)}) == nil {
				t.Error("no error")
			}
			if _, err := x.Read(t.Context(), key(1), b); err == nil || errors.Is(err, tier.ErrMissing) {
				t.Error(err)
			}
			time.Sleep(50 * time.Millisecond)
			if n := log.count("does not answer"); n != 1 {
				t.Errorf("%d lines", n)
			}
		})
	}
}

// A cluster that is full of objects of others keeps no object of ours, which is no failure of the tier. The tier reads the objects
// that are there, and writes again when there is room.
func TestClusterFullOfOthersObjects(t *testing.T) {
	c, log := newCluster(t, 1), &lines{}
	x := open(t, Options{Masters: []string{c.Addr}, Log: slog.New(slog.NewTextHandler(log, nil))})
	defer x.Close()
	was := put(t, x, 1, 100)
	c.Set(func() { c.NoRoom = 1 << 30 })
	b, meta := tiertest.Object(2, 1000)
	if err := x.Write(t.Context(), key(2), meta, b); !errors.Is(err, tier.ErrResting) || !errors.Is(err, tier.ErrFull) {
		t.Error(err)
	}
	got := make([]byte, 100)
	if _, err := x.Read(t.Context(), key(1), got); err != nil || !bytes.Equal(got, was) {
		t.Error(err)
	}
	c.Set(func() { c.NoRoom = 0 })
	put(t, x, 2, 1000)
	if n := log.count("level=WARN"); n != 0 {
		t.Errorf("%d warnings", n)
	}
}

// The note is shared by all servers of the cluster.
func TestNote(t *testing.T) {
	c := newCluster(t, 1)
	one, two := open(t, Options{Masters: []string{c.Addr}}), open(t, Options{Masters: []string{c.Addr}})
	defer one.Close()
	defer two.Close()
	tiertest.Notes(t, one, two)
}

// A master without nodes has no room; an object that is written then waits until there is a node.
func TestMasterWithoutNodes(t *testing.T) {
	c := newCluster(t, 0)
	x := open(t, Options{Masters: []string{c.Addr}})
	defer x.Close()
	b, meta := tiertest.Object(1, 100)
	if err := x.Write(t.Context(), key(1), meta, b); !errors.Is(err, tier.ErrResting) || !errors.Is(err, tier.ErrFull) || errors.Is(err, tier.ErrNotKept) {
		t.Errorf("without nodes: %v", err)
	}
}
