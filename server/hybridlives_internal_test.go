// SPDX-License-Identifier: Apache-2.0

package server

import (
	"io"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// A hybrid engine's registration is what it was after a restart, whatever its top-level fields say: its chunks hit.
func TestHybridRegistrationOverARestart(t *testing.T) {
	dir, p := t.TempDir(), prompt57(96)
	s, end := startLife(t, dir, 4<<20, io.Discard)
	c := newClient57(t, s)
	c.negotiate(24)
	groups := []lmcache.GroupLayout{
		{Layers: 3, Hidden: 4, DType: "bfloat16", WindowTokens: 8, Planes: 1, WindowChunks: 1, TokensPerBlock: 8},
		{Layers: 2, Hidden: 6, DType: "float16", Planes: 2, TokensPerBlock: 24},
		{Layers: 1, Hidden: 2, DType: "float32", Planes: 1, WindowChunks: 2, Recurrent: true},
	}
	c.register(1, groups...)
	if n := c.store(1, p, 96, "a"); n != 12 {
		t.Fatal(n)
	}
	one := newClient57(t, s)
	one.model = "o"
	one.negotiate(8)
	one.register(2, lmcache.GroupLayout{Layers: 7, Hidden: 9, DType: "float32", WindowTokens: 16, Planes: 1, WindowChunks: 3}) // of a list of one the top-level fields count
	if n := one.store(2, p, 96, "a"); n != 6 {
		t.Fatal(n)
	}
	for range 2 {
		end()
		s, end = startLife(t, dir, 4<<20, io.Discard)
		for _, fresh := range []bool{false, true} {
			d, e := c.over(s, 0, 0), one.over(s, 0, 0)
			if fresh {
				d.negotiate(24)
				d.register(1, groups...)
				e.negotiate(8)
			}
			if a, b := d.lookup(p, 0, 96, "b"), e.lookup(p, 0, 96, "b"); a != 4 || b != 6 {
				t.Errorf("registered again %v: hits of %d and %d chunks", fresh, a, b)
			}
			if n := d.store(1, p, 96, "c"); n != 0 {
				t.Errorf("registered again %v: %d objects were lost", fresh, n)
			}
		}
	}
	end()
}
