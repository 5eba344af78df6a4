// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// Engines number their requests from 0, so two of them have requests of one id in
// progress. Each scheduler is told its own hit and ends its own request: a hit of
// another one would be chunks that were never stored.
func TestEqualRequestIDsOfTwoEngines(t *testing.T) {
	f := func(name string, second peercred.Peer) {
		t.Helper()
		n, stop := startNode(t, t.TempDir(), 16, server.Options{Pickle: server.PickleOn})
		defer stop()
		worker := &visitor{t, n.Server, sameUser, 7}
		worker.register()
		long := promptKey(1, 3)
		worker.prepareStore(long)
		if !worker.commitStore(long, nil) {
			t.Fatal("not stored")
		}
		scheduler := func(who peercred.Peer, socket uint64) *visitor {
			who.Socket = socket
			return &visitor{t, n.Server, who, 0}
		}
		a, b := scheduler(sameUser, 101), scheduler(second, 102)
		look := func(v *visitor, k *lmcache.Key) {
			key := *k
			key.Worker, key.RequestID = lmcache.AllWorkers, "0"
			v.call(lmcache.OpLookup, key.Append(nil), lmcache.AppendInt(nil, 1))
		}
		hit := func(v *visitor) int64 {
			n, err := lmcache.DecodeInt(v.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, "0")))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		look(b, promptKey(2, 3)) // never stored
		look(a, long)
		if got := hit(b); got != 0 {
			t.Errorf("%s: the second engine was told a hit of %d chunks, want 0", name, got)
		}
		if got := hit(a); got != 3 {
			t.Errorf("%s: the first engine was told a hit of %d chunks, want 3", name, got)
		}
		b.call(lmcache.OpFreeLookupLocks, func() []byte { k := *long; k.RequestID = "0"; return k.Append(nil) }(), lmcache.AppendInt(nil, 1))
		b.call(lmcache.OpEndSession, lmcache.AppendString(nil, "0"))
		key := *long
		key.RequestID = "0"
		if got := worker.prepareRetrieve(&key); len(got.Slots) != 3 {
			t.Errorf("%s: the first engine's load got %d of 3 chunks after the second engine ended its request", name, len(got.Slots))
		}
		a.call(lmcache.OpEndSession, lmcache.AppendString(nil, "0"))
		if got := worker.prepareRetrieve(&key); len(got.Slots) != 0 {
			t.Errorf("%s: %d chunks are pinned after both engines ended their requests", name, len(got.Slots))
		}
	}
	f("of one user", sameUser)
	f("of two users", anotherUser)
	f("of two hosts", remoteHost)
}

// The workers of an engine on several hosts read what its scheduler pinned.
func TestWorkersOfOtherHostsReadWhatTheSchedulerPinned(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{Pickle: server.PickleOn})
	defer stop()
	scheduler, far := &visitor{t, n.Server, sameUser, 7}, &visitor{t, n.Server, remoteHost, 8}
	scheduler.register()
	far.register()
	k := promptKey(1, 2)
	if !far.commitStore(k, pickled(t, 2, 5)) {
		t.Fatal("not stored")
	}
	if got := scheduler.lookup(*k); got != 2 {
		t.Fatalf("a hit of %d chunks", got)
	}
	if got := far.prepareRetrieve(k); len(got.Data) == 0 {
		t.Error("the far worker was refused")
	}
}
