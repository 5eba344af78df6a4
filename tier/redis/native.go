// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// strayLife is the time to live of stripes until the first value is written: if their writer
// ends before that, Redis removes them.
const strayLife = 10 * time.Minute

// found is the result of looking at an object's name.
type found struct {
	header
	there   bool // the name exists
	foreign bool // its type is not string: another program made it
	good    bool // it has a header, and all stripes exist
	headed  bool // it has a header
	later   bool // it has a header of a later release
}

// find looks at objects: one round for their headers, and one more if some have several stripes. If an object lacks a stripe, find looks at
// its header again: another server may have replaced the object meanwhile, and find then returns the new one. If only some servers
// answered, the error is errSome, and the objects of the others look missing.
func (t *Tier) find(ctx context.Context, keys []kv.Key) ([]found, error) {
	all, some := t.findOnce(ctx, keys)
	if all == nil {
		return nil, some
	}
	var lack []int
	var queries []query
	now := make([]found, len(keys))
	for i := range all {
		if all[i].headed && !all[i].good {
			lack = append(lack, i)
			queries = append(queries, t.lookAt(keys[i], &now[i]))
		}
	}
	if len(lack) == 0 || t.ask(ctx, queries) != nil { // without the second look the first one counts
		return all, some
	}
	var replaced []kv.Key
	lack = slices.DeleteFunc(lack, func(i int) bool { return !now[i].headed || now[i].header == all[i].header })
	for _, i := range lack {
		replaced = append(replaced, keys[i])
	}
	if len(lack) == 0 {
		return all, some
	}
	if again, _ := t.findOnce(ctx, replaced); again != nil {
		for j, i := range lack {
			all[i] = again[j]
		}
	}
	return all, some
}

// findOnce is find without the second look at the headers.
func (t *Tier) findOnce(ctx context.Context, keys []kv.Key) ([]found, error) {
	all := make([]found, len(keys))
	queries := make([]query, len(keys))
	for i, k := range keys {
		queries[i] = t.lookAt(k, &all[i])
	}
	some := t.ask(ctx, queries)
	if acceptPartial(ctx, some) != nil {
		return nil, some
	}
	type stripe struct {
		of, i int
		there bool
	}
	var stripes []stripe
	for i := range all {
		for j := 1; all[i].headed && j < all[i].stripes(); j++ {
			stripes = append(stripes, stripe{of: i, i: j})
		}
	}
	queries = queries[:0]
	for i := range stripes {
		s := &stripes[i]
		name, h := t.name(keys[s.of]), all[s.of].header
		queries = append(queries, query{name, []string{"STRLEN", stripeName(name, h, s.i)}, func(c *resp.Conn) error {
			n, err := c.Int()
			s.there = err == nil && n == h.stripeBytes(s.i)
			return unlessWrongType(err)
		}})
	}
	if err := t.ask(ctx, queries); err != nil {
		if some = err; acceptPartial(ctx, err) != nil {
			return nil, err
		}
	}
	for _, s := range stripes {
		all[s.of].good = all[s.of].good && s.there
	}
	return all, some
}

// lookAt asks for an object's header.
func (t *Tier) lookAt(k kv.Key, f *found) query {
	name := t.name(k)
	return query{name, []string{"GETRANGE", name, "0", strconv.Itoa(sealedHeaderBytes - 1)}, func(c *resp.Conn) (err error) {
		*f, err = readFound(c, k)
		return err
	}}
}

// unlessWrongType drops the error that a name is not of type string.
func unlessWrongType(err error) error {
	if e, ok := errors.AsType[*resp.Error](err); ok && e.Code() == "WRONGTYPE" {
		return nil
	}
	return err
}

func readFound(c *resp.Conn, k kv.Key) (f found, _ error) {
	n, err := c.Value()
	switch {
	case err != nil && unlessWrongType(err) == nil:
		return found{there: true, foreign: true}, nil
	case errors.Is(err, resp.ErrNil):
		return f, nil
	case err != nil:
		return f, err
	case n > sealedHeaderBytes:
		return f, fmt.Errorf("%w: %d bytes where %d were asked for", resp.ErrProtocol, n, sealedHeaderBytes)
	case n == 0:
		return f, nil
	}
	b := make([]byte, n)
	if err := c.Fill(b); err != nil {
		return f, err
	}
	f.there = true
	f.header, f.headed = parseHeader(b, k)
	f.good, f.later = f.headed, isLater(b)
	return f, nil
}

// readNative fills dst from an object's stripes. If another server replaces the object meanwhile, it reads the new one.
func (t *Tier) readNative(ctx context.Context, k kv.Key, dst []byte, sum *tier.Summer) (tier.Meta, error) {
	m, replaced, err := t.readNativeOnce(ctx, k, dst, sum)
	if replaced && ctx.Err() == nil {
		m, _, err = t.readNativeOnce(ctx, k, dst, sum)
	}
	return m, err
}

// readNativeOnce is readNative without the second try. It reports whether the object was replaced while it read.
func (t *Tier) readNativeOnce(ctx context.Context, k kv.Key, dst []byte, sum *tier.Summer) (m tier.Meta, replaced bool, _ error) {
	name, flow := t.name(k), tier.FlowOf(ctx)
	var h header
	var end uint32
	err := t.at(ctx, name, int64(len(dst)), func(c *resp.Conn) (err error) {
		h, end, err = readFirst(c, k, name, dst, sum, flow)
		return err
	})
	torn := err != nil // the first value is torn
	for i := 1; err == nil && i < h.stripes(); i++ {
		from, to := h.span(i)
		err = t.at(ctx, name, to-from, func(c *resp.Conn) error {
			return readExact(c, k, stripeName(name, h, i), dst[from:to], from, sum, flow)
		})
	}
	if errors.Is(err, errForeign) {
		return tier.Meta{}, false, tier.ErrMissing
	}
	if h.length > 0 && isOurs(err) { // a part is missing or torn, so the rest is useless
		return tier.Meta{}, t.removeTorn(ctx, k, h, torn), tier.ErrMissing
	}
	if err != nil {
		return tier.Meta{}, false, err
	}
	m = h.meta()
	m.End = end
	return m, false, nil
}

// removeTorn removes the rest of an object whose parts do not fit together. first means that its first value does not fit. If another
// server has replaced the object meanwhile, removeTorn keeps the new object, and reports true if that object is good. What cannot be
// removed now, the next reader removes.
func (t *Tier) removeTorn(ctx context.Context, k kv.Key, h header, first bool) (replaced bool) {
	all, err := t.find(ctx, []kv.Key{k})
	if err != nil {
		return false
	}
	switch now, name := all[0], t.name(k); {
	case now.header != h:
		_ = t.remove(ctx, name, names(name, h)[1:])
		return now.good
	case first, !now.good:
		_ = t.remove(ctx, name, names(name, h))
	}
	return false
}

// readEnd reads the answer to PTTL and returns the end of the object's life, 0 for none or if the user may not ask.
func readEnd(c *resp.Conn) (end uint32, err error) {
	left, err := c.Reply()
	if _, refused := errors.AsType[*resp.Error](err); refused {
		return 0, nil
	}
	if err != nil || left.Kind != ':' || left.Int < 0 {
		return 0, err
	}
	return uint32(time.Now().Add(time.Duration(min(left.Int, 1<<40)) * time.Millisecond).Unix()), nil
}

// readFirst reads an object's header and its first stripe. If the first stripe does not fit the header, it returns
// the header with an error. end is the end of the object's life, 0 if it has none.
func readFirst(c *resp.Conn, k kv.Key, name string, dst []byte, sum *tier.Summer, flow *tier.Flow) (h header, end uint32, _ error) {
	c.Command("PTTL", name)
	c.Command("GET", name)
	end, err := readEnd(c)
	if err != nil {
		return h, 0, err
	}
	n, err := c.Value()
	switch {
	case err != nil:
		return h, 0, readError(err)
	case n < headerBytes:
		return h, 0, errForeign
	}
	var all [sealedHeaderBytes]byte
	b := all[:headerBytes]
	if err := c.Fill(b); err != nil {
		return h, 0, err
	}
	if size := headerSize(b); size > headerBytes && n >= int64(size) {
		if err := c.Fill(all[headerBytes:size]); err != nil {
			return h, 0, err
		}
		b = all[:size]
	}
	h, ok := parseHeader(b, k)
	if !ok {
		return header{}, 0, errForeign
	}
	if int64(h.length) != int64(len(dst)) {
		return header{}, 0, &tier.CorruptError{Key: k, Want: tier.Meta{Len: int64(len(dst))}, Got: h.meta()}
	}
	if n-int64(h.size()) != h.stripeBytes(0) {
		return h, 0, tier.ErrMissing
	}
	flow.Starts(h.meta())
	return h, end, flow.Fill(sum, c, dst[:h.stripeBytes(0)], 0)
}

// readError turns an answer that means a missing or foreign value into that error.
func readError(err error) error {
	if unlessWrongType(err) == nil {
		return errForeign
	}
	if errors.Is(err, resp.ErrNil) {
		return tier.ErrMissing
	}
	return err
}

// readExact fills dst, which begins at byte `at` of the object, with a value that must be as long as dst.
func readExact(c *resp.Conn, k kv.Key, name string, dst []byte, at int64, sum *tier.Summer, flow *tier.Flow) error {
	c.Command("GET", name)
	n, err := c.Value()
	switch {
	case err != nil:
		return readError(err)
	case n == 0:
		return tier.ErrMissing
	case n != int64(len(dst)):
		return &tier.CorruptError{Key: k, Want: tier.Meta{Len: int64(len(dst))}, Got: tier.Meta{Len: n}}
	}
	return flow.Fill(sum, c, dst, at)
}

// writeNative writes an object's stripes, the first one last.
func (t *Tier) writeNative(ctx context.Context, k kv.Key, m tier.Meta, src []byte) (wrote bool, _ error) {
	all, err := t.find(ctx, []kv.Key{k})
	if err != nil {
		return false, err
	}
	was, name := all[0], t.name(k)
	switch {
	case was.foreign:
		return false, fmt.Errorf("%w: a value of another program has the object's name in Redis", tier.ErrNotKept)
	case was.later:
		if _, said := t.warned.LoadOrStore(tier.ErrNewer, true); !said {
			t.log.Warn("values of a later release are misses and stay as they are: start the release that wrote them, or name another prefix", "name", name)
		}
		return false, fmt.Errorf("%w: %w", tier.ErrNotKept, tier.ErrNewer)
	case was.good && was.meta() == tier.Meta{Len: m.Len, Sum: m.Sum, Seal: m.Seal}:
		return false, nil
	case was.good && m.Unseals(was.meta()):
		return false, fmt.Errorf("%w: %w", tier.ErrNotKept, tier.ErrSealed)
	case m.Over(time.Now()):
		return false, fmt.Errorf("%w: the object's time to live is over", tier.ErrNotKept)
	}
	h := headerOf(m, t.o.Stripe)
	if h.stripes() > maxStripes {
		return false, fmt.Errorf("%w: an object of %d bytes needs %d stripes, at most %d are possible", tier.ErrNotKept, m.Len, h.stripes(), maxStripes)
	}
	ttl, flow := t.lifeOf(m), tier.FlowOf(ctx)
	life := cmp.Or(ttl, strayLife)
	for i := 1; i < h.stripes(); i++ {
		from, to := h.span(i)
		err := t.at(ctx, name, to-from, func(c *resp.Conn) error {
			parts, ready := flow.Parts(src[from:to], from)
			if err := c.SendWhen([]string{"SET", stripeName(name, h, i)}, parts, ready, "EX", seconds(life)); err != nil {
				return err
			}
			return c.OK()
		})
		if err != nil {
			return true, err
		}
	}
	before, err := t.writeFirst(ctx, k, h, src[:h.stripeBytes(0)], was, ttl)
	if err != nil {
		return true, err
	}
	for _, f := range []found{was, before} {
		if f.headed && (f.sum != h.sum || f.stripe != h.stripe || f.write != h.write || f.seal != h.seal) {
			err = errors.Join(err, t.remove(ctx, name, names(name, f.header)[1:]))
		}
	}
	return true, err
}

// lifeOf returns how long Redis must keep an object, in whole seconds; 0: until it is deleted.
func (t *Tier) lifeOf(m tier.Meta) time.Duration {
	life := t.o.TTL
	if m.End > 0 {
		left := max(time.Second, time.Until(time.Unix(int64(m.End), 0)).Truncate(time.Second))
		life = min(cmp.Or(life, left), left)
	}
	return life
}

// writeFirst writes an object's first value and then removes the early end of life (strayLife) of the other values. `was` is what find saw
// under the name. It returns what the write really replaced. If `was` is empty, and another server has written the object meanwhile, that
// server's object stays.
func (t *Tier) writeFirst(ctx context.Context, k kv.Key, h header, first []byte, was found, ttl time.Duration) (before found, _ error) {
	name, flow := t.name(k), tier.FlowOf(ctx)
	var options []string
	if ttl > 0 {
		options = append(options, "EX", seconds(ttl))
	}
	if !was.there {
		options = append(options, "NX")
	}
	lost := false
	err := t.at(ctx, name, int64(len(first)), func(c *resp.Conn) (err error) {
		if was.there {
			c.Command(t.lookAt(k, nil).args...)
		}
		parts, ready := flow.Parts(first, 0)
		if ready != nil { // the header is always ready
			whenReady := ready
			ready = func(i int) error {
				if i == 0 {
					return nil
				}
				return whenReady(i - 1)
			}
		}
		if err := c.SendWhen([]string{"SET", name}, append([][]byte{h.bytes(k)}, parts...), ready, options...); err != nil {
			return err
		}
		if was.there {
			if before, err = readFound(c, k); err != nil {
				return err
			}
		}
		err = c.OK()
		if lost = errors.Is(err, resp.ErrNil); lost {
			return nil
		}
		if err != nil {
			return err
		}
		return persist(c, name, h, ttl)
	})
	if err != nil || !lost || h.stripes() == 1 {
		return before, err
	}
	var now found
	if err := t.ask(ctx, []query{t.lookAt(k, &now)}); err != nil {
		return before, err
	}
	if now.header != h {
		return before, t.remove(ctx, name, names(name, h)[1:])
	}
	return before, t.at(ctx, name, 0, func(c *resp.Conn) error { return persist(c, name, h, ttl) })
}

// persist removes the early end of life of an object's stripes, unless the object has a TTL.
func persist(c *resp.Conn, name string, h header, ttl time.Duration) error {
	if ttl > 0 {
		return nil
	}
	for i := 1; i < h.stripes(); i++ {
		c.Command("PERSIST", stripeName(name, h, i))
	}
	for i := 1; i < h.stripes(); i++ {
		if _, err := c.Int(); err != nil {
			return err
		}
	}
	return nil
}

func seconds(d time.Duration) string { return strconv.FormatInt(int64(d/time.Second), 10) }

// remove deletes values, which must all be in the slot of name.
func (t *Tier) remove(ctx context.Context, name string, values []string) error {
	return t.ask(ctx, unlink(nil, name, values))
}

// unlink adds a command for each value, because a cluster refuses a command with several names while it moves
// their slot.
func unlink(queries []query, name string, values []string) []query {
	for _, v := range values {
		queries = append(queries, query{name, []string{"UNLINK", v}, func(c *resp.Conn) error {
			_, err := c.Int()
			return err
		}})
	}
	return queries
}
