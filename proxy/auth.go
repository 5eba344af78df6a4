// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/proxy/limits"
)

// admit finds the API key of the request, if the proxy demands keys, and counts the request against the key's limits. If it refuses the
// request, the error is a *refusal.
func (e *exchange) admit() error {
	if e.p.o.Keys == nil {
		return nil
	}
	secret, ok := apiKey(e.r)
	if ok {
		e.key = e.p.o.Keys.Find(secret)
	}
	if e.key == nil {
		e.w.Header().Set("WWW-Authenticate", "Bearer")
		return &refusal{status: http.StatusUnauthorized, kind: "AuthenticationError", text: "the API key is missing or unknown", outcome: "unauthorized"}
	}
	e.want.who = e.key.Name
	wait, ok := e.key.Begin(time.Now())
	if ok {
		if wait, ok = e.beginShared(); !ok {
			e.key.End()
		}
	}
	if !ok {
		e.key = nil
		return &refusal{
			status: http.StatusTooManyRequests, kind: "RateLimitError", outcome: "limited",
			text: "the API key has no more requests now", retry: max(1, int(math.Ceil(wait.Seconds()))),
		}
	}
	return nil
}

// beginShared counts the request against the limits of its key that all proxies count together, if Options.Limits is set. ok is false if
// a limit is reached: then the request is not counted, and wait is how long the client should wait.
func (e *exchange) beginShared() (wait time.Duration, ok bool) {
	if e.p.o.Limits == nil {
		return 0, true
	}
	var l limits.Limit
	if l.Key, l.Rate, l.Burst, l.AtOnce = e.key.Limits(); l.Rate == 0 && l.AtOnce == 0 {
		return 0, true
	}
	if wait, ok = e.p.o.Limits.Begin(l); ok {
		e.shared = &l
	}
	return wait, ok
}

// apiKey returns the API key of a request: a bearer token, as OpenAI's clients send it, or else the field x-api-key, as Anthropic's
// clients send it.
func apiKey(r *http.Request) (secret string, ok bool) {
	if secret, ok = bearer(r); ok {
		return secret, true
	}
	secret = strings.TrimSpace(r.Header.Get("X-Api-Key"))
	return secret, secret != ""
}

func bearer(r *http.Request) (secret string, ok bool) {
	kind, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.TrimSpace(secret), strings.EqualFold(kind, "Bearer") && secret != ""
}

// allowed reports whether a request that no limit counts may be answered: it has a known API key, or the proxy demands no keys.
func (p *Proxy) allowed(r *http.Request) bool {
	if p.o.Keys == nil {
		return true
	}
	secret, ok := apiKey(r)
	return ok && p.o.Keys.Find(secret) != nil
}

// hasSalt reports whether the first edit in e.salt sets cache_salt.
func (e *exchange) hasSalt() bool { return len(e.salt) > 0 && e.salt[0].Key == "cache_salt" }

// tenantOf returns the salt under which the cache server keeps the KV of a prompt. For a signed salt that is the tenant in it.
func (p *Proxy) tenantOf(salt string) string {
	if p.o.Salts == nil {
		return salt
	}
	tenant, _ := p.o.Salts.Tenant([]byte(salt))
	return string(tenant)
}

// sharedTenant is the tenant of clients without a key, and of keys without a salt.
const sharedTenant = "shared"

// salted returns the edits that separate a key's prefix cache from the caches of other keys. A client may divide its own cache with a
// salt of its own, but it can never choose another key's. With signed salts, the proxy sets one in every request, so that no client can
// send a signed salt of its own.
func (e *exchange) salted() []openai.Edit {
	salt := ""
	if e.key != nil {
		salt = e.key.Salt
	}
	if salt == "" && e.p.o.Salts != nil {
		salt = sharedTenant
	}
	if salt == "" {
		return nil
	}
	if own := e.q.Salt.Of(e.q.Body); len(own) > 0 && string(own) != "null" {
		sum := sha256.Sum256(fmt.Appendf(nil, "%s %s", salt, own))
		salt = hex.EncodeToString(sum[:16])
	}
	if e.p.o.Salts != nil {
		salt, _ = e.p.o.Salts.Sign(salt) // it has 1 to 32 bytes
	}
	value, _ := json.Marshal(salt) // a string always encodes
	return []openai.Edit{{Key: "cache_salt", Value: value}}
}
