// SPDX-License-Identifier: Apache-2.0

// Package tenant has an account for each cache salt with a quota: its use of the pool, its quota, and an eviction policy of its own. All
// other tenants share one policy. The package also knows the TTLs of slots and the pins of operators. Terms has the settings of operators
// for tenants, and the file that stores them.
//
// A quota is a guarantee, not a limit: while memory is free a tenant may have more. Eviction first takes slots beyond a tenant's quota,
// then slots of tenants without a quota. It takes slots within a quota only to make room for the same tenant.
//
// A Table takes no lock: its owner's covers it.
package tenant

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/evict"
)

const (
	// MaxQuotas bounds the tenants with a quota; also those with a TTL of their own, and those that may pin. A quota costs the memory of
	// its policy: for leaf-hazard 8 MB at most, and a part for each slot.
	MaxQuotas = 256
)

var (
	// ErrTooMany means that MaxQuotas tenants have a quota, a TTL or a limit of pins already.
	ErrTooMany = errors.New("tenant: too many tenants with a quota, a TTL or a limit of pins")
	// ErrSum means that all quotas, with the limits of pins that are larger, are more than the pool.
	ErrSum = errors.New("tenant: the quotas do not fit into the pool")
	// ErrQuota means that a quota is negative.
	ErrQuota = errors.New("tenant: a quota below 0")
)

// Table has the accounts and knows every slot in use. Its methods Add, Use, Remove, Victim and Ascend are those of evict.Policy, for all
// tenants together.
type Table struct {
	pool   int64 // bytes of the pool
	common evict.Policy
	policy func(quota int64) evict.Policy // makes the policy of an account
	busy   func(slot uint32) bool
	bytes  func(slot uint32) int64

	accounts map[string]*account // by salt
	order    []*account          // the same accounts, in a slice
	owners   owners[*account]
	slots    container.PagedSlice[place] // by slot, for slots in an account; grows only while there are accounts
	ttls     ttls
	pins     pins

	writer *account // the account for which room is made; nil for a tenant without a quota
	need   int64    // bytes that are needed for it
}

// place is the account of a slot. The zero place is in none.
type place struct {
	in    *owner[*account]
	local uint32 // 1 + the slot's number in the account's policy; 0 while it is staged
}

// of returns the account of a slot, nil for none.
func (p place) of() *account {
	if p.in == nil {
		return nil
	}
	return p.in.tenant
}

type account struct {
	Usage
	policy evict.Policy
	slots  container.PagedSlice[uint32] // by local number: the slot in the pool
	free   []uint32                     // local numbers that are free
	used   uint32                       // local numbers that were ever used
	busy   func(local uint32) bool
}

// Usage is how much of the pool a tenant has, and its settings.
type Usage struct {
	Salt         string
	QuotaBytes   int64 // -1: no quota; then the next four are not counted
	Bytes        int64 // of staged and resident objects, as the pool rounds them
	Objects      int   // staged and resident
	Evicted      uint64
	EvictedBytes uint64

	TTL     time.Duration // the tenant's own TTL, or Forever; 0: none, and Expired is not counted
	Expired uint64        // objects that expired

	PinLimit      int64 // bytes that may be pinned
	PinnedBytes   int64
	PinnedObjects int
}

// New returns a Table without quotas for a pool of `pool` bytes. policy makes the policy of a tenant with a quota. busy reports whether a
// slot cannot be evicted. bytes returns how much of the pool a slot takes.
func New(pool int64, common evict.Policy, policy func(quota int64) evict.Policy, busy func(slot uint32) bool, bytes func(slot uint32) int64) *Table {
	return &Table{pool: pool, common: common, policy: policy, busy: busy, bytes: bytes, accounts: make(map[string]*account)}
}

// Any reports whether any tenant has a quota.
func (t *Table) Any() bool { return len(t.order) > 0 }

// Named reports whether any tenant has a quota or a TTL of its own. Only then namespaces must be named.
func (t *Table) Named() bool { return t.Any() || len(t.ttls.of) > 0 }

func checkSalt(salt string) error {
	switch {
	case kv.CheckSalt(salt) != nil:
		return kv.ErrSalt
	case !utf8.ValidString(salt):
		return fmt.Errorf("%w: it is not UTF-8", kv.ErrSalt)
	}
	return nil
}

// mayReserve returns an error if a tenant may not have this quota and limit of pins. Of each tenant the larger of the two counts, and all
// together must fit into the pool.
func (t *Table) mayReserve(salt string, quota, pins int64) error {
	if err := checkSalt(salt); err != nil {
		return err
	}
	if quota < 0 || pins < 0 {
		return ErrQuota
	}
	bytes := max(quota, pins)
	sum := min(bytes, math.MaxInt64/2)
	for _, o := range t.order {
		if o.Salt != salt {
			sum += max(o.QuotaBytes, t.pins.limitOf(o.Salt))
		}
	}
	for _, b := range t.pins.budgets {
		if b.salt != salt && t.accounts[b.salt] == nil {
			sum += b.limit
		}
	}
	if bytes > t.pool || sum > t.pool {
		return fmt.Errorf("%w: with this one they are %s of %s", ErrSum, kv.FormatBytes(sum), kv.FormatBytes(t.pool))
	}
	return nil
}

// SetQuota sets or changes a tenant's quota. Slots that the tenant has already count once its namespaces are named and its slots adopted.
// Errors: ErrTooMany, ErrSum, ErrQuota, kv.ErrSalt.
func (t *Table) SetQuota(salt string, bytes int64) error {
	a := t.accounts[salt]
	if err := t.mayReserve(salt, bytes, t.pins.limitOf(salt)); err != nil {
		return err
	}
	if a == nil && len(t.order) == MaxQuotas {
		return fmt.Errorf("%w: %d tenants have a quota", ErrTooMany, MaxQuotas)
	}
	if a == nil {
		a = &account{Usage: Usage{Salt: salt}, policy: t.policy(bytes)}
		a.busy = func(local uint32) bool { return t.busy(*a.slots.At(int(local))) }
		t.accounts[salt] = a
		t.order = append(t.order, a)
	}
	a.QuotaBytes = bytes
	return nil
}

// Name sets the tenant of a namespace. It reports whether that was a change. The caller must then call Adopt for the slots that the
// namespace has already.
func (t *Table) Name(ns kv.Namespace, salt []byte) (news bool) {
	if a := t.accounts[string(salt)]; a != nil {
		news = t.owners.name(ns, a)
	}
	if l := t.ttls.of[string(salt)]; l != nil {
		news = t.ttls.owners.name(ns, l) || news
	}
	return news
}

// Stage records that a slot is being written.
func (t *Table) Stage(slot uint32, ns kv.Namespace) {
	if in := t.owners.of[ns]; in != nil {
		t.slots.Grow(int(slot) + 1)
		*t.slots.At(int(slot)) = place{in: in}
		t.owners.enter(in)
		in.tenant.Bytes += t.bytes(slot)
		in.tenant.Objects++
	}
}

// Add records that a slot became resident: see evict.Policy.
func (t *Table) Add(slot uint32, ns kv.Namespace, id, parent uint64) {
	if t.ttls.on {
		t.ttls.add(slot, ns)
	}
	t.admit(slot, ns, id, parent)
}

// admit adds a resident slot to the policy of its tenant, or to the common one if the tenant has none.
func (t *Table) admit(slot uint32, ns kv.Namespace, id, parent uint64) {
	p := t.at(slot)
	if p.in == nil && t.Any() {
		t.Stage(slot, ns)
		p = t.at(slot)
	}
	if p.in == nil {
		t.common.Add(slot, id, parent, t.bytes(slot))
		return
	}
	p.of().policy.Add(t.enter(slot, p.of()), id, parent, t.bytes(slot))
}

// enter gives a slot a local number in an account.
func (t *Table) enter(slot uint32, a *account) (local uint32) {
	if last := len(a.free) - 1; last >= 0 {
		local, a.free = a.free[last], a.free[:last]
	} else {
		local = a.used
		a.used++
		a.slots.Grow(int(a.used))
	}
	*a.slots.At(int(local)) = slot
	t.slots.At(int(slot)).local = local + 1
	return local
}

// Adopt moves a slot of a named namespace into its tenant's account; a resident slot becomes the most recently used there. A slot that is
// in an account already stays in that one.
func (t *Table) Adopt(slot uint32, ns kv.Namespace, resident bool, id, parent uint64) {
	if resident {
		t.ttls.adopt(slot, ns)
	}
	switch {
	case t.owners.of[ns] == nil || t.at(slot).in != nil:
	case resident:
		t.common.Remove(slot)
		t.admit(slot, ns, id, parent)
	default:
		t.Stage(slot, ns)
	}
}

// Use records that a slot was served or stored again.
func (t *Table) Use(slot uint32) {
	if t.ttls.on {
		t.ttls.use(slot)
	}
	switch p := t.at(slot); {
	case p.in == nil:
		t.common.Use(slot)
	case p.local > 0:
		p.of().policy.Use(p.local - 1)
	}
}

// Cause says why a slot is removed.
type Cause uint8

// The causes that are counted for tenants.
const (
	Other   Cause = iota
	Evicted       // to make room
	Expired       // it was not used for its TTL
)

// Remove records that a slot has no content any more, and counts the cause `why` for its tenant. It does nothing for a slot that the Table
// does not know.
func (t *Table) Remove(slot uint32, why Cause) {
	if why == Expired {
		t.ttls.expired(slot)
	}
	t.ttls.remove(slot)
	t.leave(slot, why == Evicted)
}

// leave removes a slot from its account and its policy.
func (t *Table) leave(slot uint32, evicted bool) {
	p := t.at(slot)
	a := p.of()
	if a == nil {
		t.common.Remove(slot)
		return
	}
	bytes := t.bytes(slot)
	a.Bytes -= bytes
	a.Objects--
	if evicted {
		a.Evicted++
		a.EvictedBytes += uint64(bytes)
	}
	if p.local > 0 {
		a.policy.Remove(p.local - 1)
		a.free = append(a.free, p.local-1)
	}
	t.owners.leave(p.in)
	*t.slots.At(int(slot)) = place{}
}

// at returns the account of a slot.
func (t *Table) at(slot uint32) place {
	if int(slot) >= t.slots.Len() {
		return place{}
	}
	return *t.slots.At(int(slot))
}

// For sets the namespace for which room is made, and how many bytes it needs. Victim, Spared and Ascend then work for the namespace's
// tenant.
func (t *Table) For(ns kv.Namespace, bytes int64) {
	t.writer, t.need = place{in: t.owners.of[ns]}.of(), bytes
}

// over returns by how many bytes an account exceeds its quota. The bytes that the writer needs count for the writer's account.
func (t *Table) over(a *account) int64 {
	n := a.Bytes - a.QuotaBytes
	if a == t.writer {
		n += t.need
	}
	return n
}

// byExcess calls f for the accounts above their quotas, the one with the largest excess first, until f reports false.
func (t *Table) byExcess(f func(a *account) bool) bool {
	last, tried := int64(0), -1
	for {
		most, at := int64(0), -1
		for i, a := range t.order {
			n := t.over(a)
			if n <= 0 || tried >= 0 && (n > last || n == last && i <= tried) {
				continue
			}
			if n > most {
				most, at = n, i
			}
		}
		if at < 0 {
			return true
		}
		if !f(t.order[at]) {
			return false
		}
		last, tried = most, at
	}
}

// Victim returns the slot to evict next for the tenant that For set: see evict.Policy.
func (t *Table) Victim() (slot uint32, ok, more bool) {
	if !t.Any() {
		return t.common.Victim(t.busy)
	}
	own := false // the writer's policy was asked
	t.byExcess(func(a *account) bool {
		own = own || a == t.writer
		slot, ok, more = t.victimOf(a)
		ok = ok && !t.Spared(slot)
		return !ok && !more
	})
	if ok || more {
		return slot, ok, more
	}
	if slot, ok, more = t.common.Victim(t.busy); ok || more || own || t.writer == nil {
		return slot, ok, more
	}
	return t.victimOf(t.writer)
}

func (t *Table) victimOf(a *account) (slot uint32, ok, more bool) {
	local, ok, more := a.policy.Victim(a.busy)
	if !ok {
		return 0, false, more
	}
	return *a.slots.At(int(local)), true, false
}

// Spared reports whether the slot must not be evicted for the writer, because another tenant would then be below its quota.
func (t *Table) Spared(slot uint32) bool {
	a := t.at(slot).of()
	return a != nil && a != t.writer && a.Bytes-t.bytes(slot) < a.QuotaBytes
}

// Ascend is as in evict.Policy, for the tenant that For set.
func (t *Table) Ascend(f func(slot uint32) bool) {
	on, own := true, false
	ascend := func(a *account) bool {
		own = own || a == t.writer
		a.policy.Ascend(func(local uint32) bool {
			on = f(*a.slots.At(int(local)))
			return on
		})
		return on
	}
	if !t.byExcess(ascend) {
		return
	}
	t.common.Ascend(func(slot uint32) bool {
		on = f(slot)
		return on
	})
	if on && !own && t.writer != nil {
		ascend(t.writer)
	}
}

// List returns the usage of each tenant that has a quota, a TTL or a limit of pins of its own, by salt.
func (t *Table) List() []Usage {
	of := make(map[string]*Usage)
	add := func(salt string) *Usage {
		if of[salt] == nil {
			of[salt] = &Usage{Salt: salt, QuotaBytes: -1}
		}
		return of[salt]
	}
	for _, a := range t.order {
		*add(a.Salt) = a.Usage
	}
	for salt, l := range t.ttls.of {
		u := add(salt)
		u.TTL, u.Expired = time.Duration(l.ttl)*time.Second, l.expired
		if l.ttl == 0 {
			u.TTL = Forever
		}
	}
	for salt, b := range t.pins.budgets {
		u := add(salt)
		u.PinLimit, u.PinnedBytes, u.PinnedObjects = b.limit, b.bytes, b.objects
	}
	out := make([]Usage, 0, len(of))
	for _, u := range of {
		out = append(out, *u)
	}
	slices.SortFunc(out, func(a, b Usage) int { return cmp.Compare(a.Salt, b.Salt) })
	return out
}

// Dropped is a tenant whose quota has ended and whose slots must be released.
type Dropped struct{ account *account }

// DropQuota ends a tenant's quota. ok is false if it has none. The tenant must not get another quota before all its slots are released.
func (t *Table) DropQuota(salt string) (d Dropped, ok bool) {
	a := t.accounts[salt]
	if a == nil {
		return Dropped{}, false
	}
	t.owners.forgetAll(a)
	delete(t.accounts, salt)
	t.order = slices.DeleteFunc(t.order, func(o *account) bool { return o == a })
	a.QuotaBytes, t.writer = 0, nil
	return Dropped{a}, true
}

// Release moves a resident slot of a dropped tenant to the common policy, as the most recently used. It removes a staged slot from the
// account. It does nothing for another slot.
func (t *Table) Release(d Dropped, slot uint32, resident bool, id, parent uint64) {
	if t.at(slot).of() != d.account {
		return
	}
	t.leave(slot, false)
	if resident {
		t.common.Add(slot, id, parent, t.bytes(slot))
	}
}
