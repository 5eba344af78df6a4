// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// storesBlocks reports whether the worker of id, asked by who, stores blocks of what
// it lends.
func storesBlocks(t *testing.T, s *server.Server, who peercred.Peer, id int64, seed int) bool {
	t.Helper()
	k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(32, seed), End: 32, RequestID: "s", Readers: 1}
	m := [][]byte{{7}, lmcache.AppendOp(nil, lmcache.OpStore), k.Append(nil), lmcache.AppendInt(nil, id), lmcache.AppendBlockIDs(nil, [][]int{{1, 2}}), lmcache.AppendBytes(nil, nil)}
	got := s.AnswerAs(who, m)
	c, err := lmcache.DecodeCopied(got[len(got)-1])
	return err == nil && c.OK
}

// A segment is mapped for a worker that could open it by its own rights, and for
// nobody else: it is its user's, or the worker is root. Users that are not seen
// (other hosts, other network namespaces) lend nothing, unless a flag names their
// address.
func TestSegmentsOfOthersAreNotMapped(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{Trust: []netip.Prefix{netip.MustParsePrefix("192.0.2.8/32")}})
	defer n.stop()
	f := func(who peercred.Peer, want bool) {
		t.Helper()
		e := n.newEngine()
		e.tint(1)
		before := shm.Mapped()
		n.AnswerAs(who, append([][]byte{{7}, lmcache.AppendOp(nil, lmcache.OpRegisterKVCache)}, e.reg.Frames()...))
		if got := storesBlocks(t, n.Server, who, e.reg.InstanceID, int(e.reg.InstanceID)); got != want {
			t.Errorf("%v lends a segment of uid %d: %v\n%s", &who, os.Geteuid(), got, n.log.String())
		}
		if mapped := shm.Mapped() > before; mapped != want {
			t.Errorf("%v: segments are mapped: %v", &who, mapped)
		}
	}
	who := sameUser
	who.Socket = 0 // who made the segments is not to be proved here
	f(who, true)
	who.UID = 0
	f(who, true)
	f(otherHost, true)
	stranger := anotherUser
	stranger.Socket = 0
	f(stranger, false)
	f(unseenUser, false)
	f(remoteHost, false)

	// A peer whose user is not known does not make the server look for files either.
	absent := n.newEngine()
	absent.reg.Descriptors[0].ShmName = "/lmcache_kv_1_absent"
	n.AnswerAs(remoteHost, append([][]byte{{7}, lmcache.AppendOp(nil, lmcache.OpRegisterKVCache)}, absent.reg.Frames()...))
	if log := n.log.String(); strings.Contains(log, "no such file") || strings.Count(log, "192.0.2.7, which is not this host") < 2 {
		t.Errorf("log:\n%s", log)
	}
}

// A segment that another worker lends is not lent again: bytes of one engine do not
// become chunks of another's prompt. Once the process of the first is gone, it may
// be, and a worker may always register its own anew.
func TestSegmentIsLentOnce(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	name, end := lender(t, n.dir)
	lend := func(id int64) *engine {
		return &engine{drivenNode: n, reg: lmcache.KVCache{
			InstanceID: id, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/" + name)},
		}}
	}
	a, b := lend(1), lend(2)
	a.register()
	mapped := shm.Mapped()
	for range 3 {
		n.call(lmcache.OpRegisterKVCache, b.reg.Frames()...)
		if got := b.storeBlocks(tokens(32, 1), 0, 32, span(1, 2)); got.OK {
			t.Fatal("b stored a's memory")
		}
	}
	if got := shm.Mapped(); got != mapped {
		t.Errorf("declined registrations leave %d segments mapped", got-mapped)
	}
	a.register()
	if got := a.storeBlocks(tokens(32, 2), 0, 32, span(1, 2)); got != done {
		t.Errorf("a, registered again: %+v\n%s", got, n.log.String())
	}
	end()
	b.register()
	if got := b.storeBlocks(tokens(32, 3), 0, 32, span(1, 2)); got != done {
		t.Errorf("b after a's end: %+v\n%s", got, n.log.String())
	}
	if got := a.storeBlocks(tokens(32, 4), 0, 32, span(1, 2)); got.OK {
		t.Error("a, whose process is gone, still stores")
	}
}

// A segment that a living process of the same user made is not lent by another one
// over the socket: engines in containers have equal numbers, and so equal names.
func TestSegmentOfAnotherProcess(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	addr, err := n.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, "tcp://"+addr)
	name, end := lender(t, n.dir)
	foreign := lmcache.KVCache{
		InstanceID: 1, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/" + name)},
	}
	own := n.newEngine() // this process made these
	store := func(id int64, seed int) bool {
		t.Helper()
		k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(32, seed), End: 32, RequestID: "s", Readers: 1}
		got, err := c.StoreBlocks(t.Context(), k, id, [][]int{{1, 2}})
		return err == nil && got.OK
	}
	for range 2 {
		if err := c.RegisterKVCache(t.Context(), &foreign); err != nil {
			t.Fatal(err)
		}
		if store(1, 1) {
			t.Error("stored another process' memory")
		}
		if err := c.RegisterKVCache(t.Context(), &own.reg); err != nil {
			t.Fatal(err)
		}
		if !store(own.reg.InstanceID, 2) {
			t.Errorf("its own memory is declined\n%s", n.log.String())
		}
	}
	end()
	if !strings.Contains(n.log.String(), "is not the one that connects") {
		t.Errorf("log:\n%s", n.log.String())
	}
}

// Segments are bounded in total and for each who registers them, far below what a
// process may map; none keeps a descriptor. One who has its share leaves room for
// others, and what is declined leaves nothing mapped.
func TestSegmentsAreBounded(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{Trust: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	defer n.stop()
	n.SetMaxMappings(20)
	user := sameUser
	user.Socket = 0
	var engines []*engine
	for range 18 {
		engines = append(engines, n.newEngine()) // two segments each
	}
	descriptors, mapped := openFiles(t), shm.Mapped()
	seed := 0
	admitted := func(who peercred.Peer, of []*engine) (count int) {
		for _, e := range of {
			seed++
			n.AnswerAs(who, append([][]byte{{7}, lmcache.AppendOp(nil, lmcache.OpRegisterKVCache)}, e.reg.Frames()...))
			if storesBlocks(t, n.Server, who, e.reg.InstanceID, seed) {
				count++
			}
		}
		return count
	}
	if got := admitted(user, engines[:6]); got != 5 { // half of 20 segments
		t.Errorf("%d workers of one user are admitted, want 5\n%s", got, n.log.String())
	}
	if got := admitted(otherHost, engines[6:9]); got != 3 {
		t.Errorf("%d workers of another are admitted, want 3", got)
	}
	if got := admitted(remoteHost, engines[9:18]); got != 2 { // the rest of the total
		t.Errorf("%d workers of a third are admitted, want 2", got)
	}
	if got := shm.Mapped() - mapped; got != 20 {
		t.Errorf("%d segments are mapped, want 20", got)
	}
	if got := openFiles(t); got > descriptors {
		t.Errorf("%d descriptors are kept for them", got-descriptors)
	}
	if got := admitted(user, engines[:5]); got != 5 { // in place of themselves
		t.Errorf("%d workers register anew, want 5", got)
	}
	n.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, engines[0].reg.InstanceID))
	if got := admitted(user, engines[5:6]); got != 1 {
		t.Error("no room after a worker left")
	}
}

// A worker of more segments than any engine has, and one above the number of
// workers, are declined and leave nothing mapped.
func TestDeclinedRegistrationLeavesNothingMapped(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{MaxInstances: 2})
	defer n.stop()
	wide := n.newEngine()
	for i := range 600 {
		d := wide.reg.Descriptors[0]
		d.ShmName = fmt.Sprintf("/lmcache_kv_%d_wide%d", os.Getpid(), i)
		if err := os.WriteFile(filepath.Join(n.dir, d.ShmName), make([]byte, engineBytes), 0o600); err != nil {
			t.Fatal(err)
		}
		wide.reg.Descriptors = append(wide.reg.Descriptors, d)
	}
	engines := []*engine{n.newEngine(), n.newEngine(), n.newEngine()}
	mapped := shm.Mapped()
	wide.register()
	if got := shm.Mapped() - mapped; got != 0 {
		t.Errorf("a worker of %d segments leaves %d mapped", len(wide.reg.Descriptors), got)
	}
	wide.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, wide.reg.InstanceID))
	for i, e := range engines {
		n.call(lmcache.OpRegisterKVCache, e.reg.Frames()...)
		if got := e.storeBlocks(tokens(32, i), 0, 32, span(1, 2)); got.OK != (i < 2) {
			t.Errorf("worker %d of at most 2: %+v", i, got)
		}
	}
	for range 5 {
		n.call(lmcache.OpRegisterKVCache, engines[2].reg.Frames()...)
	}
	if got := shm.Mapped() - mapped; got != 4 {
		t.Errorf("%d segments of two workers are mapped, want 4", got)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
