// SPDX-License-Identifier: Apache-2.0

// Package access finds out who is behind a connection, and what that peer may do.
//
// A server gives a peer no more than the peer's own rights. A peer that may open the pool is told places in it. The owner of a segment may
// lend it. The peer that registered a worker may speak for it. The server identifies the peer of a connection once, before it reads
// anything from it.
package access

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/store/lease"
)

// Principal is who may speak for a worker: a user of this host or, if the user is not known, an address. The zero Principal has no rights.
type Principal struct {
	User bool       `json:",omitempty"`
	UID  int        `json:",omitzero"`
	Addr netip.Addr `json:",omitzero"`
}

func (p Principal) String() string {
	if p.User {
		return fmt.Sprintf("uid %d", p.UID)
	}
	if !p.Addr.IsValid() {
		return "a user of this host that is not known"
	}
	return p.Addr.String()
}

// Caller is the peer behind a connection.
type Caller struct {
	Peer    peercred.Peer
	By      Principal // the user or address that this peer may speak for
	Name    string    // By as a text
	Number  uint64    // number of the connection, unique in this process
	Trusted bool      // counts as this process's user
}

// New returns the Caller of a peer. A peer that connects from one of the trusted addresses counts as this process's user.
func New(p peercred.Peer, trust []netip.Prefix, number uint64) Caller {
	c := Caller{Peer: p, By: Principal{Addr: p.Addr}, Number: number}
	c.Trusted = p.Addr.IsValid() && slices.ContainsFunc(trust, func(t netip.Prefix) bool { return t.Contains(p.Addr) })
	switch {
	case p.Known():
		c.By = Principal{User: true, UID: p.UID}
	case !p.Addr.IsValid():
		c.By.UID = -1 // all peers without a user and an address are one principal
	}
	c.Name = c.By.String()
	return c
}

// Self returns the caller of requests that come from this process.
func Self() Caller {
	return Caller{Peer: peercred.Peer{UID: os.Geteuid()}, By: Principal{User: true, UID: os.Geteuid()}}
}

// Owner returns the owner of the connection's sessions.
func (c *Caller) Owner() lease.Owner { return lease.Owner{Peer: c.Name, Conn: c.Number} }

func (c *Caller) String() string { return c.Peer.String() }

var (
	// ErrMayNotOpen means that a peer could not open the pool by its own rights.
	ErrMayNotOpen = errors.New("this worker may not open the pool")
	// ErrLender means that a segment belongs to another user or process.
	ErrLender = errors.New("this worker may not lend its shared memory to the server")
)

// MayOpen returns nil if c could open the pool by its own rights. Otherwise it returns why c must not be told places in it.
func (c *Caller) MayOpen() error {
	switch {
	case c.Trusted:
		return nil
	case !c.Peer.Known():
		return fmt.Errorf("%w: %s", ErrMayNotOpen, c.unseen())
	case c.Peer.UID != os.Geteuid() && c.Peer.UID != 0:
		return fmt.Errorf("%w: it connects as uid %d, the pool belongs to uid %d", ErrMayNotOpen, c.Peer.UID, os.Geteuid())
	}
	return nil
}

// Seen returns an error if c can lend nothing at all, because its user is not known.
func (c *Caller) Seen() error {
	if c.Trusted || c.Peer.Known() {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrLender, c.unseen())
}

// MayLend returns an error if c may not lend a file of user uid. It returns nil if the file is c's, or c is root.
func (c *Caller) MayLend(uid int) error {
	if err := c.Seen(); err != nil {
		return err
	}
	as := c.Peer.UID
	if c.Trusted {
		as = os.Geteuid()
	}
	if as != uid && as != 0 {
		return fmt.Errorf("%w: the segment belongs to uid %d, the worker is uid %d", ErrLender, uid, as)
	}
	return nil
}

// unseen returns a text that says why the user is not known, and what can be done.
func (c *Caller) unseen() string {
	addr := c.Peer.Addr.String()
	switch {
	case !c.Peer.Addr.IsValid():
		return fmt.Sprintf("its user is not known (%v)", c.Peer.Err)
	case onThisHost(c.Peer.Addr):
		return fmt.Sprintf("it connects from %s, and its user is not seen (%v); a container shares the network namespace, or --trust-address %s says that everybody there is this server's user",
			addr, c.Peer.Err, addr)
	}
	return fmt.Sprintf("it connects from %s, which is not this host; for containers of this host --trust-address %s says that everybody there is this server's user", addr, addr)
}

// onThisHost reports whether an address belongs to this host.
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
