// SPDX-License-Identifier: Apache-2.0

// Package keys knows who may use an API: names, hashes of secrets, rates, numbers of requests at a
// time. The file has no secrets, and is read again when it changes.
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
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// ErrFile means that a file of keys has a line that is none.
var ErrFile = errors.New("keys: file")

// Limits of a file.
const (
	maxFile = 16 << 20 // bytes
	maxKeys = 100_000
	maxName = 64
)

// hash is the SHA-256 of a secret.
type hash = [sha256.Size]byte

// Key is what one secret may do. Its methods are safe for concurrent use.
type Key struct {
	Name string
	Salt string // for its prefix cache: that of no other key; "": none

	of     hash
	rate   float64 // requests per second; 0: any
	atOnce int     // requests at a time; 0: any

	mu struct {
		sync.Mutex
		tokens   float64
		at       time.Time // of tokens
		inFlight int
	}
}

// Set is all keys of a file. Its methods are safe for concurrent use.
type Set struct {
	path string
	keys atomic.Pointer[map[hash]*Key]
	read stamp // by Watch, after Open
}

// stamp is a state of the file. Another file under the path, as behind a link that was changed, is another state, whatever its time: some
// systems give all files one.
type stamp struct {
	changed time.Time
	size    int64
	info    os.FileInfo // nil: it cannot be looked at
}

func stampOf(info os.FileInfo) stamp { return stamp{info.ModTime(), info.Size(), info} }

func (s stamp) same(o stamp) bool {
	if s.info == nil || o.info == nil {
		return s.info == o.info
	}
	return s.changed.Equal(o.changed) && s.size == o.size && os.SameFile(s.info, o.info)
}

// Open reads a file: on each line a name, the SHA-256 of a secret in hexadecimal digits, and
// options: rate=N (requests per second), concurrent=N, salt=off. Empty lines and lines that begin
// with # mean nothing.
func Open(path string) (*Set, error) {
	s := &Set{path: path}
	f, err := s.load()
	if err != nil {
		return nil, err
	}
	s.take(f)
	return s, nil
}

// file is what a file of keys has.
type file struct {
	stamp stamp
	keys  map[hash]*Key
	whole bool // it ends with a newline, or is empty
}

// load reads the file.
func (s *Set) load() (*file, error) {
	r, err := os.OpenFile(s.path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO without a writer would hang
	if err != nil {
		return nil, err
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%w %s: not a regular file", ErrFile, s.path)
	}
	text, err := io.ReadAll(io.LimitReader(r, maxFile))
	if err != nil {
		return nil, err
	}
	all, err := parse(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%w %s: %w", ErrFile, s.path, err)
	}
	return &file{stampOf(info), all, len(text) == 0 || text[len(text)-1] == '\n'}, nil
}

// take makes the keys of a file those of the set. Keys that are still there keep their counts.
func (s *Set) take(f *file) {
	if old := s.keys.Load(); old != nil {
		for h, k := range f.keys {
			if was := (*old)[h]; was != nil && was.Name == k.Name && was.Salt == k.Salt && was.rate == k.rate && was.atOnce == k.atOnce {
				f.keys[h] = was
			}
		}
	}
	s.keys.Store(&f.keys)
	s.read = f.stamp
}

// lacks counts the keys of the set that a file does not have.
func (s *Set) lacks(f *file) (n int) {
	for h := range *s.keys.Load() {
		if f.keys[h] == nil {
			n++
		}
	}
	return n
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
				err = errors.New("only off can be said")
			}
		default:
			err = errors.New("unknown")
		}
		if err != nil {
			return nil, fmt.Errorf("option %.40q: %w", w, err)
		}
	}
	k.mu.tokens = k.burst()
	return k, nil
}

// settleTime is how long a file that lacks keys must stay as it is before they are gone: it may be half written.
const settleTime = 5 * time.Second

// Watch reads the file again when it has changed, looking each interval, until ctx ends.
//
// A file that is being written is not taken for the new keys: two looks in a row must find the same file, it must end with a
// newline, and when it lacks keys that the set has, it must stay so for 5 s. A file without any key never replaces a set that
// has some. What cannot be taken is logged once for each state of the file, and the former keys stay.
func (s *Set) Watch(ctx context.Context, interval time.Duration, log *slog.Logger) {
	seen, since := s.read, time.Now()
	settled := true // the file in this state was taken, or it was logged why not
	for {
		select {
		case <-time.After(interval):
		case <-ctx.Done():
			return
		}
		var now stamp // zero: it cannot be looked at
		info, err := os.Stat(s.path)
		if err == nil {
			now = stampOf(info)
		}
		if !now.same(seen) {
			seen, since, settled = now, time.Now(), false
			continue
		}
		if settled {
			continue
		}
		f, lost := (*file)(nil), 0
		if err == nil {
			f, err = s.load()
		}
		switch {
		case err != nil:
		case !f.stamp.same(now):
			continue // it changed since the look
		case len(f.keys) == 0 && s.Len() > 0:
			err = fmt.Errorf("%w %s: it has no key", ErrFile, s.path)
		case !f.whole:
			err = fmt.Errorf("%w %s: its last line does not end, it may be half written", ErrFile, s.path)
		}
		if err != nil {
			log.Error("API keys: the former ones stay", "err", err)
			settled = true
			continue
		}
		if lost = s.lacks(f); lost > 0 && time.Since(since) < settleTime {
			continue
		}
		s.take(f)
		settled = true
		if lost > 0 {
			log.Warn("API keys were removed", "removed", lost, "keys", s.Len())
		} else {
			log.Info("API keys were read again", "keys", s.Len())
		}
	}
}

// Len is how many keys there are.
func (s *Set) Len() int { return len(*s.keys.Load()) }

// Find returns the key of a secret; nil for none.
func (s *Set) Find(secret string) *Key {
	return (*s.keys.Load())[sha256.Sum256([]byte(secret))]
}

// burst is how many requests may come at once after a pause.
func (k *Key) burst() float64 { return math.Max(1, math.Ceil(k.rate)) }

// Begin asks for one more request. If it may not be, wait says when it may, for all that is known.
// Each Begin that is ok needs an End.
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

// Limits returns what the key may do in all: requests per second, how many of them at once after a pause,
// and requests at a time; 0 is any. id is the key's name where several proxies count together.
func (k *Key) Limits() (id string, rate, burst float64, atOnce int) {
	sum := sha256.Sum256(append([]byte("kvasir limits of "), k.of[:]...))
	return k.Name + " " + hex.EncodeToString(sum[:8]), k.rate, k.burst(), k.atOnce
}

// End notes that a request has ended.
func (k *Key) End() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.mu.inFlight--
}
