// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/store"
)

// One connection serves any number of tenants: those beyond what it keeps by name find and store as the first ones, and the first ones
// after them.
func TestConnectionServesTenantsBeyondThoseItKeeps(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	a := n.connect(helloOf("a"))
	defer a.close()
	const kept = 1024
	for i := range kept + 40 {
		tenant := fmt.Sprint("tenant-", i)
		if got := a.store(tenant, keysOf(0, 1)); got != 1 {
			t.Fatalf("%s: %d rows stored", tenant, got)
		}
		if got := a.load(tenant, keysOf(0, 2)); got != 1 {
			t.Fatalf("%s: %d rows loaded", tenant, got)
		}
	}
	for _, i := range []int{kept + 39, kept, kept + 20} { // these were stored last: the pool has 64 rows
		if got := a.load(fmt.Sprint("tenant-", i), keysOf(0, 1)); got != 1 {
			t.Errorf("tenant %d: %d rows loaded", i, got)
		}
	}
	if got := a.load("tenant-0", keysOf(0, 1)); got != 0 {
		t.Errorf("%d rows of the first tenant, which were evicted", got)
	}
	if got := a.store("tenant-0", keysOf(0, 1)); got != 1 {
		t.Errorf("%d rows of the first tenant stored again", got)
	}
	if got := a.load("tenant-0", keysOf(0, 1)); got != 1 {
		t.Errorf("%d rows of the first tenant loaded again", got)
	}
}

// A quota holds for the tenant that requests name: what others store through the same and another engine takes none of its rows, and
// takes those of a tenant without one.
func TestQuotasGoByTheTenantOfARequest(t *testing.T) {
	var st atomic.Pointer[store.Store]
	name := func(ns kv.Namespace, _, salt []byte, _ string) { st.Load().NameTenant(ns, salt) }
	n := start(t, t.TempDir(), setup{offload: offload.Options{Name: name}})
	defer n.close()
	st.Store(n.store)
	if err := n.store.SetQuota("team-a", 16*rowBytes); err != nil {
		t.Fatal(err)
	}
	a, b := n.connect(helloOf("a")), n.connect(helloOf("b"))
	defer a.close()
	defer b.close()
	for _, tenant := range []string{"team-a", "team-b"} {
		if got := a.store(tenant, keysOf(0, 16)); got != 16 {
			t.Fatalf("%s: %d rows stored", tenant, got)
		}
	}
	for i := range 10 {
		a.store("", keysOf(1000+16*i, 1016+16*i))
		b.store("team-c", keysOf(16*i, 16*i+16))
	}
	if got := b.load("team-a", keysOf(0, 16)); got != 16 {
		t.Errorf("%d rows of the tenant with a quota, want 16", got)
	}
	if got := b.load("team-b", keysOf(0, 16)); got != 0 {
		t.Errorf("%d rows of the tenant without one, want 0", got)
	}
}
