// Package lease keeps the pins between a lookup and the retrieves that follow it.
//
// A lookup promises an engine a prefix hit; until it is read, given up or its
// session ends, the store must not evict those chunks. Pins belong to a session
// (an engine request), and a session that is idle too long loses them. They are
// promises only: who really touches a chunk's bytes takes a hold in the pool.
//
// A Table only keeps books. It starts no goroutine and takes no lock: its owner
// locks, and undoes the pins of what it gets back.
package lease

import (
	"cmp"
	"time"
)

// Options configures a Table. A zero field means its default.
type Options struct {
	Idle        time.Duration // life of a session after its last use; default 600 s
	MaxSessions int           // default 65,536; the one idle longest makes room
	MaxLeases   int           // per session; default 4; the oldest makes room
}

// Lease is what one lookup pinned: of the leading Chunks chunks of each row (one
// for each object group and shard) those that are needed.
type Lease struct {
	Chunks, Rows int
	Slots        []uint32 // [chunk*Rows + row]
	Left         []uint8  // readers left, parallel to Slots; 0 is given back, or never pinned
}

// Span is a run of chunks of one row, the first of them chunk From.
type Span struct {
	Row, From int
	Slots     []uint32
}

// Session is one engine request.
type Session struct {
	ID        string
	Hit       int // chunks of the last lookup
	HitUnread bool

	leases       []Lease
	last         time.Time
	older, newer *Session
}

// Table holds the sessions of one store, in order of last use.
type Table struct {
	opts     Options
	sessions map[string]*Session
	ring     Session // anchor: ring.newer is the oldest, ring.older the newest
}

// New returns an empty Table.
func New(o Options) *Table {
	o.Idle = cmp.Or(o.Idle, 600*time.Second)
	o.MaxSessions = cmp.Or(o.MaxSessions, 1<<16)
	o.MaxLeases = cmp.Or(o.MaxLeases, 4)
	t := &Table{opts: o, sessions: make(map[string]*Session)}
	t.ring.older, t.ring.newer = &t.ring, &t.ring
	return t
}

// Len is the number of sessions.
func (t *Table) Len() int { return len(t.sessions) }

// Open returns the session id, a new one if need be, and restarts its idle timer.
// pushed is the session that had to make room, or nil; its pins are the caller's
// to undo.
func (t *Table) Open(id []byte, now time.Time) (s, pushed *Session) {
	if s := t.Get(id, now); s != nil {
		return s, nil
	}
	if len(t.sessions) >= t.opts.MaxSessions {
		pushed = t.ring.newer
		t.remove(pushed)
	}
	s = &Session{ID: string(id)}
	t.sessions[s.ID] = s
	t.link(s, now)
	return s, pushed
}

// Get returns the session id, or nil, and restarts its idle timer.
func (t *Table) Get(id []byte, now time.Time) *Session {
	s := t.sessions[string(id)]
	if s != nil {
		t.unlink(s)
		t.link(s, now)
	}
	return s
}

// End removes and returns the session id, or nil.
func (t *Table) End(id []byte) *Session {
	s := t.sessions[string(id)]
	if s != nil {
		t.remove(s)
	}
	return s
}

// Expire removes and returns one session that has been idle for Options.Idle, or
// nil when none has.
func (t *Table) Expire(now time.Time) *Session {
	s := t.ring.newer
	if s == &t.ring || now.Sub(s.last) < t.opts.Idle {
		return nil
	}
	t.remove(s)
	return s
}

// Each calls f for every session, the one idle longest first. f must not end it.
func (t *Table) Each(f func(*Session)) {
	for s := t.ring.newer; s != &t.ring; s = s.newer {
		f(s)
	}
}

func (t *Table) remove(s *Session) {
	delete(t.sessions, s.ID)
	t.unlink(s)
}

func (t *Table) link(s *Session, now time.Time) {
	s.last = now
	s.older, s.newer = t.ring.older, &t.ring
	s.older.newer, t.ring.older = s, s
}

func (t *Table) unlink(s *Session) { s.older.newer, s.newer.older = s.newer, s.older }

// Grant adds a lease. dropped is the lease that had to make room, if any; its
// pins are the caller's to undo.
func (t *Table) Grant(s *Session, l Lease) (dropped Lease) {
	if len(s.leases) >= t.opts.MaxLeases {
		dropped = s.leases[0]
		s.leases = append(s.leases[:0], s.leases[1:]...)
	}
	s.leases = append(s.leases, l)
	return dropped
}

// Leases returns the session's leases, oldest first.
func (s *Session) Leases() []Lease { return s.leases }

// Drop forgets the session's leases and returns them; their pins are the
// caller's to undo.
func (s *Session) Drop() []Lease {
	l := s.leases
	s.leases = nil
	return l
}

// Find returns the newest lease in which every slot of every span has readers
// left; nil when there is none.
func (s *Session) Find(spans ...Span) *Lease {
	for i := len(s.leases) - 1; i >= 0; i-- {
		if l := &s.leases[i]; l.covers(spans) {
			return l
		}
	}
	return nil
}

func (l *Lease) covers(spans []Span) bool {
	for _, span := range spans {
		if span.Row >= l.Rows || span.From+len(span.Slots) > l.Chunks {
			return false
		}
		for i, slot := range span.Slots {
			if at := (span.From+i)*l.Rows + span.Row; l.Slots[at] != slot || l.Left[at] == 0 {
				return false
			}
		}
	}
	return true
}

// Take gives back up to readers readers of each chunk [from, to) of row and
// calls unpin for each chunk that has none left, last chunk first.
func (l *Lease) Take(row, from, to, readers int, unpin func(slot uint32)) {
	if row >= l.Rows {
		return
	}
	for c := min(to, l.Chunks) - 1; c >= from; c-- {
		i := c*l.Rows + row
		if l.Left[i] == 0 {
			continue
		}
		l.Left[i] -= uint8(min(readers, int(l.Left[i])))
		if l.Left[i] == 0 {
			unpin(l.Slots[i])
		}
	}
}
