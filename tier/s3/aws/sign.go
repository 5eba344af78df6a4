// SPDX-License-Identifier: Apache-2.0

// Package aws signs requests for Amazon's services and compatible ones, and finds
// the credentials for the signatures.
//
// Source: AWS Signature Version 4, Amazon S3 API reference (2006-03-01).
package aws

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"
	"sync"
	"time"
)

// Unsigned is the digest of a body that is not signed.
const Unsigned = "UNSIGNED-PAYLOAD"

// Field is a line of a request's head. Its name is lower-case.
type Field struct{ Name, Value string }

// Signer signs requests to one service in one region. Its methods are safe for concurrent
// use.
type Signer struct {
	Service, Region string

	mu struct {
		sync.Mutex
		secret, day string
		key         []byte // signing key of that day
	}
}

// Request is a request to sign.
type Request struct {
	Method string
	Path   string // escaped, as it is sent
	Query  string // escaped and in order, as it is sent
	Host   string
	Fields []Field // fields to send besides Host and the signature's own; all are signed
	Digest string  // of the body, hexadecimal SHA-256, or Unsigned
}

const scheme = "AWS4-HMAC-SHA256"

// Sign returns the fields to send: those of the request, and the signature's own.
func (s *Signer) Sign(r *Request, c Credentials, now time.Time) []Field {
	now = now.UTC()
	stamp, day := now.Format("20060102T150405Z"), now.Format("20060102")
	sent := append(slices.Clip(r.Fields), Field{"x-amz-content-sha256", r.Digest}, Field{"x-amz-date", stamp})
	if c.Token != "" {
		sent = append(sent, Field{"x-amz-security-token", c.Token})
	}
	signed := append(slices.Clone(sent), Field{"host", r.Host})
	slices.SortFunc(signed, func(a, b Field) int { return strings.Compare(a.Name, b.Name) })
	var canonical, names strings.Builder
	canonical.WriteString(r.Method + "\n" + r.Path + "\n" + r.Query + "\n")
	for i, f := range signed {
		canonical.WriteString(f.Name + ":" + strings.TrimSpace(f.Value) + "\n")
		if i > 0 {
			names.WriteByte(';')
		}
		names.WriteString(f.Name)
	}
	canonical.WriteString("\n" + names.String() + "\n" + r.Digest)
	scope := day + "/" + s.Region + "/" + s.Service + "/aws4_request"
	sum := sha256.Sum256([]byte(canonical.String()))
	signature := mac(s.key(c.Secret, day), scheme+"\n"+stamp+"\n"+scope+"\n"+hex.EncodeToString(sum[:]))
	return append(sent, Field{"authorization", scheme + " Credential=" + c.ID + "/" + scope + ",SignedHeaders=" + names.String() + ",Signature=" + hex.EncodeToString(signature)})
}

// key returns the signing key of a day, which all requests of that day share.
func (s *Signer) key(secret, day string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.secret != secret || s.mu.day != day {
		key := []byte("AWS4" + secret)
		for _, part := range []string{day, s.Region, s.Service, "aws4_request"} {
			key = mac(key, part)
		}
		s.mu.secret, s.mu.day, s.mu.key = secret, day, key
	}
	return s.mu.key
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}

// Escape escapes a text for a path or a query: all but letters, digits and -_.~ becomes
// %XX. In a path slashes stay.
func Escape(text string, path bool) string {
	const digits = "0123456789ABCDEF"
	var out strings.Builder
	for i := range len(text) {
		c := text[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_', c == '.', c == '~', c == '/' && path:
			out.WriteByte(c)
		default:
			out.WriteByte('%')
			out.WriteByte(digits[c>>4])
			out.WriteByte(digits[c&15])
		}
	}
	return out.String()
}

// Query escapes the names and values of a query, in the order that is signed.
func Query(values map[string]string) string {
	parts := make([]string, 0, len(values))
	for name, value := range values {
		parts = append(parts, Escape(name, false)+"="+Escape(value, false))
	}
	slices.Sort(parts)
	return strings.Join(parts, "&")
}
