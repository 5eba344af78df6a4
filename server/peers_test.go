// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
)

// The recorded life of a peer: it looks three objects up, of which two are there, asks twice
// where they are, and unlocks them. Every reply is the reference's.
func TestRecordedPeer(t *testing.T) {
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/p2p.json", &rec)
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	for i := 6; i < 8; i++ {
		seg, err := shm.Create(filepath.Join(n.dir, fmt.Sprintf("lmcache_kv_7013_%d", i)), 8192)
		if err != nil {
			t.Fatal(err)
		}
		defer seg.Close()
	}
	cases := 0
	for _, step := range rec.Steps {
		for i, f := range step.Frames {
			if f.Direction != "client_to_server" {
				continue
			}
			cases++
			compareReply(t, step.Step, f.Hex[1], n.Answer(testkit.Frames(f.Hex)), testkit.Frames(step.Frames[i+1].Hex))
			if locked := n.store.Stats().Quarantined; locked != 0 && step.Step != "p2p_lookup_and_lock" && step.Step != "p2p_query_lookup_results" && step.Step != "p2p_query_lookup_results_again" {
				t.Errorf("after %s %d lookups hold something", step.Step, locked)
			}
		}
	}
	if cases != 7 {
		t.Errorf("%d cases", cases)
	}
}
