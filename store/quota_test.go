// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	tenants "github.com/kvasir-kv/kvasir/store/tenant"
)

// salts are the tenants, by their namespaces: the empty salt is one like others, and so is what
// LMCache calls the empty one.
var salts = map[kv.Namespace]string{{1}: "", {2}: "_default", {3}: "c"}

// tenant draws one and lets the store know it.
func (m *model) tenant() kv.Namespace {
	space := kv.Namespace{byte(rapid.IntRange(1, len(salts)).Draw(m.r, "tenant"))}
	m.store.NameTenant(space, []byte(salts[space]))
	return space
}

// quota gives a tenant a quota, another one or none.
func (m *model) quota() {
	space := kv.Namespace{byte(rapid.IntRange(1, len(salts)).Draw(m.r, "tenant"))}
	salt := salts[space]
	if rapid.IntRange(0, 2).Draw(m.r, "drop") == 0 {
		if _, had := m.quotas[salt]; m.store.DropQuota(salt) != had {
			m.r.Fatalf("tenant %q: had a quota is %v", salt, had)
		}
		delete(m.quotas, salt)
		return
	}
	bytes := int64(rapid.IntRange(0, int(m.pool.Bytes)).Draw(m.r, "quota"))
	if rapid.Bool().Draw(m.r, "whole chunks") {
		bytes -= bytes % chunkBytes
	}
	sum := m.reserved(salt, bytes, m.limits[salt])
	switch err := m.store.SetQuota(salt, bytes); {
	case errors.Is(err, tenants.ErrSum) != (sum > m.pool.Bytes):
		m.r.Fatalf("quotas of %d bytes of %d: %v", sum, m.pool.Bytes, err)
	case err == nil:
		m.quotas[salt] = bytes
		m.store.NameTenant(space, []byte(salt))
	}
}

// reserved is what all tenants' quotas and limits of pins take of the pool, with others for one.
func (m *model) reserved(salt string, quota, limit int64) int64 {
	sum := max(quota, limit)
	for _, other := range salts {
		if other != salt {
			sum += max(m.quotas[other], m.limits[other])
		}
	}
	return sum
}

// ttl gives a tenant a time to live, another one or none.
func (m *model) ttl() {
	space := kv.Namespace{byte(rapid.IntRange(1, len(salts)).Draw(m.r, "tenant"))}
	ttl := rapid.SampledFrom([]time.Duration{0, tenants.Forever, 5 * time.Second, time.Minute}).Draw(m.r, "ttl")
	if err := m.store.SetTTL(salts[space], ttl); err != nil {
		m.r.Fatalf("%v", err)
	}
	m.store.NameTenant(space, []byte(salts[space]))
}

// limitPins says how much of a tenant may be pinned.
func (m *model) limitPins() {
	salt := salts[kv.Namespace{byte(rapid.IntRange(1, len(salts)).Draw(m.r, "tenant"))}]
	bytes := int64(rapid.IntRange(0, int(m.pool.Bytes)).Draw(m.r, "limit"))
	sum := m.reserved(salt, m.quotas[salt], bytes)
	switch err := m.store.SetPinLimit(salt, bytes); {
	case errors.Is(err, tenants.ErrSum) != (sum > m.pool.Bytes && bytes > 0):
		m.r.Fatalf("limits and quotas of %d bytes of %d: %v", sum, m.pool.Bytes, err)
	case err == nil:
		m.limits[salt] = bytes
	}
}

// pin pins some objects of a prompt, or ends that.
func (m *model) pin() {
	space := m.tenant()
	sh := m.shardOf(space, 0)
	var keys []kv.Key
	for _, h := range prompt(rapid.IntRange(0, 8).Draw(m.r, "prompt"), rapid.IntRange(1, 6).Draw(m.r, "chunks")) {
		for i := range sh.World {
			keys = append(keys, objectKey(sh, i, h))
		}
	}
	if rapid.IntRange(0, 2).Draw(m.r, "unpin") == 0 {
		m.store.Unpin(keys)
		return
	}
	life := time.Duration(rapid.IntRange(1, 100).Draw(m.r, "life")) * time.Second
	if n, err := m.store.Pin(salts[space], keys, life); n > 0 && m.limits[salts[space]] == 0 || err != nil && !errors.Is(err, tenants.ErrNoPins) && !errors.Is(err, tenants.ErrPinLimit) {
		m.r.Fatalf("%d are pinned, %v", n, err)
	}
}

// kept fails when a store of one tenant took from another what is within its quota.
func (m *model) kept(before []tenants.Usage, writer kv.Namespace) {
	for i, now := range m.store.Tenants() {
		was := before[i]
		if now.PinnedBytes < was.PinnedBytes {
			m.r.Fatalf("of what is pinned of %q %d bytes are left of %d after %q stored", now.Salt, now.PinnedBytes, was.PinnedBytes, salts[writer])
		}
		if now.Salt != salts[writer] && now.Bytes < min(was.Bytes, was.QuotaBytes) {
			m.r.Fatalf("tenant %q has %d bytes, had %d of a quota of %d before %q stored", now.Salt, now.Bytes, was.Bytes, was.QuotaBytes, salts[writer])
		}
	}
}

// shardOf is shard for a tenant.
func (m *model) shardOf(space kv.Namespace, i int) object.Shard {
	sh := m.shard(i)
	sh.Namespace = space
	return sh
}

// bytesOf is the content of a chunk of a tenant's shard.
func bytesOf(sh object.Shard, h kv.Hash) []byte {
	return content(h, sh.Index+256*int(sh.Namespace[0]-1))
}

// tenantOf is a tenant that stores prompts of its own, of objects of so many bytes.
type tenantOf struct {
	*bench
	salt   string
	space  kv.Namespace
	groups *object.Groups
}

func (b *bench) tenantOf(salt string, bytes int64) *tenantOf {
	x := &tenantOf{b, salt, kv.NamespaceOf("m", salt, fmt.Sprint(bytes)), object.FullAttention(1, bytes)}
	if b.tenants == nil {
		b.tenants = make(map[kv.Namespace]string)
	}
	b.tenants[x.space] = salt
	return x
}

func (x *tenantOf) shard() object.Shard {
	return object.Shard{Namespace: x.space, World: 1, Groups: x.groups}
}

// put stores a prompt of one chunk and reports whether it found a place.
func (x *tenantOf) put(number int) bool {
	x.t.Helper()
	x.store.NameTenant(x.space, []byte(x.salt))
	hashes := prompt(100+number, 1)
	hashes[0][31] = byte(number)
	hashes[0][30] = byte(number >> 8)
	name := hold.Transfer{Instance: 1, Shard: x.shard(), To: 1, Last: hashes[0]}
	var place store.Transfer
	if _, err := x.store.BeginStore(name, []byte("r"), hashes, &place); err != nil {
		x.t.Fatalf("%v", err)
	}
	return len(place.Offsets) > 0 && x.store.CommitStore(name, []byte("r"), hashes, true).Chunks == 1
}

// has reports whether a prompt that put stored is there; it is a use of it.
func (x *tenantOf) has(number int) bool {
	x.t.Helper()
	x.store.NameTenant(x.space, []byte(x.salt))
	hashes := prompt(100+number, 1)
	hashes[0][31] = byte(number)
	hashes[0][30] = byte(number >> 8)
	defer x.store.EndSession([]byte("l"), lease.Owner{})
	return x.store.Lookup([]byte("l"), x.shard(), store.Hashed(hashes), 1).Hit == 1
}

// bytes is what the tenant has by the books.
func (x *tenantOf) bytes() int64 {
	for _, of := range x.store.Tenants() {
		if of.Salt == x.salt {
			return of.Bytes
		}
	}
	return -1
}

func (x *tenantOf) quota(chunks int) {
	x.t.Helper()
	if err := x.store.SetQuota(x.salt, int64(chunks)*chunkBytes); err != nil {
		x.t.Fatalf("%v", err)
	}
}

// Two tenants under pressure: each keeps its quota whatever the other and those without one
// store, and may have what is free beyond it.
func TestQuotasAreKept(t *testing.T) {
	for _, policy := range evict.Names {
		t.Run(policy, func(t *testing.T) {
			b := newBench(t, t.TempDir(), 16, store.Options{})
			b.policy = policy
			b.restart()
			defer b.stop()
			one, other, none := b.tenantOf("one", chunkBytes), b.tenantOf("other", chunkBytes), b.tenantOf("", chunkBytes)
			one.quota(4)
			other.quota(6)
			for i := range 16 {
				if !one.put(i) {
					t.Fatalf("chunk %d of a pool that is free finds no place", i)
				}
			}
			if one.bytes() != 16*chunkBytes {
				t.Errorf("a tenant alone has %d bytes of a free pool", one.bytes())
			}
			for i := range 40 {
				if !none.put(i) {
					t.Fatal("who has no quota finds no place while others pass theirs")
				}
			}
			if one.bytes() != 4*chunkBytes {
				t.Errorf("pressed by somebody without a quota it has %d chunks, want 4", one.bytes()/chunkBytes)
			}
			for i := range 40 {
				if !other.put(i) || one.bytes() != 4*chunkBytes {
					t.Fatalf("after %d chunks of the other it has %d, want 4", i, one.bytes()/chunkBytes)
				}
			}
			for i := range 40 {
				if !one.put(100+i) || other.bytes() < 6*chunkBytes {
					t.Fatalf("after %d chunks of the one the other has %d, want 6 at least", i, other.bytes()/chunkBytes)
				}
			}
			if all := one.bytes() + other.bytes(); all > 16*chunkBytes || one.bytes() < 4*chunkBytes {
				t.Errorf("they have %d and %d chunks", one.bytes()/chunkBytes, other.bytes()/chunkBytes)
			}
		})
	}
}

// Where the quotas take the whole pool, a tenant without a quota finds no place, and the result
// says so.
func TestNothingIsLeftForOthers(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	one, none := b.tenantOf("one", chunkBytes), b.tenantOf("", chunkBytes)
	one.quota(8)
	for i := range 8 {
		one.put(i)
	}
	if none.put(1) || one.bytes() != 8*chunkBytes {
		t.Errorf("somebody without a quota took a place; the tenant has %d chunks", one.bytes()/chunkBytes)
	}
	if !one.put(9) || one.bytes() != 8*chunkBytes {
		t.Error("the tenant cannot take the place of its own chunks")
	}
}

// The policy of a tenant does not see another: what one uses again and again does not save it
// from its own eviction, nor harm the order of the other's.
func TestPoliciesAreApart(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	one, other := b.tenantOf("one", chunkBytes), b.tenantOf("other", chunkBytes)
	one.quota(4)
	other.quota(4)
	for i := range 4 {
		one.put(i)
	}
	for i := range 4 {
		other.put(i)
	}
	for range 3 { // by one order for both, the first of one would be the newest of all
		one.has(0)
	}
	other.put(4)
	if other.has(0) {
		t.Error("the other did not lose its own oldest")
	}
	for i := range 4 {
		if !one.has(i) {
			t.Errorf("chunk %d of the one went", i)
		}
	}
	one.has(0)
	one.put(4)
	if one.has(1) || !one.has(0) {
		t.Error("the one did not lose its own oldest")
	}
}

// A tenant at its quota makes room of its own, and leaves others what they have.
func TestAtItsQuotaATenantPaysItself(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	one, none := b.tenantOf("one", chunkBytes), b.tenantOf("", chunkBytes)
	one.quota(4)
	for i := range 4 {
		none.put(i)
		one.put(i)
	}
	for i := range 9 {
		one.put(4 + i)
	}
	for i := range 4 {
		if !none.has(i) {
			t.Errorf("chunk %d of somebody else went", i)
		}
	}
}

// Where a large object needs several neighbours of a tenant to go that may lose only one,
// it finds no place.
func TestARunOfNeighboursEndsAtTheQuota(t *testing.T) {
	b := newBench(t, t.TempDir(), 16, store.Options{})
	defer b.stop()
	small, large := b.tenantOf("small", chunkBytes), b.tenantOf("", 3*chunkBytes)
	small.quota(9)
	for i := range 16 { // side by side
		small.put(i)
	}
	for i := range 16 { // every third goes first, so that nowhere two neighbours do
		if i%3 != 0 {
			small.has(i)
		}
	}
	if large.put(0) {
		t.Error("three neighbours went")
	}
	if got := small.bytes() / chunkBytes; got != 9 {
		t.Errorf("%d chunks are left of a quota of 9", got)
	}
}

// The empty salt, a tenant of the name that LMCache gives to it, and a name that is one of the
// other's beginnings are three tenants.
func TestTenantsWithSimilarNamesAreApart(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	for chunks, salt := range map[int]string{1: "", 2: "_default", 3: "_defaul"} {
		x := b.tenantOf(salt, chunkBytes)
		x.quota(chunks)
		for i := range chunks {
			x.put(i)
		}
	}
	got := ""
	for _, u := range b.store.Tenants() {
		got += fmt.Sprintf("%q has %d of %d; ", u.Salt, u.Bytes, u.QuotaBytes)
	}
	if want := `"" has 4096 of 4096; "_defaul" has 12288 of 12288; "_default" has 8192 of 8192; `; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// What a tenant stored before it got a quota counts from its next request on, what it stores
// while that is dropped counts no more, and its objects stay.
func TestQuotaComesAndGoes(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	one, none := b.tenantOf("one", chunkBytes), b.tenantOf("", chunkBytes)
	for i := range 4 {
		one.put(i)
	}
	one.quota(3)
	if one.bytes() != 0 || !one.has(0) || one.bytes() != 4*chunkBytes {
		t.Errorf("%d bytes of what was there before are counted", one.bytes())
	}
	for i := range 20 {
		none.put(i)
	}
	if one.bytes() != 3*chunkBytes {
		t.Errorf("%d bytes are kept", one.bytes())
	}
	if !b.store.DropQuota("one") || b.store.DropQuota("one") || b.store.NamesTenants() {
		t.Error("a quota is not dropped once")
	}
	if got := b.store.Stats(); got.Resident != 8 || got.EvictableObjs != 8 {
		t.Errorf("after the quota: %+v", got)
	}
	for i := range 20 {
		none.put(50 + i)
	}
	if one.has(0) || one.has(1) || one.has(2) || one.has(3) {
		t.Error("what has no quota any more is kept")
	}
}

// Quotas that do not fit are refused and change nothing.
func TestQuotasThatDoNotFit(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	one, other := b.tenantOf("one", chunkBytes), b.tenantOf("other", chunkBytes)
	one.quota(5)
	f := func(salt string, bytes int64, want error) {
		t.Helper()
		if err := b.store.SetQuota(salt, bytes); !errors.Is(err, want) {
			t.Errorf("%q, %d bytes: %v, want %v", salt, bytes, err, want)
		}
	}
	f("other", 4*chunkBytes, tenants.ErrSum)
	f("other", 1<<62, tenants.ErrSum)
	f("other", -1, tenants.ErrQuota)
	f("one", 9*chunkBytes, tenants.ErrSum)
	f("one", 8*chunkBytes, nil)
	if other.bytes() >= 0 {
		t.Error("a refused quota is there")
	}
	f("one", 0, nil)
	for i := range tenants.MaxQuotas - 1 {
		f(fmt.Sprint(i), 1, nil)
	}
	f("one more", 1, tenants.ErrTooMany)
}

// Tenants of small and large objects press one another in a pool in which large ones find
// room only where several neighbours go: nobody falls below its quota by another's doing.
func TestQuotasOfUnlikeObjects(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(r *rapid.T) {
		b := newBench(r, dir, 24, store.Options{})
		b.policy = rapid.SampledFrom(evict.Names).Draw(r, "policy")
		b.restart()
		defer b.stop()
		all := []*tenantOf{
			b.tenantOf("small", chunkBytes), b.tenantOf("middle", 3*chunkBytes), b.tenantOf("large", 5*chunkBytes), b.tenantOf("", 2*chunkBytes),
		}
		left := int(b.pool.Bytes)
		for _, x := range all[:rapid.IntRange(1, 3).Draw(r, "quotas")] {
			bytes := rapid.IntRange(0, left).Draw(r, "quota")
			if err := b.store.SetQuota(x.salt, int64(bytes)); err != nil {
				r.Fatalf("%v", err)
			}
			left -= bytes
		}
		for i := range rapid.IntRange(1, 120).Draw(r, "stores") {
			x := rapid.SampledFrom(all).Draw(r, "tenant")
			before := b.store.Tenants()
			x.put(i)
			for j, now := range b.store.Tenants() {
				if was := before[j]; now.Salt != x.salt && now.Bytes < min(was.Bytes, was.QuotaBytes) {
					r.Fatalf("%q has %d bytes, had %d of a quota of %d before %q stored", now.Salt, now.Bytes, was.Bytes, was.QuotaBytes, x.salt)
				}
			}
			checkUsage(r, b)
		}
	})
}
