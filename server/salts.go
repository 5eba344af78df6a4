// SPDX-License-Identifier: Apache-2.0

package server

import (
	"github.com/kvasir-kv/kvasir/lmcache"
)

// takeTenant puts the tenant in the place of the signed salt of a request, where salts must be signed. A lookup without a valid signature
// is a miss that says why, other requests are refused.
func (s *Server) takeTenant(sc *scratch, r lmcache.Request) error {
	sc.unsigned = false
	if s.opts.Salts == nil {
		return nil
	}
	var k *lmcache.KeyView
	switch r := r.(type) {
	case *lmcache.LookupRequest:
		k = r.Key
		sc.unsigned = !s.signed(k)
		return nil
	case *lmcache.FreeLookupLocksRequest:
		k = r.Key
	case *lmcache.PrepareStoreRequest:
		k = r.Key
	case *lmcache.CommitStoreRequest:
		k = r.Key
	case *lmcache.PrepareRetrieveRequest:
		k = r.Key
	case *lmcache.CommitRetrieveRequest:
		k = r.Key
	case *lmcache.StoreRequest:
		k = r.Key
	case *lmcache.RetrieveRequest:
		k = r.Key
	default:
		return nil
	}
	if !s.signed(k) {
		return errUnsigned
	}
	return nil
}

// signed reports whether the salt of a key has a valid signature. Then the salt is the tenant; else it is none.
func (s *Server) signed(k *lmcache.KeyView) (ok bool) {
	k.Salt, ok = s.opts.Salts.Tenant(k.Salt)
	if !ok {
		k.Salt = nil
	}
	return ok
}
