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
		tab.Open(fmt.Append(nil, i), at(i))
	}
	tab.Get([]byte("0"), at(10)) // used again: now 1 is idle longest
	if _, pushed := tab.Open([]byte("3"), at(11)); pushed == nil || pushed.ID != "1" {
		t.Fatalf("pushed %+v, want session 1", pushed)
	}
	if s := tab.Expire(at(61)); s != nil {
		t.Fatalf("%s expired early", s.ID)
	}
	if s := tab.Expire(at(62)); s == nil || s.ID != "2" {
		t.Fatalf("%+v, want session 2 expired", s)
	}
	if s := tab.End([]byte("0")); s == nil || tab.Len() != 1 {
		t.Fatalf("%+v, %d left", s, tab.Len())
	}
	if s := tab.End([]byte("0")); s != nil {
		t.Fatal("ended twice")
	}
}

func TestFindAndTake(t *testing.T) {
	tab := lease.New(lease.Options{MaxLeases: 2})
	s, _ := tab.Open([]byte("r"), start)
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
	if d := tab.Grant(s, one); d.Chunks != 0 {
		t.Fatalf("dropped %+v", d)
	}
	if d := tab.Grant(s, one); d.Chunks != 3 {
		t.Fatalf("dropped %+v, want the oldest", d)
	}
	if l := s.Drop(); len(l) != 2 || len(s.Leases()) != 0 {
		t.Fatalf("%v", l)
	}
}
