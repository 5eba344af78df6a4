// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"fmt"
	"time"
)

const (
	// MaxPins bounds the slots that are pinned, of all tenants together; each takes about 60 bytes. Beyond it Pin returns ErrTooManyPins.
	MaxPins = 1 << 16

	// MaxPinLife bounds the life of a pin: a longer one is cut to it. A new pin of the same slot may extend it.
	MaxPinLife = 7 * 24 * time.Hour
)

var (
	// ErrNoPins means that a tenant has no limit of pins, so it may pin nothing.
	ErrNoPins = errors.New("tenant: the tenant has no limit of pins, so it may pin nothing")
	// ErrPinLimit means that a pin would exceed the tenant's limit.
	ErrPinLimit = errors.New("tenant: the tenant has pinned as much as it may")
	// ErrTooManyPins means that there are MaxPins pins.
	ErrTooManyPins = errors.New("tenant: all tenants together have too many pins")
)

// pins are slots that an operator wants to stay for a time. The owner of the Table must not evict them from Pin to Unpin or EndPins.
type pins struct {
	budgets map[string]*budget // by salt; of tenants that may pin or have pinned
	at      map[uint32]int     // index in list of each slot
	list    []pin
	next    uint32 // the earliest second at which a pin may end
	over    bool   // a tenant may have more pins than its limit
}

// budget is how much a tenant may pin, and has pinned.
type budget struct {
	salt    string
	limit   int64 // bytes; 0: nothing
	bytes   int64
	objects int
}

// pin is a pinned slot. until is a second of ttls.now.
type pin struct {
	slot  uint32
	until uint32
	of    *budget
	bytes int64
}

// SetPinLimit sets how many bytes of a tenant's objects may be pinned; 0: none. EndPins ends pins beyond the limit. Limits and quotas of
// all tenants must fit into the pool together; of each tenant the larger of the two counts. Errors: ErrTooMany, ErrSum, ErrQuota,
// kv.ErrSalt.
func (t *Table) SetPinLimit(salt string, bytes int64) error {
	p := &t.pins
	b := p.budgets[salt]
	if bytes == 0 {
		if b != nil {
			b.limit, p.over = 0, true
			p.forget(b)
		}
		return nil
	}
	quota := int64(0)
	if a := t.accounts[salt]; a != nil {
		quota = a.QuotaBytes
	}
	if err := t.mayReserve(salt, quota, bytes); err != nil {
		return err
	}
	if b == nil {
		if len(p.budgets) >= MaxQuotas {
			return fmt.Errorf("%w: %d tenants have a limit of pins", ErrTooMany, MaxQuotas)
		}
		if p.budgets == nil {
			p.budgets, p.at = make(map[string]*budget), make(map[uint32]int)
		}
		b = &budget{salt: salt}
		p.budgets[salt] = b
	}
	b.limit = bytes
	p.over = p.over || b.bytes > bytes
	return nil
}

// limitOf returns how many bytes of a tenant's objects may be pinned.
func (p *pins) limitOf(salt string) int64 {
	if b := p.budgets[salt]; b != nil {
		return b.limit
	}
	return 0
}

// forget removes a budget with neither a limit nor pins.
func (p *pins) forget(b *budget) {
	if b.limit == 0 && b.objects == 0 {
		delete(p.budgets, b.salt)
	}
}

// Pin pins a resident slot of a tenant for the time life, at most MaxPinLife. A slot that is pinned for longer already keeps its longer
// pin. fresh says that the slot was not pinned before. Errors: ErrNoPins, ErrPinLimit, ErrTooManyPins.
func (t *Table) Pin(salt string, slot uint32, life time.Duration) (fresh bool, _ error) {
	p := &t.pins
	until := t.ttls.now + 1 + inSeconds(min(life, MaxPinLife))
	if i, ok := p.at[slot]; ok {
		p.list[i].until = max(p.list[i].until, until)
		return false, nil
	}
	b, bytes := p.budgets[salt], t.bytes(slot)
	switch {
	case b == nil || b.limit == 0:
		return false, ErrNoPins
	case b.bytes+bytes > b.limit:
		return false, ErrPinLimit
	case len(p.list) == MaxPins:
		return false, ErrTooManyPins
	}
	if len(p.list) == 0 || until < p.next {
		p.next = until
	}
	p.at[slot] = len(p.list)
	p.list = append(p.list, pin{slot, until, b, bytes})
	b.bytes += bytes
	b.objects++
	return true, nil
}

// Unpin ends a slot's pin. It reports whether there was one.
func (t *Table) Unpin(slot uint32) bool {
	i, ok := t.pins.at[slot]
	if ok {
		t.pins.remove(i)
	}
	return ok
}

func (p *pins) remove(i int) {
	gone, last := p.list[i], len(p.list)-1
	gone.of.bytes -= gone.bytes
	gone.of.objects--
	p.forget(gone.of)
	p.list[i] = p.list[last]
	p.at[p.list[i].slot] = i
	p.list = p.list[:last]
	delete(p.at, gone.slot)
}

// EndPins ends `most` pins at most: those whose time is over or that exceed their tenant's limit, or with all any pin. It calls f for their
// slots. more says that further pins must end.
func (t *Table) EndPins(all bool, most int, f func(slot uint32)) (more bool) {
	p := &t.pins
	if !all && !p.over && (len(p.list) == 0 || t.ttls.now < p.next) {
		return false
	}
	next := ^uint32(0)
	for i := len(p.list) - 1; i >= 0; i-- { // the last pin moves to the place of a pin that ends
		of := &p.list[i]
		if !all && of.until > t.ttls.now && of.of.bytes <= of.of.limit {
			next = min(next, of.until)
			continue
		}
		if most == 0 {
			return true
		}
		most--
		slot := of.slot
		p.remove(i)
		f(slot)
	}
	p.next, p.over = next, false
	return false
}

// Pinned is a slot that is pinned.
type Pinned struct {
	Slot uint32
	Left time.Duration // until the pin ends
}

// Pins appends pinned slots to dst, `most` at most, from number `from` on. next is the number for the next call, or 0 when none is left. A
// pin that changes between two calls may be missed or returned twice.
func (t *Table) Pins(from, most int, dst []Pinned) (_ []Pinned, next int) {
	list := t.pins.list
	to := min(from+most, len(list))
	for _, p := range list[min(from, to):to] {
		dst = append(dst, Pinned{p.slot, time.Duration(p.until-min(p.until, t.ttls.now)) * time.Second})
	}
	if to == len(list) {
		return dst, 0
	}
	return dst, to
}
