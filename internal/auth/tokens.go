// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Scope says what a token allows. Each scope includes the smaller ones.
type Scope uint8

// The scopes of tokens.
const (
	Read  Scope = iota + 1 // to look: figures, status, lists
	Write                  // to use: send requests, register, pin
	Admin                  // to control: clear, drop, quotas, engines, profiles
)

var scopeNames = map[string]Scope{"read": Read, "write": Write, "admin": Admin}

// ParseScope returns the scope of that name.
func ParseScope(name string) (Scope, error) {
	if s, ok := scopeNames[name]; ok {
		return s, nil
	}
	return 0, fmt.Errorf("scope %.40q is not read, write or admin", name)
}

// String returns the name of a scope.
func (s Scope) String() string {
	for name, of := range scopeNames {
		if of == s {
			return name
		}
	}
	return "none"
}

type hash = [sha256.Size]byte

// Token is an entry of a file of tokens: for a secret, or for the subject of a client certificate.
type Token struct {
	Name  string
	Scope Scope
	Until time.Time // when it ends; zero: never

	of      hash   // hash of the secret, or of the subject
	subject string // empty: the entry is for a secret
}

// Limits of a file of tokens. A file beyond one of them is refused as a whole; entries read before stay in use.
const (
	MaxTokenFile = 1 << 20 // bytes
	maxTokens    = 1000
	maxName      = 64 // bytes
)

// Tokens holds the entries of a file of tokens. Its methods are safe for concurrent use.
type Tokens struct {
	file *File
	all  atomic.Pointer[[]*Token]
}

// OpenTokens reads a file of tokens. Each line has a name, the SHA-256 of a secret in hexadecimal digits (or cert: and the subject of a
// client certificate, with %20 for blanks), a scope, and optionally until=DATE. Empty lines and lines that begin with # are skipped.
// The file has no secrets, but only its owner and group may be able to read it.
func OpenTokens(path string) (*Tokens, error) {
	t := &Tokens{}
	t.all.Store(&[]*Token{})
	var err error
	t.file, err = OpenFile(FileOptions{Path: path, MaxBytes: MaxTokenFile, Parse: t.parse})
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	return t, nil
}

// HasSubjects reports whether any entry is for the subject of a certificate.
func (t *Tokens) HasSubjects() bool {
	return slices.ContainsFunc(*t.all.Load(), func(k *Token) bool { return k.subject != "" })
}

// FindSubject returns the entry for the subject of a certificate, in the form of pkix.Name.String; nil: there is none, or it has ended.
func (t *Tokens) FindSubject(subject string, now time.Time) *Token {
	for _, k := range *t.all.Load() {
		if k.subject != "" && k.subject == subject && !k.ended(now) {
			return k
		}
	}
	return nil
}

func (t *Token) ended(now time.Time) bool { return !t.Until.IsZero() && !now.Before(t.Until) }

// Watch reads the file again when it changes, until ctx ends.
func (t *Tokens) Watch(ctx context.Context, log *slog.Logger) { t.file.Watch(ctx, WatchInterval, log) }

// Len returns the number of entries.
func (t *Tokens) Len() int { return len(*t.all.Load()) }

// Find returns the entry of a secret; nil: there is none, or it has ended. It compares the secret with every entry in constant time.
func (t *Tokens) Find(secret string, now time.Time) (found *Token) {
	sum := sha256.Sum256([]byte(secret))
	for _, k := range *t.all.Load() {
		if subtle.ConstantTimeCompare(sum[:], k.of[:]) == 1 && k.subject == "" {
			found = k
		}
	}
	if found == nil || found.ended(now) {
		return nil
	}
	return found
}

func (t *Tokens) parse(text []byte) (Change, error) {
	var all []*Token
	hashes, names := map[hash]bool{}, map[string]bool{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		k, err := parseToken(words)
		switch {
		case err != nil:
			return Change{}, fmt.Errorf("line %d: %w", n, err)
		case hashes[k.of] || names[k.Name]:
			return Change{}, fmt.Errorf("line %d: %.64q or its hash is listed twice", n, k.Name)
		case len(all) == maxTokens:
			return Change{}, fmt.Errorf("more than %d tokens", maxTokens)
		}
		hashes[k.of], names[k.Name] = true, true
		all = append(all, k)
	}
	removed := 0
	for _, k := range *t.all.Load() {
		if !hashes[k.of] {
			removed++
		}
	}
	return Change{Take: func() { t.all.Store(&all) }, Entries: len(all), Removed: removed}, lines.Err()
}

func parseToken(words []string) (*Token, error) {
	if len(words) < 3 || len(words[0]) > maxName {
		return nil, fmt.Errorf("want NAME SHA256|cert:SUBJECT read|write|admin [until=DATE], a name of at most %d bytes", maxName)
	}
	k := &Token{Name: words[0]}
	sum, err := hex.DecodeString(words[1])
	if text, ok := strings.CutPrefix(words[1], "cert:"); ok {
		if k.subject, err = url.PathUnescape(text); err != nil || k.subject == "" {
			return nil, fmt.Errorf("%.80q is no subject like cert:CN=ops,O=Example%%20Ltd", words[1])
		}
		digest := sha256.Sum256([]byte(words[1]))
		sum = digest[:]
	} else if err != nil || len(sum) != len(k.of) {
		return nil, errors.New("the second word is not the 64 digits of a SHA-256, and not cert:SUBJECT: kvasir token makes such a line")
	}
	k.of = hash(sum)
	if k.Scope, err = ParseScope(words[2]); err != nil {
		return nil, err
	}
	for _, w := range words[3:] {
		text, ok := strings.CutPrefix(w, "until=")
		if !ok {
			return nil, fmt.Errorf("option %.40q is unknown", w)
		}
		if k.Until, err = ParseUntil(text); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// ParseUntil parses the end of a token: a date, which means its first moment in UTC, or a time in the form of RFC 3339.
func ParseUntil(text string) (time.Time, error) {
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("until %.40q is no date like 2027-01-31", text)
}

// NewToken returns a new secret and the line for it in a file of tokens.
func NewToken(name string, scope Scope, until time.Time) (secret, line string, err error) {
	if name == "" || len(name) > maxName || strings.HasPrefix(name, "#") || len(strings.Fields(name)) != 1 || strings.Fields(name)[0] != name {
		return "", "", fmt.Errorf("name %.70q is not one word of 1 to %d bytes", name, maxName)
	}
	var b [32]byte
	rand.Read(b[:]) // never fails
	secret = "kv-" + base64.RawURLEncoding.EncodeToString(b[:])
	line = fmt.Sprintf("%s %x %s", name, sha256.Sum256([]byte(secret)), scope)
	if !until.IsZero() {
		line += " until=" + until.UTC().Format(time.RFC3339)
	}
	return secret, line, nil
}
