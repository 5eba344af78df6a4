// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"fmt"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// Engines of three ranks store for tenants that press one another, over the protocol: none falls below its quota by another's
// doing, its own prompts hit in all ranks, and the empty salt, a tenant called _default and one without a quota are three.
func TestTenantsOfThreeRanksPressOneAnother(t *testing.T) {
	const world = 3
	d := newDesk(t, server.Options{}) // 64 objects of 4 KiB
	for rank := range world {
		d.register(int64(1+rank), world, 2)
	}
	quotas := map[string]int64{"": 4 * world, "_default": 6 * world}
	for salt, objects := range quotas {
		if err := d.store.SetQuota(salt, objects*4096); err != nil {
			t.Fatal(err)
		}
	}
	key := func(salt string, number, rank int) *lmcache.Key {
		k := deskKey(world, rank, 1, fmt.Sprint("r", number))
		k.Salt, k.Tokens = salt, tokens(16, 100+number)
		return k
	}
	put := func(salt string, number int) {
		t.Helper()
		before := d.store.Tenants()
		for rank := range world {
			if n := d.put(int64(1+rank), key(salt, number, rank)); n != 1 {
				t.Fatalf("prompt %d of %q: rank %d stored %d chunks", number, salt, rank, n)
			}
		}
		for i, now := range d.store.Tenants() {
			if was := before[i]; now.Salt != salt && now.Bytes < min(was.Bytes, was.QuotaBytes) {
				t.Fatalf("%q has %d bytes, had %d of a quota of %d before %q stored", now.Salt, now.Bytes, was.Bytes, was.QuotaBytes, salt)
			}
		}
	}
	hits := func(salt string, from, to int) (n int) {
		for number := from; number < to; number++ {
			k := key(salt, number, lmcache.AllWorkers)
			k.RequestID = fmt.Sprint("look", number)
			d.ask(lmcache.OpLookup, k.Append(nil), lmcache.AppendInt(nil, 1))
			got, err := lmcache.DecodeInt(d.ask(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, k.RequestID)))
			if err != nil {
				t.Fatal(err)
			}
			n += int(got)
			d.ask(lmcache.OpEndSession, lmcache.AppendString(nil, k.RequestID))
		}
		return n
	}
	usage := func(salt string) (out tenant.Usage) {
		for _, u := range d.store.Tenants() {
			if u.Salt == salt {
				out = u
			}
		}
		return out
	}
	for number := range 21 { // 63 objects: more than the quota, while others have nothing
		put("", number)
	}
	if got := usage(""); got.Bytes != 63*4096 || usage("_default").Bytes != 0 {
		t.Fatalf("%+v, %+v", got, usage("_default"))
	}
	for number := range 40 {
		for _, salt := range []string{"_default", "nobody's", ""} {
			put(salt, 1000+number)
		}
	}
	for salt, objects := range quotas {
		if got := hits(salt, 1000, 1040); int64(got) < objects/world {
			t.Errorf("%d prompts of %q hit in all ranks, its quota is for %d", got, salt, objects/world)
		}
		if u := usage(salt); u.Bytes < objects*4096 || u.Evicted == 0 {
			t.Errorf("%+v", u)
		}
	}
	if got := hits("_default", 0, 21); got != 0 {
		t.Errorf("%d prompts of the empty salt hit for another tenant", got)
	}
}
