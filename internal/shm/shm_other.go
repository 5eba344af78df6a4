// SPDX-License-Identifier: Apache-2.0

//go:build !linux

// Package shm works on Linux only. On other systems its functions fail. See shm.go.
package shm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
)

// Dir is the folder of POSIX shared memory on Linux.
const Dir = "/dev/shm"

// The errors of shm.go.
var (
	ErrLocked     = errors.New("shm: segment is locked by another process")
	ErrName       = errors.New("shm: bad segment name")
	ErrFolder     = errors.New("shm: the folder cannot be used")
	ErrNoPopulate = errors.New("shm: memory cannot be provided ahead of use here")
	ErrNotOurs    = errors.New("shm: the file is not this user's alone")
	ErrTooLong    = errors.New("shm: file is too long")
)

var errHere = fmt.Errorf("shm: shared memory on %s: %w", runtime.GOOS, errors.ErrUnsupported)

// Segment is a mapped file; this system has none.
type Segment struct{}

// File describes a segment's file.
type File struct {
	UID   int
	Perm  uint32
	Links int
	Inode uint64
	Bytes int64
	Taken int64
}

// Path returns the path of the segment `name` in dir; an empty dir means Dir.
func Path(dir, name string) (string, error) {
	name = strings.TrimPrefix(name, "/")
	if name == "" || len(name) > 200 || strings.ContainsAny(name, "/\x00") || name == "." || name == ".." {
		return "", fmt.Errorf("%w: %q", ErrName, name)
	}
	if dir == "" {
		dir = Dir
	}
	return filepath.Join(dir, name), nil
}

// The functions below always fail.

func Create(string, int64) (*Segment, error)              { return nil, errHere }
func Attach(string) (*Segment, error)                     { return nil, errHere }
func AttachIf(string, func(File) error) (*Segment, error) { return nil, errHere }
func AttachFile(*os.File) (*Segment, error)               { return nil, errHere }
func Ours(File) error                                     { return errHere }
func Stat(string) (File, error)                           { return File{}, errHere }
func LockFile(string) (*os.File, error)                   { return nil, errHere }
func Write(string, []byte) error                          { return errHere }
func Read(string, int64) ([]byte, error)                  { return nil, errHere }
func RemoveUnfinished(string)                             {}
func InodeOf(string) (uint64, error)                      { return 0, errHere }
func Free(string) (int64, error)                          { return 0, errHere }
func Mapped() int64                                       { return 0 }
func (*Segment) Path() string                             { return "" }
func (*Segment) Inode() uint64                            { return 0 }
func (*Segment) Len() int64                               { return 0 }
func (*Segment) Bytes(int64, int64) []byte                { panic("BUG: a segment on a system without them") }

func (*Segment) Word(int64) *atomic.Uint64         { panic("BUG: a segment on a system without them") }
func (*Segment) CloseFile() error                  { return errHere }
func (*Segment) ReadAt([]byte, int64) (int, error) { return 0, errHere }
func (*Segment) Lock() error                       { return errHere }
func (*Segment) Populate(int64, int64, bool) error { return errHere }
func (*Segment) Provided(known int64) int64        { return known }
func (*Segment) Extend(int64) error                { return errHere }
func (*Segment) Punch(int64, int64) error          { return errHere }
func (*Segment) Taken() int64                      { return 0 }
func (*Segment) Exists() bool                      { return false }
func (*Segment) Unlink() error                     { return errHere }
func (*Segment) Close() error                      { return errHere }
