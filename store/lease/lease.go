// SPDX-License-Identifier: Apache-2.0

// Package lease keeps the pins between a lookup and the retrieves that follow it.
//
// A lookup promises an engine a prefix hit. Until the hit is read, given up or its session ends, the store must not evict those chunks.
// Pins belong to a session (an engine's request), and a session that is idle too long loses them. A pin is only a promise: while a chunk's
// bytes are copied, a hold in the pool keeps them.
//
// A Table only keeps books. It starts no goroutine and takes no lock: its owner locks. The owner must unpin the slots of the leases that it
// gets back.
package lease

import (
	"cmp"
	"time"
)

// Options configures a Table. A zero field means its default.
type Options struct {
	Idle        time.Duration // life of a session after its last use; default 600 s
	MaxSessions int           // default 65,536; beyond it another session ends: see Owner
	MaxLeases   int           // leases of one session; default 4; beyond it the oldest is dropped
	MaxPins     int           // slots of all leases together; default 2^23; beyond it other sessions with pins end: see Owner
}

// Owner identifies who opened a session. At the limit of sessions or of pins, a session must make room. It is one of the peer that has the
// most of them, of this peer's connection that has the most: the session that was idle for longest.
type Owner struct {
	Peer string // a user or an address
	Conn uint64 // a connection of the peer
}

// Lease is what one lookup pinned: of the first Chunks chunks of each row (one for each object group and shard), those slots that a load
// needs.
type Lease struct {
	From         int // chunks before it were not pinned, because the engine has them
	Chunks, Rows int
	Slots        []uint32 // [chunk*Rows + row]
	Left         []uint8  // pins left, parallel to Slots; 0: released, or never pinned
}

// Span is consecutive chunks of one row, from chunk From on.
type Span struct {
	Row, From int
	Slots     []uint32
}

// Session is one request of one engine: a request id on one connection. Engines count their requests, so the same id on two connections
// means two sessions. N is the type of the owner's note on a session.
type Session[N any] struct {
	ID   string
	Note N // the owner's note; the Table never looks at it

	leases       []Lease
	first        [1]Lease // memory for the first lease; used once, because Drop gives it away
	firstUsed    bool
	pins         int // slots of its leases
	last         time.Time
	older, newer *Session[N]

	table *Table[N]
	of    *share[N]
	mine  struct{ older, newer *Session[N] }    // neighbours among the sessions of the same owner
	named [2]struct{ older, newer *Session[N] } // neighbours among the sessions of the same name, by place in names
}

// share is what one owner has in the Table.
type share[N any] struct {
	owner    Owner
	sessions int
	pins     int
	ring     Session[N] // anchor of the owner's sessions, as Table.ring
}

// Table has the sessions of one store, in the order of their last use.
type Table[N any] struct {
	opts   Options
	named  map[name]*Session[N] // the newest session of each name
	shares map[Owner]*share[N]
	spare  *share[N] // the share of an owner whose last session ended, to be used again
	len    int
	pins   int
	ring   Session[N] // anchor: ring.newer is the least recently used session, ring.older the most recently used
}

// name is a request id of one peer, or of any peer.
type name struct{ peer, id string }

// anyPeer stands for all peers; no peer has this name.
const anyPeer = "\x00"

// New returns an empty Table.
func New[N any](o Options) *Table[N] {
	o.Idle = cmp.Or(o.Idle, 600*time.Second)
	o.MaxSessions = cmp.Or(o.MaxSessions, 1<<16)
	o.MaxLeases = cmp.Or(o.MaxLeases, 4)
	o.MaxPins = cmp.Or(o.MaxPins, 1<<23)
	t := &Table[N]{opts: o, named: make(map[name]*Session[N]), shares: make(map[Owner]*share[N])}
	t.ring.older, t.ring.newer = &t.ring, &t.ring
	return t
}

// Len returns the number of sessions.
func (t *Table[N]) Len() int { return t.len }

// Pins returns the number of slots of all leases together.
func (t *Table[N]) Pins() int { return t.pins }

// Open returns owner's session id, a new one if there is none, and restarts its idle time. pushed is the session that had to make room, or
// nil; the caller must unpin its slots.
func (t *Table[N]) Open(id []byte, owner Owner, now time.Time) (s, pushed *Session[N]) {
	if s := t.Get(id, owner, now); s != nil {
		return s, nil
	}
	if t.len >= t.opts.MaxSessions {
		pushed = t.heaviest(func(of *share[N]) int { return of.sessions }).ring.mine.newer
		t.remove(pushed)
	}
	of := t.share(owner)
	s = &Session[N]{ID: string(id), table: t, of: of}
	of.sessions++
	t.len++
	for i, n := range s.names() {
		older := t.named[n]
		if s.named[i].older = older; older != nil {
			older.named[i].newer = s
		}
		t.named[n] = s
	}
	t.link(s, now)
	return s, pushed
}

// share returns the share of owner, an empty one if there was none.
func (t *Table[N]) share(owner Owner) *share[N] {
	if of := t.shares[owner]; of != nil {
		return of
	}
	of := t.spare
	if t.spare = nil; of == nil {
		of = &share[N]{}
		of.ring.mine.older, of.ring.mine.newer = &of.ring, &of.ring
	}
	of.owner = owner
	t.shares[owner] = of
	return of
}

// heaviest returns the heaviest share by `weight`: it picks the peer whose shares weigh most together, and then the heaviest share of that
// peer.
func (t *Table[N]) heaviest(weight func(*share[N]) int) (most *share[N]) {
	peers := map[string]int{}
	for owner, of := range t.shares {
		peers[owner.Peer] += weight(of)
	}
	for _, of := range t.shares {
		if most == nil || t.compare(peers, weight, of, most) > 0 {
			most = of
		}
	}
	return most
}

func (t *Table[N]) compare(peers map[string]int, weight func(*share[N]) int, a, b *share[N]) int {
	return cmp.Or(
		cmp.Compare(peers[a.owner.Peer], peers[b.owner.Peer]), cmp.Compare(a.owner.Peer, b.owner.Peer),
		cmp.Compare(weight(a), weight(b)), cmp.Compare(a.owner.Conn, b.owner.Conn),
	)
}

// places in Session.names
const (
	ofPeer = iota
	ofAny
)

// names returns the two names under which s is found.
func (s *Session[N]) names() [2]name { return [2]name{{s.of.owner.Peer, s.ID}, {anyPeer, s.ID}} }

// find returns owner's session id, or nil.
func (t *Table[N]) find(id []byte, owner Owner) *Session[N] {
	s := t.named[name{owner.Peer, string(id)}]
	for s != nil && s.of.owner != owner {
		s = s.named[ofPeer].older
	}
	return s
}

// Get returns owner's session id, or nil, and restarts its idle time.
func (t *Table[N]) Get(id []byte, owner Owner, now time.Time) *Session[N] {
	s := t.find(id, owner)
	if s != nil {
		t.used(s, now)
	}
	return s
}

// maxOthers is how many sessions of an id Pinned searches among those of all peers, the newest first.
const maxOthers = 64

// Pinned returns the newest lease in which every slot of every span has pins left, of a session id on any of the peer's connections. It
// restarts that session's idle time. An engine's workers have other connections than its scheduler, and on other hosts they are another
// peer. So if the peer has no such lease, it searches those of other peers. known reports whether there was any lease of that id.
func (t *Table[N]) Pinned(id []byte, peer string, now time.Time, spans ...Span) (l *Lease, known bool) {
	newest := [...]*Session[N]{ofPeer: t.named[name{peer, string(id)}], ofAny: t.named[name{anyPeer, string(id)}]}
	for place, limit := range [...]int{ofPeer: t.opts.MaxSessions, ofAny: maxOthers} {
		for s := newest[place]; s != nil && limit > 0; s, limit = s.named[place].older, limit-1 {
			known = known || len(s.leases) > 0
			if l := s.Find(spans...); l != nil {
				t.used(s, now)
				return l, true
			}
		}
	}
	return nil, known
}

// End removes and returns owner's session id. It returns nil if there is none.
func (t *Table[N]) End(id []byte, owner Owner) *Session[N] {
	s := t.find(id, owner)
	if s != nil {
		t.remove(s)
	}
	return s
}

func (t *Table[N]) used(s *Session[N], now time.Time) {
	t.unlink(s)
	t.link(s, now)
}

// Expire removes and returns one session that was idle for Options.Idle, or nil if there is none.
func (t *Table[N]) Expire(now time.Time) *Session[N] {
	s := t.ring.newer
	if s == &t.ring || now.Sub(s.last) < t.opts.Idle {
		return nil
	}
	t.remove(s)
	return s
}

// Each calls f for every session, the least recently used first. f must not end it.
func (t *Table[N]) Each(f func(*Session[N])) {
	for s := t.ring.newer; s != &t.ring; s = s.newer {
		f(s)
	}
}

func (t *Table[N]) remove(s *Session[N]) {
	t.len--
	for i, n := range s.names() {
		older, newer := s.named[i].older, s.named[i].newer
		if older != nil {
			older.named[i].newer = newer
		}
		switch {
		case newer != nil:
			newer.named[i].older = older
		case older != nil:
			t.named[n] = older
		default:
			delete(t.named, n)
		}
		s.named[i].older, s.named[i].newer = nil, nil
	}
	t.unlink(s)
	s.count(-s.pins)
	if s.of.sessions--; s.of.sessions == 0 {
		delete(t.shares, s.of.owner)
		t.spare = s.of
	}
	s.table, s.of = nil, nil
}

// count records that the session's leases have n slots more.
func (s *Session[N]) count(n int) {
	if s.table != nil {
		s.table.pins += n
		s.of.pins += n
		s.pins += n
	}
}

func (t *Table[N]) link(s *Session[N], now time.Time) {
	s.last = now
	s.older, s.newer = t.ring.older, &t.ring
	s.older.newer, t.ring.older = s, s
	of := &s.of.ring
	s.mine.older, s.mine.newer = of.mine.older, of
	s.mine.older.mine.newer, of.mine.older = s, s
}

func (t *Table[N]) unlink(s *Session[N]) {
	s.older.newer, s.newer.older = s.newer, s.older
	s.mine.older.mine.newer, s.mine.newer.mine.older = s.mine.newer, s.mine.older
}

// Grant adds a lease to a session. dropped are the leases that had to make room: the session's oldest, or all leases of another session,
// which ends. The caller must unpin their slots.
func (t *Table[N]) Grant(s *Session[N], l Lease) (dropped []Lease) {
	if len(s.leases) >= t.opts.MaxLeases {
		dropped = append(dropped, s.leases[0])
		s.count(-len(s.leases[0].Slots))
		s.leases = append(s.leases[:0], s.leases[1:]...)
	}
	if !s.firstUsed {
		s.leases, s.firstUsed = s.first[:0], true
	}
	s.leases = append(s.leases, l)
	s.count(len(l.Slots))
	for t.pins > t.opts.MaxPins {
		victim := t.overweight(s)
		if victim == nil {
			break // no other session has a pin
		}
		dropped = append(dropped, victim.Drop()...)
		t.remove(victim)
	}
	return dropped
}

// overweight returns the session that must make room for pins of s: one of the heaviest owner; if that owner has only s, one of its peer;
// else one of any owner.
func (t *Table[N]) overweight(s *Session[N]) (other *Session[N]) {
	of := t.heaviest(func(of *share[N]) int { return of.pins })
	for o := of.ring.mine.newer; o != &of.ring; o = o.mine.newer {
		if o != s && o.pins > 0 {
			return o
		}
	}
	for o := t.ring.newer; o != &t.ring; o = o.newer {
		if o == s || o.pins == 0 {
			continue
		}
		if o.of.owner.Peer == of.owner.Peer {
			return o
		}
		if other == nil {
			other = o
		}
	}
	return other
}

// Over returns, of the peer with the most pins, the least recently used session with pins. It returns nil if that peer is `peer`, or has at
// most `limit` pins.
func (t *Table[N]) Over(peer string, limit int) *Session[N] {
	of := t.heaviest(func(of *share[N]) int { return of.pins })
	if of == nil || of.owner.Peer == peer {
		return nil
	}
	pins := 0
	for owner, o := range t.shares {
		if owner.Peer == of.owner.Peer {
			pins += o.pins
		}
	}
	if pins <= limit {
		return nil
	}
	for s := t.ring.newer; s != &t.ring; s = s.newer {
		if s.of.owner.Peer == of.owner.Peer && s.pins > 0 {
			return s
		}
	}
	return nil
}

// GiveUp removes the last chunks of the session's oldest lease, `slots` slots at most or one chunk, and calls unpin for each slot that has
// pins left.
func (s *Session[N]) GiveUp(slots int, unpin func(slot uint32)) {
	l := &s.leases[0]
	from := max(0, l.Chunks-max(1, slots/l.Rows))
	for row := range l.Rows {
		l.Take(row, from, l.Chunks, 255, unpin)
	}
	s.count((from - l.Chunks) * l.Rows)
	l.Chunks, l.Slots, l.Left = from, l.Slots[:from*l.Rows], l.Left[:from*l.Rows]
	if from == 0 {
		s.leases = append(s.leases[:0], s.leases[1:]...)
	}
}

// Ended reports whether the session is no longer in its Table.
func (s *Session[N]) Ended() bool { return s.table == nil }

// Newest calls f for up to n sessions of owner, the most recently used first, until f reports false. f must not end a session.
func (t *Table[N]) Newest(owner Owner, n int, f func(*Session[N]) bool) {
	of := t.shares[owner]
	if of == nil {
		return
	}
	for s := of.ring.mine.older; s != &of.ring && n > 0 && f(s); s = s.mine.older {
		n--
	}
}

// EndThis removes the session s from the Table.
func (t *Table[N]) EndThis(s *Session[N]) { t.remove(s) }

// Leases returns the session's leases, oldest first.
func (s *Session[N]) Leases() []Lease { return s.leases }

// Drop removes and returns the session's leases. The caller must unpin their slots.
func (s *Session[N]) Drop() []Lease {
	l := s.leases
	s.leases = nil
	s.count(-s.pins)
	return l
}

// Find returns the newest lease in which every slot of every span has pins left, or nil.
func (s *Session[N]) Find(spans ...Span) *Lease {
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

// Pinned reports whether any slot of the chunks [from, to), which the lease must have, has pins left.
func (l *Lease) Pinned(from, to int) bool {
	for _, n := range l.Left[from*l.Rows : to*l.Rows] {
		if n > 0 {
			return true
		}
	}
	return false
}

// Take releases up to `readers` pins of each chunk [from, to) of a row. It calls unpin for each chunk that has none left, the last chunk
// first.
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
