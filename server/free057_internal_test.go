// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// An engine gives back the pins of what it has itself, up to one of its blocks. The chunk that it has in part keeps its pin.
func TestFreeLookupLocksInsideOfAChunk(t *testing.T) {
	for _, packed := range []bool{true, false} {
		var log bytes.Buffer
		s, st := newBareServerWith(t, &log, 4<<20, Options{ChunkTokens: 16})
		c := newClient57(t, s)
		c.packed = packed
		c.negotiate(8)
		c.register(1)
		p := prompt57(64)
		c.store(1, p, 48, "a")
		c.call(lmcache.OpLookup, c.key(p, 0, 48, lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 1))
		free := [][]byte{c.key(p, 0, 24, lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 1)}
		if packed {
			free = append(free, []byte{0x90})
		}
		c.call(lmcache.OpFreeLookupLocks, free...)
		if n := st.Stats().EvictableObjs; n != 1 {
			t.Errorf("packed %v: %d of the 3 chunks can be evicted, want the one that the engine has whole", packed, n)
		}
		if strings.Contains(log.String(), "declined") {
			t.Errorf("packed %v:\n%s", packed, &log)
		}
	}
}

// The last chunk of a hit that its engine computes itself, and what an abandoned lookup found, go with one call.
func TestFreeLookupLocksOfAReplayedChunk(t *testing.T) {
	s, st := newBareServerWith(t, io.Discard, 4<<20, Options{ChunkTokens: 16})
	c := newClient57(t, s)
	c.negotiate(8)
	c.register(1)
	p := prompt57(64)
	c.store(1, p, 64, "a")
	for _, start := range []int{32, 0} { // the engine lost what it had below 32 in between
		c.call(lmcache.OpLookup, c.key(p, start, 64, lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 1))
		c.call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, "r"))
	}
	ranges := []byte{0x92, 0x92, 32, 64, 0x92, 48, 64}
	c.call(lmcache.OpFreeLookupLocks, c.key(p, 0, 24, lmcache.AllWorkers, "r"), lmcache.AppendInt(nil, 1), ranges)
	if n := st.Stats().EvictableObjs; n != 2 { // the first and the last; the others are loaded
		t.Errorf("%d of the 4 chunks can be evicted, want 2", n)
	}
	got, err := lmcache.DecodePrepareRetrieve(c.call(lmcache.OpPrepareRetrieve, c.key(p, 16, 48, 0, "r"), lmcache.AppendInt(nil, 1)))
	if err != nil || len(got.Slots) != 2 {
		t.Errorf("the load of the others: %+v, %v", got, err)
	}
}
