// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"
)

// Need is the right that a request needs.
type Need uint8

// The rights that requests can need. NeedRead, NeedWrite and NeedAdmin are the Scopes.
const (
	NeedNothing Need = iota // health checks: everyone gets an answer
	NeedRead                // scope Read
	NeedWrite               // scope Write
	NeedAdmin               // scope Admin
	NeedPeer                // requests that stock peers send without credentials: an address in Networks suffices
)

// Options configures a Gate.
type Options struct {
	Listener    string       // name of the listener, for the log
	Tokens      *Tokens      // nil: no tokens
	Keys        []string     // secrets that give every right
	Authorities *Authorities // their client certificates give every right; nil: none
	Networks    *Networks    // networks from which requests may come; nil: every address

	// Certificates has entries for the subjects of certificates, with their scopes. Unlisted is the scope of a certificate without an
	// entry; 0: it has none. Without Certificates, every certificate of Authorities gives every right.
	Certificates *Tokens
	Unlisted     Scope

	Tenants *TenantLimits // limits the clients of a listener, certificate or token to some tenants (see LimitOf); nil: no limits

	Audit *Audit // log of the requests that need NeedAdmin, and of DELETE requests; nil: none

	// Need returns the right that a request needs.
	Need func(*http.Request) Need

	// Refuse answers a request that is not allowed; nil: the answer is {"error": text}.
	Refuse func(w http.ResponseWriter, status int, text string)

	Log *slog.Logger // nil: nothing is logged
}

// Gate guards an HTTP listener. Except health checks, every request must come from one of Networks, if these are set. If Tokens, Keys
// or Authorities are set, it must also have a credential: a token with the needed scope, a key, or a certificate. Requests of stock
// peers (NeedPeer) need no credential.
type Gate struct {
	o    Options
	keys []hash

	badCredential, badScope, badAddress, badTenant atomic.Uint64
	logged                                         atomic.Int64 // when a refusal was last logged, Unix nanoseconds
}

// New returns a Gate.
func New(o Options) *Gate {
	g := &Gate{o: o}
	for _, k := range o.Keys {
		g.keys = append(g.keys, sha256.Sum256([]byte(k)))
	}
	if g.o.Log == nil {
		g.o.Log = slog.New(slog.DiscardHandler)
	}
	if g.o.Refuse == nil {
		g.o.Refuse = refuseJSON
	}
	return g
}

// WantsCredentials reports whether the Gate asks for a token, a key or a certificate.
func (g *Gate) WantsCredentials() bool {
	return g.o.Tokens != nil || len(g.keys) > 0 || g.o.Authorities != nil
}

// Stats are the figures of a Gate, for metrics.
type Stats struct {
	Refused   map[string]uint64 `counter:"kvasir_auth_refused_total" label:"reason" help:"Requests and connections refused: address (HTTP from outside --allow-from), network (connections of other protocols from outside), credential (missing, unknown or ended), scope (the token does not allow it), tenant (--tenant-file does not allow it)."`
	Unaudited uint64            `counter:"kvasir_audit_lost_total" help:"Deeds of administrators that could not be written to --audit-log; the server's log has them."`
}

// Stats returns the figures.
func (g *Gate) Stats() Stats {
	s := Stats{Refused: map[string]uint64{"address": g.badAddress.Load(), "credential": g.badCredential.Load(), "scope": g.badScope.Load(), "tenant": g.badTenant.Load()}}
	if g.o.Audit != nil {
		s.Unaudited = g.o.Audit.lost.Load()
	}
	return s
}

type scopeKey struct{}

// Allows reports whether the Gate in front of the handler found a credential in the request with at least the scope s.
func Allows(r *http.Request, s Scope) bool {
	has, _ := r.Context().Value(scopeKey{}).(Scope)
	return has >= s
}

// Handler returns a handler that lets only allowed requests through to h.
func (g *Gate) Handler(h http.Handler) http.Handler {
	if !g.WantsCredentials() && g.o.Networks == nil && g.o.Audit == nil && g.o.Tenants == nil {
		return h
	}
	serve := func(w http.ResponseWriter, r *http.Request, need Need, who string) {
		if g.o.Tenants != nil {
			if l := g.o.Tenants.For(g.subjects(r)...); l.Limited() {
				r = r.WithContext(context.WithValue(r.Context(), limitKey{}, limited{l, g}))
			}
		}
		if g.o.Audit != nil && audited(r, need) {
			g.serveAudited(w, r, who, h)
			return
		}
		h.ServeHTTP(w, r)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		need := g.o.Need(r)
		if need == NeedNothing {
			h.ServeHTTP(w, r)
			return
		}
		if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && !g.o.Networks.Contains(from.Addr()) {
			g.badAddress.Add(1)
			g.refuse(w, r, http.StatusUnauthorized, "the address is in no network of --allow-from")
			return
		}
		if !g.WantsCredentials() {
			serve(w, r, need, "")
			return
		}
		want := Scope(need)
		if need == NeedPeer {
			want = 0
		}
		has, who, why := g.scope(r)
		switch {
		case has >= want:
		case has == 0:
			g.badCredential.Add(1)
			w.Header().Set("WWW-Authenticate", "Bearer")
			g.refuse(w, r, http.StatusUnauthorized, why)
			return
		default:
			g.badScope.Add(1)
			g.refuse(w, r, http.StatusForbidden, "the token has the scope "+has.String()+", this needs "+want.String())
			return
		}
		serve(w, r.WithContext(context.WithValue(r.Context(), scopeKey{}, has)), need, who)
	})
}

// subjects returns the subjects by which the client of a request may be limited. A certificate limits its client even if the request
// also has a token with a larger scope.
func (g *Gate) subjects(r *http.Request) []Subject {
	out := []Subject{{KindListener, g.o.Listener}}
	now := time.Now()
	if a := g.o.Authorities; a != nil && r.TLS != nil && a.Verify(r.TLS.PeerCertificates, now) == nil {
		out = append(out, Subject{KindCert, r.TLS.PeerCertificates[0].Subject.String()})
	}
	if secret, given := Secret(r); given && g.o.Tokens != nil {
		if t := g.o.Tokens.Find(secret, now); t != nil {
			out = append(out, Subject{KindToken, t.Name})
		}
	}
	return out
}

// scope returns the scope that a request's credentials give it (`has`) and the name of their owner (`who`). If the scope is 0, the request
// has no valid credential, and why says what is wrong.
func (g *Gate) scope(r *http.Request) (has Scope, who, why string) {
	why = "a token is missing"
	now := time.Now()
	if a := g.o.Authorities; a != nil {
		var err error
		if r.TLS != nil {
			err = a.Verify(r.TLS.PeerCertificates, now)
		} else {
			err = errNoCertificate
		}
		if err == nil {
			if has, who = g.certificate(r.TLS.PeerCertificates[0].Subject.String(), now); has == Admin {
				return has, who, ""
			}
			err = errUnlisted
		}
		why = err.Error()
	}
	secret, given := Secret(r)
	if !given {
		return has, who, why
	}
	if more, name, wrong := g.secret(secret, now); more > has {
		return more, name, ""
	} else if has == 0 {
		return 0, "", wrong
	}
	return has, who, ""
}

// certificate returns the scope that a client certificate with that subject gives, 0 if none, and the name of its owner.
func (g *Gate) certificate(subject string, now time.Time) (Scope, string) {
	if g.o.Certificates == nil {
		return Admin, subject
	}
	if k := g.o.Certificates.FindSubject(subject, now); k != nil {
		return k.Scope, k.Name
	}
	return g.o.Unlisted, subject
}

// secret returns the scope that a key or token gives (`has`) and the name of its owner (`who`). If the scope is 0, why says what is wrong.
func (g *Gate) secret(secret string, now time.Time) (has Scope, who, why string) {
	sum, fits := sha256.Sum256([]byte(secret)), 0
	for i := range g.keys {
		fits |= subtle.ConstantTimeCompare(sum[:], g.keys[i][:])
	}
	if fits == 1 {
		return Admin, "key", ""
	}
	if g.o.Tokens != nil {
		if t := g.o.Tokens.Find(secret, now); t != nil {
			return t.Scope, t.Name, ""
		}
	}
	return 0, "", "the token is unknown, or its time is over"
}

// Secret returns the bearer token of a request, or the value of the header in which LMCache's clients send an API key.
func Secret(r *http.Request) (secret string, ok bool) {
	if scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " "); strings.EqualFold(scheme, "Bearer") {
		secret = strings.TrimSpace(token)
	} else {
		secret = r.Header.Get("X-LMCache-API-Key")
	}
	return secret, secret != ""
}

// refuse answers a refused request. It logs at most one refusal a minute.
func (g *Gate) refuse(w http.ResponseWriter, r *http.Request, status int, text string) {
	now, last := time.Now().UnixNano(), g.logged.Load()
	if now-last >= int64(time.Minute) && g.logged.CompareAndSwap(last, now) {
		g.o.Log.Warn("a request was refused", "listener", g.o.Listener, "from", r.RemoteAddr, "why", text,
			"refused_in_all", g.badAddress.Load()+g.badCredential.Load()+g.badScope.Load()+g.badTenant.Load())
	}
	w.Header().Set("Connection", "close") // the Gate does not read the body
	g.o.Refuse(w, status, text)
}

func refuseJSON(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": text}) // the client is gone if this fails
}

// TLSConfig returns the TLS configuration of a listener: it uses the certificate that get returns, and asks clients for their
// certificates if a is not nil. The Gate, not TLS, verifies client certificates, for each request: so a client with a wrong certificate
// gets an answer that says so, and a revoked certificate fails at once.
func TLSConfig(get func(*tls.ClientHelloInfo) (*tls.Certificate, error), a *Authorities) *tls.Config {
	c := &tls.Config{GetCertificate: get, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	if a == nil {
		return c
	}
	c.ClientAuth = tls.RequestClientCert
	c.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now := c.Clone()
		now.GetConfigForClient, now.ClientCAs = nil, a.Pool()
		now.SessionTicketsDisabled = true // a resumed session would not prove that the client has its key
		return now, nil
	}
	return c
}
