// SPDX-License-Identifier: Apache-2.0

// Package keys knows the API keys of clients: names, hashes of secrets, rates, and how many requests a key may have at a time. The file
// has no secrets. It is read again when it changes.
package keys

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// ErrFile means that a file of keys cannot be used: it cannot be read, others may read it, it is too large, or it has a malformed line or
// no key.
var ErrFile = errors.New("keys: file")

// Limits of a file of keys. A file beyond one of them is refused as a whole; keys read before stay in force.
const (
	maxFile = 16 << 20 // bytes
	maxKeys = 100_000
	maxName = 64 // bytes of a key's name
)

// hash is the SHA-256 of a secret.
type hash = [sha256.Size]byte

// Key is the rights of one secret. Its methods are safe for concurrent use.
type Key struct {
	Name string
	Salt string // salt of its prefix cache, which no other key has; "": none

	of     hash
	rate   float64 // requests per second; 0: no limit
	atOnce int     // requests at a time; 0: no limit

	mu struct {
		sync.Mutex
		tokens   float64   // requests that the rate allows to begin now
		at       time.Time // time up to which tokens is computed
		inFlight int
	}
}

// Set holds all keys of a file. Its methods are safe for concurrent use.
type Set struct {
	file *auth.File
	keys atomic.Pointer[map[hash]*Key]
}

// Open reads a file of keys. Each line has a name, the SHA-256 of a secret in hexadecimal digits, and options: rate=N (requests per
// second), concurrent=N, salt=off. Empty lines and lines that begin with # are skipped. Only the owner of the file and its group may be
// able to read it.
func Open(path string) (*Set, error) {
	s := &Set{}
	s.keys.Store(&map[hash]*Key{})
	var err error
	if s.file, err = auth.OpenFile(auth.FileOptions{Path: path, MaxBytes: maxFile, Parse: s.parse}); err != nil {
		return nil, fmt.Errorf("%w %w", ErrFile, err)
	}
	return s, nil
}

// Watch checks the file every interval and reads it again when it has changed, until ctx ends. It ignores a file that is still being written.
func (s *Set) Watch(ctx context.Context, interval time.Duration, log *slog.Logger) {
	s.file.Watch(ctx, interval, log)
}

// parse parses the text of the file. The returned Change puts its keys into force.
func (s *Set) parse(text []byte) (auth.Change, error) {
	all, err := parse(bytes.NewReader(text))
	if err != nil {
		return auth.Change{}, err
	}
	removed := 0
	for h := range *s.keys.Load() {
		if all[h] == nil {
			removed++
		}
	}
	return auth.Change{Take: func() { s.take(all) }, Entries: len(all), Removed: removed}, nil
}

// take replaces the keys of the set by those of a file. A key that has not changed keeps its counts.
func (s *Set) take(all map[hash]*Key) {
	for h, k := range all {
		if was := (*s.keys.Load())[h]; was != nil && was.Name == k.Name && was.Salt == k.Salt && was.rate == k.rate && was.atOnce == k.atOnce {
			all[h] = was
		}
	}
	s.keys.Store(&all)
}

func parse(r io.Reader) (map[hash]*Key, error) {
	all, names := make(map[hash]*Key), make(map[string]bool)
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		k, err := parseKey(words)
		switch {
		case err != nil:
			return nil, fmt.Errorf("line %d: %w", n, err)
		case all[k.of] != nil || names[k.Name]:
			return nil, fmt.Errorf("line %d: %.64q or its hash is listed twice", n, k.Name)
		case len(all) == maxKeys:
			return nil, fmt.Errorf("more than %d keys", maxKeys)
		}
		all[k.of], names[k.Name] = k, true
	}
	return all, lines.Err()
}

func parseKey(words []string) (*Key, error) {
	if len(words) < 2 || len(words[0]) > maxName {
		return nil, fmt.Errorf("want NAME SHA256 [rate=N] [concurrent=N] [salt=off], a name of at most %d bytes", maxName)
	}
	k := &Key{Name: words[0]}
	sum, err := hex.DecodeString(words[1])
	if err != nil || len(sum) != len(k.of) {
		return nil, errors.New("the second word is not the 64 digits of a SHA-256: printf %s SECRET | sha256sum")
	}
	k.of = hash(sum)
	salt := sha256.Sum256(append([]byte("kvasir cache_salt of "), sum...))
	k.Salt = hex.EncodeToString(salt[:16])
	for _, w := range words[2:] {
		name, value, _ := strings.Cut(w, "=")
		var err error
		switch name {
		case "rate":
			if k.rate, err = strconv.ParseFloat(value, 64); err == nil && !(k.rate > 0 && k.rate <= 1e9) {
				err = strconv.ErrRange
			}
		case "concurrent":
			if k.atOnce, err = strconv.Atoi(value); err == nil && k.atOnce < 1 {
				err = strconv.ErrRange
			}
		case "salt":
			if k.Salt = ""; value != "off" {
				err = errors.New("its one value is off")
			}
		default:
			err = errors.New("unknown; known are rate, concurrent and salt")
		}
		if err != nil {
			return nil, fmt.Errorf("option %.40q: %w", w, err)
		}
	}
	k.mu.tokens = k.burst()
	return k, nil
}

// Len returns the number of keys.
func (s *Set) Len() int { return len(*s.keys.Load()) }

// Find returns the key of a secret; nil: there is none. It compares hashes, so the time of a miss reveals nothing about a secret.
func (s *Set) Find(secret string) *Key {
	return (*s.keys.Load())[sha256.Sum256([]byte(secret))]
}

// burst returns how many requests may come at the same time after a pause.
func (k *Key) burst() float64 { return math.Max(1, math.Ceil(k.rate)) }

// Begin asks for the right to begin one more request. If a limit of the key is reached, ok is false, and wait is the estimated time until
// it is not. Each Begin with ok needs an End.
func (k *Key) Begin(now time.Time) (wait time.Duration, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.atOnce > 0 && k.mu.inFlight >= k.atOnce {
		return time.Second, false
	}
	if k.rate > 0 {
		if !k.mu.at.IsZero() {
			k.mu.tokens = math.Min(k.burst(), k.mu.tokens+k.rate*math.Max(0, now.Sub(k.mu.at).Seconds()))
		}
		k.mu.at = now
		if k.mu.tokens < 1 {
			return time.Duration((1 - k.mu.tokens) / k.rate * float64(time.Second)), false
		}
		k.mu.tokens--
	}
	k.mu.inFlight++
	return 0, true
}

// Limits returns the key's limits: requests per second, how many requests at the same time after a pause, and requests in progress at a
// time; 0 means no limit. id names the key for several proxies that count together.
func (k *Key) Limits() (id string, rate, burst float64, atOnce int) {
	sum := sha256.Sum256(append([]byte("kvasir limits of "), k.of[:]...))
	return k.Name + " " + hex.EncodeToString(sum[:8]), k.rate, k.burst(), k.atOnce
}

// End records that a request has ended.
func (k *Key) End() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.inFlight--
}
