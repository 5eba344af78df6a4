// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
)

// Limits of a file of shared secrets. A file beyond one of them is refused as a whole; secrets read before stay in use.
const (
	maxSecretFile = 64 << 10 // bytes
	maxSecrets    = 4
	minSecret     = 32 // fewest bytes of a secret
)

// secretLines holds the secrets of a file, one on each line. Empty lines and lines that begin with # are skipped.
type secretLines struct {
	file    *File
	all     atomic.Pointer[[][]byte] // has at least one secret once the file is open
	version atomic.Uint64            // incremented after each change of all
}

func (s *secretLines) open(path string) (err error) {
	s.all.Store(&[][]byte{})
	s.file, err = OpenFile(FileOptions{Path: path, MaxBytes: maxSecretFile, Parse: s.parse})
	return err
}

// Watch reads the file again when it changes, until ctx ends.
func (s *secretLines) Watch(ctx context.Context, log *slog.Logger) {
	s.file.Watch(ctx, WatchInterval, log)
}

// Reload reads the file now and puts it into use. Unlike Watch, it does not check whether the file is being written.
func (s *secretLines) Reload() error {
	c, _, _, err := s.file.load()
	if err != nil {
		return err
	}
	c.Take()
	return nil
}

func (s *secretLines) parse(text []byte) (Change, error) {
	var all [][]byte
	n := 0
	for line := range bytes.Lines(text) {
		n++
		line = bytes.TrimSpace(line)
		switch {
		case len(line) == 0 || line[0] == '#':
		case len(line) < minSecret:
			return Change{}, fmt.Errorf("line %d: a secret of fewer than %d characters (openssl rand -hex 32 makes one)", n, minSecret)
		case len(all) == maxSecrets:
			return Change{}, fmt.Errorf("more than %d secrets", maxSecrets)
		default:
			all = append(all, bytes.Clone(line))
		}
	}
	removed := 0
	for _, was := range *s.all.Load() {
		if !slices.ContainsFunc(all, func(b []byte) bool { return bytes.Equal(b, was) }) {
			removed++
		}
	}
	take := func() {
		s.all.Store(&all)
		s.version.Add(1)
	}
	return Change{Take: take, Entries: len(all), Removed: removed}, nil
}
