// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// run runs a node of 16 MiB over m until the test ends, or stop is called.
func run(t *testing.T, m *Master, o NodeOptions) (n *Node, stop func()) {
	t.Helper()
	o.Memory, o.PingEvery = make([]byte, segmentAlign), 5*time.Millisecond
	n, err := NewNode(m, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return n, stop
}

// settled waits until a node is mounted and the master has said that it knows it.
func settled(t *testing.T, n *Node) {
	t.Helper()
	testkit.Eventually(t, "mounted", func() bool { return n.Stats().Mounted == 1 })
	pings := n.Stats().Pings
	testkit.Eventually(t, "known", func() bool { s := n.Stats(); return s.Mounted == 1 && s.Pings > pings })
}

func newMaster(t *testing.T) (*storetest.Master, *Master) {
	fake := storetest.New(t)
	m := masterOf(t, MasterOptions{Addresses: []string{fake.Addr}, CallTimeout: time.Minute})
	t.Cleanup(func() { m.Close() })
	return fake, m
}

// A master that has worked before may refuse calls for a while, for example while it starts. The node
// waits for it: clients may still read objects in the node's memory.
func TestNodeOutlivesAMasterThatRefuses(t *testing.T) {
	fake, m := newMaster(t)
	n, _ := run(t, m, NodeOptions{})
	settled(t, n)
	fake.Set(func() { fake.Answered = func(string, []byte) []byte { return storetest.Refusal(noFunction) } })
	failed := n.Stats().Failures
	testkit.Eventually(t, "several refusals", func() bool { return n.Stats().Failures > failed+3 })
	fake.Set(func() { fake.Answered = nil })
	pings := n.Stats().Pings
	testkit.Eventually(t, "pings again", func() bool { return n.Stats().Pings > pings+3 })
}

// A master that is not ready when a node starts may answer with any error. The node must not take it for a master of an unknown
// release, and waits for it.
func TestMasterThatIsNotReady(t *testing.T) {
	fake, m := newMaster(t)
	var n atomic.Int64
	fake.Answered = func(method string, b []byte) []byte {
		if method != "PutStart" { // which finds out the release
			return b
		}
		switch n.Add(1) {
		case 1: // the RPC is out of order
			return storetest.Refusal(3)
		case 2: // the master does not serve now
			code := int32(-1010)
			binary.LittleEndian.PutUint32(b[len(b)-4:], uint32(code))
		}
		return b
	}
	node, _ := run(t, m, NodeOptions{})
	settled(t, node)
	if n.Load() < 3 {
		t.Error(n.Load())
	}
}

// The master has an unknown release, or the server is no master. Then a node mounts nothing there, every put and get fails, and each
// error names the cause.
func TestMasterOfAnotherRelease(t *testing.T) {
	fake := storetest.New(t)
	fake.Answered = func(method string, b []byte) []byte {
		if method == "PutStart" { // which finds out the release
			return storetest.Refusal(badArguments)
		}
		return b
	}
	for address, want := range map[string]error{fake.Addr: ErrVersion, peer(t, "HTTP/1.1 400 Bad Request\r\n\r\n"): errProtocol} {
		m := masterOf(t, MasterOptions{Addresses: []string{address}, CallTimeout: time.Minute})
		te := transfer.New(transfer.Options{})
		c := NewClient(m, te, ClientOptions{})
		objects := []Object{{"a", [][]byte{{1}}}, {"b", [][]byte{{2}}}}
		for _, err := range append(c.Put(t.Context(), objects), c.Get(t.Context(), objects)...) {
			if !errors.Is(err, want) {
				t.Error(err)
			}
		}
		present := make([]bool, 1)
		if err := m.Exists(t.Context(), []string{"a"}, present); !errors.Is(err, want) || present[0] {
			t.Error(present, err)
		}
		n, err := NewNode(m, NodeOptions{Memory: make([]byte, segmentAlign), PingEvery: 5 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- n.Run(ctx) }()
		if want != ErrVersion { // another server listens there now; a master may do so later
			testkit.Eventually(t, "it tries on", func() bool { return n.Stats().Failures > 3 })
			cancel()
		}
		if err := <-done; want == ErrVersion && (!errors.Is(err, want) || !strings.Contains(err.Error(), "0.3.13")) || want != ErrVersion && err != nil {
			t.Error(err)
		}
		if s := n.Stats(); s.Mounted != 0 || s.Pings != 0 {
			t.Errorf("%+v", s)
		}
		cancel()
		te.Close()
		m.Close()
	}
	fake.Set(func() {
		if len(fake.Segments)+len(fake.Objects) != 0 {
			t.Error(fake.Segments, fake.Objects)
		}
	})
}

// An error about a release says whether the master refused the request or sent an answer that cannot be read.
func TestReleaseErrorsNameTheirCause(t *testing.T) {
	for what, answer := range map[string]func(b []byte) []byte{
		"refuses the requests of 0.3.7, 0.3.11, 0.3.12, 0.3.13 and 0.3.14": func([]byte) []byte { return storetest.Refusal(badArguments) },
		"its answer to PutStart cannot be read": func(b []byte) []byte {
			b[responseHeader+4] |= 2 // a length of four bytes, which is not there
			return b
		},
	} {
		fake := storetest.New(t)
		fake.Answered = func(method string, b []byte) []byte {
			if method == "PutStart" {
				return answer(b)
			}
			return b
		}
		m := masterOf(t, MasterOptions{Addresses: []string{fake.Addr}})
		if _, err := m.Version(t.Context()); !errors.Is(err, ErrVersion) || !strings.Contains(err.Error(), what) {
			t.Errorf("%v, want %q", err, what)
		}
		m.Close()
	}
}

// The master carried out a mount but its answer was lost. Clients may have put objects there, and may still read
// them. So after the master forgot the node, the node never mounts those addresses again.
func TestMountWithoutAnAnswerIsALife(t *testing.T) {
	fake, m := newMaster(t)
	var once atomic.Bool
	var base uint64
	fake.Answered = func(method string, b []byte) []byte {
		if method == "MountSegment" && once.CompareAndSwap(false, true) {
			fake.Set(func() { base = fake.Segments[0].Base })
			fake.Forget()
			return nil
		}
		return b
	}
	n, _ := run(t, m, NodeOptions{})
	settled(t, n)
	fake.Set(func() {
		for _, s := range fake.Segments {
			if s.Base == base {
				t.Error("addresses that others may know were mounted again")
			}
		}
	})
}

// A node that is stopped while it mounts leaves no segment behind, into which others would put for ten seconds.
func TestNodeStoppedWhileItMounts(t *testing.T) {
	fake, m := newMaster(t)
	mounted, stopped := make(chan bool), make(chan bool)
	var once atomic.Bool
	fake.Answered = func(method string, b []byte) []byte {
		if method == "MountSegment" && once.CompareAndSwap(false, true) {
			mounted <- true
			<-stopped
		}
		return b
	}
	_, stop := run(t, m, NodeOptions{})
	<-mounted
	stop()
	close(stopped)
	fake.Set(func() {
		if len(fake.Segments) > 0 {
			t.Error("the segment is still there")
		}
	})
}

// A master says by mistake that it does not know a node. The node then mounts under new addresses and unmounts the
// former ones: else the master would place half of all objects at addresses that no node serves.
func TestFormerLifeIsUnmounted(t *testing.T) {
	fake, m := newMaster(t)
	n, _ := run(t, m, NodeOptions{})
	settled(t, n)
	fake.Set(fake.ForgetClients)
	testkit.Eventually(t, "mounted again", func() bool { s := n.Stats(); return s.Lives == 2 && s.Mounted == 1 })
	fake.Set(func() {
		if len(fake.Segments) != 1 || fake.Segments[0].Endpoint != n.Stats().Endpoint {
			t.Errorf("%+v", fake.Segments)
		}
	})
}

// Objects stay readable for the whole time of grace, also where a ping gets lost meanwhile.
func TestGraceOutlastsALostPing(t *testing.T) {
	const grace = 300 * time.Millisecond
	fake, m := newMaster(t)
	n, stop := run(t, m, NodeOptions{Grace: grace})
	settled(t, n)
	var told, gone atomic.Int64
	fake.Set(func() {
		fake.Answered = func(method string, b []byte) []byte {
			switch {
			case method == "GracefulUnmountSegment":
				told.Store(time.Now().UnixNano())
			case method == "UnmountSegment":
				gone.Store(time.Now().UnixNano())
			case method == "Ping" && told.Load() > 0:
				return nil
			}
			return b
		}
	})
	stop()
	if told.Load() == 0 || gone.Load() == 0 {
		t.Fatal("the master was not told")
	}
	if d := time.Duration(gone.Load() - told.Load()); d < grace-10*time.Millisecond {
		t.Errorf("the segment was taken back after %v", d)
	}
}

// A node whose ports cannot be opened for a new life tries again, and ends only where that is so at its start.
func TestPortsThatCannotBeOpened(t *testing.T) {
	fake, m := newMaster(t)
	full := errors.New("no port is left")
	n, err := NewNode(m, NodeOptions{Memory: make([]byte, segmentAlign), PingEvery: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	n.listen = func(transfer.TargetOptions, *transfer.Table) (*transfer.Target, error) { return nil, full }
	if err := n.Run(t.Context()); !errors.Is(err, full) {
		t.Fatal(err)
	}
	var refused, tries atomic.Int64
	n.listen = func(o transfer.TargetOptions, table *transfer.Table) (*transfer.Target, error) {
		if tries.Add(1) > 1 && refused.Add(1) <= 3 {
			return nil, full
		}
		return transfer.Listen(o, table)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	settled(t, n)
	fake.Forget()
	testkit.Eventually(t, "mounted again", func() bool { return n.Stats().Lives == 2 && n.Stats().Mounted == 1 })
	cancel()
	if err := <-done; err != nil || refused.Load() < 4 {
		t.Error(err, refused.Load())
	}
}

// A node does not report itself as mounted when the master was silent for so long that it has forgotten the node.
func TestMountedEndsWithASilentMaster(t *testing.T) {
	fake, m := newMaster(t)
	n, err := NewNode(m, NodeOptions{Memory: make([]byte, segmentAlign), PingEvery: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	n.forgotten = 20 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	mounted := func(v int64) func() bool { return func() bool { return n.Stats().Mounted == v } }
	settled(t, n)
	fake.Set(func() { fake.Answered = func(string, []byte) []byte { return nil } })
	testkit.Eventually(t, "not known", mounted(0))
	fake.Set(func() { fake.Answered = nil })
	testkit.Eventually(t, "known again", mounted(1))
	if n.Stats().Lives != 1 {
		t.Error("a master that remembers the node ended its life")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Nodes may be named as hosts and by addresses of IPv6.
func TestNamesOfNodes(t *testing.T) {
	for _, host := range []string{"localhost", "::1"} {
		if l, err := net.Listen("tcp", net.JoinHostPort(host, "0")); err != nil {
			t.Log(host, err) // this machine has none
			continue
		} else {
			l.Close()
		}
		_, m := newMaster(t)
		n, stop := run(t, m, NodeOptions{Host: host})
		settled(t, n)
		te := transfer.New(transfer.Options{})
		c := NewClient(m, te, ClientOptions{})
		if errs := c.Put(t.Context(), []Object{{"a", [][]byte{{7}}}}); errs[0] != nil {
			t.Fatal(host, errs)
		}
		got := make([]byte, 1)
		if errs := c.Get(t.Context(), []Object{{"a", [][]byte{got}}}); errs[0] != nil || got[0] != 7 {
			t.Error(host, got, errs)
		}
		te.Close()
		stop()
	}
}

// A master may give a replica an invalid address, or one where no node listens. A read of an object that has no other replica fails in
// time, and the other objects of the batch are read.
func TestWrongNamesOfNodes(t *testing.T) {
	c := newCluster(t, 1, ClientOptions{})
	if errs := c.client.Put(t.Context(), []Object{{"a", [][]byte{{7}}}, {"b", [][]byte{{8}}}}); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	for _, name := range []string{"", ":", "nosuch", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:0", "[::1", "a\x00b:1\n", strings.Repeat("x", 10_000) + ":1"} {
		c.master.Set(func() { c.master.Objects["a"].Pieces[0].Endpoint = name })
		got := []byte{0, 0}
		errs := c.client.Get(t.Context(), []Object{{"a", [][]byte{got[:1]}}, {"b", [][]byte{got[1:]}}})
		if !errors.Is(errs[0], ErrTransfer) && !errors.Is(errs[0], ErrUnreadable) || errs[1] != nil || got[1] != 8 {
			t.Errorf("%.20q: %v", name, errs)
		}
	}
}

// Lives that follow each other leave nothing open.
func TestManyLivesLeaveNothing(t *testing.T) {
	fake, m := newMaster(t)
	n, _ := run(t, m, NodeOptions{})
	open := func() int {
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc to count descriptors in: ", err)
		}
		return len(files)
	}
	settled(t, n)
	files, goroutines := open(), runtime.NumGoroutine()
	testkit.Eventually(t, "20 lives", func() bool { fake.Set(fake.ForgetClients); return n.Stats().Lives > 20 })
	settled(t, n)
	testkit.Eventually(t, "everything closed", func() bool { return open() <= files+2 && runtime.NumGoroutine() <= goroutines+4 })
}
