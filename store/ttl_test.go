// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// pass lets time go by, with what the store does every second.
func (b *bench) pass(d time.Duration) {
	for ; d > 0; d -= time.Second {
		time.Sleep(time.Second)
		b.store.Expire()
	}
}

// ask looks a prompt of put up, and leaves nothing pinned.
func (x *tenantOf) ask(number int) store.LookupResult {
	x.t.Helper()
	x.store.NameTenant(x.space, []byte(x.salt))
	defer x.store.EndSession([]byte("l"), lease.Owner{})
	return x.store.Lookup([]byte("l"), x.shard(), store.Hashed(numbered(number)), 1)
}

// numbered is the prompt of one chunk that put stores.
func numbered(number int) []kv.Hash {
	hashes := prompt(100+number, 1)
	hashes[0][31], hashes[0][30] = byte(number), byte(number>>8)
	return hashes
}

// removed returns how many of the events that follow a number say that something went.
func (b *bench) removed(after uint64) (n int) {
	events := make([]store.Event, 1000)
	got, lost := b.store.Events(after, events)
	if lost {
		b.t.Fatalf("events are lost")
	}
	for _, e := range events[:got] {
		if e.Removed {
			n++
		}
	}
	return n
}

// What nobody uses for its TTL goes, its own tenant's or the common one, in the background and not before; it is told as an
// event, counted and explained.
func TestTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 64, store.Options{TTL: 10 * time.Second})
		defer b.stop()
		b.store.Watch(1000)
		short, long, ever, none := b.tenantOf("short", chunkBytes), b.tenantOf("long", chunkBytes), b.tenantOf("ever", chunkBytes), b.tenantOf("", chunkBytes)
		for x, ttl := range map[*tenantOf]time.Duration{short: 3 * time.Second, long: time.Minute, ever: tenant.Forever} {
			if err := b.store.SetTTL(x.salt, ttl); err != nil {
				t.Fatal(err)
			}
		}
		all := []*tenantOf{short, long, ever, none}
		for _, x := range all {
			x.put(0)
			x.put(1)
		}
		f := func(passed time.Duration, resident int, gone ...*tenantOf) {
			t.Helper()
			b.pass(passed)
			if got := b.store.Stats(); got.Resident != resident || got.ExpiredChunks != uint64(8-resident) || got.ExpiredBytes != uint64(8-resident)*chunkBytes || got.EvictedChunks != 0 {
				t.Fatalf("%d are there, want %d: %+v", got.Resident, resident, got.Counters)
			}
			if got := b.removed(0); got != 8-resident {
				t.Errorf("%d events of removal, want %d", got, 8-resident)
			}
			for _, x := range gone {
				if got := x.ask(0); got.Hit != 0 || got.Why != miss.Expired || got.Gone.At.IsZero() || got.Gone.By != "" {
					t.Errorf("tenant %q: %+v", x.salt, got)
				}
			}
		}
		f(3*time.Second, 8)
		f(2*time.Second, 6, short)
		f(5*time.Second, 6)
		f(2*time.Second, 4, short, none)
		f(49*time.Second, 2, short, none, long)
		f(30*24*time.Hour/1000, 2)
		if !ever.has(0) || !ever.has(1) {
			t.Error("what is to stay for ever is gone")
		}
		for _, u := range b.store.Tenants() {
			if want := map[string]uint64{"short": 2, "long": 2}[u.Salt]; u.Expired != want || u.QuotaBytes != -1 {
				t.Errorf("%+v, want %d expired", u, want)
			}
		}
		b.idle()
	})
}

// A use begins the time anew; what is pinned by a lookup, being read, or lent never expires.
func TestUsedObjectsDoNotExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 64, store.Options{TTL: 10 * time.Second, SessionIdle: time.Hour})
		defer b.stop()
		x := b.tenantOf("x", chunkBytes)
		for i := range 5 {
			x.put(i)
		}
		const used, pinned, read, lent, idle = 0, 1, 2, 3, 4
		look := func(session string, number int) {
			t.Helper()
			if got := b.store.Lookup([]byte(session), x.shard(), store.Hashed(numbered(number)), 1); got.Hit != 1 {
				t.Fatalf("%+v", got)
			}
		}
		look("pinned", pinned)
		look("read", read)
		name := hold.Transfer{Instance: 1, Shard: x.shard(), To: 1, Last: numbered(read)[0], Load: true}
		var place store.Transfer
		if why := b.store.BeginLoad([]byte("read"), name, numbered(read), &place); why != miss.None {
			t.Fatal(why)
		}
		var k kv.Key
		sh := x.shard()
		sh.Key(&k, 0, 0, numbered(lent)[0])
		_, loan, err := b.store.Lend("uid 1", []kv.Key{k}, time.Hour, 1<<40)
		if err != nil || loan == nil {
			t.Fatal(loan, err)
		}
		for range 9 {
			b.pass(5 * time.Second)
			if !x.has(used) {
				t.Fatal("what is used every 5 s is gone")
			}
		}
		if got := b.store.Stats(); got.Resident != 4 || got.ExpiredChunks != 1 {
			t.Fatalf("%+v", got)
		}
		b.store.CommitLoad(name, []byte("read"))
		b.store.EndSession([]byte("read"), lease.Owner{})
		b.store.EndSession([]byte("pinned"), lease.Owner{})
		loan.GiveBack()
		b.pass(9 * time.Second)
		if got := b.store.Stats(); got.Resident != 4 {
			t.Errorf("the end of a read, of a pin and of a loan is no use: %+v", got)
		}
		b.pass(3 * time.Second)
		if got := b.store.Stats(); got.Resident != 0 || x.ask(idle).Why != miss.Expired {
			t.Errorf("%+v", got)
		}
		b.idle()
	})
}

// Between two looks of the background nothing is served after its time, and what is stored again is new.
func TestExpiredIsNotServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 1<<18, store.Options{TTL: 10 * time.Second}) // more than one look sees
		defer b.stop()
		x := b.tenantOf("x", chunkBytes)
		x.put(0)
		x.put(1)
		x.put(2)
		time.Sleep(12 * time.Second) // nobody calls Expire
		if _, loan, err := b.store.Lend("uid 1", x.keys(2), time.Hour, 1<<40); err != nil || loan != nil {
			t.Errorf("what has expired is lent: %v, %v", loan, err)
		}
		if !x.put(0) || !x.has(0) {
			t.Error("what has expired is not stored again")
		}
		if got := x.ask(1); got.Hit != 0 || got.Why != miss.Expired {
			t.Errorf("%+v", got)
		}
		if got := b.store.Stats(); got.ExpiredChunks != 3 || got.Resident != 1 {
			t.Errorf("%+v", got)
		}
	})
}

// A store that makes room for the rest of a prompt does not bring back what of its beginning has expired.
func TestAStoreRevivesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 4, store.Options{TTL: 10 * time.Second})
		defer b.stop()
		old, young := prompt(1, 4), prompt(2, 2)
		b.put("a", old, 0, 2, 2)
		time.Sleep(5 * time.Second)
		b.put("b", young, 0, 2, 2)
		time.Sleep(7 * time.Second) // nobody calls Expire
		b.put("c", old, 2, 4, 2)
		if got := b.hit(old); got.Hit != 0 {
			t.Errorf("%d chunks of a prompt are served whose first two nobody used for 12 s: %+v", got.Hit, got)
		}
		if got := b.hit(young); got.Hit != 2 {
			t.Errorf("of what had not expired %d chunks are left: %+v", got.Hit, got)
		}
		b.idle()
	})
}

// A TTL that comes later counts from then on, for what is there already, too; one that goes leaves the common one.
func TestTTLComesAndGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 16, store.Options{})
		defer b.stop()
		x, y := b.tenantOf("x", chunkBytes), b.tenantOf("y", chunkBytes)
		x.put(0)
		y.put(0)
		b.pass(time.Hour / 10)
		set := func(ttl time.Duration) {
			t.Helper()
			if err := b.store.SetTTL("x", ttl); err != nil {
				t.Fatal(err)
			}
		}
		set(time.Minute)
		b.store.NameTenant(x.space, []byte("x"))
		b.pass(59 * time.Second)
		if got := b.store.Stats(); got.Resident != 2 {
			t.Fatalf("%+v", got)
		}
		b.pass(4 * time.Second)
		if got := b.store.Stats(); got.Resident != 1 || !y.has(0) {
			t.Fatalf("%+v", got)
		}
		x.put(0)
		set(0)
		b.pass(5 * time.Minute)
		if !x.has(0) || b.store.NamesTenants() || len(b.store.Tenants()) > 0 {
			t.Error("a TTL that was taken back counts")
		}
		for _, ttl := range []time.Duration{-2, time.Millisecond, tenant.MaxTTL + 1} {
			if err := b.store.SetTTL("x", ttl); !errors.Is(err, tenant.ErrTTL) {
				t.Errorf("a TTL of %v: %v", ttl, err)
			}
		}
	})
}

// After a restart all that was kept begins a new life.
func TestTTLAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 16, store.Options{TTL: 10 * time.Second})
		defer b.stop()
		x := b.tenantOf("x", chunkBytes)
		x.put(0)
		b.pass(8 * time.Second)
		b.restart()
		b.pass(8 * time.Second)
		if got := b.store.Stats(); got.Resident != 1 {
			t.Fatalf("%+v", got)
		}
		b.pass(4 * time.Second)
		if got := b.store.Stats(); got.Resident != 0 || got.ExpiredChunks != 1 {
			t.Fatalf("%+v", got)
		}
	})
}

// keys are the objects of prompts of put.
func (x *tenantOf) keys(numbers ...int) (out []kv.Key) {
	sh := x.shard()
	for _, n := range numbers {
		var k kv.Key
		sh.Key(&k, 0, 0, numbered(n)[0])
		out = append(out, k)
	}
	return out
}

// Pinned objects survive the pressure of others, a clear and their TTL, until the time of the pin is over. Never more is pinned than the
// tenant may pin.
func TestPins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 8, store.Options{TTL: time.Minute})
		defer b.stop()
		x, other := b.tenantOf("x", chunkBytes), b.tenantOf("other", chunkBytes)
		for i := range 5 {
			x.put(i)
		}
		pin := func(life time.Duration, want int, why error, numbers ...int) {
			t.Helper()
			if n, err := b.store.Pin("x", x.keys(numbers...), life); n != want || !errors.Is(err, why) {
				t.Errorf("%d are pinned, %v; want %d, %v", n, err, want, why)
			}
			if u := x.usage(); u.PinnedBytes > u.PinLimit || int64(u.PinnedObjects)*chunkBytes != u.PinnedBytes {
				t.Errorf("%+v", u)
			}
		}
		pin(time.Hour, 0, tenant.ErrNoPins, 0)
		if err := b.store.SetPinLimit("x", 3*chunkBytes+100); err != nil {
			t.Fatal(err)
		}
		pin(time.Hour, 2, nil, 0, 1, 77) // 77 is not there
		pin(time.Hour, 2, nil, 0, 1)     // again is once
		pin(2*time.Minute, 0, tenant.ErrPinLimit, 2, 3, 4)
		pin(2*time.Minute, 1, nil, 2)
		for i := range 40 {
			if !other.put(i) {
				t.Fatal("others find no room")
			}
		}
		b.store.Clear(false)
		b.pass(90 * time.Second)
		there := func(want ...int) {
			t.Helper()
			var got []int
			for i := range 5 {
				if b.resident(x.keys(i)[0]) {
					got = append(got, i)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%v are there, want %v", got, want)
			}
		}
		there(0, 1, 2)
		var left []time.Duration
		list, next := b.store.Pins(0, nil)
		for _, p := range list {
			left = append(left, p.Left)
		}
		slices.Sort(left)
		if next != 0 || len(left) != 3 || left[0] > 31*time.Second || left[0] < 29*time.Second || left[1] < 58*time.Minute || left[2] > 59*time.Minute {
			t.Errorf("pins for %v, then from %d", left, next)
		}
		b.pass(time.Minute)
		for i := range 40 {
			other.put(i)
		}
		there(0, 1)
		if n := b.store.Unpin(x.keys(0, 0, 2, 9)); n != 1 {
			t.Errorf("%d pins ended, want 1", n)
		}
		for i := range 40 {
			other.put(100 + i)
		}
		there(1)
		if got := b.store.Clear(true); got == 0 || x.usage().PinnedObjects != 0 {
			t.Errorf("a forced clear dropped %d, left %+v", got, x.usage())
		}
		there()
		b.idle()
	})
}

func (x *tenantOf) usage() tenant.Usage {
	for _, u := range x.store.Tenants() {
		if u.Salt == x.salt {
			return u
		}
	}
	return tenant.Usage{}
}

// resident reports whether an object is there; that is no use of it.
func (b *bench) resident(k kv.Key) bool {
	return slices.Contains(b.store.OfChunk(k.Chunk), k)
}

// A limit that is lowered ends pins, and quotas and limits fit into the pool together.
func TestPinLimits(t *testing.T) {
	b := newBench(t, t.TempDir(), 8, store.Options{})
	defer b.stop()
	x, y := b.tenantOf("x", chunkBytes), b.tenantOf("y", chunkBytes)
	f := func(err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
	x.quota(4)
	f(b.store.SetPinLimit("x", 4*chunkBytes), nil) // within the quota
	f(b.store.SetPinLimit("y", 5*chunkBytes), tenant.ErrSum)
	f(b.store.SetPinLimit("y", 4*chunkBytes), nil)
	f(b.store.SetPinLimit("y", -1), tenant.ErrQuota)
	f(b.store.SetPinLimit("x", 5*chunkBytes), tenant.ErrSum)
	f(b.store.SetQuota("y", 5*chunkBytes), tenant.ErrSum)
	f(b.store.SetQuota("y", 4*chunkBytes), nil)
	f(b.store.SetQuota("y", 0), nil)
	for i := range 4 {
		x.put(i)
		y.put(i)
	}
	if n, err := b.store.Pin("y", y.keys(0, 1, 2, 3), time.Hour); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	f(b.store.SetPinLimit("y", 2*chunkBytes), nil)
	if u := y.usage(); u.PinnedObjects != 2 {
		t.Errorf("%+v", u)
	}
	for i := range 20 { // y keeps what it has pinned, though its quota is 0
		x.put(100 + i)
	}
	for i, want := range []bool{true, true, false, false} {
		if b.resident(y.keys(i)[0]) != want {
			t.Errorf("chunk %d of y: want %v", i, want)
		}
	}
	f(b.store.SetPinLimit("y", 0), nil)
	if u := y.usage(); u.PinnedObjects != 0 || u.PinLimit != 0 {
		t.Errorf("%+v", u)
	}
	if b.store.DropQuota("y"); y.usage().Salt != "" {
		t.Errorf("what has nothing of its own is listed: %+v", y.usage())
	}
	b.idle()
}

// Tenants whose objects lie in three shards press one another while events are watched: nobody falls below
// its quota by another's doing, and the events say exactly what is there.
func TestQuotasOfThreeRanksWithEvents(t *testing.T) {
	b := newBench(t, t.TempDir(), 36, store.Options{})
	defer b.stop()
	b.store.Watch(1 << 14)
	groups := object.FullAttention(1, chunkBytes)
	const world = 3
	all := map[string]int{"one": 4 * world, "other": 6 * world, "": -1} // quotas, in objects
	for salt, quota := range all {
		if quota >= 0 {
			if err := b.store.SetQuota(salt, int64(quota)*chunkBytes); err != nil {
				t.Fatal(err)
			}
		}
	}
	shardOf := func(salt string, rank int) object.Shard {
		return object.Shard{Namespace: kv.NamespaceOf("m", salt, "three"), World: world, Index: rank, Groups: groups}
	}
	put := func(salt string, number int) {
		t.Helper()
		hashes := numbered(number)
		for rank := range world {
			sh := shardOf(salt, rank)
			b.store.NameTenant(sh.Namespace, []byte(salt))
			name := hold.Transfer{Instance: int64(rank + 1), Shard: sh, To: 1, Last: hashes[0]}
			var place store.Transfer
			if _, err := b.store.BeginStore(name, []byte("r"), hashes, &place); err != nil || len(place.Offsets) != 1 {
				t.Fatalf("prompt %d, rank %d of %q: %d places, %v; %+v", number, rank, salt, len(place.Offsets), err, b.store.Tenants())
			}
			b.store.CommitStore(name, []byte("r"), hashes, true)
		}
	}
	hits := func(salt string, from, to int) (n int) {
		for i := from; i < to; i++ {
			n += b.store.Lookup([]byte("l"), shardOf(salt, 0), store.Hashed(numbered(i)), 1).Hit
			b.store.EndSession([]byte("l"), lease.Owner{})
		}
		return n
	}
	there := map[kv.Key]bool{}
	var seen uint64
	check := func(writer string, before []tenant.Usage) {
		t.Helper()
		for i, now := range b.store.Tenants() {
			if was := before[i]; now.Salt != writer && now.Bytes < min(was.Bytes, was.QuotaBytes) {
				t.Fatalf("%q has %d bytes, had %d of a quota of %d before %q stored", now.Salt, now.Bytes, was.Bytes, was.QuotaBytes, writer)
			}
		}
		events := make([]store.Event, 1000)
		n, lost := b.store.Events(seen, events)
		if lost {
			t.Fatal("events are lost")
		}
		for _, e := range events[:n] {
			if there[e.Key] == !e.Removed {
				t.Fatalf("%v is told twice: %+v", e.Key, e)
			}
			there[e.Key] = !e.Removed
		}
		seen += uint64(n)
		resident, _, more := b.store.Residents(0, nil)
		told := 0
		for _, is := range there {
			if is {
				told++
			}
		}
		if more || told != len(resident) {
			t.Fatalf("by the events %d objects are there, there are %d", told, len(resident))
		}
		for _, k := range resident {
			if !there[k] {
				t.Fatalf("%v is there and was not told", k)
			}
		}
	}
	for i := range 12 {
		put("one", i)
	}
	if got := hits("one", 0, 12); got != 12 {
		t.Fatalf("%d of a free pool's 12 hit", got)
	}
	for i := range 30 {
		for j, salt := range []string{"other", "one", "", ""} {
			before := b.store.Tenants()
			put(salt, 1000*(1+j/3)+i)
			check(salt, before)
		}
	}
	for salt, quota := range map[string]int{"one": 4, "other": 6} {
		if got := hits(salt, 1000, 1030); got < quota {
			t.Errorf("%d whole chunks of %q hit, its quota is %d", got, salt, quota)
		}
	}
	one, other := shardOf("one", 0), shardOf("other", 0)
	if got := b.store.Lookup([]byte("x"), one, store.Hashed(numbered(1029)), 1); got.Hit != 1 || one.Namespace == other.Namespace {
		t.Errorf("%+v", got)
	}
	b.store.EndSession([]byte("x"), lease.Owner{})
}
