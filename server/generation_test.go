// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// A recorded client of each release gets the answers that its own server gave,
// but for places.
func TestRecordedGenerations(t *testing.T) {
	for _, release := range []string{"0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5"} {
		t.Run(release, func(t *testing.T) { replayGeneration(t, release) })
	}
}

type recordedMessage struct {
	Way string
	Hex []testkit.Hex
}

func replayGeneration(t *testing.T, release string) {
	var rec struct {
		Sockets [2][]recordedMessage // the scheduler's and the worker's
	}
	testkit.ReadVector(t, "lmcache-mp/generation-"+release+".json", &rec)
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	of, err := lmcache.ParseGenerations(release)
	if err != nil {
		t.Fatal(err)
	}
	clients := [2]*oldClient{n.dial(t, 0), n.dial(t, 0)}
	// play sends what socket s said up to the first request of an operation.
	play := func(s int, until lmcache.Op) {
		for i, m := range rec.Sockets[s] {
			if m.Way != ">" {
				continue
			}
			frames := testkit.Frames(m.Hex)
			r, err := of.Read(frames, nil)
			if err != nil || len(r) != 1 {
				t.Fatalf("request %x: %v, %v", frames[1], r, err)
			}
			c := clients[s]
			c.uid = frames[0][0]
			got := c.call(frames[1][0], frames[2:]...)
			for _, answer := range rec.Sockets[s][i:] {
				if want := testkit.Frames(answer.Hex); answer.Way == "<" && bytes.Equal(want[0], frames[0]) {
					compareResult(t, r[0].Op, got, want[2:])
				}
			}
			if r[0].Op == until {
				rec.Sockets[s] = rec.Sockets[s][i+1:]
				return
			}
		}
	}
	const scheduler, worker = 0, 1
	play(worker, lmcache.OpCommitStore)
	play(scheduler, lmcache.OpQueryPrefetchStatus)
	play(worker, lmcache.OpCommitRetrieve)
	play(scheduler, lmcache.OpUnknown)
	play(worker, lmcache.OpUnknown)
	if log := n.log.String(); strings.Contains(log, "declined") {
		t.Errorf("log:\n%s", log)
	}
}

// compareResult compares a result with the recorded one, none or one frame.
func compareResult(t *testing.T, op lmcache.Op, got []byte, recorded [][]byte) {
	t.Helper()
	want := slices.Concat(recorded...)
	if op == lmcache.OpPrepareRetrieve {
		g, _ := lmcache.DecodePrepareRetrieve(got)
		if w, _ := lmcache.DecodePrepareRetrieve(want); len(w.Data) > 0 {
			if !g.Success || !sameTensors(t, g.Data, w.Data) {
				t.Errorf("prepare_retrieve: other tensors")
			}
			return
		}
	}
	if want != nil && got != nil {
		got, want = withoutPlaces(t, op, got), withoutPlaces(t, op, want)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%v: %x, want %x", op, got, want)
	}
}

// Two generations at once: one number on two connections is two operations, and
// each finds what the other stored.
func TestTwoGenerationsAtOnce(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	old, now := n.dial(t, 0), n.dial(t, 0)
	old.want(old.call(17), integer(16), "0.4.7's get_chunk_size")
	now.want(now.call(21), integer(16), "0.5.3's get_chunk_size")
	now.want(now.call(40), []byte{0x90}, "0.5.3's get_experimental")
	for i, c := range []*oldClient{old, now} {
		if p, err := lmcache.DecodePool(c.call([]byte{10, 14}[i], oldRegistration(int64(100+i)))); err != nil || p.ShmName == "" {
			t.Fatalf("registered at %+v, %v", p, err)
		}
		p, err := lmcache.DecodePrepareStore(c.call([]byte{12, 16}[i], oldKey(0, i, 32, "s"), integer(int64(100+i))))
		if err != nil || len(p.Slots) != 2 {
			t.Fatalf("prepare_store: %+v, %v", p, err)
		}
		c.want(c.call([]byte{13, 17}[i], oldKey(0, i, 32, "s"), integer(int64(100+i)), empty), yes, "commit_store")
	}
	for seed := range 2 {
		request := fmt.Sprint("r", seed)
		look := oldKey(lmcache.AllWorkers, seed, 32, request)
		old.want(old.call(5, look, integer(1)), nil, "0.4.7's lookup")
		old.want(old.call(6, text(request)), integer(2), "0.4.7's hit")
		old.want(old.call(8, look, integer(1)), nil, "0.4.7's free_lookup_locks")
		old.want(old.call(9, text(request)), nil, "0.4.7's end_session")
		now.want(now.call(8, look, integer(1)), nil, "0.5.3's lookup")
		now.want(now.call(9, text(request)), integer(2), "0.5.3's hit")
		now.want(now.call(12, look, integer(1)), nil, "0.5.3's free_lookup_locks")
	}
	if st := n.store.Stats(); st.EvictableObjs != 4 {
		t.Errorf("%d of 4 chunks are not pinned", st.EvictableObjs)
	}
}

// The second life of a server knows from the note of the first what the workers
// are: their first message is not their first request. Number 14 with a key and an
// id is commit_retrieve of 0.4.6 and prepare_retrieve of 0.4.7.
func TestNoteRestoresGeneration(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	a, b := n.dial(t, 0), n.dial(t, 0)
	a.want(a.call(16), integer(16), "0.4.6's get_chunk_size")
	a.want(a.call(10, oldRegistration(46)), nil, "0.4.6's registration")
	b.want(b.call(17), integer(16), "0.4.7's get_chunk_size")
	if b.call(10, oldRegistration(47)) == nil {
		t.Error("0.4.7 is not told of the pool")
	}
	key := oldKey(0, 1, 16, "s")
	if p, err := lmcache.DecodePrepareStore(b.call(12, key, integer(47))); err != nil || len(p.Slots) != 1 {
		t.Fatalf("prepare_store: %+v, %v", p, err)
	}
	b.want(b.call(13, key, integer(47), empty), yes, "commit_store")
	stop()

	n, stop = startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	look := n.dial(t, 20) // 0.4.7's scheduler; 0.4.6's would say the same
	look.want(look.call(5, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1)), nil, "lookup")
	look.want(look.call(6, text("r")), integer(1), "hit")
	a, b = n.dial(t, 20), n.dial(t, 20)
	a.want(a.call(14, oldKey(0, 1, 16, "r"), integer(46)), yes, "0.4.6's commit_retrieve")
	p, err := lmcache.DecodePrepareRetrieve(b.call(14, oldKey(0, 1, 16, "r"), integer(47)))
	if err != nil || !p.Success || len(p.Slots) != 1 {
		t.Errorf("0.4.7's prepare_retrieve: %+v, %v", p, err)
	}
	b.want(b.call(15, oldKey(0, 1, 16, "r"), integer(47)), yes, "0.4.7's commit_retrieve")
	for _, ping := range [][2]any{{a, byte(17)}, {b, byte(18)}} {
		c := ping[0].(*oldClient)
		c.want(c.call(ping[1].(byte)), yes, "ping of a worker that is known")
	}
}

// Heartbeats without an id bring workers back to a server that lost what it knew:
// false once, so that they register again, and true from then on. A server that
// took over every worker says true at once.
func TestPingWithoutID(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	for i, ping := range []byte{17, 18} {
		fresh, survivor := n.dial(t, 0), n.dial(t, 20)
		fresh.want(fresh.call(16+byte(i)), integer(16), "get_chunk_size")
		fresh.want(fresh.call(ping), yes, "ping of a client of this life")
		survivor.want(survivor.call(ping), no, "first ping of a client of an earlier life")
		survivor.want(survivor.call(ping), yes, "second ping")
		survivor.call(10, oldRegistration(int64(ping)))
		survivor.want(survivor.call(ping), yes, "ping after it registered")
		fresh.call(2, integer(int64(ping)))
		survivor.want(survivor.call(ping), no, "ping after its worker was dropped")
		survivor.call(10, oldRegistration(int64(ping)))
		stranger := n.dial(t, 20)
		stranger.send(ping)
		stranger.want(stranger.answer(20), no, "first ping of another one")
		stranger.want(stranger.call(11+byte(i), oldKey(0, 1, 16, "s"), integer(int64(999-i))), lmcache.AppendPrepareStore(nil, &lmcache.Slots{}), "prepare_store of an unknown worker")
		stranger.want(stranger.call(ping), no, "ping of a worker that named itself and is not known")
		stranger.want(stranger.call(ping), yes, "the next")
	}
	stop()
	n, stop = startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	for _, ping := range []byte{17, 18} {
		survivor := n.dial(t, 30)
		survivor.want(survivor.call(ping), yes, "ping to a server that took over every worker")
	}
}

// A restored worker whose heartbeats have no id does not count as silent before its first transfer:
// until then no heartbeat is known to be its own.
func TestRestoredWorkerWithoutID(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{})
	for i, first := range []byte{17, 21} {
		c := n.dial(t, 0)
		c.call(first)
		id := int64(47 + 6*i)
		c.call([]byte{10, 14}[i], oldRegistration(id))
		if i == 0 {
			c.want(c.call(18), yes, "ping")
		} else {
			c.want(c.call(22, integer(id)), yes, "ping")
		}
	}
	stop()
	n, stop = startNode(t, dir, 64, server.Options{})
	defer stop()
	for range 25 { // not all at once, as after a suspension
		n.Tick(time.Now())
	}
	for second := range 200 {
		n.Tick(time.Now().Add(time.Duration(second) * time.Second))
	}
	log := n.log.String()
	if !strings.Contains(log, "wakes it\" worker=53") || strings.Contains(log, "wakes it\" worker=47") {
		t.Errorf("log:\n%s", log)
	}
}

// Early clients name workers by process ids, which come again. A worker that was
// registered by a client of another generation is not this one's.
func TestWorkerOfAnotherGeneration(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	old, now := n.dial(t, 0), n.dial(t, 0)
	old.call(17)
	old.call(10, oldRegistration(4711))
	now.call(21)
	now.call(40)
	nothing := lmcache.AppendPrepareStore(nil, &lmcache.Slots{})
	now.want(now.call(16, oldKey(0, 1, 16, "s"), integer(4711)), nothing, "prepare_store of the other's worker")
	now.call(14, oldRegistration(4711))
	for _, c := range []struct {
		*oldClient
		prepare byte
		places  int
	}{{now, 16, 1}, {old, 12, 0}} {
		if p, err := lmcache.DecodePrepareStore(c.call(c.prepare, oldKey(0, 1, 16, "s"), integer(4711))); err != nil || len(p.Slots) != c.places {
			t.Errorf("after it registered: %+v, %v", p, err)
		}
	}
}

// A message that names nobody is not one of the worker with the number 0.
func TestMessageWithoutWorkerIsNotWorkerZero(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	old := n.Connect(peercred.Peer{UID: os.Geteuid()})
	old([][]byte{{0}, {17}})
	old([][]byte{{1}, {10}, oldRegistration(0)})
	now := n.Connect(peercred.Peer{UID: os.Geteuid()})
	now([][]byte{{20}, {9}, text("r")}) // 0.4.7's end_session, or a later status
	if got := now([][]byte{{21}, {22}, {0xc0}}); len(got) != 3 || !bytes.Equal(got[2], yes) {
		t.Errorf("ping of a later generation: %x", got)
	}
}

// What another user registered under a model tells nothing about this one's client.
func TestAnotherUsersGeneration(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	theirs := n.Connect(peercred.Peer{UID: os.Geteuid() + 1})
	theirs([][]byte{{0}, {17}})
	theirs([][]byte{{1}, {10}, oldRegistration(1)})
	mine := n.Connect(peercred.Peer{UID: os.Geteuid()})
	mine([][]byte{{20}, {8}, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1)})
	if got := mine([][]byte{{21}, {22}, {0xc0}}); len(got) != 3 || !bytes.Equal(got[2], yes) {
		t.Errorf("ping of a later generation: %x", got)
	}
}

// Clients whose releases move KV by CUDA IPC only are told so once each in the log,
// and nothing of theirs is read as something else.
func TestEarlyClientsAreRefused(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	for range 2 {
		c := n.dial(t, 0)
		c.want(c.call(11), nil, "0.4.4's get_chunk_size")
		c.want(c.call(5, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1)), nil, "lookup")
		c.want(c.call(6, text("r")), nil, "status")
	}
	if got := strings.Count(n.log.String(), `lmcache="0.4.3 to 0.4.5"`); got != 1 {
		t.Errorf("%d lines\n%s", got, n.log.String())
	}
}

// A client that opens the event of every answer cannot be declined a store: its
// registration is not answered, and what else it asks is.
func TestLentKVOfEarlyGenerations(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	pickled := append(msgp.AppendArrayHeader(nil, 1), 0xd5, 1, 0x80, 4)
	registration := [][]byte{nil, pickled, text("m"), integer(1), text("vllm"), {0x80}, {0x90}}
	for i, ping := range []byte{17, 18} {
		c := n.dial(t, 0)
		c.want(c.call(16+byte(i)), integer(16), "get_chunk_size")
		registration[0] = integer(int64(5 + i))
		c.quiet(1, registration[:6+i]...)
		c.want(c.call(ping), no, "ping")
	}
	if got := strings.Count(n.log.String(), "lends its KV by CUDA IPC"); got != 2 {
		t.Errorf("%d lines\n%s", got, n.log.String())
	}
	// 0.5.3 survives [b"", false] on CPUs only, later ones everywhere.
	c := n.dial(t, 0)
	c.call(21)
	c.call(40)
	c.quiet(1, registration...)
	onCPU := slices.Clone(registration)
	onCPU[1] = append(msgp.AppendArrayHeader(nil, 1), append([]byte{0xc7, 21, 1, 0x80, 4}, "CpuShmTensorWrapper"...)...)
	c.want(c.call(1, onCPU...), nil, "0.5.3's registration of KV on CPUs")
	c.want(c.call(6, oldKey(0, 1, 16, "r"), integer(6), []byte{0x91, 0x91, 1}, empty), lmcache.Copied{}.Append(nil), "0.5.3's store")
	c = n.dial(t, 0)
	c.call(21)
	c.call(32)
	c.want(c.call(1, registration...), nil, "0.5.5's registration")
}

// What a client of 0.4.6 is refused leaves no frame that it cannot decode: one
// would end the thread that serves its sockets.
func TestRefusedPickleOnlyClient(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOff})
	defer stop()
	c := n.dial(t, 0)
	c.call(16)
	c.want(c.call(10, oldRegistration(1)), nil, "registration without --pickle")
	c.want(c.call(10, []byte{0x80}), nil, "registration that does not decode")
	c.want(c.call(11, oldKey(0, 1, 16, "s"), integer(1)), lmcache.AppendPrepareStore(nil, &lmcache.Slots{}), "prepare_store")
	c.want(c.call(12, oldKey(0, 1, 16, "s"), integer(1), lmcache.AppendBytes(nil, []byte{1})), no, "commit_store")
	if !strings.Contains(n.log.String(), "--pickle on") {
		t.Errorf("log:\n%s", n.log.String())
	}
}

// --client-generation reads what would be ambiguous.
func TestForcedGeneration(t *testing.T) {
	for g, want := range map[lmcache.Generation][]byte{lmcache.Gen046: no, lmcache.Gen047: lmcache.AppendPrepareRetrieve(nil, nil)} {
		n, stop := startNode(t, t.TempDir(), 64, server.Options{ClientGenerations: lmcache.Only(g)})
		c := n.dial(t, 20)
		c.want(c.call(14, oldKey(0, 1, 16, "r"), integer(1)), want, fmt.Sprint("14 of ", g))
		stop()
	}
}

// Ranks that share one shard's objects are counted by what their scheduler sends
// beside the key: all of them may read, and the pins go when all have.
func TestReadersOfEarlyClients(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	c := n.dial(t, 0)
	c.call(21)
	c.call(40)
	for id := range int64(2) {
		c.call(14, oldRegistration(1+id))
	}
	c.call(16, oldKey(0, 1, 16, "s"), integer(1))
	c.want(c.call(17, oldKey(0, 1, 16, "s"), integer(1), empty), yes, "commit_store")
	for _, free := range []bool{false, true} {
		request := fmt.Sprint("r", free)
		c.call(8, oldKey(lmcache.AllWorkers, 1, 16, request), integer(2))
		c.want(c.call(9, text(request)), integer(1), "hit")
		for rank := range int64(2) {
			if got := n.store.Stats().EvictableObjs; got != 0 {
				t.Errorf("not pinned any more before rank %d", rank)
			}
			if !free {
				c.call(18, oldKey(0, 1, 16, request), integer(1+rank))
				c.want(c.call(19, oldKey(0, 1, 16, request), integer(1+rank)), yes, "commit_retrieve")
			}
		}
		if free {
			c.call(12, oldKey(lmcache.AllWorkers, 1, 16, request), integer(2))
		}
		if got := n.store.Stats().EvictableObjs; got != 1 {
			t.Errorf("pins are left, freed %v", free)
		}
	}
}
