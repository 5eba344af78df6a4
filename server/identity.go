package server

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/lease"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A server grants a peer no more than the peer's own rights. Who may open the pool
// is told places in it; who owns a segment may lend it; who registered a worker may
// speak for it. Who is behind a connection is found once, before anything is read
// from it.

// principal names who may speak for a worker: a user of this host or, where the
// user is not known, an address. The zero principal is nobody.
type principal struct {
	User bool       `json:",omitempty"`
	UID  int        `json:",omitzero"`
	Addr netip.Addr `json:",omitzero"`
}

func (p principal) String() string {
	if p.User {
		return fmt.Sprintf("uid %d", p.UID)
	}
	if !p.Addr.IsValid() {
		return "a user of this host that is not known"
	}
	return p.Addr.String()
}

// caller is who is behind a connection.
type caller struct {
	peer    peercred.Peer
	by      principal
	name    string // of by
	number  uint64 // tells connections apart
	trusted bool   // by Options.Trust: taken for this server's user

	pid  int // of its process, once it was looked for; used by its reading goroutine
	conn *connection
}

// mark keeps the connection when a new one needs its place.
func (sc *scratch) mark() {
	if sc.peer != nil {
		sc.peer.Mark()
	}
}

// owner is who the connection's sessions belong to.
func (c *caller) owner() lease.Owner { return lease.Owner{Peer: c.name, Conn: c.number} }

func (c *caller) String() string { return c.peer.String() }

// self is the caller of requests that come from this process.
var self = &caller{peer: peercred.Peer{UID: os.Geteuid()}, by: principal{User: true, UID: os.Geteuid()}}

// identify finds out who is behind a connection.
func (s *Server) identify(c net.Conn) any {
	who := s.callerOf(peercred.Of(c))
	who.conn = &connection{generations: s.opts.ClientGenerations}
	return who
}

// shareOf names the user for whom a connection counts; empty where only its address is
// known.
func shareOf(who any) string {
	if c, ok := who.(*caller); ok && c.by.User {
		return c.name
	}
	return ""
}

func (s *Server) callerOf(p peercred.Peer) *caller {
	c := &caller{peer: p, by: principal{Addr: p.Addr}}
	c.trusted = p.Addr.IsValid() && slices.ContainsFunc(s.opts.Trust, func(t netip.Prefix) bool { return t.Contains(p.Addr) })
	switch {
	case p.Known():
		c.by = principal{User: true, UID: p.UID}
	case !p.Addr.IsValid():
		c.by.UID = -1 // all of those are one
	}
	c.name, c.number = c.by.String(), s.n.callers.Add(1)
	return c
}

// caller returns who sent the request.
func (sc *scratch) caller() *caller {
	if sc.peer == nil {
		return cmp.Or(sc.inProcess, self)
	}
	return whoIs(sc.peer)
}

// whoIs returns who is behind a connection.
func whoIs(p *zmtp.Peer) *caller {
	c, ok := p.Who().(*caller)
	if !ok {
		panic("BUG: server: a peer that was not identified")
	}
	return c
}

var (
	errNotTold = errors.New("the pool is not told to this worker")
	errLender  = errors.New("the segment is not this worker's to lend")
)

// mayOpen reports why c may not be told places in the pool; nil when c could open
// it by its own rights.
func (c *caller) mayOpen() error {
	switch {
	case c.trusted:
		return nil
	case !c.peer.Known():
		return fmt.Errorf("%w: %s", errNotTold, c.unseen())
	case c.peer.UID != os.Geteuid() && c.peer.UID != 0:
		return fmt.Errorf("%w: it connects as uid %d, the pool belongs to uid %d", errNotTold, c.peer.UID, os.Geteuid())
	}
	return nil
}

// isSeen reports why c can lend nothing at all: its user is not known.
func (c *caller) isSeen() error {
	if c.trusted || c.peer.Known() {
		return nil
	}
	return fmt.Errorf("%w: %s", errLender, c.unseen())
}

// mayLend reports why c may not lend a file of user uid; nil when it is c's, or c
// is root.
func (c *caller) mayLend(uid int) error {
	if err := c.isSeen(); err != nil {
		return err
	}
	as := c.peer.UID
	if c.trusted {
		as = os.Geteuid()
	}
	if as != uid && as != 0 {
		return fmt.Errorf("%w: it belongs to uid %d, the worker is uid %d", errLender, uid, as)
	}
	return nil
}

// unseen says why the user is not known, and what can be done.
func (c *caller) unseen() string {
	addr := c.peer.Addr.String()
	switch {
	case !c.peer.Addr.IsValid():
		return fmt.Sprintf("its user is not known (%v)", c.peer.Err)
	case onThisHost(c.peer.Addr):
		return fmt.Sprintf("it connects from %s, and its user is not seen (%v); a container shares the network namespace, or --trust-address %s says that everybody there is this server's user",
			addr, c.peer.Err, addr)
	}
	return fmt.Sprintf("it connects from %s, which is not this host; for containers of this host --trust-address %s says that everybody there is this server's user", addr, addr)
}

// onThisHost reports whether an address is one of this host's.
func onThisHost(a netip.Addr) bool {
	if a.IsLoopback() {
		return true
	}
	own, err := net.InterfaceAddrs()
	return err == nil && slices.ContainsFunc(own, func(o net.Addr) bool {
		n, ok := o.(*net.IPNet)
		return ok && n.IP.Equal(a.AsSlice())
	})
}

// sayTrust says at the start what trusted addresses mean.
func (s *Server) sayTrust() {
	for _, p := range s.opts.Trust {
		s.log.Warn(fmt.Sprintf("--trust-address %v: whoever connects from there is taken for this server's user (uid %d): "+
			"told where the pool is, and may lend this user's memory", p, os.Geteuid()))
	}
}
