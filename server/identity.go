// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"net"
	"os"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// principal is the user or address that may speak for a worker.
type principal = access.Principal

// caller is who is behind a connection, and what is known of its client.
type caller struct {
	access.Caller
	pid  int // id of its process, once it was looked for; only the goroutine that reads the connection uses it
	conn *connection

	client *workers.Client // set once it has looked something up; only the goroutine that reads the connection uses it
}

// findClient begins to look for the client's process. The connection's lookups then use the layout of that process's workers.
func (s *Server) findClient(c *caller) {
	if c.client == nil && c != self {
		c.client = s.registry.NewClient(&c.Caller)
	}
}

// query returns the registry's query for a lookup.
func (s *Server) query(sc *scratch, k *lmcache.KeyView) workers.Query {
	c := sc.caller()
	s.findClient(c)
	return workers.Query{
		Model: k.Model, Salt: k.Salt, World: k.WorldSize, Chunk: sc.chunk.tokens, By: c.By, From: c.client, Named: sc.conn.named, Worker: sc.conn.worker,
	}
}

// mark protects the connection from being closed when a new connection needs its place.
func (sc *scratch) mark() {
	if sc.peer != nil {
		sc.peer.Mark()
	}
}

// self is the caller of requests that come from this process.
var self = &caller{Caller: access.Self()}

// identify returns the caller behind a connection.
func (s *Server) identify(c net.Conn) any {
	who := s.callerOf(peercred.Of(c))
	who.conn = &connection{generations: s.opts.ClientGenerations, base: s.bases.get(c.LocalAddr()), local: c.LocalAddr()}
	return who
}

// shareOf returns the user to whose share a connection counts; empty if only its address is known.
func shareOf(who any) string {
	if c, ok := who.(*caller); ok && c.By.User {
		return c.Name
	}
	return ""
}

func (s *Server) callerOf(p peercred.Peer) *caller {
	return &caller{Caller: access.New(p, s.opts.Trust, s.n.callers.Add(1))}
}

// callerAgain returns the caller as which a worker of the note registered: the user or the address `by`.
func (s *Server) callerAgain(by principal) *caller {
	if by.User {
		return &caller{Caller: access.Caller{Peer: peercred.Peer{UID: by.UID}, By: by}}
	}
	return s.callerOf(peercred.Peer{Addr: by.Addr, Err: peercred.ErrNotHere})
}

// caller returns the sender of the request.
func (sc *scratch) caller() *caller {
	if sc.peer == nil {
		return cmp.Or(sc.inProcess, self)
	}
	return whoIs(sc.peer)
}

// whoIs returns the caller behind a connection.
func whoIs(p *zmtp.Peer) *caller {
	c, ok := p.Identity().(*caller)
	if !ok {
		panic("BUG: server: a peer that was not identified")
	}
	return c
}

// seesPool returns an error if the process behind c does not see this pool's file under its name. It returns nil if the process does, or if
// the server cannot find out.
func (s *Server) seesPool(c *caller) error {
	if c.pid == 0 {
		if c.pid = s.finder.Process(&c.Caller); c.pid == 0 {
			return nil
		}
	}
	return access.SameFile(c.pid, s.store.Files().Path())
}

// logTrust logs at the start what trusted addresses mean.
func (s *Server) logTrust() {
	for _, p := range s.opts.Trust {
		s.log.Warn("--trust-address: every peer that connects from there counts as this server's user: it learns the pool's name and may lend this user's memory",
			"addresses", p.String(), "uid", os.Geteuid())
	}
}
