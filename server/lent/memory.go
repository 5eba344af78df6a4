// SPDX-License-Identifier: Apache-2.0

package lent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/server/access"
)

// prefix begins the names of the segments that LMCache's CPU workers lend:
// lmcache_kv_<pid>_<n>. No other file is ever mapped or removed for a worker.
const prefix = "lmcache_kv_"

// maxSegments bounds the segments of one worker: an engine lends one per layer at
// most, and the deepest models have about 130.
const maxSegments = 512

// ErrMemory means that what a worker lends is not there, or not what it says.
var ErrMemory = errors.New("worker's shared memory")

// Segment is one segment that a worker lends.
type Segment struct {
	Name  string
	Inode uint64
	Owner peercred.Process // who made it; zero when that is not proved
}

type mapped struct {
	*shm.Segment
	owner peercred.Process
}

// memory is what one worker lends, mapped while it is registered.
type memory struct {
	mu struct {
		sync.RWMutex // held for reading while a copy uses the memory
		segments     map[string]mapped
		closed       bool
	}
}

// attach maps the segment name of dir, once, and returns its first n bytes. A
// shorter segment is refused, and so is any other file than a worker's, or one that
// may refuses.
func (l *memory) attach(dir, name string, n int64, may func(shm.File) error) ([]byte, error) {
	name = strings.TrimPrefix(name, "/")
	if !strings.HasPrefix(name, prefix) {
		return nil, fmt.Errorf("%w: the name %q does not begin with %s", ErrMemory, name, prefix)
	}
	seg, ok := l.mu.segments[name]
	if !ok {
		path, err := shm.Path(dir, name)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrMemory, err)
		}
		if len(l.mu.segments) >= maxSegments {
			return nil, fmt.Errorf("%w: more than %d segments", ErrMemory, maxSegments)
		}
		if seg.Segment, err = shm.AttachIf(path, may); errors.Is(err, access.ErrLender) {
			return nil, err
		} else if err != nil {
			return nil, fmt.Errorf("%w: %w (same host, same user, same /dev/shm?)", ErrMemory, err)
		}
		if err := seg.CloseFile(); err != nil { // the mapping is enough
			return nil, errors.Join(fmt.Errorf("%w: %w", ErrMemory, err), seg.Close())
		}
		if l.mu.segments == nil {
			l.mu.segments = make(map[string]mapped)
		}
		l.mu.segments[name] = seg
	}
	if n < 0 || n > seg.Len() {
		return nil, fmt.Errorf("%w: %s has %d bytes, announced are %d", ErrMemory, name, seg.Len(), n)
	}
	return seg.Bytes(0, n), nil
}

// use calls f while the memory is mapped; it reports false when it is no longer.
func (l *memory) use(f func()) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.mu.closed {
		return false
	}
	f()
	return true
}

// close unmaps the memory after the copies in progress.
func (l *memory) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closed = true
	var err error
	for _, seg := range l.mu.segments {
		err = errors.Join(err, seg.Close())
	}
	l.mu.segments = nil
	return err
}

// has reports whether l is among what is mapped.
func (l *memory) has(of Segment) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	seg, ok := l.mu.segments[of.Name]
	return ok && seg.Inode() == of.Inode
}

// list returns the mapped segments, with the owner of each where it is proved.
func (l *memory) list() []Segment {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out := make([]Segment, 0, len(l.mu.segments))
	for name, seg := range l.mu.segments {
		out = append(out, Segment{Name: name, Inode: seg.Inode(), Owner: seg.owner})
	}
	return out
}

// findOwners records the creators of the segments: the process in a segment's name, if it maps
// that file now. Behind another PID namespace, or for another user's process,
// nothing is proved. known are owners that were proved before.
func (l *memory) findOwners(known []Segment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps := map[int]map[string]uint64{}
	for name, seg := range l.mu.segments {
		for _, k := range known {
			if k.Name == name && k.Inode == seg.Inode() {
				seg.owner = k.Owner
			}
		}
		digits, _, ok := strings.Cut(strings.TrimPrefix(name, prefix), "_")
		pid, err := strconv.Atoi(digits)
		if seg.owner.PID == 0 && ok && err == nil && pid > 0 {
			if _, ok := maps[pid]; !ok {
				maps[pid], _ = peercred.Mapped(pid, prefix)
			}
			if inode, ok := maps[pid][name]; ok && inode == seg.Inode() {
				if p, ok := peercred.Running(pid); ok {
					seg.owner = p
				}
			}
		}
		l.mu.segments[name] = seg
	}
}

// Leftovers are the segments of workers that are no longer registered. An engine
// that dies leaves them behind. Its methods are safe for concurrent use.
type Leftovers struct {
	mu struct {
		sync.Mutex
		list []Segment
	}
}

const maxLeftovers = 1 << 14

// Add takes over segments of a worker that left. It ignores segments without a proved owner, or of
// another kind of name: this server may not remove them.
func (r *Leftovers) Add(list []Segment) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range list {
		ours := strings.HasPrefix(l.Name, prefix) && l.Owner.PID != 0
		if ours && len(r.mu.list) < maxLeftovers && !slices.Contains(r.mu.list, l) {
			r.mu.list = append(r.mu.list, l)
		}
	}
}

// All returns the segments that were left.
func (r *Leftovers) All() []Segment {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.mu.list)
}

// Sweep removes the segments whose owner has ended, unless inUse, and forgets
// those that are gone. It reports whether the list changed.
func (r *Leftovers) Sweep(dir string, inUse func(Segment) bool, removed func(Segment)) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := r.mu.list[:0]
	n := len(r.mu.list)
	for _, l := range r.mu.list {
		path, err := shm.Path(dir, l.Name)
		if err != nil || !isFile(path, l.Inode) {
			continue
		}
		if !l.Owner.Gone() || inUse(l) {
			kept = append(kept, l)
			continue
		}
		if err := os.Remove(path); err == nil || errors.Is(err, fs.ErrNotExist) {
			removed(l)
		}
	}
	r.mu.list = kept
	return len(kept) != n
}

// isFile reports whether path is still the file of that inode.
func isFile(path string, inode uint64) bool {
	got, err := shm.InodeOf(path)
	return err == nil && got == inode
}
