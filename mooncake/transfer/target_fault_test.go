// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// works fails unless a fresh client can write and read back.
func works(t *testing.T, target *Target) {
	t.Helper()
	c := New(Options{})
	defer c.Close()
	src, dst := pattern(8192, byte(rand.Uint32())), make([]byte, 8192)
	ctx := timeout(t, 60*time.Second)
	if err := c.Write(ctx, target.Name(), []Entry{{src, testBase}}); err != nil {
		t.Fatalf("the target does not serve any more: %v", err)
	}
	if err := c.Read(ctx, target.Name(), []Entry{{dst, testBase}}); err != nil || !bytes.Equal(src, dst) {
		t.Fatalf("the target does not serve any more: %v", err)
	}
}

// quiet waits until the target has no data connection, those that it has not
// accepted yet included: it takes them in order, so one more shows their end.
func quiet(t *testing.T, target *Target) {
	t.Helper()
	last := dialData(t, target)
	last.Write(header{1, testBase, opRead | opAcked}.appendTo(nil))
	last.Read(make([]byte, 1)) // or it was refused
	last.Close()
	for end := time.Now().Add(60 * time.Second); target.Stats().DataConns > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d data connections remain", target.Stats().DataConns)
		}
	}
}

// An initiator that goes away at any step leaves nothing behind.
func TestTargetCutByInitiator(t *testing.T) {
	target, _ := listen(t, 1<<20, TargetOptions{})
	body := pattern(1000, 3)
	cases := 0
	f := func(op byte, n int, reset bool) {
		t.Helper()
		cases++
		c := dialData(t, target)
		at := uint64(testBase + 1<<16 + 1000*cases) // writers of the same bytes race
		c.Write(append(header{1000, at, op}.appendTo(nil), body...)[:n])
		if reset {
			c.SetLinger(0)
		}
		c.Close()
	}
	for _, op := range []byte{opWrite, opWrite | opAcked, opRead, opRead | opAcked} {
		for _, n := range []int{0, 1, 8, 23, 24, 25, 500, 1023, 1024} {
			for _, reset := range []bool{false, true} {
				f(op, min(n, headerBytes+1000*int(op&1)), reset)
			}
		}
	}
	quiet(t, target)
	waitClaims(t, target.Table(), 0)
	works(t, target)
	t.Logf("%d cases", cases)
}

// The target cuts a peer that stops within a frame after the timeout, and keeps one
// that is silent between frames.
func TestTargetStalledPeer(t *testing.T) {
	target, _ := listen(t, 64<<20, TargetOptions{ProgressTimeout: 600 * time.Millisecond})
	idle := dialData(t, target)
	ping := func() {
		t.Helper()
		idle.Write(append(header{1, testBase, opWrite | opAcked}.appendTo(nil), 9))
		if _, err := io.ReadFull(idle, make([]byte, statusBytes)); err != nil {
			t.Fatalf("the idle connection is gone: %v", err)
		}
	}
	ping()
	f := func(send []byte) {
		t.Helper()
		c := dialData(t, target)
		c.Write(send)
		before := time.Now()
		for target.Stats().DataConns > 1 || time.Since(before) < 20*time.Millisecond {
			if time.Since(before) > 60*time.Second {
				t.Fatal("the stalled connection lives on")
			}
			time.Sleep(time.Millisecond)
		}
	}
	f(make([]byte, 1))
	f(header{100, testBase, opWrite | opAcked}.appendTo(nil))
	f(append(header{1 << 20, testBase, opWrite | opAcked}.appendTo(nil), make([]byte, 1<<19)...))
	f(header{64 << 20, testBase, opRead | opAcked}.appendTo(nil)) // reads nothing of it
	f(header{64 << 20, testBase, opRead}.appendTo(nil))
	ping()
	time.Sleep(time.Second)
	ping()
}

// Impossible and foreign ranges: code 1 for acknowledged requests, a reset for
// the others, and no byte of memory changes.
func TestTargetRefuses(t *testing.T) {
	const n = 1 << 16
	target, mem := listen(t, n, TargetOptions{})
	want := pattern(n, 8)
	copy(mem, want)
	target.Table().Observe()
	cases := 0
	f := func(addr, size uint64) {
		t.Helper()
		for _, op := range []byte{opWrite, opRead, 0x7f, 2} {
			cases++
			c := dialData(t, target)
			c.Write(append(header{size, addr, op | opAcked}.appendTo(nil), make([]byte, 100)...))
			got, err := io.ReadAll(c)
			if code, ok := uint32(0), false; len(got) == statusBytes {
				if code, ok = parseStatus(got); !ok || code != statusRejected || err != nil {
					t.Errorf("%#x + %#x, op %#x: code %d, %v", addr, size, op, code, err)
				}
			} else {
				t.Errorf("%#x + %#x, op %#x: answer %x, %v", addr, size, op, got, err)
			}
			c.Close()
			if size == 0 {
				continue // without an acknowledgement nothing to say
			}
			c = dialData(t, target)
			c.Write(header{size, addr, op}.appendTo(nil))
			if got, err := io.ReadAll(c); err == nil || len(got) > 0 {
				t.Errorf("%#x + %#x, op %#x without acknowledgement: answer %x, %v", addr, size, op, got, err)
			}
			c.Close()
		}
	}
	f(testBase-1, 1)
	f(testBase-1, 2)
	f(testBase+n, 1)
	f(testBase+n-1, 2)
	f(testBase, n+1)
	f(testBase, 0)
	f(0, 0)
	f(0, 8)
	f(testBase, math.MaxUint64)
	f(testBase, math.MaxUint64-testBase+1)
	f(testBase+n-1, math.MaxUint64-testBase-n+2) // its end wraps to 0
	f(testBase+10, math.MaxUint64-9)             // ends before it begins
	f(math.MaxUint64, math.MaxUint64)
	f(1<<63, 1<<63)
	quiet(t, target)
	if !bytes.Equal(mem, want) {
		t.Error("memory changed")
	}
	t.Logf("%d cases", cases)
	works(t, target)
}

// device takes and gives any bytes.
type device struct{}

func (*device) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (*device) ReadAt(p []byte, _ int64) (int, error)  { return len(p), nil }

// 10,000 random frames per port: the target answers by its rules and lives.
func TestTargetRandomFrames(t *testing.T) {
	const frames = 10000
	const n = 1 << 16
	target, mem := listen(t, n, TargetOptions{})
	target.Table().Fence(t.Context(), Range{testBase, n}) // stays as it is
	want := pattern(n, 5)
	copy(mem, want)
	open := new(device) // what the frames may write
	if _, err := target.Table().RegisterFunc(Range{testBase + n, n}, open, open); err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for range frames / 4 {
				b := make([]byte, 24+r.IntN(100))
				for i := range b {
					b[i] = byte(r.Uint32())
				}
				if r.IntN(2) == 0 { // nearly right
					binary.LittleEndian.PutUint64(b, uint64(r.IntN(120)))
					binary.LittleEndian.PutUint64(b[8:], testBase-50+r.Uint64N(2*n+100))
				}
				throw(t, target.data.Addr().String(), b[:1+r.IntN(len(b))], r.IntN(2) == 0)
			}
		})
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w+4)))
			for range frames / 4 {
				text := make([]byte, 1+r.IntN(60))
				for i := range text {
					text[i] = byte(r.Uint32())
				}
				if r.IntN(2) == 0 {
					copy(text, []string{"\x01{}", "\x02{\"name\":", "\x03{}", "{}", "\x00{}", "\x01[[[["}[r.IntN(6)])
				}
				b := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
				if r.IntN(4) == 0 {
					b[r.IntN(8)] = byte(r.Uint32())
				}
				throw(t, target.Name(), append(b, text...), true)
			}
		})
	}
	wg.Wait()
	quiet(t, target)
	if !bytes.Equal(mem, want) {
		t.Errorf("seed %d: closed memory changed", seed)
	}
	target.Table().Reopen(Range{testBase, n})
	works(t, target)
	t.Logf("%d frames per port, seed %d", frames, seed)
}

// throw sends b and goes away, by a reset or after hearing the target's end.
func throw(t *testing.T, addr string, b []byte, reset bool) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(60 * time.Second))
	c.Write(b)
	c.(*net.TCPConn).CloseWrite()
	if !reset {
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("no end after %x", b)
		}
	}
	c.(*net.TCPConn).SetLinger(0)
}

// A handshake client that sends nothing, or too much, delays no other.
func TestHandshakeFaults(t *testing.T) {
	target, _ := listen(t, 1<<16, TargetOptions{HandshakeTimeout: 1500 * time.Millisecond, MaxHandshakes: 8})
	var silent []net.Conn
	for range 7 {
		c, err := net.Dial("tcp", target.Name())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	works(t, target)
	for _, c := range silent {
		c.SetDeadline(time.Now().Add(60 * time.Second))
		if n, err := c.Read(make([]byte, 1)); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a silent client: %d bytes, %v", n, err)
		}
	}
	length := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
	f := func(b []byte) {
		t.Helper()
		c, err := net.Dial("tcp", target.Name())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(60 * time.Second))
		c.Write(b)
		if got, err := io.ReadAll(c); len(got) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%.40q: answer %q, %v", b, got, err)
		}
	}
	f(length(0))
	f(length(maxHandshakeBytes + 1))
	f(length(math.MaxUint64))
	f(length(1 << 63))
	f(append(length(100), "\x01{"...)) // and no more
	f(append(length(3), "\x01{["...))
	f(append(length(2), "7}"...))
	f(append(length(1), 1))
	f([]byte{1, 2, 3})
	works(t, target)
}

// More regions than a default peer can read are refused at registration, so a
// descriptor always fits its frame.
func TestLargestDescriptor(t *testing.T) {
	table := NewTable()
	for i := range uint64(MaxRegions) {
		if _, err := table.RegisterFunc(Range{1<<62 + i<<40, 1 << 40}, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	target, err := Listen(TargetOptions{}, table)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	d, err := client(t, Options{}).Describe(timeout(t, 60*time.Second), target.Name())
	if err != nil || len(d.Buffers) != MaxRegions {
		t.Fatal(err)
	}
	d.Buffers = table.buffers(strings.Repeat("long-host-name.", 17) + ":65535")
	text, err := json.Marshal(d)
	if err != nil || len(text) > maxHandshakeBytes*9/10 {
		t.Errorf("%d regions need %d bytes: %v", MaxRegions, len(text), err)
	}
}

// IPv6 works as IPv4 does.
func TestIPv6(t *testing.T) {
	table := NewTable()
	if _, err := table.Register(testBase, make([]byte, 8192)); err != nil {
		t.Fatal(err)
	}
	target, err := Listen(TargetOptions{Host: "::1"}, table)
	if err != nil {
		t.Skip("no IPv6: ", err)
	}
	defer target.Close()
	if err := target.SelfDial(timeout(t, 60*time.Second)); err != nil {
		t.Error(err)
	}
	works(t, target)
}

// A storm of 2,000 connections, each with one write, as engines before 0.3.13
// make for a batch.
func TestConnectionStorm(t *testing.T) {
	const conns = 2000
	target, mem := listen(t, conns*512, TargetOptions{})
	want := pattern(len(mem), 4)
	start := time.Now()
	var wg sync.WaitGroup
	for i := range conns {
		wg.Go(func() {
			c, err := net.Dial("tcp", target.data.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(60 * time.Second))
			c.Write(append(header{512, testBase + uint64(i)*512, opWrite | opAcked}.appendTo(nil), want[i*512:][:512]...))
			got := make([]byte, statusBytes)
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, okFrame[:]) {
				t.Errorf("connection %d: %x, %v", i, got, err)
			}
		})
	}
	wg.Wait()
	target.Table().Observe()
	if !bytes.Equal(mem, want) {
		t.Error("memory differs")
	}
	t.Logf("%d connections in %v", conns, time.Since(start).Round(time.Millisecond))
}

// Above MaxConns connections are closed at once, below it they are served again.
func TestMaxConns(t *testing.T) {
	target, _ := listen(t, 1<<16, TargetOptions{MaxConns: 3})
	var held []net.Conn
	for range 3 {
		held = append(held, dialData(t, target))
		waitConns(t, target, len(held))
	}
	c := dialData(t, target)
	if n, err := c.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Errorf("%d, %v", n, err)
	}
	if s := target.Stats(); s.RefusedConns != 1 || s.DataConns != 3 {
		t.Errorf("%+v", s)
	}
	for _, c := range held {
		c.Close()
	}
	quiet(t, target)
	works(t, target)
}

func waitConns(t *testing.T, target *Target, n int) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); target.Stats().DataConns != int64(n); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d connections, want %d", target.Stats().DataConns, n)
		}
	}
}

// SelfDial checks the advertised address: it fails where another target, or none, answers there.
func TestSelfDial(t *testing.T) {
	target, _ := listen(t, 4096, TargetOptions{})
	if err := target.SelfDial(timeout(t, 60*time.Second)); err != nil {
		t.Error(err)
	}
	other, err := Listen(TargetOptions{Host: "127.0.0.2", Bind: "127.0.0.1"}, NewTable())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := other.SelfDial(timeout(t, 60*time.Second)); err == nil {
		t.Error("nobody answers at the published address, and SelfDial is content")
	}
	twin, err := Listen(TargetOptions{Host: "127.0.0.2", HandshakePort: port(other.hs)}, NewTable())
	if err != nil {
		t.Skip("no second loopback address: ", err)
	}
	defer twin.Close()
	if err := other.SelfDial(timeout(t, 60*time.Second)); !errors.Is(err, ErrProtocol) {
		t.Errorf("another target answers: %v", err)
	}
}
