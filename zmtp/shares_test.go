// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// dialFrom connects from another loopback address and shakes hands.
func dialFrom(t *testing.T, from string, to net.Addr) *client {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := d.DialContext(t.Context(), "tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testWait))
	c := &client{t, conn, bufio.NewReaderSize(conn, 1<<16)}
	c.hello()
	return c
}

// At the limit of connections a silent one of the host with most gives way: never
// one of another host, and none that is marked.
func TestSilentConnectionsGiveWay(t *testing.T) {
	r, addr, _ := startRouter(t, func(p *Peer, m Message) {
		p.Mark()
		echo(p, m)
	}, RouterOptions{MaxPeers: 8, GiveWay: true})
	quiet := dialFrom(t, "127.0.0.2", addr) // one silent peer of its own host
	worker := dialFrom(t, "127.0.0.3", addr)
	worker.send(frames("mark"))
	worker.want("mark")
	var flood []*client
	for range 60 {
		flood = append(flood, dialFrom(t, "127.0.0.3", addr))
	}
	for _, c := range flood[:49] { // the last eleven may be equally silent
		c.wantEnd()
	}
	newcomer := dialFrom(t, "127.0.0.4", addr)
	for name, c := range map[string]*client{"silent": quiet, "marked": worker, "new": newcomer} {
		c.send(frames(name))
		c.want(name)
	}
	testkit.Eventually(t, "peers beyond the limit are closed", func() bool { s := r.Stats(); return s.Peers <= 8 && s.Closed["too_many_peers"] >= 49 })
}

// A message that stops coming ends its connection; a peer that is silent between
// messages is left alone.
func TestStalledMessage(t *testing.T) {
	_, addr, ends := startRouter(t, echo, RouterOptions{ReceiveTimeout: 3 * time.Second, HandshakeTimeout: testWait})
	stalled, silent := dialReady(t, addr), dialReady(t, addr)
	stalled.send(frames(strings.Repeat("x", stallProgress))[:1000])
	stalled.wantEnd()
	if err := recv(t, ends); Reason(err) != "stalled" {
		t.Fatalf("ended with %v", err)
	}
	silent.send(frames("here"))
	silent.want("here")
}

// A message that comes slowly, but more than stallProgress in each ReceiveTimeout, is left alone; one that comes more slowly is not.
func TestSlowMessage(t *testing.T) {
	f := func(n int, every time.Duration, whole bool) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			conn, r := pipePeer(RouterOptions{ReceiveTimeout: 3 * time.Second})
			defer r.Close()
			defer conn.Close()
			c := &client{t, conn, bufio.NewReaderSize(conn, 1<<16)}
			c.hello()
			body := strings.Repeat("x", 20*stallProgress)
			long := frames(body)
			for at := 0; at < len(long); at += n {
				if _, err := c.Write(long[at:min(at+n, len(long))]); err != nil {
					break
				}
				time.Sleep(every)
			}
			if whole {
				c.want(body)
			}
			synctest.Wait()
			if s := r.Stats(); whole != (s.Closed["stalled"] == 0) {
				t.Errorf("%d bytes every %v: %v", n, every, s.Closed)
			}
		})
	}
	f(2*stallProgress, 400*time.Millisecond, true)
	f(2*stallProgress, 2*time.Second, true)
	f(stallProgress/8, time.Second, false)
}

// Messages that all end in time never count as stalled, also if each next message has
// begun before the last one ends.
func TestMessagesThatOverlapAreNotStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, r := pipePeer(RouterOptions{ReceiveTimeout: 3 * time.Second})
		defer r.Close()
		defer conn.Close()
		c := &client{t, conn, bufio.NewReaderSize(conn, 1<<16)}
		c.hello()
		message := frames("hello")
		half := len(message) / 2
		c.send(message[:half])
		for range 100 {
			c.send(append(append([]byte{}, message[half:]...), message[:half]...))
			c.want("hello")
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		if s := r.Stats(); s.Peers != 1 || len(s.Closed) != 0 {
			t.Errorf("%d peers, %v", s.Peers, s.Closed)
		}
	})
}

// The bytes of unfinished messages of all peers together are bounded: the host with most of them
// loses its largest, and another host's message goes on.
func TestUnfinishedMessagesHaveShares(t *testing.T) {
	const total = 4 << 20
	r, addr, _ := startRouter(t, echo, RouterOptions{MaxReceiveBytes: total})
	honest := dialFrom(t, "127.0.0.2", addr)
	body := strings.Repeat("h", 600<<10)
	message := frames(body)
	honest.send(message[:len(message)/2])
	var greedy []*client
	part := frames(strings.Repeat("g", 2<<20))[:1<<20]
	for range 20 {
		c := dialFrom(t, "127.0.0.3", addr)
		greedy = append(greedy, c)
		_, _ = c.Write(part) // it may be closed meanwhile
	}
	testkit.Eventually(t, "peers beyond their share are closed", func() bool { return r.Stats().Closed["share"] >= 15 && r.role.received.total.Load() <= total })
	honest.send(message[len(message)/2:])
	honest.want(body)
	for _, c := range greedy {
		_ = c.Close()
	}
	testkit.Eventually(t, "one peer is left", func() bool { return r.Stats().Peers == 1 })
	if n := r.role.received.total.Load(); n < 0 || n > 4<<20 {
		t.Errorf("%d bytes are counted as held", n)
	}
	_ = honest.Close()
	testkit.Eventually(t, "the peers are gone and hold no bytes", func() bool { return r.Stats().Peers == 0 && r.role.received.total.Load() == 0 })
}

// A frame of more than LargeBytes is only taken from a peer that may send one, and
// is refused by its header, before memory is taken.
func TestLargeFramesNeedLeave(t *testing.T) {
	r, addr, _ := startRouter(t, echo, RouterOptions{
		LargeBytes: 1000, MaxFrameBytes: 1 << 20, Large: func(p *Peer) bool { return p.host == "127.0.0.2" },
	})
	body := strings.Repeat("x", 5000)
	long := frames(body)
	may, mayNot := dialFrom(t, "127.0.0.2", addr), dialFrom(t, "127.0.0.3", addr)
	mayNot.send(long[:20])
	mayNot.wantEnd()
	may.send(long)
	may.want(body)
	testkit.Eventually(t, "the peer with too large a message is closed", func() bool { return r.Stats().Closed["too_large"] == 1 })
}

// HasRoom closes peers that do not read when another host needs room, but not when
// their own host needs it.
func TestRoomForLargeReplies(t *testing.T) {
	reply := bytes.Repeat([]byte("r"), 24<<20) // more than a socket takes
	answers := make(chan bool, 100)
	r, addr, _ := startRouter(t, nil, RouterOptions{MaxUnsentBytes: 60 << 20, SendQueueBytes: 60 << 20})
	r.role.deliver = func(p *Peer, m Message) {
		ok := r.HasRoom(p, int64(len(reply)))
		if ok {
			ok = p.SendOwned([]byte("x"), reply) == nil
		}
		answers <- ok
	}
	granted := 0
	for range 6 { // none of them reads
		c := dialFrom(t, "127.0.0.3", addr)
		c.send(frames("give"))
		if recv(t, answers) {
			granted++
		}
	}
	if granted < 2 || granted > 4 {
		t.Fatalf("%d of 6 large replies were granted", granted)
	}
	reader := dialFrom(t, "127.0.0.2", addr)
	reader.send(frames("give"))
	if !recv(t, answers) {
		t.Fatal("another host's reader is refused")
	}
	reader.want("x", string(reply))
}
