// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
)

// macBytes is the length of the MAC in a salt, with the dot before it. MaxTenant is the longest tenant, so that a salt has at most 128
// bytes.
const macBytes, MaxTenant = 44, 128 - 44

// SaltSecrets signs and verifies the salts of tenants: TENANT.MAC, where MAC is the HMAC-SHA256 of the tenant in 43 characters of
// base64url. Whoever knows a signed salt can use it. So a proxy must replace the salts of clients by signed ones, and clients must not
// be able to reach the engines. Its methods are safe for concurrent use.
type SaltSecrets struct {
	secretLines // the first secret signs
}

// OpenSaltSecrets reads a file of secrets, one of at least 32 bytes on each line. The first secret signs; all of them verify. Empty
// lines and lines that begin with # are skipped.
func OpenSaltSecrets(path string) (*SaltSecrets, error) {
	s := &SaltSecrets{}
	if err := s.open(path); err != nil {
		return nil, fmt.Errorf("secrets of salts: %w", err)
	}
	return s, nil
}

var errTenant = errors.New("a tenant has 1 to 84 bytes")

// Sign returns the signed salt of a tenant.
func (s *SaltSecrets) Sign(tenant string) (string, error) {
	if len(tenant) == 0 || len(tenant) > MaxTenant {
		return "", errTenant
	}
	return tenant + "." + string(mac((*s.all.Load())[0], []byte(tenant))), nil
}

// Tenant returns the tenant in a signed salt; the result is a part of salt. It returns false for a salt without a MAC, and for a MAC
// that none of the secrets has made.
func (s *SaltSecrets) Tenant(salt []byte) (tenant []byte, ok bool) {
	dot := len(salt) - macBytes
	if dot < 1 || dot > MaxTenant || salt[dot] != '.' {
		return nil, false
	}
	for _, secret := range *s.all.Load() {
		ok = hmac.Equal(mac(secret, salt[:dot]), salt[dot+1:]) || ok
	}
	return salt[:dot], ok
}

// mac returns the MAC of a tenant. It also covers a text that names its purpose, so that a MAC that the same secret made for another
// purpose is not valid for a tenant.
func mac(secret, tenant []byte) []byte {
	h := hmac.New(sha256.New, secret)
	_, _ = h.Write([]byte("kvasir salt\x00")) // never fails
	_, _ = h.Write(tenant)
	return base64.RawURLEncoding.AppendEncode(nil, h.Sum(nil))
}
