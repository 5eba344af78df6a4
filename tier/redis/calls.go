// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/resp"
)

// refresh makes watch ask for the topology soon.
func (t *Tier) refresh() {
	select {
	case t.stale <- struct{}{}:
	default:
	}
}

// pick returns the server that has a key. If the topology is not known yet, it asks for it.
func (t *Tier) pick(ctx context.Context, key string) (*server, error) {
	s, err := t.topology.pick(key)
	if errors.Is(err, errNoServer) { // in the first call after the start
		if err := t.topology.ask(ctx); err != nil {
			return nil, err
		}
		s, err = t.topology.pick(key)
	}
	return s, err
}

// at calls f with a connection to the server that has a key: a connection for values if bytes is not 0. It calls f again when a server
// redirects the call to another one.
func (t *Tier) at(ctx context.Context, key string, bytes int64, f func(*resp.Conn) error) error {
	s, err := t.pick(ctx, key)
	if err != nil {
		return err
	}
	return t.from(ctx, s, false, bytes, f)
}

// from is at, beginning with server s. asking means that ASKING must precede each command, because another server redirected the call here.
func (t *Tier) from(ctx context.Context, s *server, asking bool, bytes int64, f func(*resp.Conn) error) error {
	for moves := 0; ; moves++ {
		p := s.lookups
		if bytes > 0 {
			p = s.bulk
		}
		err := s.do(ctx, p, bytes, func(c *resp.Conn) error {
			c.Asking(asking)
			defer c.Asking(false)
			return f(c)
		})
		if err == nil {
			return nil
		}
		r, ok := t.topology.redirected(s.addr, err)
		if !ok || moves == maxMoves {
			t.noteFailure(ctx, s, err)
			return err
		}
		if s, err = t.follow(r); err != nil {
			return err
		}
		asking = r.ask
	}
}

// noteFailure refreshes the topology after a failure of a server, and warns once of a cluster without cluster_mode.
func (t *Tier) noteFailure(ctx context.Context, s *server, err error) {
	if judge(ctx, err) == fails {
		t.refresh()
	}
	if e, ok := errors.AsType[*resp.Error](err); ok && e.Code() == "MOVED" && !t.o.Cluster && t.firstWarning("cluster") {
		t.log.Warn("the Redis server belongs to a cluster: set cluster_mode", "addr", s.addr)
	}
}

// follow returns the server that a redirection names.
func (t *Tier) follow(r redirection) (*server, error) {
	s, err := t.topology.server(r.addr)
	if err == nil && !r.ask {
		t.topology.moved(r.slot, s)
		t.refresh()
	}
	return s, err
}

// query is one command of a lookup. take reads the answer; it may be called more than once.
type query struct {
	key  string
	args []string
	take func(*resp.Conn) error
}

// inFlight is how many commands are sent before their answers are read.
const inFlight = 512

// errSome means that some servers answered and others did not.
var errSome = errors.New("redis: not all servers answered")

// ask sends many commands at once, each to the server that has its key. The error is
// errSome if only some servers answered.
func (t *Tier) ask(ctx context.Context, queries []query) error {
	groups := make(map[*server][]query)
	for _, q := range queries {
		s, err := t.pick(ctx, q.key)
		if err != nil {
			return err
		}
		groups[s] = append(groups[s], q)
	}
	if len(groups) == 0 {
		return nil
	}
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	for s, of := range groups {
		part := func() {
			if err := t.askOne(ctx, s, of); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		}
		if len(groups) == 1 {
			part()
		} else {
			wg.Go(part)
		}
	}
	wg.Wait()
	err := errors.Join(errs...)
	if len(errs) > 0 && len(errs) < len(groups) {
		err = fmt.Errorf("%w: %w", errSome, err)
	}
	return err
}

// acceptPartial accepts the answers of some servers: keys of servers that did not answer count as
// missing.
func acceptPartial(ctx context.Context, err error) error {
	if errors.Is(err, errSome) && ctx.Err() == nil {
		return nil
	}
	return err
}

// askOne sends commands to one server, and then, one by one, those that the server redirects.
func (t *Tier) askOne(ctx context.Context, s *server, queries []query) error {
	type elsewhere struct {
		redirection
		query
	}
	for len(queries) > 0 {
		now := queries[:min(len(queries), inFlight)]
		queries = queries[len(now):]
		var others []elsewhere
		err := s.do(ctx, s.lookups, 0, func(c *resp.Conn) error {
			others = nil
			for _, q := range now {
				c.Command(q.args...)
			}
			var first error
			for _, q := range now {
				err := q.take(c)
				if err == nil {
					continue
				}
				if r, ok := t.topology.redirected(s.addr, err); ok {
					others = append(others, elsewhere{r, q})
					continue
				}
				if _, refused := errors.AsType[*resp.Error](err); !refused {
					return err
				}
				if first == nil {
					first = err
				}
			}
			return first
		})
		if err != nil {
			t.noteFailure(ctx, s, err)
			return err
		}
		for _, q := range others {
			to, err := t.follow(q.redirection)
			if err == nil {
				err = t.from(ctx, to, q.ask, 0, func(c *resp.Conn) error {
					c.Command(q.args...)
					return q.take(c)
				})
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}
