// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"cmp"
	"sync"
	"time"
)

// Limits on held messages: Keep refuses a message beyond one of the first four, and Late removes what was held for longer than the last.
const (
	maxHeldMessages   = 16       // of one connection
	maxHeldBytes      = 2 << 20  // of one connection
	maxHeldBytesOfOne = 16 << 20 // of all connections of one owner
	maxHeldBytesInAll = 64 << 20
	maxHeldTime       = 15 * time.Second // of a connection's oldest message
)

// heldMessages keeps messages of connections C for a short time, until their meaning is known. It bounds them for each connection, for each
// owner O of connections, and in all. The zero value is empty; its methods are safe for concurrent use.
type heldMessages[C, O comparable] struct {
	time  time.Duration // maxHeldTime if 0; under mu
	mu    sync.Mutex    // a leaf
	bytes int64
	by    map[O]int64
	of    map[C]*heldConnection[O]
}

// heldConnection has the held messages of one connection.
type heldConnection[O comparable] struct {
	owner    O
	messages [][][]byte // oldest first
	bytes    int64
	since    time.Time // when the oldest came
}

// Keep keeps a copy of a message of a connection. It reports false, and keeps nothing, if a limit on messages or bytes is reached.
func (h *heldMessages[C, O]) Keep(conn C, owner O, m [][]byte) bool {
	own, n := make([][]byte, len(m)), int64(0)
	for i, frame := range m {
		own[i] = bytes.Clone(frame)
		n += int64(len(frame))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of == nil {
		h.by, h.of = make(map[O]int64), make(map[C]*heldConnection[O])
	}
	c := h.of[conn]
	if c == nil {
		c = &heldConnection[O]{owner: owner, since: time.Now()}
	}
	if len(c.messages) == maxHeldMessages || c.bytes+n > maxHeldBytes || h.by[owner]+n > maxHeldBytesOfOne || h.bytes+n > maxHeldBytesInAll {
		return false
	}
	c.messages, c.bytes = append(c.messages, own), c.bytes+n
	h.of[conn] = c
	h.by[owner] += n
	h.bytes += n
	return true
}

// Take removes and returns the held messages of a connection, oldest first.
func (h *heldMessages[C, O]) Take(conn C) [][][]byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.takeLocked(conn)
}

func (h *heldMessages[C, O]) takeLocked(conn C) [][][]byte {
	c := h.of[conn]
	if c == nil {
		return nil
	}
	delete(h.of, conn)
	h.bytes -= c.bytes
	if h.by[c.owner] -= c.bytes; h.by[c.owner] == 0 {
		delete(h.by, c.owner)
	}
	return c.messages
}

// Late removes and returns the messages that were held for too long, by connection; nil if there are none.
func (h *heldMessages[C, O]) Late(now time.Time) (late map[C][][][]byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for conn, c := range h.of {
		if now.Sub(c.since) >= cmp.Or(h.time, maxHeldTime) {
			if late == nil {
				late = make(map[C][][][]byte)
			}
			late[conn] = h.takeLocked(conn)
		}
	}
	return late
}
