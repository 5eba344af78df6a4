// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// Where no note tells, an ambiguous message is answered when the next one has shown
// what the client is, and as that.
func TestAmbiguousMessageWaits(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	for _, ping := range []byte{17, 18} {
		c := n.dial(t, 20)
		c.quiet(14, oldKey(0, 1, 16, "r"), integer(int64(ping)))
		if got := c.call2(ping); !bytes.Equal(got[0], no) {
			t.Errorf("ping of a worker that is not known: %x", got[0])
		} else if p, err := lmcache.DecodePrepareRetrieve(got[1]); ping == 17 && !bytes.Equal(got[1], no) ||
			ping == 18 && (err != nil || p.Success) {
			t.Errorf("after ping %d: %x", ping, got[1])
		}
	}
	// One that never shows it is declined, and costs no more than its share.
	c, began := n.dial(t, 20), time.Now()
	for range 16 {
		c.quiet(14, oldKey(0, 1, 16, "r"), integer(7))
	}
	c.want(c.call(14, oldKey(0, 1, 16, "r"), integer(7)), nil, "one too many")
	n.Tick(began.Add(14 * time.Second))
	if !c.silent() {
		t.Error("answered before a heartbeat can have come")
	}
	n.Tick(time.Now().Add(16 * time.Second))
	for uid := byte(20); uid < 36; uid++ {
		c.want(c.answer(uid), nil, "held for too long")
	}
}

// Where one answer is right for all that a message can be, it comes at once; so
// does one to a client that is new and did not ask for the chunk size, which no
// connector is.
func TestAmbiguousMessageIsDeclined(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	c := n.dial(t, 0)
	c.call(17)
	c.call(10, oldRegistration(1))
	c.call(12, oldKey(0, 1, 16, "s"), integer(1))
	c.want(c.call(13, oldKey(0, 1, 16, "s"), integer(1), empty), yes, "commit_store")
	c.call(5, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1))
	other := tokenKey("other", lmcache.AllWorkers, 1, 16, "r")
	stranger := n.dial(t, 20)
	stranger.want(stranger.call(8, other, integer(1)), nil, "free_lookup_locks or lookup")
	stranger.want(stranger.call(9, text("r")), nil, "end_session or status")
	if st := n.store.Stats(); st.EvictableObjs != 0 || st.Sessions != 1 {
		t.Errorf("a guess was made: %+v", st)
	}
	stranger = n.dial(t, 20)
	both := stranger.call(13, oldKey(0, 1, 16, "r"), integer(77))
	if p, err := lmcache.DecodePrepareRetrieve(both); err != nil || p.Success {
		t.Errorf("as prepare_retrieve: %+v, %v", p, err)
	}
	if p, err := lmcache.DecodePrepareStore(both); err != nil || p.Slots == nil || len(p.Slots) > 0 {
		t.Errorf("as prepare_store: %+v, %v", p, err)
	}
	narrowed := n.dial(t, 20) // 0.4.6 or 0.4.7, which agree on 9
	narrowed.quiet(14, oldKey(0, 1, 16, "r"), integer(77))
	narrowed.call(5, oldKey(lmcache.AllWorkers, 1, 16, "s"), integer(1))
	if st := n.store.Stats(); st.Sessions != 2 {
		t.Errorf("no session began: %+v", st)
	}
	narrowed.want(narrowed.call(9, text("s")), nil, "end_session")
	if st := n.store.Stats(); st.Sessions != 1 {
		t.Errorf("the session is not ended: %+v", st)
	}
	young := n.dial(t, 0)
	young.want(young.call(14, oldKey(0, 1, 16, "r"), integer(77)), nil, "commit_retrieve or prepare_retrieve")
	if log := n.log.String(); !strings.Contains(log, "commit_retrieve of 0.4.6, prepare_retrieve of 0.4.7") {
		t.Errorf("log:\n%s", log)
	}
}

// Held messages are a share of a user's, also of many connections, and go with
// the connection.
func TestHeldMessagesHaveAShare(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	n.HoldMessagesFor(time.Hour) // until the shares are full, however slow the machine is
	large := oldKey(0, 1, 150_000, "r")
	each := 2 << 20 / len(large)
	all := 16 << 20 / len(large)
	var clients []*oldClient
	for held := 0; held+each <= all; held += each {
		c := n.dial(t, 20)
		for range each {
			c.quiet(14, large, integer(7))
		}
		if len(clients) == 0 {
			c.want(c.call(14, large, integer(7)), nil, "more than a connection's share")
		}
		clients = append(clients, c)
	}
	late := n.dial(t, 20)
	for range all - each*len(clients) {
		late.quiet(14, large, integer(7))
	}
	testkit.Eventually(t, "all messages are held", func() bool { return n.HeldMessageBytes() >= int64(all*len(large)) }) // each connection has its own time
	late.want(late.call(14, large, integer(7)), nil, "more than a user's share")
	if err := clients[0].dealer.Close(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(60 * time.Second); ; {
		if late.send(14, large, integer(7)); late.silent() {
			return
		}
		if time.Now().After(end) {
			t.Fatal("what an ended connection had held is still counted")
		}
	}
}

// silent reports that no reply comes; one that came is taken.
func (c *oldClient) silent() bool {
	select {
	case <-c.replies:
		return false
	case <-time.After(50 * time.Millisecond):
		return true
	}
}

// call2 sends one request and returns its result and that of the request before.
func (c *oldClient) call2(op byte) (results [2][]byte) {
	c.t.Helper()
	uid := c.send(op)
	for range 2 {
		select {
		case m := <-c.replies:
			results[uid-m[0][0]] = append([]byte(nil), slices.Concat(m[2:]...)...)
		case <-time.After(60 * time.Second):
			c.t.Fatal("no reply")
		}
	}
	return results
}

// What was held for too long is not counted any more, over all and for its user.
func TestHeldBytesAreGivenBack(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	large := oldKey(0, 1, 150_000, "r")
	c := n.dial(t, 20)
	rounds := 80 << 20 / len(large)
	for range rounds {
		c.uid = 20
		c.send(14, large, integer(7))
		for end := time.Now().Add(60 * time.Second); c.silent(); {
			n.Tick(time.Now().Add(16 * time.Second))
			if time.Now().After(end) {
				t.Fatal("what was held for too long gets no answer")
			}
		}
	}
	if got := metric(t, n.Server, "kvasir_held_requests_total"); got < float64(rounds) {
		t.Errorf("%v of %d messages were held", got, rounds)
	}
}
