// SPDX-License-Identifier: Apache-2.0

package server

import (
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// takeTenant replaces the signed salt of a request by its tenant, where salts must be signed. A lookup without a valid signature
// becomes a miss with that reason; every other request is refused.
func (s *Server) takeTenant(sc *scratch, r lmcache.Request) error {
	sc.unsigned = false
	if s.opts.Salts == nil {
		return nil
	}
	k := lmcache.KeyOf(r)
	if k == nil {
		return nil
	}
	tenant, ok := s.tenantOf(r.Op(), k.Salt)
	if k.Salt = tenant; ok {
		return nil
	}
	if _, ok := r.(*lmcache.LookupRequest); ok {
		sc.unsigned = true
		return nil
	}
	return errUnsigned
}

// tenantOf returns the tenant that signed salts keep KV by; false: the salt has no valid signature, and the request may use no KV.
// With Options.CountUnsigned such a salt is its own tenant, and is counted.
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
