// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/server/access"
)

var (
	// ErrUnknown means that the peer has registered no worker of that id.
	ErrUnknown = errors.New("worker instance is not registered")
	// ErrRefused means that the worker's registration was refused.
	ErrRefused = errors.New("worker's registration was refused")
	// ErrTooMany means that the table of workers is full.
	ErrTooMany = errors.New("too many workers are registered")
	// ErrMappings means that no more segments can be mapped, for one peer or at all.
	ErrMappings = errors.New("too many segments are mapped")
)

// maxMappings returns how many segments of all workers are mapped at once: a quarter of the mappings that the kernel allows a process. The
// Go runtime needs mappings too, and ends the process if it gets none.
var maxMappings = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/sys/vm/max_map_count")
	n, perr := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || perr != nil || n < 1 {
		n = 65530 // the kernel's default
	}
	return n / 4
})

// mayLendLocked checks the segments of the worker `in`, which replaces old: no other worker may lend them, and there must not be too many.
// Errors: access.ErrLender, with the other worker, and ErrMappings.
func (r *Registry) mayLendLocked(in, old *Worker) (lender *Worker, err error) {
	if in.Lent == nil {
		return nil, nil
	}
	for _, seg := range in.Lent.Segments {
		for _, other := range r.mu.lenders[seg.Inode] {
			if other != old && !in.Lent.SameProcess(other.Lent) {
				return other, fmt.Errorf("%w: worker %d lends %s already", access.ErrLender, other.ID, seg.Name)
			}
		}
	}
	total, own := len(in.Lent.Segments), len(in.Lent.Segments)
	for by, n := range r.mu.mappings {
		total += n
		if by == in.By {
			own += n
		}
	}
	if old != nil && old.Lent != nil {
		total, own = total-len(old.Lent.Segments), own-len(old.Lent.Segments)
	}
	switch limit := r.maxMappings; {
	case total > limit:
		return nil, fmt.Errorf("%w: %d with these, of all workers at most %d", ErrMappings, total, limit)
	case own > limit/2:
		return nil, fmt.Errorf("%w: %d with these, of the workers of %v at most %d", ErrMappings, own, in.By, limit/2)
	}
	return nil, nil
}

func (r *Registry) lendLocked(in *Worker) {
	if in.Lent == nil {
		return
	}
	for _, seg := range in.Lent.Segments {
		r.mu.lenders[seg.Inode] = append(r.mu.lenders[seg.Inode], in)
	}
	r.mu.mappings[in.By] += len(in.Lent.Segments)
}

func (r *Registry) unlendLocked(in *Worker) {
	if in.Lent == nil {
		return
	}
	for _, seg := range in.Lent.Segments {
		var rest []*Worker
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
	if r.mu.mappings[in.By] -= len(in.Lent.Segments); r.mu.mappings[in.By] == 0 {
		delete(r.mu.mappings, in.By)
	}
}

// SetMaxMappings sets how many segments may be mapped at once. Tests use it.
func (r *Registry) SetMaxMappings(n int) { r.maxMappings = n }
