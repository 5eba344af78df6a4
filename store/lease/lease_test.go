// SPDX-License-Identifier: Apache-2.0

package lease_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/store/lease"
)

var start = time.Unix(1000, 0)

func TestIdleOrder(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{Idle: time.Minute, MaxSessions: 3})
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	for i := range 3 {
		tab.Open(fmt.Append(nil, i), lease.Owner{}, at(i))
	}
	tab.Get([]byte("0"), lease.Owner{}, at(10)) // used again: now 1 is idle longest
	if _, pushed := tab.Open([]byte("3"), lease.Owner{}, at(11)); pushed == nil || pushed.ID != "1" {
		t.Fatalf("pushed %+v, want session 1", pushed)
	}
	if s := tab.Expire(at(61)); s != nil {
		t.Fatalf("%s expired early", s.ID)
	}
	if s := tab.Expire(at(62)); s == nil || s.ID != "2" {
		t.Fatalf("%+v, want session 2 expired", s)
	}
	if s := tab.End([]byte("0"), lease.Owner{}); s == nil || tab.Len() != 1 {
		t.Fatalf("%+v, %d left", s, tab.Len())
	}
	if s := tab.End([]byte("0"), lease.Owner{}); s != nil {
		t.Fatal("ended twice")
	}
}

func TestFindAndTake(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{MaxLeases: 2})
	s, _ := tab.Open([]byte("r"), lease.Owner{}, start)
	// Two shards of three chunks, two readers each.
	tab.Grant(s, lease.Lease{Chunks: 3, Rows: 2, Slots: []uint32{1, 11, 2, 12, 3, 13}, Left: []uint8{2, 2, 2, 2, 2, 2}})
	var gone []uint32
	unpin := func(slot uint32) { gone = append(gone, slot) }
	l := s.Find(lease.Span{Row: 1, From: 1, Slots: []uint32{12, 13}})
	if l == nil {
		t.Fatal("not found")
	}
	l.Take(1, 1, 3, 1, unpin)
	if len(gone) != 0 {
		t.Fatalf("%v ended with a reader left", gone)
	}
	l.Take(1, 1, 9, 5, unpin) // beyond the lease, and more readers than there are
	if !slices.Equal(gone, []uint32{13, 12}) {
		t.Fatalf("ended %v, want 13 before 12", gone)
	}
	f := func(shard, from int, slots ...uint32) {
		t.Helper()
		if s.Find(lease.Span{Row: shard, From: from, Slots: slots}) != nil {
			t.Errorf("found shard %d from %d: %v", shard, from, slots)
		}
	}
	f(1, 1, 12)       // given back
	f(0, 1, 12)       // of another shard
	f(0, 2, 3, 11)    // past the end of the row
	f(2, 0, 1)        // no such shard
	f(0, 0, 1, 2, 99) // not that slot
	if s.Find(lease.Span{Slots: []uint32{1, 2, 3}}) == nil {
		t.Error("shard 0 lost its pins")
	}
	one := lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{7}, Left: []uint8{1}}
	if d := tab.Grant(s, one); d != nil {
		t.Fatalf("dropped %+v", d)
	}
	if d := tab.Grant(s, one); len(d) != 1 || d[0].Chunks != 3 {
		t.Fatalf("dropped %+v, want the oldest", d)
	}
	if l := s.Drop(); len(l) != 2 || len(s.Leases()) != 0 {
		t.Fatalf("%v", l)
	}
}

// At the limits the peer with most gives way, and of its connections the one with
// most: its session that has been idle longest. Others keep theirs.
func TestLargestOwnerGivesWay(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{MaxSessions: 20, MaxPins: 50})
	open := func(peer string, conn uint64, i int) (pushed *lease.Session[struct{}]) {
		t.Helper()
		s, pushed := tab.Open(fmt.Appendf(nil, "%s/%d/%d", peer, conn, i), lease.Owner{Peer: peer, Conn: conn}, start)
		tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{uint32(i)}, Left: []uint8{1}})
		return pushed
	}
	for i := range 6 {
		open("quiet", 1, i)
	}
	for i := range 4 {
		open("loud", 1, i)
	}
	for i := range 1000 {
		pushed := open("loud", 2, i)
		if i < 10 && pushed != nil || i >= 10 && (pushed == nil || pushed.ID != fmt.Sprintf("loud/2/%d", i-10)) {
			t.Fatalf("session %d pushed %+v", i, pushed)
		}
	}
	if tab.Len() != 20 || tab.Pins() != 20 {
		t.Fatalf("%d sessions, %d pins", tab.Len(), tab.Pins())
	}
	// Pins: who asks for more than all others have pays first.
	grant := func(peer string, conn uint64, id string, slots int) (lost []string) {
		t.Helper()
		var before []string
		tab.Each(func(s *lease.Session[struct{}]) { before = append(before, s.ID) })
		s, _ := tab.Open([]byte(id), lease.Owner{Peer: peer, Conn: conn}, start)
		tab.Grant(s, lease.Lease{Chunks: slots, Rows: 1, Slots: make([]uint32, slots), Left: make([]uint8, slots)})
		for _, id := range before {
			found := false
			tab.Each(func(s *lease.Session[struct{}]) { found = found || s.ID == id })
			if !found {
				lost = append(lost, id)
			}
		}
		return lost
	}
	if lost := grant("loud", 3, "loud/3/0", 33); len(lost) != 3 { // one for the number of sessions
		t.Errorf("%q made room", lost)
	}
	for _, id := range grant("loud", 3, "loud/3/0", 10) {
		if id[:4] != "loud" {
			t.Errorf("%s made room for the loud peer", id)
		}
	}
	if tab.Pins() > 50 {
		t.Errorf("%d pins", tab.Pins())
	}
	for i := range 6 {
		if tab.Get(fmt.Appendf(nil, "quiet/1/%d", i), lease.Owner{Peer: "quiet", Conn: 1}, start) == nil {
			t.Errorf("the quiet peer lost session %d to the loud one", i)
		}
	}
	tab.End([]byte("loud/3/0"), lease.Owner{Peer: "loud", Conn: 3})
	for _, of := range []lease.Owner{{Peer: "quiet", Conn: 1}, {Peer: "loud", Conn: 1}, {Peer: "loud", Conn: 2}} {
		for i := range 1000 {
			tab.End(fmt.Appendf(nil, "%s/%d/%d", of.Peer, of.Conn, i), of)
		}
	}
	if tab.Len() != 0 || tab.Pins() != 0 {
		t.Errorf("%d sessions, %d pins are left", tab.Len(), tab.Pins())
	}
}

// An owner that alone has more pins than the limit pushes out other sessions, the one idle longest
// first, and keeps its own.
func TestOneLargeLease(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{MaxPins: 10})
	grant := func(peer string, slots int) (lost int) {
		s, _ := tab.Open([]byte(peer), lease.Owner{Peer: peer}, start)
		for _, l := range tab.Grant(s, lease.Lease{Chunks: slots, Rows: 1, Slots: make([]uint32, slots), Left: make([]uint8, slots)}) {
			lost += len(l.Slots)
		}
		return lost
	}
	if grant("a", 3) != 0 || grant("b", 2) != 0 || grant("c", 1) != 0 {
		t.Fatal("room was made within the limit")
	}
	get := func(peer string) *lease.Session[struct{}] {
		return tab.Get([]byte(peer), lease.Owner{Peer: peer}, start)
	}
	if lost := grant("large", 7); lost != 3 || get("a") != nil || get("b") == nil {
		t.Errorf("%d slots made room, a %v, b %v", lost, get("a"), get("b"))
	}
	if lost := grant("larger", 20); lost != 10 || tab.Pins() != 20 {
		t.Errorf("%d slots made room, %d are pinned", lost, tab.Pins())
	}
}

// A load of one of an engine's workers finds the lookup's lease over another connection
// of its peer, or over another peer, and is a use of the session: it does not end as
// idle. Where no lease covers what is asked for, it is still known that there was one.
func TestLoadsOfOtherConnectionsUseTheSession(t *testing.T) {
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	span := lease.Span{Slots: []uint32{7}}
	for _, peer := range []string{"host", "other host"} {
		tab := lease.New[struct{}](lease.Options{Idle: time.Minute})
		for i, id := range []string{"used", "idle"} {
			s, _ := tab.Open([]byte(id), lease.Owner{Peer: "host", Conn: 1}, at(i))
			tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{7}, Left: []uint8{1}})
		}
		if l, known := tab.Pinned([]byte("used"), peer, at(30), span); l == nil || !known {
			t.Fatalf("%s: %v, %v", peer, l, known)
		}
		if s := tab.Expire(at(61)); s == nil || s.ID != "idle" {
			t.Errorf("%s: %+v ended first", peer, s)
		}
		if s := tab.Expire(at(89)); s != nil {
			t.Errorf("%s: %s ended although it was loaded from", peer, s.ID)
		}
		if l, known := tab.Pinned([]byte("used"), peer, at(89), lease.Span{Slots: []uint32{8}}); l != nil || !known {
			t.Errorf("%s: another slot: %v, %v", peer, l, known)
		}
		if s := tab.Expire(at(90)); s == nil || s.ID != "used" {
			t.Errorf("%s: %+v ended: what finds nothing is no use", peer, s)
		}
		if l, known := tab.Pinned([]byte("used"), peer, at(91), span); l != nil || known {
			t.Errorf("%s: of a session that ended: %v, %v", peer, l, known)
		}
	}
}

// A lease covers spans up to its last chunk and last row, and nothing beside them.
func TestLeaseEndsAtItsLastChunkAndRow(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{})
	s, _ := tab.Open([]byte("r"), lease.Owner{}, start)
	tab.Grant(s, lease.Lease{Chunks: 2, Rows: 2, Slots: []uint32{1, 11, 2, 12}, Left: []uint8{1, 1, 1, 0}})
	f := func(row, from int, want bool, slots ...uint32) {
		t.Helper()
		if got := s.Find(lease.Span{Row: row, From: from, Slots: slots}) != nil; got != want {
			t.Errorf("row %d from %d, %v: %v", row, from, slots, got)
		}
	}
	f(0, 0, true, 1, 2)
	f(0, 1, true, 2)
	f(1, 0, true, 11)
	f(1, 1, false, 12)    // given back
	f(2, 0, false, 2)     // no such row; there is the next chunk's
	f(0, 1, false, 2, 99) // beyond the last chunk
	l := s.Find()
	l.Take(2, 0, 2, 1, func(slot uint32) { t.Errorf("slot %d of no row is given back", slot) })
	var gone []uint32
	l.Take(0, 0, 1, 255, func(slot uint32) { gone = append(gone, slot) })
	if !slices.Equal(gone, []uint32{1}) {
		t.Errorf("%v given back, want what is before the second chunk", gone)
	}
}

// What a session gives up is no longer counted, piece by piece until nothing is left.
func TestGivenUpPinsAreNotCounted(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{})
	owner := lease.Owner{Peer: "uid 1"}
	s, _ := tab.Open([]byte("r"), owner, start)
	many := lease.Lease{Chunks: 5, Rows: 2}
	for i := range 10 {
		many.Slots, many.Left = append(many.Slots, uint32(i)), append(many.Left, 1)
	}
	tab.Grant(s, many)
	tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{77}, Left: []uint8{1}})
	var gone []uint32
	f := func(slots, pins, leases int, want ...uint32) {
		t.Helper()
		gone = nil
		s.GiveUp(slots, func(slot uint32) { gone = append(gone, slot) })
		slices.Sort(gone)
		if !slices.Equal(gone, want) || tab.Pins() != pins || len(s.Leases()) != leases {
			t.Errorf("%v given up, %d pins, %d leases; want %v, %d, %d", gone, tab.Pins(), len(s.Leases()), want, pins, leases)
		}
	}
	f(4, 7, 2, 6, 7, 8, 9)    // two chunks of two rows
	f(1, 5, 2, 4, 5)          // at least a chunk
	f(2048, 1, 1, 0, 1, 2, 3) // the rest; the next lease is the oldest now
	f(2048, 0, 0, 77)         // all
	if over := tab.Over("uid 2", 0); over != nil {
		t.Errorf("%s has pins over the limit and has none", over.ID)
	}
	tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{5}, Left: []uint8{1}})
	if tab.Pins() != 1 || tab.Over("uid 2", 1) != nil || tab.Over("uid 1", 0) != nil || tab.Over("uid 2", 0) != s {
		t.Errorf("%d pins; who has more than the limit is wrong", tab.Pins())
	}
}

// Sessions of an owner are told the one used last first, as many as asked for, and until
// the caller has seen enough; a session that was ended says so.
func TestNewestSessionsFirst(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{})
	owner := lease.Owner{Peer: "uid 1", Conn: 1}
	for i, id := range []string{"a", "b", "c"} {
		tab.Open([]byte(id), owner, start.Add(time.Duration(i)))
		tab.Open([]byte(id), lease.Owner{Peer: "uid 1", Conn: 2}, start)
	}
	tab.Get([]byte("a"), owner, start.Add(9))
	f := func(n int, until, want string) {
		t.Helper()
		got := ""
		tab.Newest(owner, n, func(s *lease.Session[struct{}]) bool { got += s.ID; return s.ID != until })
		if got != want {
			t.Errorf("%d until %q: %q, want %q", n, until, got, want)
		}
	}
	f(9, "", "acb")
	f(3, "", "acb")
	f(2, "", "ac")
	f(9, "c", "ac")
	f(0, "", "")
	tab.Newest(lease.Owner{Peer: "nobody"}, 9, func(s *lease.Session[struct{}]) bool { t.Errorf("%s is nobody's", s.ID); return true })
	s := tab.Get([]byte("c"), owner, start)
	if s.Ended() {
		t.Error("a session that goes on has ended")
	}
	tab.EndThis(s)
	if !s.Ended() || tab.Len() != 5 || tab.Get([]byte("c"), owner, start) != nil {
		t.Errorf("%d sessions, ended %v", tab.Len(), s.Ended())
	}
	if tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{7}, Left: []uint8{1}}); tab.Pins() != 0 {
		t.Errorf("%d pins of a session that ended", tab.Pins())
	}
}

// Without options a session lives 600 s after its last use, and has four leases.
func TestDefaults(t *testing.T) {
	tab := lease.New[struct{}](lease.Options{})
	s, _ := tab.Open([]byte("r"), lease.Owner{}, start)
	for i := range 6 {
		if d := tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{uint32(i)}, Left: []uint8{1}}); len(d) != max(0, min(1, i-3)) {
			t.Errorf("%d leases made room for lease %d", len(d), i)
		}
	}
	if s := tab.Expire(start.Add(600*time.Second - 1)); s != nil {
		t.Error("a session ended early")
	}
	if s := tab.Expire(start.Add(600 * time.Second)); s == nil || tab.Pins() != 0 {
		t.Errorf("%+v after 600 s, %d pins", s, tab.Pins())
	}
}

// Sessions of one id are found by their owners, whichever of them ended before, and the
// one that was opened last is searched first for a lease.
func TestEqualIDsOfManyOwners(t *testing.T) {
	id := []byte("r")
	owners := []lease.Owner{{Peer: "a", Conn: 1}, {Peer: "a", Conn: 2}, {Peer: "b", Conn: 3}, {Peer: "a", Conn: 4}}
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}} {
		tab := lease.New[struct{}](lease.Options{})
		for i, o := range owners {
			s, _ := tab.Open(id, o, start)
			tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{7}, Left: []uint8{uint8(1 + i)}})
		}
		left := map[int]bool{0: true, 1: true, 2: true, 3: true}
		for _, gone := range order {
			newest := map[string]int{"a": -1, "b": -1}
			for i := range owners {
				if left[i] {
					newest[owners[i].Peer] = i
				}
			}
			for peer, i := range newest {
				if i < 0 { // others' are searched then
					i = max(newest["a"], newest["b"])
				}
				if l, known := tab.Pinned(id, peer, start, lease.Span{Slots: []uint32{7}}); !known || l == nil || int(l.Left[0]) != 1+i {
					t.Errorf("ended in order %v, left %v: %s finds %+v, want that of owner %d", order, left, peer, l, i)
				}
			}
			if s := tab.End(id, owners[gone]); s == nil || !s.Ended() {
				t.Fatalf("owner %d has no session", gone)
			}
			delete(left, gone)
			for i, o := range owners {
				if got := tab.Get(id, o, start) != nil; got != left[i] {
					t.Errorf("ended in order %v, left %v: the session of owner %d is there: %v", order, left, i, got)
				}
			}
			if tab.Len() != len(left) || tab.Pins() != len(left) {
				t.Errorf("%d sessions, %d pins, want %d", tab.Len(), tab.Pins(), len(left))
			}
		}
		if l, known := tab.Pinned(id, "a", start, lease.Span{Slots: []uint32{7}}); l != nil || known {
			t.Errorf("%+v, %v of sessions that ended", l, known)
		}
	}
}

// A limited number of other peers' sessions is searched, the ones opened last. A peer finds each of
// its own.
func TestOthersSessionsAreSearchedToALimit(t *testing.T) {
	const limit = 64
	f := func(own bool, sessions int, want bool) {
		t.Helper()
		tab := lease.New[struct{}](lease.Options{})
		for i := range sessions {
			owner := lease.Owner{Peer: fmt.Sprint("peer ", i)}
			if own {
				owner = lease.Owner{Peer: "us", Conn: uint64(i)}
			}
			s, _ := tab.Open([]byte("r"), owner, start)
			tab.Grant(s, lease.Lease{Chunks: 1, Rows: 1, Slots: []uint32{uint32(i)}, Left: []uint8{1}})
		}
		if l, known := tab.Pinned([]byte("r"), "us", start, lease.Span{Slots: []uint32{0}}); (l != nil) != want || !known {
			t.Errorf("%d sessions, own %v: %+v, %v", sessions, own, l, known)
		}
	}
	f(false, limit, true)
	f(false, limit+1, false)
	f(true, 3*limit, true)
}
