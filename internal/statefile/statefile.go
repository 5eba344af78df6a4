// SPDX-License-Identifier: Apache-2.0

// Package statefile keeps one document of a process in a file that can always be read back: each write replaces the file as a whole,
// and only one process at a time can have it open.
//
// The file has a header line and the document:
//
//	MAGIC CRC32C-of-the-document-in-hex
//	document
//
// A write creates a new file beside the old one (.tmp), syncs and renames it, and syncs the folder. So a process that is killed at any
// moment leaves either the old document or the new one.
package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/kvasir-kv/kvasir/internal/takeover"
)

// Error means that a file cannot be used.
type Error struct {
	Path    string
	Reason  string
	Foreign bool // it is no state file of this kind and version, so it is not damaged
	Newer   bool // a later release wrote it
}

func (e *Error) Error() string {
	advice := "remove it to start without"
	switch {
	case e.Newer:
		advice = "start the release that wrote it, or name another file"
	case e.Foreign:
		advice = "name another one"
	}
	return fmt.Sprintf("state file %s: %s; %s", e.Path, e.Reason, advice)
}

// File is an open state file. Several goroutines may write to it.
type File struct {
	path, magic string
	max         int64
	lock        *os.File
	writing     sync.Mutex // orders writes, because there is only one .tmp file
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Open locks PATH.lock and returns the document, which is nil if there is no file yet. magic names the kind of content and its version.
// max bounds the file, in bytes: Open does not accept a longer one, and Write does not write one. If another process has the file open,
// Open waits a moment, in case that process is ending, and then returns an error.
func Open(path, magic string, max int64) (*File, []byte, error) {
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("lock state file: %w", err)
	}
	take := func() error { return syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }
	if err := takeover.LockAfter(takeover.LockOwner(lock), syscall.EWOULDBLOCK, take); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("state file %s is in use by another process: %w", path, err), lock.Close())
	}
	takeover.SetLockOwner(lock)
	f := &File{path: path, magic: magic, max: max, lock: lock}
	doc, err := f.read()
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, doc, nil
}

// Close releases the lock, so that other processes can open the file.
func (f *File) Close() error { return f.lock.Close() }

// Path returns the file's path.
func (f *File) Path() string { return f.path }

func (f *File) read() ([]byte, error) {
	in, err := os.OpenFile(f.path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO without a writer would hang
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read state file: %w", err)
	}
	defer in.Close()
	if info, err := in.Stat(); err == nil && !info.Mode().IsRegular() {
		return nil, &Error{Path: f.path, Reason: "not a regular file", Foreign: true}
	}
	b, err := io.ReadAll(io.LimitReader(in, f.max+1))
	if err != nil {
		return nil, fmt.Errorf("read state file: %w", err)
	}
	return f.parse(b)
}

// parse returns the document in the bytes of a file. The error is an *Error.
func (f *File) parse(b []byte) ([]byte, error) {
	head, doc, ok := bytes.Cut(b, []byte("\n"))
	sum, known := bytes.CutPrefix(head, []byte(f.magic+" "))
	doc = bytes.TrimSuffix(doc, []byte("\n"))
	switch {
	case !known && newer(head, f.magic):
		return nil, &Error{Path: f.path, Reason: fmt.Sprintf("a later release wrote it: this one reads %q", f.magic), Foreign: true, Newer: true}
	case !known:
		return nil, &Error{Path: f.path, Reason: "not a " + f.magic + " file", Foreign: true}
	case int64(len(b)) > f.max:
		return nil, &Error{Path: f.path, Reason: fmt.Sprintf("longer than %d bytes", f.max)}
	case !ok || string(sum) != fmt.Sprintf("%08x", crc32.Checksum(doc, castagnoli)):
		return nil, &Error{Path: f.path, Reason: "damaged: the checksum does not fit"}
	}
	return doc, nil
}

// newer reports whether the first line of a file has the magic with a higher version. The version is the number at the end of magic.
func newer(head []byte, magic string) bool {
	name := strings.TrimRight(magic, "0123456789")
	rest, ok := bytes.CutPrefix(head, []byte(name))
	digits, _, _ := bytes.Cut(rest, []byte(" "))
	theirs, err := strconv.ParseUint(string(digits), 10, 32)
	ours, ourErr := strconv.ParseUint(magic[len(name):], 10, 32)
	return ok && err == nil && ourErr == nil && theirs > ours
}

// text returns the content of a file with the document doc.
func (f *File) text(doc []byte) []byte {
	b := fmt.Appendf(nil, "%s %08x\n", f.magic, crc32.Checksum(doc, castagnoli))
	return append(append(b, doc...), '\n')
}

// Write replaces the document. doc must not end in a newline.
func (f *File) Write(doc []byte) error {
	b := f.text(doc)
	if int64(len(b)) > f.max {
		return fmt.Errorf("a document of %d bytes is too long, at most %d", len(b), f.max)
	}
	f.writing.Lock()
	defer f.writing.Unlock()
	tmp := f.path + ".tmp"
	out, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(b)
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return errors.Join(err, os.Remove(tmp))
	}
	if err := os.Rename(tmp, f.path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(f.path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
