// SPDX-License-Identifier: Apache-2.0

package peercred

import (
	"context"
	"net/netip"
	"sync"
)

// Origin identifies the sender of a request, by which limits are shared.
type Origin struct {
	User string `json:"user"` // "uid N" for a peer on this host; else the IPv4 address or IPv6 /64 network
	Addr string `json:"addr"` // IP address
	Here bool   `json:"here,omitempty"`
}

// OriginOfAddr returns the Origin of a peer of which only the address is known.
func OriginOfAddr(a netip.Addr) Origin {
	a = a.Unmap().WithZone("")
	o := Origin{User: a.String(), Addr: a.String(), Here: a.IsLoopback()}
	if net, err := a.Prefix(64); err == nil && a.Is6() && !o.Here {
		o.User = net.String()
	}
	return o
}

// LargestOrigin returns the origin that must give way when `from` asks for n more: of the user who holds the most, the address that
// holds the most, counting the n more. That may be `from` itself, which must then be refused. `held` is what each origin holds now.
func LargestOrigin(held map[Origin]int, from Origin, n int) Origin {
	users := map[string]int{from.User: n}
	for o, k := range held {
		users[o.User] += k
	}
	best, bestHas := from, held[from]+n
	for o, k := range held {
		if u, b := users[o.User], users[best.User]; o != from && (u > b || (u == b && o.User == best.User && k > bestHas)) {
			best, bestHas = o, k
		}
	}
	return best
}

// OriginShares bounds how many tasks run at a time. When Max tasks run, a new task of another origin ends the oldest task of the origin
// with the most tasks. Its methods are safe for concurrent use.
type OriginShares struct {
	Max int // immutable

	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		in []*originShare // oldest first
	}
}

type originShare struct {
	from Origin
	end  context.CancelCauseFunc
}

// Enter takes a share for a task of the origin `from`. ok is false if `from` itself has the most shares. The returned context ends,
// with the cause why, when the task must give up its share. The caller must call leave when the task ends.
func (s *OriginShares) Enter(ctx context.Context, from Origin, why error) (_ context.Context, leave func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.in) >= s.Max {
		held := map[Origin]int{}
		for _, h := range s.mu.in {
			held[h.from]++
		}
		most := LargestOrigin(held, from, 1)
		if most == from {
			return nil, nil, false
		}
		for _, h := range s.mu.in {
			if h.from == most {
				h.end(why)
				s.removeLocked(h)
				break
			}
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	h := &originShare{from, cancel}
	s.mu.in = append(s.mu.in, h)
	return ctx, func() {
		cancel(nil)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.removeLocked(h)
	}, true
}

func (s *OriginShares) removeLocked(h *originShare) {
	for i := range s.mu.in {
		if s.mu.in[i] == h {
			s.mu.in = append(s.mu.in[:i], s.mu.in[i+1:]...)
			return
		}
	}
}

// Taken returns how many shares are in use.
func (s *OriginShares) Taken() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.in)
}
