package server

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// maxSegments bounds the segments of one worker: an engine lends one per layer at
// most, and the deepest models have about 130.
const maxSegments = 512

var (
	errTooMany  = errors.New("too many workers are registered")
	errMappings = errors.New("too many segments are mapped")
)

// maxMappings returns how many segments are mapped at once, of all workers: a
// quarter of what the kernel allows a process. The Go runtime needs mappings, too,
// and ends the process without them.
var maxMappings = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/sys/vm/max_map_count")
	n, perr := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || perr != nil || n < 1 {
		n = 65530 // the kernel's default
	}
	return n / 4
})

// mayLendLocked checks the segments of in, which takes the place of old: nobody
// else may lend them, and there are not too many. Errors: errLender with the other
// worker, errMappings.
func (r *registry) mayLendLocked(in, old *instance) (lender *instance, err error) {
	if in.driven == nil {
		return nil, nil
	}
	for _, seg := range in.driven.segments {
		for _, other := range r.mu.lenders[seg.Inode] {
			if other != old && !in.driven.sameProcess(other.driven) {
				return other, fmt.Errorf("%w: worker %d lends %s already", errLender, other.id, seg.Name)
			}
		}
	}
	total, own := len(in.driven.segments), len(in.driven.segments)
	for by, n := range r.mu.mappings {
		total += n
		if by == in.by {
			own += n
		}
	}
	if old != nil && old.driven != nil {
		total, own = total-len(old.driven.segments), own-len(old.driven.segments)
	}
	switch limit := r.maxMappings; {
	case total > limit:
		return nil, fmt.Errorf("%w: %d with these, of all workers at most %d", errMappings, total, limit)
	case own > limit/2:
		return nil, fmt.Errorf("%w: %d with these, of the workers of %v at most %d", errMappings, own, in.by, limit/2)
	}
	return nil, nil
}

func (r *registry) lendLocked(in *instance) {
	if in.driven == nil {
		return
	}
	for _, seg := range in.driven.segments {
		r.mu.lenders[seg.Inode] = append(r.mu.lenders[seg.Inode], in)
	}
	r.mu.mappings[in.by] += len(in.driven.segments)
}

func (r *registry) unlendLocked(in *instance) {
	if in.driven == nil {
		return
	}
	for _, seg := range in.driven.segments {
		var rest []*instance
		for _, other := range r.mu.lenders[seg.Inode] {
			if other != in {
				rest = append(rest, other)
			}
		}
		if len(rest) == 0 {
			delete(r.mu.lenders, seg.Inode)
		} else {
			r.mu.lenders[seg.Inode] = rest
		}
	}
	if r.mu.mappings[in.by] -= len(in.driven.segments); r.mu.mappings[in.by] == 0 {
		delete(r.mu.mappings, in.by)
	}
}

// sameProcess reports whether both workers are proved to be one process.
func (d *driven) sameProcess(other *driven) bool {
	return d.process != (peercred.Process{}) && d.process == other.process
}

// ownProcess proves that the process that made the segments is the one behind c. It
// returns an error when it is proved to be another, and no process when nothing is
// proved.
func (l *lentMemory) ownProcess(c *caller) (peercred.Process, error) {
	var of peercred.Process
	for _, seg := range l.list() {
		p := seg.Owner
		if p == (peercred.Process{}) {
			continue
		}
		var has, seen bool
		switch {
		case c.peer.PID != 0:
			has, seen = c.peer.PID == p.PID, true
		case c.peer.Socket != 0:
			has, seen = peercred.HasSocket(p.PID, c.peer.Socket)
		}
		if seen && !has && !p.Gone() {
			return of, fmt.Errorf("%w: %s belongs to process %d, which is not the one that connects", errLender, seg.Name, p.PID)
		}
		if has {
			of = p
		}
	}
	return of, nil
}

// owned reports whether every segment's owner is proved.
func (d *driven) owned() bool {
	for _, seg := range d.segments {
		if seg.Owner == (peercred.Process{}) {
			return false
		}
	}
	return len(d.segments) > 0
}

// dead reports whether every segment's owner is proved, and has ended.
func (d *driven) dead() bool { return d.deadBy(peercred.Process.Gone) }

func (d *driven) deadBy(gone func(peercred.Process) bool) bool {
	return d.owned() && !slices.ContainsFunc(d.segments, func(seg lent) bool { return !gone(seg.Owner) })
}
