// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// maxValue is the longest value, in bytes, that Redis takes by default. In LMCache's layouts a larger object is not kept.
const maxValue = 512 << 20

// Flows implements tier.Flowing.
func (t *Tier) Flows() {}

// Stat implements tier.Tier.
func (t *Tier) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	clear(metas[:len(keys)])
	if t.o.Layout != Native {
		return t.statLMCache(ctx, keys, metas)
	}
	all, err := t.find(ctx, keys)
	if acceptPartial(ctx, err) != nil {
		return err
	}
	for i, f := range all {
		if f.good {
			metas[i] = f.meta()
		}
	}
	return nil
}

// statLMCache asks for lengths, since LMCache's layouts store nothing more about an object.
func (t *Tier) statLMCache(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	queries := make([]query, 0, len(keys))
	for i, k := range keys {
		name, ok := t.lmcacheName(k)
		if !ok {
			continue
		}
		queries = append(queries, query{name, []string{"STRLEN", name}, func(c *resp.Conn) error {
			n, err := c.Int()
			if n > 0 && err == nil {
				metas[i] = tier.Meta{Len: n, NoSum: true}
			}
			return unlessWrongType(err)
		}})
	}
	return acceptPartial(ctx, t.ask(ctx, queries))
}

// Read implements tier.Tier. In LMCache's layouts a value whose length is not that of dst stays: the next Write replaces it.
func (t *Tier) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	return t.read(ctx, k, dst, nil)
}

// ReadSummed implements tier.Summing.
func (t *Tier) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m tier.Meta, sum uint64, err error) {
	return tier.Summed(dst, func(s *tier.Summer) (tier.Meta, error) { return t.read(ctx, k, dst, s) })
}

func (t *Tier) read(ctx context.Context, k kv.Key, dst []byte, sum *tier.Summer) (tier.Meta, error) {
	if err := ctx.Err(); err != nil {
		return tier.Meta{}, err
	}
	if t.o.Layout == Native {
		return t.readNative(ctx, k, dst, sum)
	}
	name, ok := t.lmcacheName(k)
	if !ok {
		return tier.Meta{}, tier.ErrMissing
	}
	err := t.at(ctx, name, int64(len(dst)), func(c *resp.Conn) error { return readExact(c, k, name, dst, 0, sum, nil) })
	if errors.Is(err, errForeign) {
		err = tier.ErrMissing
	}
	if err != nil {
		return tier.Meta{}, err
	}
	return tier.Meta{Len: int64(len(dst)), NoSum: true}, nil
}

// Write implements tier.Tier. In LMCache's layouts it keeps an existing value of the right length.
func (t *Tier) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if m.Len != int64(len(src)) || m.Len < 1 {
		return fmt.Errorf("redis: write of %d bytes for an object of %d: the lengths must be equal and above 0", len(src), m.Len)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	name, known := "", true
	if t.o.Layout == Native {
		name = t.name(k)
	} else if name, known = t.lmcacheName(k); !known {
		return t.o.Names.Unnamed(k)
	}
	s, err := t.pick(ctx, name)
	if err != nil {
		return err
	}
	if err := t.checkMemory(ctx, s, m.Len); err != nil {
		return err
	}
	wrote := false
	if t.o.Layout == Native {
		wrote, err = t.writeNative(ctx, k, m, src)
	} else {
		wrote, err = t.writeLMCache(ctx, name, src)
	}
	if wrote {
		t.written.Add(m.Len)
		t.memory.add(s.addr, m.Len)
	}
	return t.refusal(err)
}

func (t *Tier) writeLMCache(ctx context.Context, name string, src []byte) (wrote bool, _ error) {
	if len(src) > maxValue {
		return false, fmt.Errorf("%w: a value has at most %d bytes", tier.ErrNotKept, maxValue)
	}
	var length int64
	err := t.at(ctx, name, 0, func(c *resp.Conn) (err error) {
		c.Command("STRLEN", name) // fails if the name is not of type string, which SET would replace, too
		length, err = c.Int()
		return err
	})
	if err != nil || length == int64(len(src)) {
		return false, err
	}
	var options []string
	if t.o.TTL > 0 {
		options = []string{"EX", seconds(t.o.TTL)}
	}
	return true, t.at(ctx, name, int64(len(src)), func(c *resp.Conn) error {
		if err := c.Send([]string{"SET", name}, [][]byte{src}, options...); err != nil {
			return err
		}
		return c.OK()
	})
}

// errMayNotDelete means that an object is not deleted, because adapters of LMCache may be about to load it.
var errMayNotDelete = errors.New(`objects of LMCache's resp adapters are not deleted: set "delete": true where no server of lmcache 0.5.6 shares them`)

// Delete implements tier.Tier. In the RESP layout without MayDelete it deletes nothing and returns tier.ErrNotKept.
func (t *Tier) Delete(ctx context.Context, keys []kv.Key) error {
	switch {
	case len(keys) == 0:
		return nil
	case t.o.Layout == RESP && !t.o.MayDelete:
		return fmt.Errorf("%w: %w", tier.ErrNotKept, errMayNotDelete)
	}
	var queries []query
	if t.o.Layout != Native {
		for _, k := range keys {
			if name, ok := t.lmcacheName(k); ok {
				queries = unlink(queries, name, []string{name})
			}
		}
		return t.ask(ctx, queries)
	}
	all, err := t.find(ctx, keys)
	if err != nil {
		return err
	}
	for i, f := range all {
		name := t.name(keys[i])
		switch {
		case f.headed:
			queries = unlink(queries, name, names(name, f.header))
		case f.there && !f.foreign:
			queries = unlink(queries, name, []string{name})
		}
	}
	return t.ask(ctx, queries)
}

// scanCount is how many names one call asks for.
const scanCount = 512

// List implements tier.Lister for the native layout. The names in LMCache's layouts do not have
// the namespace.
func (t *Tier) List(ctx context.Context, f func(kv.Key, tier.Meta) bool) error {
	if t.o.Layout != Native {
		return tier.ErrNoList
	}
	if err := t.topology.ask(ctx); err != nil {
		return err
	}
	seen := make(map[kv.Key]bool)
	for _, s := range t.topology.all() {
		more, err := t.scan(ctx, s, func(names []string, keys []kv.Key) (bool, error) { return t.listSome(ctx, keys, seen, f) })
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// listSome calls f for the keys of whole objects that are not in seen yet, since a scan may return a name
// twice.
func (t *Tier) listSome(ctx context.Context, keys []kv.Key, seen map[kv.Key]bool, f func(kv.Key, tier.Meta) bool) (more bool, _ error) {
	keys = slices.DeleteFunc(keys, func(k kv.Key) bool {
		was := seen[k]
		seen[k] = true
		return was
	})
	all, err := t.find(ctx, keys)
	if err != nil {
		return false, err
	}
	for i, found := range all {
		if found.good && !f(keys[i], found.meta()) {
			return false, nil
		}
	}
	return true, nil
}

// Hottest implements tier.Ranking for the native layout. It ranks by the number of uses if the server
// counts them (a maxmemory-policy of the LFU kind), else by the last use. It leaves out a server that
// fails.
func (t *Tier) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	if t.o.Layout != Native {
		return tier.ErrNoList
	}
	if err := t.topology.ask(ctx); err != nil {
		return err
	}
	hot := tier.NewHot(n)
	var errs []error
	all := t.topology.all()
	for _, s := range all {
		_, err := t.scan(ctx, s, func(names []string, keys []kv.Key) (bool, error) {
			heats, err := t.heats(ctx, s, names)
			if err != nil {
				return false, err
			}
			for i := range heats {
				hot.Add(keys[i], heats[i])
			}
			return true, nil
		})
		if err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == len(all) {
		return cmp.Or(errors.Join(errs...), errNoServer)
	}
	return hot.Each(ctx, t, f)
}

// heats asks a server how hot values are. A value without an answer gets the lowest heat.
func (t *Tier) heats(ctx context.Context, s *server, names []string) (heats []int64, err error) {
	err = s.do(ctx, s.lookups, 0, func(c *resp.Conn) error {
		heats = make([]int64, len(names))
		for _, name := range names {
			c.Command("OBJECT", "FREQ", name)
			c.Command("OBJECT", "IDLETIME", name)
		}
		if err := c.Flush(); err != nil {
			return err
		}
		for i := range names { // the server's policy decides which of the two is an error
			freq, err1 := number(c)
			idle, err2 := number(c)
			if err := cmp.Or(err1, err2); err != nil {
				return err
			}
			switch {
			case freq >= 0:
				heats[i] = freq
			case idle >= 0:
				heats[i] = -idle
			default:
				heats[i] = math.MinInt64
			}
		}
		return nil
	})
	return heats, err
}

// number reads an integer, and returns -1 if the server refuses or has none.
func number(c *resp.Conn) (int64, error) {
	r, err := c.Reply()
	if _, refused := errors.AsType[*resp.Error](err); refused || errors.Is(err, resp.ErrNil) || err == nil && r.Kind != ':' {
		return -1, nil
	}
	return r.Int, err
}

// scan calls f with the names and keys of a server's objects, a page at a time, until f returns false.
func (t *Tier) scan(ctx context.Context, s *server, f func(names []string, keys []kv.Key) (more bool, _ error)) (more bool, _ error) {
	return t.scanAs(ctx, s, t.pattern(), t.contentOf, func(names []string, contents []tier.Content) (bool, error) {
		keys := make([]kv.Key, len(contents))
		for i, c := range contents {
			keys[i] = c.Key
		}
		return f(names, keys)
	})
}

// scanAs calls f with the names on a server that match pattern, and with the Content that `of` returns for each, a page at a time, until f
// returns false. It leaves out names for which `of` reports false.
func (t *Tier) scanAs(ctx context.Context, s *server, pattern string, of func(name string) (tier.Content, bool), f func([]string, []tier.Content) (more bool, _ error)) (more bool, _ error) {
	cursor := "0"
	for {
		var names []string
		var contents []tier.Content
		err := s.do(ctx, s.lookups, 0, func(c *resp.Conn) error {
			r, err := c.Do("SCAN", cursor, "MATCH", pattern, "COUNT", strconv.Itoa(scanCount))
			if err != nil {
				return err
			}
			if len(r.List) != 2 || r.List[0].Kind != '$' {
				return fmt.Errorf("%w: the answer to SCAN is not a cursor and a list", resp.ErrProtocol)
			}
			cursor, names, contents = r.List[0].Text, nil, nil
			for _, name := range r.List[1].List {
				if c, ok := of(name.Text); ok {
					names, contents = append(names, name.Text), append(contents, c)
				}
			}
			return nil
		})
		if err != nil {
			return false, err
		}
		if more, err := f(names, contents); err != nil || !more {
			return false, err
		}
		if cursor == "0" {
			return true, nil
		}
	}
}
