// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/container"
	"github.com/kvasir-kv/kvasir/kv"
)

// Forever is the TTL of a tenant whose slots do not expire, whatever the common TTL is.
const Forever time.Duration = -1

// MaxTTL is the longest TTL, ten years. A longer one is ErrTTL.
const MaxTTL = 10 * 365 * 24 * time.Hour

// ErrTTL means that a TTL is neither Forever nor from one second to MaxTTL.
var ErrTTL = errors.New("tenant: a TTL is from 1 s to ten years")

// ttls has the TTLs and the last uses of slots, in seconds. Without any TTL it costs nothing; with one, 16 bytes for each slot.
type ttls struct {
	on     bool
	common uint32                // TTL of tenants without one of their own; 0: they do not expire
	of     map[string]*tenantTTL // by salt
	owners owners[*tenantTTL]
	slots  container.PagedSlice[lastUse]
	now    uint32
	began  uint32 // when on became true: earlier uses count as uses at this time
}

// tenantTTL is the TTL of one tenant.
type tenantTTL struct {
	ttl     uint32 // 0: its slots do not expire
	expired uint64 // number of slots that expired
}

// lastUse is when a slot was last used, and its tenant; in is nil if the tenant has no TTL of its own.
type lastUse struct {
	in *owner[*tenantTTL]
	at uint32
}

func checkTTL(ttl time.Duration) error {
	if ttl != Forever && (ttl < time.Second || ttl > MaxTTL) {
		return fmt.Errorf("%w, not %v", ErrTTL, ttl)
	}
	return nil
}

// inSeconds returns a TTL in seconds, rounded up.
func inSeconds(ttl time.Duration) uint32 {
	return uint32((max(ttl, 0) + time.Second - 1) / time.Second)
}

// SetCommonTTL sets the TTL of slots whose tenant has none of its own or is unknown. With 0 or Forever they do not expire. Error: ErrTTL.
func (t *Table) SetCommonTTL(ttl time.Duration) error {
	if ttl == 0 {
		ttl = Forever
	}
	if err := checkTTL(ttl); err != nil {
		return err
	}
	t.ttls.common = inSeconds(ttl)
	t.ttls.turn()
	return nil
}

// SetTTL gives a tenant a TTL of its own, or Forever. It applies to slots that the tenant has already once its namespaces are named and its
// slots adopted. Errors: ErrTTL, ErrTooMany, kv.ErrSalt.
func (t *Table) SetTTL(salt string, ttl time.Duration) error {
	l := t.ttls.of[salt]
	if err := checkSalt(salt); err != nil {
		return err
	}
	if err := checkTTL(ttl); err != nil {
		return err
	}
	if l == nil && len(t.ttls.of) == MaxQuotas {
		return fmt.Errorf("%w: %d tenants have a TTL", ErrTooMany, MaxQuotas)
	}
	if l == nil {
		l = new(tenantTTL)
		if t.ttls.of == nil {
			t.ttls.of = make(map[string]*tenantTTL)
		}
		t.ttls.of[salt] = l
	}
	l.ttl = inSeconds(ttl)
	t.ttls.turn()
	return nil
}

// DropTTL ends a tenant's own TTL; the common TTL then applies to its slots. It reports whether there was one.
func (t *Table) DropTTL(salt string) bool {
	l := t.ttls.of[salt]
	if l == nil {
		return false
	}
	t.ttls.owners.forgetAll(l)
	delete(t.ttls.of, salt)
	t.ttls.turn()
	return true
}

// turn begins to record uses once there is a TTL, and stops once there is none.
func (l *ttls) turn() {
	on := l.common > 0 || len(l.of) > 0
	if on && !l.on {
		l.began = l.now
	}
	l.on = on
}

// Tick sets the present time, counted from a fixed moment. Later uses get this time, until the next Tick.
func (t *Table) Tick(now time.Duration) { t.ttls.now = uint32(now / time.Second) }

// Mortal reports whether any slot may expire.
func (t *Table) Mortal() bool { return t.ttls.on }

// Expired reports whether a resident slot was not used for longer than its TTL.
func (t *Table) Expired(slot uint32) bool {
	ttl, at := t.ttls.life(slot)
	return ttl > 0 && t.ttls.now-min(t.ttls.now, at) > ttl
}

// Left returns how long a resident slot lives without another use, rounded up to seconds. It reports false if the slot does not expire.
func (t *Table) Left(slot uint32) (time.Duration, bool) {
	l := &t.ttls
	ttl, at := l.life(slot)
	if ttl == 0 {
		return 0, false
	}
	return time.Duration(ttl-min(ttl, l.now-min(l.now, at))) * time.Second, true
}

// life returns the TTL of a slot, 0 if it does not expire, and the time of its last use.
func (l *ttls) life(slot uint32) (ttl, at uint32) {
	if !l.on {
		return 0, 0
	}
	var of lastUse
	if int(slot) < l.slots.Len() {
		of = *l.slots.At(int(slot))
	}
	ttl = l.common
	if of.in != nil && !of.in.forgotten {
		ttl = of.in.tenant.ttl
	}
	return ttl, max(of.at, l.began)
}

// expired counts a slot that is dropped because its TTL was over.
func (l *ttls) expired(slot uint32) {
	if int(slot) < l.slots.Len() {
		if in := l.slots.At(int(slot)).in; in != nil {
			in.tenant.expired++
		}
	}
}

// add records a slot that became resident.
func (l *ttls) add(slot uint32, ns kv.Namespace) {
	l.slots.Grow(int(slot) + 1)
	of := lastUse{l.owners.of[ns], l.now}
	if of.in != nil {
		l.owners.enter(of.in)
	}
	*l.slots.At(int(slot)) = of
}

// adopt records the tenant of a resident slot's namespace.
func (l *ttls) adopt(slot uint32, ns kv.Namespace) {
	in := l.owners.of[ns]
	if in == nil {
		return
	}
	l.slots.Grow(int(slot) + 1)
	of := l.slots.At(int(slot))
	if of.in == in {
		return
	}
	if of.in != nil {
		l.owners.leave(of.in)
	}
	of.in = in
	l.owners.enter(in)
}

func (l *ttls) use(slot uint32) {
	l.slots.Grow(int(slot) + 1)
	l.slots.At(int(slot)).at = l.now
}

func (l *ttls) remove(slot uint32) {
	if int(slot) < l.slots.Len() {
		of := l.slots.At(int(slot))
		if of.in != nil {
			l.owners.leave(of.in)
		}
		*of = lastUse{}
	}
}
