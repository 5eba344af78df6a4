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

// prefix is the beginning of the names of segments that LMCache's CPU workers lend: lmcache_kv_<pid>_<n>. The server never maps or removes
// any other file for a worker.
const prefix = "lmcache_kv_"

// maxSegments bounds the segments of one worker; a registration with more is refused. An engine lends at most one for each layer, and the
// deepest models have about 130 layers.
const maxSegments = 512

// ErrMemory means that memory which a worker lends does not exist, or is not as the worker describes it.
var ErrMemory = errors.New("worker's shared memory")

// Segment is one segment that a worker lends.
type Segment struct {
	Name  string
	Inode uint64
	Owner peercred.Process // the process that made it; zero: not proved
}

type mapped struct {
	*shm.Segment
	owner peercred.Process
}

// memory has the segments of one worker, mapped while the worker is registered.
type memory struct {
	mu struct {
		sync.RWMutex // held for reading while a copy uses the memory
		segments     map[string]mapped
		closed       bool
	}
}

// attach maps the segment `name` of dir, unless it is mapped already, and returns its first n bytes. It refuses a shorter segment, a file
// that is no worker's segment, one for which `may` returns an error, and more than maxSegments.
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
		if err := seg.CloseFile(); err != nil { // only the mapping is needed
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

// use calls f while the memory is mapped. It reports false if the memory is no longer mapped.
func (l *memory) use(f func()) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.mu.closed {
		return false
	}
	f()
	return true
}

// close waits for the copies in progress, then unmaps the memory.
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

// has reports whether a segment is one of the mapped ones.
func (l *memory) has(of Segment) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	seg, ok := l.mu.segments[of.Name]
	return ok && seg.Inode() == of.Inode
}

// list returns the mapped segments, each with its owner if that is proved.
func (l *memory) list() []Segment {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out := make([]Segment, 0, len(l.mu.segments))
	for name, seg := range l.mu.segments {
		out = append(out, Segment{Name: name, Inode: seg.Inode(), Owner: seg.owner})
	}
	return out
}

// findOwners records which processes made the segments: the process in a segment's name, if it maps that file now. For a process in another
// PID namespace, or of another user, nothing is proved. known are owners that were proved before.
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

// Leftovers has the segments of workers that are no longer registered. An engine that is killed leaves them. Its methods are safe for
// concurrent use.
type Leftovers struct {
	mu struct {
		sync.Mutex
		list []Segment
	}
}

// maxLeftovers bounds the segments of Leftovers. Further ones are not remembered, so they are never removed.
const maxLeftovers = 1 << 14

// Add adds the segments of a worker whose registration has ended. It ignores segments without a proved owner, and those with a name of
// another form, because this server may not remove them.
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

// All returns all these segments.
func (r *Leftovers) All() []Segment {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.mu.list)
}

// Sweep removes those segments whose owner has ended and for which inUse reports false. It forgets segments that no longer exist. It
// reports whether the list changed.
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
