// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
)

// A cell belongs to who has most of it, and of more owners than the bound the last one stands for the rest.
func TestOwnersOfTheMap(t *testing.T) {
	m := NewMap(8192, 2, 0)
	a, b := kv.Namespace{1}, kv.Namespace{2}
	m.own(a, 0, 1000, 1)
	m.own(b, 1000, 3096, 1)
	m.own(a, 4096, 4096, 2)
	if m.Owner[0] != 1 || m.Owner[1] != 0 || len(m.Owners) != 2 || m.Owners[0] != (Owner{a, 1000 + 2*4096, 3}) || m.Owners[1] != (Owner{b, 3096, 1}) {
		t.Errorf("%+v, %+v", m.Owner, m.Owners)
	}
	m.own(a, 4000, 200, 1) // across two cells
	if m.Owner[0] != 1 || m.Owner[1] != 0 {
		t.Errorf("%v", m.Owner)
	}
	for i := range 1000 {
		m.own(kv.Namespace{9, byte(i), byte(i >> 8)}, 0, 1, 1)
	}
	if n := len(m.Owners); n != MaxOwners || m.Owners[n-1].Namespace != (kv.Namespace{}) || m.Owners[n-1].Chunks != 1000-(MaxOwners-3) {
		t.Errorf("%d owners, the last %+v", n, m.Owners[n-1])
	}
}
