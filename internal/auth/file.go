// SPDX-License-Identifier: Apache-2.0

// Package auth decides who may use a listener: bearer tokens, client certificates and networks.
//
// A Gate guards one HTTP listener; a Networks guards a listener of any other protocol. Files of secrets are read again when they
// change, but not while they are being written.
package auth

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// FileError means that a file of secrets cannot be used. Its text names the file.
type FileError struct{ Path, Reason string }

func (e *FileError) Error() string { return e.Path + ": " + e.Reason }

// stamp identifies a state of a file. Another file at the same path, for example after a link has changed, is another state, even if
// its time is equal: some systems give all files the same time.
type stamp struct {
	changed time.Time
	size    int64
	info    os.FileInfo // nil: stat failed
}

func stampOf(info os.FileInfo) stamp { return stamp{info.ModTime(), info.Size(), info} }

func (s stamp) same(o stamp) bool {
	if s.info == nil || o.info == nil {
		return s.info == o.info
	}
	return s.changed.Equal(o.changed) && s.size == o.size && s.info.Mode() == o.info.Mode() && os.SameFile(s.info, o.info)
}

// othersMay are the permission bits of users who are neither the owner of a file nor in its group.
const othersMay fs.FileMode = 0o006

// CheckPrivate returns an error if every user of this machine may read or write the file at path. For a link, the mode of its target
// counts. The group may have rights, because Kubernetes mounts secrets that way.
func CheckPrivate(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return checkMode(path, info)
}

func checkMode(path string, info os.FileInfo) error {
	if info.Mode().Perm()&othersMay != 0 {
		return &FileError{path, fmt.Sprintf("every user of this machine may read or write it (mode %04o): chmod o-rwx", info.Mode().Perm())}
	}
	return nil
}

// ReadSecret reads a file of secrets of at most max bytes. It refuses a file that every user of this machine may read, an empty file,
// and a file that is not regular.
func ReadSecret(path string, max int64) ([]byte, error) {
	text, _, err := readFile(path, max, true)
	return text, err
}

func readFile(path string, max int64, private bool) ([]byte, stamp, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO without a writer would hang
	if err != nil {
		return nil, stamp{}, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, stamp{}, err
	}
	if !info.Mode().IsRegular() {
		return nil, stamp{}, &FileError{path, "not a regular file"}
	}
	if private {
		err = checkMode(path, info)
	} else if info.Mode().Perm()&0o002 != 0 { // whoever may write the file decides who is allowed in
		err = &FileError{path, fmt.Sprintf("every user of this machine may write it (mode %04o): chmod o-w", info.Mode().Perm())}
	}
	if err != nil {
		return nil, stamp{}, err
	}
	text, err := io.ReadAll(io.LimitReader(f, max+1))
	switch {
	case err != nil:
		return nil, stamp{}, err
	case int64(len(text)) > max:
		return nil, stamp{}, &FileError{path, fmt.Sprintf("more than %d bytes", max)}
	case len(text) == 0:
		return nil, stamp{}, &FileError{path, "it is empty"}
	}
	return text, stampOf(info), nil
}

// Change is the change that a new text of a File would make.
type Change struct {
	Take    func() // puts the new text into use
	Entries int
	Removed int // entries in use that are missing in the new text
}

// FileOptions configures a File.
type FileOptions struct {
	Path     string
	MaxBytes int64
	Public   bool // the file has no secret: every user may read it, but may not write it

	// Parse returns the change that a text would make, but does not make it.
	Parse func(text []byte) (Change, error)
}

// File is a file that is read again when it changes.
type File struct {
	o    FileOptions
	read stamp // state that was read last; owned by Watch after OpenFile
}

// OpenFile reads a file and puts it into use. A file without an entry is an error.
func OpenFile(o FileOptions) (*File, error) {
	f := &File{o: o}
	c, at, _, err := f.load()
	if err != nil {
		return nil, err
	}
	c.Take()
	f.read = at
	return f, nil
}

// load reads the file, in the state `at`, and returns the change that its text would make. `whole` means that the text ends with a newline.
func (f *File) load() (c Change, at stamp, whole bool, err error) {
	text, at, err := readFile(f.o.Path, f.o.MaxBytes, !f.o.Public)
	if err != nil {
		return c, at, false, err
	}
	if c, err = f.o.Parse(text); err != nil {
		return c, at, false, fmt.Errorf("%s: %w", f.o.Path, err)
	}
	if c.Entries == 0 {
		return c, at, false, &FileError{f.o.Path, "it has no entry"}
	}
	return c, at, text[len(text)-1] == '\n', nil
}

// settleTime is how long a file that lacks entries must stay unchanged before the entries are removed: the file may be half written.
const settleTime = 5 * time.Second

// WatchInterval is the interval of Watch for most files.
const WatchInterval = 2 * time.Second

// Watch checks the file every interval until ctx ends, and reads it again when it has changed.
//
// Watch does not use a file that is being written: two checks in a row must find the same state, and the file must end with a newline.
// If the file lacks entries that are in use, it must stay unchanged for 5 s. Watch never uses a file without entries. If it cannot use
// a file, it logs that once for each state of the file, and the former entries stay in use.
func (f *File) Watch(ctx context.Context, interval time.Duration, log *slog.Logger) {
	seen, since := f.read, time.Now()
	settled := true // the current state of the file is in use, or a log line says why it is not
	for {
		select {
		case <-time.After(interval):
		case <-ctx.Done():
			return
		}
		var now stamp // zero: stat failed
		info, err := os.Stat(f.o.Path)
		if err == nil {
			now = stampOf(info)
		}
		if !now.same(seen) {
			seen, since, settled = now, time.Now(), false
			continue
		}
		if !settled {
			settled = f.putIntoUse(now, since, err, log)
		}
	}
}

// putIntoUse puts the file into use in the state `now`, which the file has had since the time `since`. It returns true if the state is
// settled: in use, or logged as unusable. looked is the error of the os.Stat that found the state.
func (f *File) putIntoUse(now stamp, since time.Time, looked error, log *slog.Logger) bool {
	c, at, whole, err := Change{}, stamp{}, false, looked
	if err == nil {
		c, at, whole, err = f.load()
	}
	switch {
	case err != nil:
	case !at.same(now):
		return false // the file has changed since the check
	case !whole:
		err = &FileError{f.o.Path, "its last line does not end, it may be half written"}
	}
	if err != nil {
		log.Error("a file cannot be read again: its former entries stay in use", "file", f.o.Path, "err", err)
		return true
	}
	if c.Removed > 0 && time.Since(since) < settleTime {
		return false
	}
	c.Take()
	f.read = at
	if c.Removed > 0 {
		log.Warn("entries of a file were removed", "file", f.o.Path, "removed", c.Removed, "entries", c.Entries)
	} else {
		log.Info("a file was read again", "file", f.o.Path, "entries", c.Entries)
	}
	return true
}
