// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net"
	"os"
	"strconv"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// takeTenant replaces the signed salt of a request by its tenant, if salts must be signed, and checks whether the client may use that
// tenant. A lookup that is not allowed becomes a miss with that reason; every other request is refused.
func (s *Server) takeTenant(sc *scratch, r lmcache.Request) error {
	sc.denied = nil
	if s.opts.Salts == nil && s.opts.Tenants == nil {
		return nil
	}
	k := lmcache.KeyOf(r)
	if k == nil {
		return nil
	}
	var denied *refusal
	if s.opts.Salts != nil {
		tenant, ok := s.tenantOf(r.Op(), k.Salt)
		if k.Salt = tenant; !ok {
			denied = errUnsigned
		}
	}
	if denied == nil && !s.limitOf(sc).Allows(string(k.Salt)) {
		k.Salt, denied = nil, errTenant
	}
	if denied == nil {
		return nil
	}
	if _, ok := r.(*lmcache.LookupRequest); ok {
		sc.denied = denied
		return nil
	}
	return denied
}

// tenantOf returns the tenant under which the KV of a signed salt is stored. ok is false if the salt has no valid signature, and the
// request may use no KV. With Options.CountUnsigned such a salt is its own tenant, and is counted.
func (s *Server) tenantOf(op lmcache.Op, salt []byte) (tenant []byte, ok bool) {
	if tenant, ok = s.opts.Salts.Tenant(salt); ok {
		return tenant, true
	}
	if !s.opts.CountUnsigned {
		return nil, false
	}
	s.n.unsigned[op].Add(1)
	s.log.Warn("--require-signed-salts would refuse this request: its cache salt has no valid signature", safelog.Per("operation", op.String()))
	return salt, true
}

// limitOf returns the tenants that the client of a request may use; nil: all. Requests of this process may use all.
func (s *Server) limitOf(sc *scratch) *auth.Limit {
	c := sc.caller()
	if s.opts.Tenants == nil || c.conn == nil {
		return nil
	}
	if c.conn.limit == nil { // by now the client has proved its identity, if it must
		of := append(listenerSubjects(c.conn.local), userSubject(c))
		if sc.peer != nil && sc.peer.Client() != "" {
			kind := auth.KindToken
			if s.opts.Clients.Curve != nil {
				kind = auth.KindKey
			}
			of = append(of, auth.Subject{Kind: kind, Name: sc.peer.Client()})
		}
		c.conn.limit = s.opts.Tenants.For(of...)
	}
	return c.conn.limit
}

// userSubject returns the user behind a connection as a subject of limits.
func userSubject(c *caller) auth.Subject {
	if c.Trusted {
		return auth.UserSubject(os.Geteuid(), true)
	}
	return auth.UserSubject(c.Peer.UID, c.Peer.Known())
}

// listenerSubjects returns the names of the listener at an address: zmq and zmq:PORT, or ipc.
func listenerSubjects(at net.Addr) []auth.Subject {
	if a, ok := at.(*net.TCPAddr); ok {
		return []auth.Subject{{Kind: auth.KindListener, Name: "zmq"}, {Kind: auth.KindListener, Name: "zmq:" + strconv.Itoa(a.Port)}}
	}
	return []auth.Subject{{Kind: auth.KindListener, Name: "ipc"}}
}
