// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// Calls to a peer that accepts handshakes and says nothing fail together, after one
// timeout, and those that come within the next second at once; another peer is
// served meanwhile.
func TestCallsShareAFailedHandshake(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	target, _ := listen(t, 4096, TargetOptions{})
	c := client(t, Options{HandshakeTimeout: 3 * time.Second})
	entries := []Entry{{make([]byte, 8), testBase}}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := c.Write(t.Context(), l.Addr().String(), entries); err == nil {
				t.Error("written to a silent peer")
			}
		})
	}
	if err := c.Write(t.Context(), target.Name(), entries); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if n := c.Stats().Handshakes; n > 3 { // the silent one again, where this took more than a second
		t.Fatalf("%d handshakes for 20 calls to a silent peer and one to another", n)
	}
}

// The look at an idle connection sees that the peer has ended it, also when the
// deadline of the last read has passed.
func TestIdleLookAfterTheDeadline(t *testing.T) {
	var lanes [2]*lane
	var targets [2]*Target
	for i := range targets {
		targets[i], _ = listen(t, 4096, TargetOptions{})
		c := client(t, Options{Conns: 1, ProgressTimeout: time.Second})
		if err := c.Write(t.Context(), targets[i].Name(), []Entry{{make([]byte, 8), testBase}}); err != nil {
			t.Fatal(err)
		}
		lanes[i] = c.mu.peers[targets[i].Name()].mu.idle[0]
	}
	time.Sleep(1100 * time.Millisecond)
	targets[0].Close()
	for end := time.Now().Add(60 * time.Second); lanes[0].idle(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the connection seems open; the peer has closed it")
		}
	}
	if !lanes[1].idle() {
		t.Fatal("the other peer's connection seems closed")
	}
}

// Thousands of refused blocks cost a connection at most, and each has its own
// result; what lies between them arrives.
func TestRefusedBlocksKeepTheConnection(t *testing.T) {
	const n, block = 4000, 512
	target, mem := listen(t, 2*n*block, TargetOptions{})
	var closed []Range
	var batch []Entry
	for i := range uint64(n) {
		at := testBase + 2*i*block // gaps: nothing is merged
		if i%10 != 5 {
			closed = append(closed, Range{at, block})
		}
		batch = append(batch, Entry{pattern(block, byte(i)), at})
	}
	target.Table().Fence(t.Context(), closed...)
	c := client(t, Options{Conns: 2})
	for range 2 {
		err := c.Write(t.Context(), target.Name(), batch)
		var be *BatchError
		if !errors.As(err, &be) {
			t.Fatal(err)
		}
		for i, err := range be.Errs {
			if i%10 == 5 {
				if err != nil || string(mem[2*i*block:][:block]) != string(batch[i].Local) {
					t.Fatalf("entry %d: %v", i, err)
				}
			} else if !errors.Is(err, ErrRejected) || mem[2*i*block] != 0 {
				t.Fatalf("entry %d: %v", i, err)
			}
		}
	}
	if s := c.Stats(); s.Dials > 2 || s.Rejected != 2*n*9/10 {
		t.Fatalf("%+v", s)
	}
	// A fence does not stop reads.
	out := make([]byte, block)
	err := c.Read(t.Context(), target.Name(), []Entry{{out, testBase + 1}, {make([]byte, 8), testBase - 64}, {make([]byte, 8), testBase + 5*2*block}})
	var be *BatchError
	if !errors.As(err, &be) || be.Errs[0] != nil || !errors.Is(be.Errs[1], ErrRejected) || be.Errs[2] != nil {
		t.Fatal(err)
	}
	if s := c.Stats(); s.Dials > 2 {
		t.Fatalf("%+v", s)
	}
}

// D restarts on its handshake port and gets another data port; another process has
// the old one. A connection made later goes to D, not there.
func TestDescriptionOfAnEarlierBoot(t *testing.T) {
	hs, data := testkit.FreePort(t), testkit.FreePort(t)
	first, _ := listen(t, 4096, TargetOptions{HandshakePort: hs, DataPort: data})
	c := client(t, Options{Conns: 1})
	write := func(b byte) error {
		return c.Write(t.Context(), first.Name(), []Entry{{[]byte{b}, testBase}})
	}
	if err := write(1); err != nil {
		t.Fatal(err)
	}
	p := c.mu.peers[first.Name()]
	l, err := c.lane(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	l.drop() // no connection that would show the restart
	p.put(l)
	first.Close()
	_, stranger := listen(t, 4096, TargetOptions{DataPort: data})
	_, mem := listen(t, 4096, TargetOptions{HandshakePort: hs})
	time.Sleep(freshFor + 50*time.Millisecond)
	if err := write(2); err != nil {
		t.Fatal(err)
	}
	if stranger[0] != 0 || mem[0] != 2 {
		t.Fatalf("the other process has %d, D has %d", stranger[0], mem[0])
	}
}

// Handshake connections that send nothing do not keep others from their handshake.
func TestSilentHandshakesGiveWay(t *testing.T) {
	target, _ := listen(t, 4096, TargetOptions{MaxHandshakes: 4, HandshakeTimeout: time.Minute})
	for range 12 {
		silent, err := net.Dial("tcp", target.Name())
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
	}
	for range 2 {
		if _, err := client(t, Options{HandshakeTimeout: 30 * time.Second}).Describe(t.Context(), target.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

// The client closes connections to peers that are gone: a call to another peer finds and closes them.
func TestConnectionsOfDeadPeersAreClosed(t *testing.T) {
	c := client(t, Options{Conns: 1})
	entries := []Entry{{make([]byte, 8), testBase}}
	var targets []*Target
	for range 5 {
		target, _ := listen(t, 4096, TargetOptions{})
		if err := c.Write(t.Context(), target.Name(), entries); err != nil {
			t.Fatal(err)
		}
		targets = append(targets, target)
	}
	for _, target := range targets[1:] {
		target.Close()
	}
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		c.mu.Lock()
		c.mu.swept = time.Time{}
		c.mu.Unlock()
		if err := c.Write(t.Context(), targets[0].Name(), entries); err != nil {
			t.Fatal(err)
		}
		c.mu.Lock()
		n := len(c.mu.conns)
		c.mu.Unlock()
		if n == 1 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d connections", n)
		}
	}
}

// When a target has too many data connections, it closes those that never sent a request. One that
// was used stays, however long it is idle.
func TestUnaskedConnectionsGiveWay(t *testing.T) {
	target, _ := listen(t, 4096, TargetOptions{MaxConns: 4})
	used := client(t, Options{Conns: 1})
	entries := []Entry{{make([]byte, 8), testBase}}
	if err := used.Write(t.Context(), target.Name(), entries); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(target.Descriptor().DataPort)))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	testkit.Eventually(t, "the target has all connections", func() bool { return target.Stats().DataConns == 4 }) // their time begins there
	time.Sleep(requestlessFor + 50*time.Millisecond)
	for range 3 {
		if err := client(t, Options{Conns: 1}).Write(t.Context(), target.Name(), entries); err != nil {
			t.Fatal(err)
		}
	}
	if err := used.Write(t.Context(), target.Name(), entries); err != nil || used.Stats().Dials != 1 {
		t.Fatal(err, used.Stats())
	}
	if s := target.Stats(); s.DataConns != 4 || s.RefusedConns != 3 {
		t.Fatalf("%+v", s)
	}
}
