// SPDX-License-Identifier: Apache-2.0

package server

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestHeldMessagesAreCopiesInOrder has two connections of one owner, whose frames are used
// again for other messages.
func TestHeldMessagesAreCopiesInOrder(t *testing.T) {
	var h heldMessages[int, string]
	frame := []byte("a")
	for _, m := range []struct {
		conn int
		text byte
	}{{1, 'a'}, {2, 'x'}, {1, 'b'}} {
		frame[0] = m.text
		if !h.Keep(m.conn, "me", [][]byte{frame}) {
			t.Fatal("too many")
		}
	}
	got := h.Take(1)
	if len(got) != 2 || string(got[0][0]) != "a" || string(got[1][0]) != "b" {
		t.Errorf("%q", got)
	}
	if again := h.Take(1); again != nil {
		t.Errorf("taken twice: %q", again)
	}
	if got := h.Take(2); len(got) != 1 || string(got[0][0]) != "x" {
		t.Errorf("the other's: %q", got)
	}
}

// TestOneConnectionsMessagesAreBoundedAndSoAreItsOwners fills both limits, and finds room
// for another owner, and again once they are taken.
func TestOneConnectionsMessagesAreBoundedAndSoAreItsOwners(t *testing.T) {
	var h heldMessages[int, string]
	large := [][]byte{make([]byte, 1<<20)}
	kept := 0
	for conn := range 20 {
		for h.Keep(conn, "me", large) {
			kept++
		}
	}
	if kept != 16 {
		t.Errorf("of one owner %d MiB are kept, two of each connection", kept)
	}
	if !h.Keep(100, "other", large) {
		t.Error("another owner has no room")
	}
	h.Take(0)
	if !h.Keep(30, "me", large) {
		t.Error("no room once some are taken")
	}
	small := 0
	for h.Keep(200, "third", [][]byte{{1}}) {
		small++
	}
	if small != 16 {
		t.Errorf("%d messages of one connection", small)
	}
}

// TestOnlyOldConnectionsAreLate has an old connection and a new one.
func TestOnlyOldConnectionsAreLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h heldMessages[int, string]
		h.Keep(1, "me", [][]byte{{1}})
		time.Sleep(10 * time.Second)
		h.Keep(2, "me", [][]byte{{2}})
		time.Sleep(6 * time.Second)
		late := h.Late(time.Now())
		if len(late) != 1 || len(late[1]) != 1 {
			t.Errorf("late: %v", late)
		}
		if got := h.Take(2); len(got) != 1 {
			t.Errorf("the new one has %v", got)
		}
		if again := h.Late(time.Now().Add(time.Hour)); again != nil {
			t.Errorf("late again: %v", again)
		}
	})
}
