// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// Limits of key files. A file beyond one of them is refused as a whole; clients that were read before may still connect.
const (
	maxKeyFile     = 4 << 10 // bytes
	maxClientsFile = 1 << 20 // bytes
	maxClients     = 4096
	maxClientName  = 128 // bytes
)

// FormatKeyFile returns the text of a file with a secret key, for ReadKeyFile and for pyzmq's zmq.auth.load_certificate.
func FormatKeyFile(secret Key) string {
	return fmt.Sprintf("# This file has a secret key of CURVE.\ncurve\n    public-key = %q\n    secret-key = %q\n", secret.Public().Z85(), secret.Z85())
}

// ReadKeyFile reads a secret key from a file: the 40 letters of Z85 alone, or a certificate in pyzmq's form. It refuses a file that
// every user of this machine may read. Errors name the file but never quote its content.
func ReadKeyFile(path string) (secret Key, err error) {
	text, err := auth.ReadSecret(path, maxKeyFile)
	if err != nil {
		return Key{}, err
	}
	found := string(bytes.TrimSpace(text))
	for line := range strings.Lines(found) {
		if name, value, ok := strings.Cut(line, "="); ok && strings.TrimSpace(name) == "secret-key" {
			found = strings.Trim(strings.TrimSpace(value), `"`)
			break
		}
	}
	if secret, err = ParseKey(found); err != nil {
		return Key{}, &auth.FileError{Path: path, Reason: "it has no secret key of CURVE (kvasir curve-key makes one)"}
	}
	return secret, nil
}

// CurveClients holds the clients that may connect, by their public keys. Its methods are safe for concurrent use.
type CurveClients struct {
	file  *auth.File
	names atomic.Pointer[map[Key]string]
}

// OpenCurveClients reads a file with a client name and a public key on each line. Empty lines and lines that begin with # are skipped.
func OpenCurveClients(path string) (*CurveClients, error) {
	c := &CurveClients{}
	c.names.Store(&map[Key]string{})
	var err error
	if c.file, err = auth.OpenFile(auth.FileOptions{Path: path, MaxBytes: maxClientsFile, Public: true, Parse: c.parse}); err != nil {
		return nil, err
	}
	return c, nil
}

// Watch reads the file again whenever it changes, until ctx ends. It does not close the connections of clients that are no longer in
// the file.
func (c *CurveClients) Watch(ctx context.Context, log *slog.Logger) {
	c.file.Watch(ctx, auth.WatchInterval, log)
}

// Find returns the name of the client with that public key. ok is false if it may not connect.
func (c *CurveClients) Find(public Key) (name string, ok bool) {
	name, ok = (*c.names.Load())[public]
	return name, ok
}

func (c *CurveClients) parse(text []byte) (auth.Change, error) {
	names, n := map[Key]string{}, 0
	for line := range strings.Lines(string(text)) {
		n++
		words := strings.Fields(line)
		if len(words) == 0 || words[0][0] == '#' {
			continue
		}
		if len(words) != 2 || len(words[0]) > maxClientName {
			return auth.Change{}, fmt.Errorf("line %d is not NAME PUBLIC-KEY", n)
		}
		k, err := ParseKey(words[1])
		if err != nil {
			return auth.Change{}, fmt.Errorf("line %d: %w", n, err)
		}
		if _, twice := names[k]; twice {
			return auth.Change{}, fmt.Errorf("line %d: the key stands in the file twice", n)
		}
		if names[k] = words[0]; len(names) > maxClients {
			return auth.Change{}, errors.New("more than 4096 keys")
		}
	}
	removed := 0
	for k := range *c.names.Load() {
		if _, stays := names[k]; !stays {
			removed++
		}
	}
	return auth.Change{Take: func() { c.names.Store(&names) }, Entries: len(names), Removed: removed}, nil
}
