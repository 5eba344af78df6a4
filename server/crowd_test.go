// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/server"
)

// One user who registers all the workers that the server takes keeps nobody out: at
// the limit, the one of its workers that is silent longest gives way.
func TestWorkersOfOneUserGiveWayAtTheLimit(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{MaxInstances: 6, Pickle: server.PickleOn})
	defer stop()
	stores := func(v *visitor, seed int) bool {
		return v.commitStore(promptKey(seed, 1), pickled(t, 1, 3))
	}
	var loud []*visitor
	for id := range int64(6) {
		loud = append(loud, &visitor{t, n.Server, anotherUser, id})
		loud[id].register()
	}
	if !stores(loud[0], 1) {
		t.Fatal("not stored")
	}
	var quiet []*visitor
	for id := range int64(3) {
		quiet = append(quiet, &visitor{t, n.Server, thirdUser, id})
		quiet[id].register()
		if !stores(quiet[id], 10+int(id)) {
			t.Errorf("worker %d of another user was kept out", id)
		}
	}
	for i, want := range []bool{true, false, false, false, true, true} { // 0 spoke last
		if got := stores(loud[i], 20+i); got != want {
			t.Errorf("worker %d of the user with most: served %v, want %v", i, got, want)
		}
	}
	for id := range int64(20) {
		v := &visitor{t, n.Server, anotherUser, 100 + id}
		v.register()
		if stores(v, 30+int(id)) {
			t.Errorf("a worker more was taken of a user who has half")
		}
	}
	for i, v := range quiet {
		if !stores(v, 60+i) {
			t.Errorf("worker %d of another user gave way", i)
		}
	}
}
