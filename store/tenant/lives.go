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

// MaxTTL bounds a TTL: ten years.
const MaxTTL = 10 * 365 * 24 * time.Hour

// ErrTTL means that a TTL is neither Forever nor from one second to MaxTTL.
var ErrTTL = errors.New("tenants: a TTL is from 1 s to ten years")

// lives has the time to live of slots, in seconds, and their last use. Without any TTL it costs
// nothing; with one, 16 bytes for each slot.
type lives struct {
	on     bool
	common uint32           // of tenants without one of their own; 0: for ever
	of     map[string]*life // by salt
	spaces spaces[*life]
	slots  container.PagedSlice[touch]
	now    uint32
	began  uint32 // to be on: what was used before counts as used then
}

// life is the TTL of one tenant.
type life struct {
	ttl     uint32 // 0: for ever
	expired uint64 // slots
}

// touch is when a slot was used last, and in whose namespace it is; nil where that has no TTL
// of its own.
type touch struct {
	in *space[*life]
	at uint32
}

func checkTTL(ttl time.Duration) error {
	if ttl != Forever && (ttl < time.Second || ttl > MaxTTL) {
		return fmt.Errorf("%w, not %v", ErrTTL, ttl)
	}
	return nil
}

// inSeconds rounds a TTL up.
func inSeconds(ttl time.Duration) uint32 {
	return uint32((max(ttl, 0) + time.Second - 1) / time.Second)
}

// SetCommonTTL sets the TTL of slots whose tenant has none of its own or is unknown;
// 0 or Forever: they do not expire. Error: ErrTTL.
func (t *Table) SetCommonTTL(ttl time.Duration) error {
	if ttl == 0 {
		ttl = Forever
	}
	if err := checkTTL(ttl); err != nil {
		return err
	}
	t.lives.common = inSeconds(ttl)
	t.lives.turn()
	return nil
}

// SetTTL gives a tenant a TTL of its own, or Forever. What the tenant has already follows it once
// its namespaces are named and its slots adopted. Errors: ErrTTL, ErrTooMany, kv.ErrSalt.
func (t *Table) SetTTL(salt string, ttl time.Duration) error {
	l := t.lives.of[salt]
	if err := checkSalt(salt); err != nil {
		return err
	}
	if err := checkTTL(ttl); err != nil {
		return err
	}
	if l == nil && len(t.lives.of) == MaxQuotas {
		return fmt.Errorf("%w: there are %d TTLs", ErrTooMany, MaxQuotas)
	}
	if l == nil {
		l = new(life)
		if t.lives.of == nil {
			t.lives.of = make(map[string]*life)
		}
		t.lives.of[salt] = l
	}
	l.ttl = inSeconds(ttl)
	t.lives.turn()
	return nil
}

// DropTTL ends a tenant's own TTL: the common one is for its slots, too. It reports whether there
// was one.
func (t *Table) DropTTL(salt string) bool {
	l := t.lives.of[salt]
	if l == nil {
		return false
	}
	t.lives.spaces.forgetAll(l)
	delete(t.lives.of, salt)
	t.lives.turn()
	return true
}

// turn begins to note uses, or ends that.
func (l *lives) turn() {
	on := l.common > 0 || len(l.of) > 0
	if on && !l.on {
		l.began = l.now
	}
	l.on = on
}

// Tick says how late it is, since any moment that stays the same. Uses are noted by the time of the
// last Tick.
func (t *Table) Tick(now time.Duration) { t.lives.now = uint32(now / time.Second) }

// Mortal reports whether any slot may expire.
func (t *Table) Mortal() bool { return t.lives.on }

// Expired reports whether a resident slot was not used for longer than its TTL.
func (t *Table) Expired(slot uint32) bool {
	l := &t.lives
	if !l.on {
		return false
	}
	var of touch
	if int(slot) < l.slots.Len() {
		of = *l.slots.At(int(slot))
	}
	ttl := l.common
	if of.in != nil && !of.in.forgotten {
		ttl = of.in.whose.ttl
	}
	return ttl > 0 && l.now-min(l.now, max(of.at, l.began)) > ttl
}

// expired counts a slot that goes because its time is over.
func (l *lives) expired(slot uint32) {
	if int(slot) < l.slots.Len() {
		if in := l.slots.At(int(slot)).in; in != nil {
			in.whose.expired++
		}
	}
}

// add notes a slot that became resident.
func (l *lives) add(slot uint32, ns kv.Namespace) {
	l.slots.Grow(int(slot) + 1)
	of := touch{l.spaces.of[ns], l.now}
	if of.in != nil {
		l.spaces.enter(of.in)
	}
	*l.slots.At(int(slot)) = of
}

// adopt notes in whose namespace a resident slot is.
func (l *lives) adopt(slot uint32, ns kv.Namespace) {
	in := l.spaces.of[ns]
	if in == nil {
		return
	}
	l.slots.Grow(int(slot) + 1)
	of := l.slots.At(int(slot))
	if of.in == in {
		return
	}
	if of.in != nil {
		l.spaces.leave(of.in)
	}
	of.in = in
	l.spaces.enter(in)
}

func (l *lives) use(slot uint32) {
	l.slots.Grow(int(slot) + 1)
	l.slots.At(int(slot)).at = l.now
}

func (l *lives) remove(slot uint32) {
	if int(slot) < l.slots.Len() {
		of := l.slots.At(int(slot))
		if of.in != nil {
			l.spaces.leave(of.in)
		}
		*of = touch{}
	}
}
