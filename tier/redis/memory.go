// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/tier"
)

const (
	lookEvery   = 10 * time.Second // between two looks at the topology and at the servers' memory
	atMostEvery = time.Second      // least time between two looks when calls ask for one

	// respShare is the part of its maxmemory up to which a server is filled in the layout
	// of LMCache's resp adapters.
	respShare = 0.9
)

// usage is a server's own report of its memory.
type usage struct {
	known       bool   // false if an ACL forbids the question
	used, limit int64  // bytes; no limit is 0
	policy      string // maxmemory-policy
	evicts      bool   // at its limit the server evicts values by itself
	keys        int64
}

// memory has the last answers of the servers about their memory.
type memory struct {
	mu struct {
		sync.Mutex
		of map[string]usage // by address
	}
}

func (m *memory) set(of map[string]usage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.of = of
}

func (m *memory) get(addr string) (u usage, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	u, ok = m.mu.of[addr]
	return u, ok
}

// put sets the usage of one server.
func (m *memory) put(addr string, u usage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.of == nil {
		m.mu.of = make(map[string]usage)
	}
	m.mu.of[addr] = u
}

// add adds bytes that were written since the server's last answer.
func (m *memory) add(addr string, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if u, ok := m.mu.of[addr]; ok {
		u.used += bytes
		m.mu.of[addr] = u
	}
}

func (m *memory) space() (s tier.Space) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.Free = -1
	for _, u := range m.mu.of {
		s.Objects += u.keys
		s.Used += u.used
		s.Limit += u.limit
	}
	return s
}

// checkMemory returns tier.ErrNotKept, with the reason, if a server must not get more bytes. It
// asks the server for its memory if that is not known yet.
func (t *Tier) checkMemory(ctx context.Context, s *server, bytes int64) error {
	if t.o.Limit == 0 && t.o.Layout != RESP {
		return nil
	}
	addr := s.addr
	u, ok := t.memory.get(addr)
	if !ok {
		var err error
		if u, err = s.usage(ctx); err != nil {
			return err
		}
		t.memory.put(addr, u)
	}
	if !u.known {
		if t.firstWarning("memory") {
			t.log.Warn("Redis does not report its memory, so nothing is written: let the user call INFO", "addr", addr)
		}
		return fmt.Errorf("%w: %s does not report its memory", tier.ErrNotKept, addr)
	}
	if t.o.Limit > 0 && u.used+bytes > t.o.Limit {
		return fmt.Errorf("%w: %w: %s uses %d of the limit of %d bytes", tier.ErrNotKept, tier.ErrFull, addr, u.used, t.o.Limit)
	}
	if t.o.Layout == RESP && u.limit > 0 && float64(u.used+bytes) > respShare*float64(u.limit) {
		if t.firstWarning("full") {
			t.log.Warn("Redis is nearly full: nothing is added, because LMCache's resp adapter does not survive a full one", "addr", addr, "used", u.used, "limit", u.limit)
		}
		return fmt.Errorf("%w: %w: %s uses %d of its maxmemory of %d bytes", tier.ErrNotKept, tier.ErrFull, addr, u.used, u.limit)
	}
	return nil
}

// watch looks at the topology and the servers' memory, until the context ends.
func (t *Tier) watch(ctx context.Context) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	reached, said := false, false
	for {
		err := t.look(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && (reached || !said):
			t.log.Warn("Redis does not answer: its objects are misses until it does", "addrs", strings.Join(t.o.Addrs, " "), "err", err)
		case err == nil && !reached:
			t.log.Info("Redis answers", "addrs", strings.Join(t.o.Addrs, " "))
		}
		reached, said = err == nil, true
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-t.stale:
			select { // wait, so that failures do not cause constant questions
			case <-ctx.Done():
				return
			case <-time.After(atMostEvery):
			}
		}
	}
}

// look asks for the topology and for the memory of each server.
func (t *Tier) look(ctx context.Context) error {
	if err := t.topology.ask(ctx); err != nil {
		return err
	}
	var errs []error
	of := make(map[string]usage)
	for _, s := range t.topology.all() {
		u, err := s.usage(ctx)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		of[s.addr] = u
		if t.o.Layout == RESP && u.limit > 0 && u.evicts && t.firstWarning("evicts") {
			t.log.Warn("Redis evicts objects when it is full: LMCache's resp adapter (0.5.6) may then hang", "addr", s.addr, "limit", u.limit)
		}
	}
	t.memory.set(of)
	return errors.Join(errs...)
}

// ServerMemory is the memory of one Redis server, as the server reports it.
type ServerMemory struct {
	Addr   string
	Known  bool  // the user may ask for it; else all fields below are zero
	Used   int64 // bytes
	Limit  int64 // maxmemory, bytes; 0: none
	Policy string
}

// Servers asks each server for its memory.
func (t *Tier) Servers(ctx context.Context) (out []ServerMemory, err error) {
	if err := t.topology.ask(ctx); err != nil {
		return nil, err
	}
	for _, s := range t.topology.all() {
		u, err := s.usage(ctx)
		if err != nil {
			return out, err
		}
		out = append(out, ServerMemory{Addr: s.addr, Known: u.known, Used: u.used, Limit: u.limit, Policy: u.policy})
	}
	return out, nil
}

// usage asks the server for its memory.
func (s *server) usage(ctx context.Context) (u usage, err error) {
	err = s.do(ctx, s.lookups, 0, func(c *resp.Conn) (err error) {
		u, err = askUsage(c)
		return err
	})
	return u, err
}

// askUsage asks one server. If an ACL forbids a question, its figures stay unknown.
func askUsage(c *resp.Conn) (u usage, _ error) {
	c.Command("INFO", "memory")
	c.Command("DBSIZE")
	info, refusedInfo := c.Reply()
	if refusedInfo != nil && !isRefusal(refusedInfo) {
		return u, refusedInfo
	}
	u.known = refusedInfo == nil
	for line := range strings.Lines(info.Text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		n, _ := strconv.ParseInt(value, 10, 64)
		switch key {
		case "used_memory":
			u.used = max(0, n)
		case "maxmemory":
			u.limit = max(0, n)
		case "maxmemory_policy":
			u.policy, u.evicts = value, value != "noeviction"
		}
	}
	var err error
	u.keys, err = c.Int()
	return u, errors.Join(unlessForbidden(refusedInfo), unlessForbidden(err))
}

func isRefusal(err error) bool {
	_, ok := errors.AsType[*resp.Error](err)
	return ok
}

func unlessForbidden(err error) error {
	if e, ok := errors.AsType[*resp.Error](err); ok && e.Code() == "NOPERM" {
		return nil
	}
	return err
}
