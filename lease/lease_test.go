package lease_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/lease"
)

var start = time.Unix(1000, 0)

func TestIdleOrder(t *testing.T) {
	tab := lease.New(lease.Options{Idle: time.Minute, MaxSessions: 3})
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
	tab := lease.New(lease.Options{MaxLeases: 2})
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
func TestTheHeaviestGivesWay(t *testing.T) {
	tab := lease.New(lease.Options{MaxSessions: 20, MaxPins: 50})
	open := func(peer string, conn uint64, i int) (pushed *lease.Session) {
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
		tab.Each(func(s *lease.Session) { before = append(before, s.ID) })
		s, _ := tab.Open([]byte(id), lease.Owner{Peer: peer, Conn: conn}, start)
		tab.Grant(s, lease.Lease{Chunks: slots, Rows: 1, Slots: make([]uint32, slots), Left: make([]uint8, slots)})
		for _, id := range before {
			found := false
			tab.Each(func(s *lease.Session) { found = found || s.ID == id })
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

// Who alone holds more than the limit pushes out others, the one idle longest
// first, and keeps its own.
func TestOneLargeLease(t *testing.T) {
	tab := lease.New(lease.Options{MaxPins: 10})
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
	get := func(peer string) *lease.Session { return tab.Get([]byte(peer), lease.Owner{Peer: peer}, start) }
	if lost := grant("large", 7); lost != 3 || get("a") != nil || get("b") == nil {
		t.Errorf("%d slots made room, a %v, b %v", lost, get("a"), get("b"))
	}
	if lost := grant("larger", 20); lost != 10 || tab.Pins() != 20 {
		t.Errorf("%d slots made room, %d are pinned", lost, tab.Pins())
	}
}
