// SPDX-License-Identifier: Apache-2.0

package lent

import (
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/server/access"
)

// SameProcess reports whether both workers are proved to be of one process.
func (d *KV) SameProcess(other *KV) bool {
	return d.Process != (peercred.Process{}) && d.Process == other.Process
}

// ownProcess tries to prove that the process behind c made the segments. It returns an error if another process is proved to have made
// them, and no process if nothing is proved.
func (l *memory) ownProcess(c *access.Caller) (peercred.Process, error) {
	var of peercred.Process
	for _, seg := range l.list() {
		p := seg.Owner
		if p == (peercred.Process{}) {
			continue
		}
		var has, seen bool
		switch {
		case c.Peer.PID != 0:
			has, seen = c.Peer.PID == p.PID, true
		case c.Peer.Socket != 0:
			has, seen = peercred.HasSocket(p.PID, c.Peer.Socket)
		}
		if seen && !has && !p.Gone() {
			return of, fmt.Errorf("%w: %s belongs to process %d, which is not the one that connects", access.ErrLender, seg.Name, p.PID)
		}
		if has {
			of = p
		}
	}
	return of, nil
}

// Owned reports whether every segment's owner is proved.
func (d *KV) Owned() bool {
	for _, seg := range d.Segments {
		if seg.Owner == (peercred.Process{}) {
			return false
		}
	}
	return len(d.Segments) > 0
}

// Dead reports whether every segment's owner is proved, and has ended.
func (d *KV) Dead() bool { return d.EndedBy(peercred.Process.Gone) }

// EndedBy is Dead with gone as the function that reports whether a process has ended.
func (d *KV) EndedBy(gone func(peercred.Process) bool) bool {
	return d.Owned() && !slices.ContainsFunc(d.Segments, func(seg Segment) bool { return !gone(seg.Owner) })
}
