// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/kv"
)

// Any user may make files in /dev/shm, under any name. So a pool's files are used only if no other user can write to them (shm.Ours), and
// removed only if they belong to this user.

// Files is the part of a Pool that needs no lock: its name, its size, the files beside it, and the places that earlier servers gave to
// engines. Pool documents the methods.
type Files interface {
	Name() string
	Bytes() int64
	FormerBytes() int64
	Path() string
	Inode() uint64
	NameLost() bool
	SetNote(b []byte) error
	Note() ([]byte, error)
	Remove() error
	FormerChunkTokens() []int
	ForgetFormer()
}

// ErrOwner means that a file of the pool's name belongs to another user.
var ErrOwner = errors.New("pool: the file is another user's")

// MaxNote is the length of the longest note, in bytes. SetNote refuses a longer one.
const MaxNote = 16 << 20

// foreign returns an error that wraps ErrOwner if path is another user's file, else
// nil.
func foreign(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || int(st.Uid) == os.Geteuid() {
		return nil
	}
	return fmt.Errorf("%w: %s belongs to %s, this process is %s", ErrOwner, path, userName(int(st.Uid)), userName(os.Geteuid()))
}

func userName(uid int) string {
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		return fmt.Sprintf("%s (uid %d)", u.Username, uid)
	}
	return fmt.Sprintf("uid %d", uid)
}

// unusable returns the error for an index that cannot be attached, for the reason `why`. It returns nil if the index may be discarded: with
// o.Cold, or because its server was killed before the index had a size. With `patient`, an index without a size is errStarting instead.
func unusable(path string, o Options, patient bool, why error) error {
	index := path + IndexSuffix
	if err := foreign(index); err != nil {
		return err
	}
	if errors.Is(why, shm.ErrFolder) { // the pool may be whole
		return why
	}
	f, err := shm.Stat(index)
	empty := err == nil && f.Bytes == 0 && shm.Ours(f) == nil
	switch {
	case empty && patient:
		return errStarting
	case !empty && !o.Cold:
		return fmt.Errorf("%w: %s: %w", ErrForeign, index, why)
	}
	lock, err := shm.LockFile(index)
	if errors.Is(err, shm.ErrLocked) {
		return fmt.Errorf("%w: another server has %s", ErrInUse, path)
	}
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrForeign, index, why)
	}
	return lock.Close()
}

// namedByUs reports whether the name of a segment is one of Kvasir's. A segment without an index and without such a name may be another
// program's.
func namedByUs(name string) bool { return strings.Contains(name, "kvasir") }

// discard removes the files of a pool that no process serves. It removes the index last, so that a pool that is removed in part is still
// found.
func discard(path, name string) error {
	_, err := remove(path, name)
	return err
}

// remove removes those of a pool's files that belong to this user, and returns the memory that they took.
func remove(path, name string) (taken int64, err error) {
	_, noIndex := os.Lstat(path + IndexSuffix)
	for _, p := range []string{path, path + NoteSuffix, path + IndexSuffix} {
		f, err := shm.Stat(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if ferr := foreign(p); ferr != nil {
			if p == path+NoteSuffix {
				continue // such a file is never read either
			}
			return taken, ferr
		}
		if p == path && noIndex != nil && !namedByUs(name) {
			err = errors.New("it has no index, and its name is not one of Kvasir's")
		}
		if err != nil {
			return taken, fmt.Errorf("%w: %s: %w", ErrForeign, p, err)
		}
		if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return taken, fmt.Errorf("remove the pool of an earlier server: %w", err)
		}
		taken += f.Taken
	}
	shm.RemoveUnfinished(path + NoteSuffix)
	return taken, nil
}

// ErrNothing means that there is no file of the pool's name.
var ErrNothing = errors.New("pool: nothing to remove")

// Drop removes the pool of a name, damaged or not, and returns the memory that its files took. Engines that map the pool keep their
// mapping. Errors: ErrNothing, ErrInUse, ErrOwner, ErrForeign.
func Drop(dir, name string) (taken int64, err error) {
	path, err := shm.Path(dir, name)
	if err != nil {
		return 0, err
	}
	_, err1 := os.Lstat(path)
	_, err2 := os.Lstat(path + IndexSuffix)
	_, err3 := os.Lstat(path + NoteSuffix)
	if err1 != nil && err2 != nil && err3 != nil {
		return 0, fmt.Errorf("%w: there is no %s", ErrNothing, path)
	}
	if err2 != nil {
		return remove(path, name)
	}
	if err := foreign(path + IndexSuffix); err != nil {
		return 0, err
	}
	var lock *os.File
	pid := servedBy(path + IndexSuffix)
	err = takeover.LockAfter(pid, shm.ErrLocked, func() error {
		lock, err = shm.LockFile(path + IndexSuffix)
		return err
	})
	if errors.Is(err, shm.ErrLocked) {
		return 0, fmt.Errorf("%w: process %d serves %s", ErrInUse, pid, path)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	defer lock.Close()
	return remove(path, name)
}

// servedBy returns the id of the process that an index names as its server, 0 for none.
func servedBy(path string) int {
	index, err := shm.AttachIf(path, shm.Ours)
	if err != nil {
		return 0
	}
	defer index.Close()
	h, err := readHeader(index)
	if err != nil {
		return 0
	}
	return h.pid
}

// ChangedError means that the existing pool has another alignment or chunk size than Open was asked for. It wraps ErrChanged.
type ChangedError struct {
	Path        string
	Kept, Asked Shape
}

// Shape has the options that cannot change while the pool exists.
type Shape struct {
	Align       int64
	ChunkTokens int
}

func (o *Options) shape() Shape { return Shape{o.Align, o.ChunkTokens} }

func (e *ChangedError) Error() string {
	var out []string
	add := func(what string, kept, asked int64) {
		if kept != asked {
			out = append(out, fmt.Sprintf("it has %d %s, asked for are %d", kept, what, asked))
		}
	}
	add("bytes of alignment", e.Kept.Align, e.Asked.Align)
	add("tokens per chunk", int64(e.Kept.ChunkTokens), int64(e.Asked.ChunkTokens))
	return fmt.Sprintf("%s: %v: %s", e.Path, ErrChanged, strings.Join(out, "; "))
}

// Unwrap returns ErrChanged.
func (e *ChangedError) Unwrap() error { return ErrChanged }

// SpaceError says that a pool does not fit into its file system. It wraps ErrNoSpace.
type SpaceError struct {
	Dir        string
	Need, Free int64     // bytes, with the index
	More       bool      // the pool becomes larger, and Need is the additional memory
	Held       int64     // bytes of the existing pool of that name that stay in use after its removal
	Holders    []int     // processes that map this existing pool
	Removed    []Removed // removed pools that processes still map
}

func (e *SpaceError) Error() string {
	takes := "the pool and its index take"
	if e.More {
		takes = "the larger pool takes further"
	}
	s := fmt.Sprintf("%v: %s %s, %s has %s free", ErrNoSpace, takes, kv.FormatBytes(e.Need), e.Dir, kv.FormatBytes(e.Free))
	if e.Held > 0 && len(e.Holders) > 0 {
		s += fmt.Sprintf("; %s of the present pool stay in use by %s", kv.FormatBytes(e.Held), processes(e.Holders))
	}
	for _, r := range e.Removed {
		s += fmt.Sprintf("; %s of a removed pool are mapped by %s, until it ends or registers again", kv.FormatBytes(r.Taken), processes(r.Mappers))
	}
	return s
}

// Unwrap returns ErrNoSpace.
func (e *SpaceError) Unwrap() error { return ErrNoSpace }

func (p *Pool) notePath() string {
	path, err := shm.Path(p.opts.Dir, p.opts.Name)
	if err != nil {
		return "" // Open has checked it
	}
	return path + NoteSuffix
}

// ErrNote means that a note is longer than MaxNote.
var ErrNote = errors.New("pool: note too long")

// SetNote stores b beside the pool, for the pool's owner after a restart. At any moment either the old or the new note is there. Error:
// ErrNote.
func (p *Pool) SetNote(b []byte) error {
	if len(b) > MaxNote {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrNote, len(b), MaxNote)
	}
	if err := shm.Write(p.notePath(), b); err != nil {
		return fmt.Errorf("write the note beside the pool: %w", err)
	}
	return nil
}

// Note returns the last note of SetNote, nil if there is none. A file that another user can write to is an error.
func (p *Pool) Note() ([]byte, error) {
	b, err := shm.Read(p.notePath(), MaxNote)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}
