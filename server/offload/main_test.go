// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(engineEnv); path != "" {
		runEngine(path)
		return
	}
	if path := os.Getenv(nodeEnv); path != "" {
		runNode(path)
		return
	}
	testkit.Main(m)
}

const (
	rowBytes = 8192
	rows     = 16
	patience = 10 * time.Second
)

// node is a server over a pool.
type node struct {
	t      *testing.T
	dir    string // of the pool, the regions and the socket
	store  *store.Store
	server *offload.Server
	stop   context.CancelFunc
	ran    chan struct{}
}

type setup struct {
	rows    int // of the pool; default 64
	store   store.Options
	offload offload.Options
}

// start starts a node over what an earlier one left in dir.
func start(t *testing.T, dir string, s setup) *node {
	t.Helper()
	if s.rows == 0 {
		s.rows = 64
	}
	p, err := pool.Open(pool.Options{Name: "kvasir_t", Bytes: int64(s.rows) * rowBytes, Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if s.store.ChecksumRate == 0 {
		s.store.ChecksumRate, s.store.SumAtOnce = 1<<30, true
	}
	s.store.LoadTimeout, s.offload.Patience = cmp.Or(s.store.LoadTimeout, time.Minute), cmp.Or(s.offload.Patience, time.Minute)
	n := &node{t: t, dir: dir, store: store.New(p, s.store), ran: make(chan struct{})}
	s.offload.Dir, s.offload.Grace = dir, cmp.Or(s.offload.Grace, 20*time.Millisecond)
	n.server = offload.New(n.store, s.offload)
	if err := n.server.Listen(t.Context(), n.socket()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	go func() {
		defer close(n.ran)
		n.store.Run(ctx)
	}()
	return n
}

func (n *node) socket() string { return filepath.Join(n.dir, "tier.sock") }

// close ends the node; the pool stays for the next one.
func (n *node) close() {
	n.t.Helper()
	if err := n.server.Close(); err != nil {
		n.t.Error(err)
	}
	n.stop()
	<-n.ran
	if err := n.store.Close(); err != nil {
		n.t.Error(err)
	}
}

// engine is an engine's side: a client and a region.
type engine struct {
	t      *testing.T
	client *vllm.Client
	region *shm.Segment
	n      int
}

func helloOf(id string) vllm.Hello {
	return vllm.Hello{Protocol: vllm.Protocol, VLLM: "test", EngineID: id, Model: "m", Namespace: `{"model_name":"m"}`, RowBytes: rowBytes, Rows: rows, Groups: 2, ChunkTokens: 16}
}

// connect connects an engine, with a region of its own.
func (n *node) connect(h vllm.Hello) *engine {
	n.t.Helper()
	e, err := n.try(h, h.RowBytes*h.Rows)
	if err != nil {
		n.t.Fatal(err)
	}
	return e
}

// try connects an engine whose region has bytes bytes.
func (n *node) try(h vllm.Hello, bytes int64) (*engine, error) {
	n.t.Helper()
	name, err := vllm.RegionName(h.EngineID)
	if err != nil {
		name = "bad"
	}
	path := filepath.Join(n.dir, name)
	region, err := shm.Create(path, bytes)
	if err != nil {
		n.t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		n.t.Fatal(err)
	}
	defer f.Close()
	client, err := vllm.Dial(n.socket(), h, f, 32)
	if err != nil {
		_ = region.Unlink()
		_ = region.Close()
		return nil, err
	}
	return &engine{t: n.t, client: client, region: region}, nil
}

func (e *engine) close() {
	e.t.Helper()
	_ = e.client.Close() // the node may have closed it
	if err := e.region.Unlink(); err != nil {
		e.t.Error(err)
	}
	if err := e.region.Close(); err != nil {
		e.t.Error(err)
	}
}

// key names row i.
func key(i int) vllm.Key { return vllm.Key{Hash: kv.Hash(sha256.Sum256(fmt.Append(nil, i)))} }

func keysOf(from, to int) (out []vllm.Key) {
	for i := from; i < to; i++ {
		out = append(out, key(i))
	}
	return out
}

// body is what a row holds: it follows from its key.
func body(k vllm.Key) []byte {
	sum := sha256.Sum256(append(k.Hash[:], byte(k.Group)))
	return bytes.Repeat(sum[:], rowBytes/len(sum))
}

// store stores rows, and returns how many were not there.
func (e *engine) store(tenant string, keys []vllm.Key) (fresh int) {
	e.t.Helper()
	e.n++
	id, places, err := e.client.Store(tenant, fmt.Sprint("store-", e.n), keys, patience)
	if err != nil {
		e.t.Fatal(err)
	}
	for i, p := range places {
		if p.Offset != vllm.NoPlace {
			copy(e.client.Pool(p), body(keys[i]))
			fresh++
		}
	}
	if fresh > 0 {
		if err := e.client.Commit(id, true); err != nil {
			e.t.Fatal(err)
		}
	}
	if _, _, err := e.client.Lookup("", "after", nil, patience); err != nil { // the commit has been read
		e.t.Fatal(err)
	}
	return fresh
}

// load looks rows up and loads what is found. It returns the number of rows, and fails for a row with other bytes.
func (e *engine) load(tenant string, keys []vllm.Key) (hits int) {
	e.t.Helper()
	id, places, err := e.client.Lookup(tenant, "load", keys, patience)
	if err != nil {
		e.t.Fatal(err)
	}
	for i, p := range places {
		if p.Offset == vllm.NoPlace {
			continue
		}
		hits++
		if !bytes.Equal(e.client.Pool(p), body(keys[i])) {
			e.t.Errorf("row %d has wrong bytes", i)
		}
	}
	if hits > 0 {
		if err := e.client.Release(vllm.Released{ID: id, Loaded: uint32(hits)}); err != nil {
			e.t.Fatal(err)
		}
	}
	return hits
}

// dialRaw connects without a Hello.
func (n *node) dialRaw() *net.UnixConn {
	n.t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: n.socket(), Net: "unix"})
	if err != nil {
		n.t.Fatal(err)
	}
	return c
}
