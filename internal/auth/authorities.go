// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// maxAuthorityFile bounds the bytes of a file of authorities; a longer one is refused. maxVerified bounds the certificates whose
// verification is remembered; beyond it, all are forgotten and verified again.
const maxAuthorityFile, maxVerified = 8 << 20, 4096

// Authorities holds the certificate authorities that sign clients' certificates, and their lists of revoked certificates, from one
// file. Its methods are safe for concurrent use.
type Authorities struct {
	file *File

	mu struct {
		sync.Mutex
		now      *authorities
		verified map[hash]validity // by leaf certificate: the result of its verification against now
	}
}

// authorities is the content of the file at one moment.
type authorities struct {
	pool    *x509.CertPool
	certs   map[hash]bool
	revoked map[string]bool // by issuer and serial number
}

// validity is the time during which a certificate and its chain are valid.
type validity struct{ from, until time.Time }

// OpenAuthorities reads a PEM file with CERTIFICATE blocks of authorities, and with X509 CRL blocks that these authorities signed.
func OpenAuthorities(path string) (*Authorities, error) {
	a := &Authorities{}
	a.mu.now = &authorities{pool: x509.NewCertPool()}
	var err error
	if a.file, err = OpenFile(FileOptions{Path: path, MaxBytes: maxAuthorityFile, Public: true, Parse: a.parse}); err != nil {
		return nil, fmt.Errorf("authorities: %w", err)
	}
	return a, nil
}

// Watch reads the file again when it changes, until ctx ends.
func (a *Authorities) Watch(ctx context.Context, log *slog.Logger) {
	a.file.Watch(ctx, WatchInterval, log)
}

// Pool returns the current authorities.
func (a *Authorities) Pool() *x509.CertPool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.now.pool
}

func (a *Authorities) parse(text []byte) (Change, error) {
	next := &authorities{x509.NewCertPool(), map[hash]bool{}, map[string]bool{}}
	var certs []*x509.Certificate
	var lists []*x509.RevocationList
	for rest := text; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		switch b.Type {
		case "CERTIFICATE":
			c, err := x509.ParseCertificate(b.Bytes)
			if err != nil {
				return Change{}, err
			}
			certs = append(certs, c)
			next.pool.AddCert(c)
			next.certs[sha256.Sum256(c.Raw)] = true
		case "X509 CRL":
			l, err := x509.ParseRevocationList(b.Bytes)
			if err != nil {
				return Change{}, err
			}
			lists = append(lists, l)
		}
	}
	for _, l := range lists {
		if !signedByAny(l, certs) {
			return Change{}, errors.New("an X509 CRL is signed by no authority of the file")
		}
		for _, r := range l.RevokedCertificateEntries {
			next.revoked[string(l.RawIssuer)+" "+r.SerialNumber.String()] = true
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	removed := 0
	for h := range a.mu.now.certs {
		if !next.certs[h] {
			removed++
		}
	}
	for r := range a.mu.now.revoked { // a half-written file must not make a revoked certificate valid again
		if !next.revoked[r] {
			removed++
		}
	}
	return Change{Take: func() { a.take(next) }, Entries: len(certs), Removed: removed}, nil
}

func (a *Authorities) take(next *authorities) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.now, a.mu.verified = next, nil
}

func signedByAny(l *x509.RevocationList, certs []*x509.Certificate) bool {
	for _, c := range certs {
		if l.CheckSignatureFrom(c) == nil {
			return true
		}
	}
	return false
}

var (
	errNoCertificate = errors.New("there is no client certificate")
	errRevoked       = errors.New("the client certificate is revoked")
	errNotInTime     = errors.New("the client certificate is not valid at this time")
	errUnlisted      = errors.New("the subject of the client certificate is not in the file of tokens")
	errUnknown       = errors.New("no authority of --tls-client-ca signed the client certificate for clients")
)

// Verify checks the certificates that a client sent, its own (the leaf) first. Call it for each request, so that a long connection
// fails, too, once its certificate is revoked or has expired.
func (a *Authorities) Verify(chain []*x509.Certificate, now time.Time) error {
	if len(chain) == 0 {
		return errNoCertificate
	}
	of := sha256.Sum256(chain[0].Raw)
	a.mu.Lock()
	v, ok := a.mu.verified[of]
	current := a.mu.now
	a.mu.Unlock()
	if !ok {
		var err error
		if v, err = current.verify(chain, now); err != nil {
			return err
		}
		a.mu.Lock()
		if a.mu.now == current {
			if a.mu.verified == nil || len(a.mu.verified) >= maxVerified {
				a.mu.verified = make(map[hash]validity)
			}
			a.mu.verified[of] = v
		}
		a.mu.Unlock()
	}
	if now.Before(v.from) || now.After(v.until) {
		return errNotInTime
	}
	return nil
}

// verify returns the time during which a certificate and its chain are valid.
func (a *authorities) verify(chain []*x509.Certificate, now time.Time) (v validity, _ error) {
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	found, err := chain[0].Verify(x509.VerifyOptions{
		Roots: a.pool, Intermediates: between, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		return v, errNotInTime
	}
	if err != nil {
		return v, errUnknown
	}
	err = errRevoked
	for _, one := range found {
		from, until, revoked := time.Time{}, now.AddDate(1000, 0, 0), false
		for _, c := range one {
			if c.NotBefore.After(from) {
				from = c.NotBefore
			}
			if c.NotAfter.Before(until) {
				until = c.NotAfter
			}
			revoked = revoked || a.revoked[string(c.RawIssuer)+" "+c.SerialNumber.String()]
		}
		if !revoked && (err != nil || until.After(v.until)) {
			v, err = validity{from, until}, nil
		}
	}
	return v, err
}
