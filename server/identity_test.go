// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/pickle"
	"github.com/kvasir-kv/kvasir/server"
)

var (
	anotherUser = peercred.Peer{UID: 4242, Addr: netip.MustParseAddr("127.0.0.1"), Socket: 1}
	thirdUser   = peercred.Peer{UID: 4243, Addr: netip.MustParseAddr("127.0.0.1"), Socket: 2}
	sameUser    = peercred.Peer{UID: os.Geteuid(), Addr: netip.MustParseAddr("127.0.0.1"), Socket: 3}
	rootUser    = peercred.Peer{UID: 0, Addr: netip.MustParseAddr("127.0.0.1"), Socket: 4}
	unseenUser  = peercred.Peer{Addr: netip.MustParseAddr("127.0.0.1"), Err: peercred.ErrNotHere}
	unseenLocal = peercred.Peer{Err: peercred.ErrUnmapped} // over a UNIX socket
	remoteHost  = peercred.Peer{Addr: netip.MustParseAddr("192.0.2.7"), Err: peercred.ErrNotHere}
	otherHost   = peercred.Peer{Addr: netip.MustParseAddr("192.0.2.8"), Err: peercred.ErrNotHere}
)

// visitor is a worker that somebody else runs.
type visitor struct {
	t   *testing.T
	s   *server.Server
	who peercred.Peer
	id  int64
}

func (v *visitor) call(op lmcache.Op, payloads ...[]byte) []byte {
	v.t.Helper()
	got := v.s.AnswerAs(v.who, append([][]byte{{7}, lmcache.AppendOp(nil, op)}, payloads...))
	if len(got) == 2 {
		return nil
	}
	return got[2]
}

func (v *visitor) register() lmcache.Pool {
	v.t.Helper()
	p := lmcache.EngineDriven{
		InstanceID: v.id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: smallLayout.Layers, Hidden: smallLayout.Hidden,
		DType: smallLayout.DType, SinglePlane: smallLayout.SinglePlane, PhysicalSlots: smallLayout.Slots,
	}
	pool, err := lmcache.DecodePool(v.call(lmcache.OpRegisterEngineDriven, p.Append(nil)))
	if err != nil {
		v.t.Fatal(err)
	}
	return pool
}

func (v *visitor) prepareStore(k *lmcache.Key) lmcache.PrepareStore {
	v.t.Helper()
	got, err := lmcache.DecodePrepareStore(v.call(lmcache.OpPrepareStore, k.Append(nil), lmcache.AppendInt(nil, v.id)))
	if err != nil {
		v.t.Fatal(err)
	}
	return got
}

func (v *visitor) commitStore(k *lmcache.Key, data []byte) bool {
	v.t.Helper()
	return v.bool(lmcache.OpCommitStore, k.Append(nil), lmcache.AppendInt(nil, v.id), lmcache.AppendBytes(nil, data))
}

func (v *visitor) bool(op lmcache.Op, payloads ...[]byte) bool {
	v.t.Helper()
	ok, err := lmcache.DecodeBool(v.call(op, payloads...))
	if err != nil {
		v.t.Fatal(err)
	}
	return ok
}

func (v *visitor) lookup(k lmcache.Key) int {
	v.t.Helper()
	k.Worker = lmcache.AllWorkers
	v.call(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1))
	n, err := lmcache.DecodeInt(v.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, k.RequestID)))
	if err != nil {
		v.t.Fatal(err)
	}
	return int(n)
}

func (v *visitor) prepareRetrieve(k *lmcache.Key) lmcache.PrepareRetrieve {
	v.t.Helper()
	got, err := lmcache.DecodePrepareRetrieve(v.call(lmcache.OpPrepareRetrieve, k.Append(nil), lmcache.AppendInt(nil, v.id)))
	if err != nil {
		v.t.Fatal(err)
	}
	return got
}

func promptKey(seed, chunks int) *lmcache.Key {
	return &lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(16*chunks, seed), End: 16 * chunks, RequestID: fmt.Sprint("r", seed), Readers: 1}
}

// pickled is a commit's data: chunks of one byte, repeated.
func pickled(t *testing.T, chunks int, fill byte) []byte {
	t.Helper()
	l, ok := pickle.NewLayout(smallLayout.DType, smallLayout.Shape())
	if !ok {
		t.Fatal(smallLayout)
	}
	return l.Append(nil, chunks, func(_ int, dst []byte) {
		for i := range dst {
			dst[i] = fill
		}
	})
}

// Only who could open the pool is told that it exists and where places in it are,
// in every mode: this user, root, and addresses that a flag names. What a worker of
// another host found under the pool's name would be another server's.
func TestPlacesOnlyForThoseWhoMayOpenThePool(t *testing.T) {
	trust := []netip.Prefix{netip.MustParsePrefix("192.0.2.8/32")}
	for _, mode := range []server.PickleMode{server.PickleOff, server.PickleOn, server.PickleOnly} {
		s, st, _ := newPickleServer(t, 16, 1<<20, server.Options{Pickle: mode, Trust: trust})
		f := func(name string, who peercred.Peer, told bool) {
			t.Helper()
			v := &visitor{t, s, who, int64(1000 + 10*int(mode) + len(name))}
			told = told && mode != server.PickleOnly
			if got := v.register(); (got.ShmName != "") != told || (got.Bytes != 0) != told {
				t.Errorf("mode %d: %s is told of %+v", mode, name, got)
			}
			k := promptKey(int(v.id), 2)
			got := v.prepareStore(k)
			if want := map[bool]int{true: 2}[told]; len(got.Slots) != want {
				t.Errorf("mode %d: %s is told %d places, want %d", mode, name, len(got.Slots), want)
			}
			stored := v.commitStore(k, pickled(t, 2, byte(v.id)))
			if want := mode != server.PickleOff; stored != want {
				t.Errorf("mode %d: %s stores through the socket: %v, want %v", mode, name, stored, want)
			}
			if back := v.prepareRetrieve(k); len(back.Slots) > 0 {
				t.Errorf("mode %d: %s is told places to read: %+v", mode, name, back)
			}
		}
		f("this user", sameUser, true)
		f("root", rootUser, true)
		f("other user", anotherUser, false)
		f("unseen user", unseenUser, false)
		f("unmapped user", unseenLocal, false)
		f("another host", remoteHost, false)
		f("a trusted host", otherHost, true)
		if got := st.Stats(); got.StagedBytes != 0 {
			t.Errorf("mode %d: %+v", mode, got)
		}
	}
}

// Memory that was never written as a chunk is not read through the socket: neither
// by another user, nor by a worker that takes places, leaves them unwritten and
// then says that it cannot map the pool.
func TestUnwrittenMemoryIsNotReadThroughTheSocket(t *testing.T) {
	secret := []byte("another tenant's prompt")
	f := func(name string, who peercred.Peer, attack func(v *visitor) []*lmcache.Key) {
		t.Helper()
		s, _, dir := newPickleServer(t, 16, 8*4096, server.Options{Pickle: server.PickleOn})
		full := bytes.Repeat(append(secret, 0), 8*4096/(len(secret)+1))
		if err := os.WriteFile(dir+"/pool", full, 0o600); err != nil { // what chunks before have left
			t.Fatal(err)
		}
		if err := os.Truncate(dir+"/pool", 8*4096); err != nil {
			t.Fatal(err)
		}
		v := &visitor{t, s, who, 7}
		v.register()
		for _, k := range attack(v) {
			v.lookup(*k)
			if got := v.prepareRetrieve(k); bytes.Contains(got.Data, secret) {
				t.Errorf("%s read what was in memory before", name)
			}
		}
	}
	commitFirst := func(v *visitor) []*lmcache.Key {
		a, b := promptKey(1, 2), promptKey(2, 1)
		v.prepareStore(a)
		v.commitStore(a, nil) // nothing was written
		v.prepareStore(b)
		v.commitStore(b, pickled(t, 1, 9))
		return []*lmcache.Key{a, b}
	}
	commitLate := func(v *visitor) []*lmcache.Key {
		a, b := promptKey(1, 2), promptKey(2, 1)
		v.prepareStore(a)
		v.prepareStore(b)
		v.commitStore(b, pickled(t, 1, 9)) // from now on it pickles
		if v.commitStore(a, nil) {
			t.Error("places of a worker that pickles became chunks")
		}
		return []*lmcache.Key{a, b}
	}
	again := func(v *visitor) []*lmcache.Key {
		a := promptKey(1, 2)
		v.prepareStore(a)
		v.commitStore(a, nil)
		v.register()
		v.commitStore(promptKey(2, 1), pickled(t, 1, 9))
		return []*lmcache.Key{a}
	}
	for name, attack := range map[string]func(*visitor) []*lmcache.Key{"commit first": commitFirst, "commit late": commitLate, "registered again": again} {
		f("another user, "+name, anotherUser, attack)
		f("this user, "+name, sameUser, attack)
	}
}

// A worker that stored in the pool itself keeps doing so: its pickled commit is
// declined, the places that it named come back, and its side is kept over a
// restart of the server. A worker that never did may still turn out to pickle.
func TestSideIsKept(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 16, server.Options{Pickle: server.PickleOn})
	a, b := &visitor{t, n.Server, sameUser, 7}, &visitor{t, n.Server, sameUser, 8}
	for _, v := range []*visitor{a, b} {
		v.register()
	}
	first := promptKey(1, 1)
	a.prepareStore(first)
	if !a.commitStore(first, nil) {
		t.Fatal("no places")
	}
	check := func() {
		t.Helper()
		k := promptKey(2, 1)
		if got := a.prepareStore(k); len(got.Slots) != 1 {
			t.Fatalf("%+v", got)
		}
		if a.commitStore(k, pickled(t, 1, 5)) {
			t.Error("a changed its side")
		}
		if got := n.store.Stats(); got.Transfers != 0 || got.StagedBytes != 0 {
			t.Errorf("a's places did not come back: %+v", got)
		}
	}
	check()
	b.prepareStore(promptKey(3, 1))
	if !b.commitStore(promptKey(3, 1), pickled(t, 1, 6)) {
		t.Error("b, which cannot map the pool, is declined")
	}
	if got := b.prepareStore(promptKey(4, 1)); len(got.Slots) != 0 {
		t.Errorf("b is told places: %+v", got)
	}
	stop()
	n, stop = startNode(t, dir, 16, server.Options{Pickle: server.PickleOn})
	defer stop()
	a.s, b.s = n.Server, n.Server
	check()
	if got := b.prepareStore(promptKey(5, 1)); len(got.Slots) != 0 {
		t.Errorf("b is told places after the restart: %+v", got)
	}
}

// A worker belongs to who registered it: under its id nobody else stores, loads,
// ends, pings or replaces it, before and after a restart of the server. Somebody else
// who registers the same id has another worker, and changes nothing for the owner.
func TestWorkerBelongsToWhoRegisteredIt(t *testing.T) {
	for _, owner := range []peercred.Peer{anotherUser, remoteHost, unseenLocal} {
		dir := t.TempDir()
		n, stop := startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
		own := &visitor{t, n.Server, owner, 7}
		own.register()
		if !own.commitStore(promptKey(1, 1), pickled(t, 1, 1)) {
			t.Fatal("the owner does not store")
		}
		for life := range 2 {
			for i, who := range []peercred.Peer{thirdUser, sameUser, rootUser, unseenUser, otherHost} {
				if who.UID == 0 && os.Geteuid() == 0 && i == 1 {
					continue // this user is root
				}
				v := &visitor{t, n.Server, who, 7}
				name := fmt.Sprintf("life %d: %v as worker of %v", life, &who, &owner)
				k := promptKey(1, 1)
				v.lookup(*k)
				if got := v.prepareRetrieve(k); got.Success {
					t.Errorf("%s loads", name)
				}
				if got := v.prepareStore(promptKey(2, 1)); len(got.Slots) > 0 {
					t.Errorf("%s is told places", name)
				}
				if v.commitStore(promptKey(2, 1), pickled(t, 1, 66)) {
					t.Errorf("%s stores", name)
				}
				if v.bool(lmcache.OpPing, lmcache.AppendInt(nil, 7)) {
					t.Errorf("%s pings", name)
				}
				v.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 7))
				v.register()
				if mine := promptKey(100+10*life+i, 1); !v.commitStore(mine, pickled(t, 1, 66)) {
					t.Errorf("%s, registered: its own chunk is declined", name)
				}
				v.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, 7))
			}
			if !own.bool(lmcache.OpPing, lmcache.AppendInt(nil, 7)) {
				t.Error("the owner's ping is answered as an unknown worker's")
			}
			if !own.commitStore(promptKey(3+life, 1), pickled(t, 1, 3)) {
				t.Error("the owner does not store any more")
			}
			if n := own.lookup(*promptKey(1, 1)); n != 1 {
				t.Errorf("hit %d", n)
			}
			if got := own.prepareRetrieve(promptKey(1, 1)); !got.Success {
				t.Error("the owner does not load")
			}
			if life == 0 {
				stop()
				n, stop = startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
				own.s = n.Server
			}
		}
		stop()
	}
}

// Two who use the same id at the same time have transfers of their own: one's
// commit, or end, does not touch what the other was told.
func TestEqualIDsOfTwoUsers(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Trust: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	defer stop()
	a, b := &visitor{t, n.Server, remoteHost, 7}, &visitor{t, n.Server, otherHost, 7} // both may open the pool
	a.register()
	b.register()
	k := promptKey(1, 2)
	if got := a.prepareStore(k); len(got.Slots) != 2 {
		t.Fatalf("%+v", got)
	}
	if b.commitStore(k, nil) {
		t.Error("b's commit made a's unwritten places chunks")
	}
	if hit := b.lookup(*k); hit != 0 {
		t.Errorf("hit %d", hit)
	}
	b.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 7))
	if got := n.store.Stats(); got.Quarantined != 0 || got.Transfers != 1 {
		t.Errorf("b's end touches a's transfer: %+v", got)
	}
	if !a.commitStore(k, nil) {
		t.Error("a's own commit is declined")
	}
}

// Another layout that somebody else registers under a model's name makes nobody
// else's lookups misses, whether it stores or not; one's own newer engine does.
func TestLayoutOfAnotherUser(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	other := smallLayout
	other.Hidden /= 2
	layout := func(v *visitor, l kv.Layout) {
		p := lmcache.EngineDriven{
			InstanceID: v.id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: l.Layers, Hidden: l.Hidden,
			DType: l.DType, SinglePlane: l.SinglePlane, PhysicalSlots: l.Slots,
		}
		v.call(lmcache.OpRegisterEngineDriven, p.Append(nil))
	}
	us := &visitor{t, n.Server, sameUser, 1}
	us.register()
	k := promptKey(1, 2)
	us.prepareStore(k)
	if !us.commitStore(k, nil) {
		t.Fatal("not stored")
	}
	for _, who := range []peercred.Peer{anotherUser, remoteHost, unseenUser, unseenLocal} {
		v := &visitor{t, n.Server, who, 2}
		layout(v, other)
		v.prepareStore(promptKey(2, 1))
		if hit := us.lookup(*k); hit != 2 {
			t.Errorf("hit %d of 2 after %v registered another layout", hit, &who)
		}
	}
	layout(&visitor{t, n.Server, sameUser, 3}, other)
	if hit := us.lookup(*k); hit != 0 {
		t.Errorf("hit %d after this user's own newer engine registered another layout", hit)
	}
}

// A model whose workers are not all one's own, as with hosts of their own, is looked
// up in the layouts of all of them.
func TestLayoutsOfWorkersOnTwoHosts(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	workers := []*visitor{{t, n.Server, sameUser, 1}, {t, n.Server, remoteHost, 2}}
	k := promptKey(1, 1)
	k.WorldSize = 2
	for i, v := range workers { // stages of unequal depth
		l := smallLayout
		l.Layers += i
		p := lmcache.EngineDriven{
			InstanceID: v.id, Model: "m", WorldSize: 2, BlockSize: 16, Layers: l.Layers, Hidden: l.Hidden,
			DType: l.DType, SinglePlane: l.SinglePlane, PhysicalSlots: l.Slots,
		}
		v.call(lmcache.OpRegisterEngineDriven, p.Append(nil))
		pl, ok := pickle.NewLayout(l.DType, l.Shape())
		if !ok {
			t.Fatal(l)
		}
		shard := *k
		shard.Worker = i
		if !v.commitStore(&shard, pl.Append(nil, 1, func(int, []byte) {})) {
			t.Fatalf("worker %d does not store\n%s", i, n.log)
		}
	}
	for _, v := range workers {
		if hit := v.lookup(*k); hit != 1 {
			t.Errorf("hit %d of 1 for %v", hit, &v.who)
		}
	}
}

// A worker that was dropped registers again by its pings, each time, whatever another
// one of the same id does.
func TestDroppedTwiceComesBack(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{MaxInstances: 2})
	defer stop()
	v, other := &visitor{t, n.Server, sameUser, 7}, &visitor{t, n.Server, anotherUser, 7}
	ping := func(v *visitor) bool { return v.bool(lmcache.OpPing, lmcache.AppendInt(nil, v.id)) }
	for drop := range 3 {
		v.register()
		if !ping(v) {
			t.Fatalf("drop %d: a registered worker's ping is false", drop)
		}
		if ping(other) || !ping(other) {
			t.Fatalf("drop %d: pings of the other are not false, true", drop)
		}
		other.register()
		third := &visitor{t, n.Server, sameUser, 8}
		for try := range 3 { // declined: there are two already
			if ping(third) || !ping(third) {
				t.Fatalf("drop %d, try %d: pings of one that was declined are not false, true", drop, try)
			}
			third.register()
		}
		for _, v := range []*visitor{v, other} {
			v.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 7))
		}
		if ping(v) || !ping(v) {
			t.Fatalf("drop %d: pings after it are not false, true", drop)
		}
	}
}

// A restart with other flags tells nobody places who may not open the pool by them:
// neither a worker that is no longer trusted, nor anybody with pickle only.
func TestRestartWithOtherFlagsRevealsNoPlaces(t *testing.T) {
	trusting := server.Options{Pickle: server.PickleOn, Trust: []netip.Prefix{netip.MustParsePrefix("192.0.2.8/32")}}
	f := func(name string, who peercred.Peer, stores bool, after server.Options, want int) {
		t.Helper()
		dir := t.TempDir()
		n, stop := startNode(t, dir, 16, trusting)
		v := &visitor{t, n.Server, who, 7}
		v.register()
		if k := promptKey(1, 1); stores && (len(v.prepareStore(k).Slots) != 1 || !v.commitStore(k, nil)) {
			t.Fatalf("%s: no places before", name)
		}
		stop()
		n, stop = startNode(t, dir, 16, after)
		defer stop()
		v.s = n.Server
		if got := v.prepareStore(promptKey(2, 1)); len(got.Slots) != want {
			t.Errorf("%s: %d places, want %d", name, len(got.Slots), want)
		}
		v.lookup(*promptKey(1, 1))
		if got := v.prepareRetrieve(promptKey(1, 1)); want == 0 && len(got.Slots) > 0 {
			t.Errorf("%s: places to read: %+v", name, got)
		}
		if want == 0 && v.commitStore(promptKey(3, 1), pickled(t, 1, 3)) == stores {
			t.Errorf("%s: pickles: %v", name, !stores) // it keeps its side until it registers again
		}
	}
	for _, stores := range []bool{false, true} {
		f(fmt.Sprint("as before, stores ", stores), otherHost, stores, trusting, 1)
		f(fmt.Sprint("no longer trusted, stores ", stores), otherHost, stores, server.Options{Pickle: server.PickleOn}, 0)
		f(fmt.Sprint("pickle only, stores ", stores), sameUser, stores, server.Options{Pickle: server.PickleOnly}, 0)
		f(fmt.Sprint("this user, stores ", stores), sameUser, stores, server.Options{}, 1)
	}
}

// What a trusted address means is said at the start.
func TestTrustedAddressesAreLogged(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{Trust: []netip.Prefix{netip.MustParsePrefix("172.17.0.0/16")}})
	defer stop()
	if got := n.log.String(); !strings.Contains(got, "172.17.0.0/16") || !strings.Contains(got, "counts as this server's user") {
		t.Errorf("log %q", got)
	}
}
