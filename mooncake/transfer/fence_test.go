// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// After Fence returns no byte of the ranges changes, whatever the writers do:
// they run on, and the owner uses the memory for itself.
func TestFenceRace(t *testing.T) {
	const block, blocks = 64 << 10, 64
	target, mem := listen(t, block*blocks, TargetOptions{})
	table := target.Table()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var refused, done atomic.Int64
	for w := range 4 {
		c := client(t, Options{Conns: 2, SplitBytes: 8 * block})
		wg.Go(func() {
			src := pattern(block, byte(w+1))
			for ctx.Err() == nil {
				var batch []Entry
				for _, i := range rand.Perm(blocks / 4) { // blocks of its own: writers of the same bytes race
					batch = append(batch, Entry{src, testBase + uint64(4*i+w)*block})
				}
				var be *BatchError
				switch err := c.Write(t.Context(), target.Name(), batch); {
				case err == nil:
					done.Add(1)
				case errors.As(err, &be):
					for _, err := range be.Errs {
						if err != nil && !errors.Is(err, ErrRejected) && !errors.Is(err, ErrLost) {
							t.Errorf("writer %d: %v", w, err)
						}
					}
					refused.Add(1)
				default:
					t.Errorf("writer %d: %v", w, err)
				}
			}
		})
	}
	cuts := 0
	met := func() bool { return done.Load() > 0 && refused.Load() > 0 }
	for begin := time.Now(); time.Since(begin) < 1500*time.Millisecond || !met() && time.Since(begin) < time.Minute; {
		first := rand.IntN(blocks - 8)
		own := mem[first*block : (first+8)*block]
		at := []Range{{testBase + uint64(first*block), 3 * block}, {testBase + uint64((first+3)*block), 5 * block}}
		patience, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(3))*time.Millisecond)
		cuts += table.Fence(patience, at...)
		cancel()
		mark := byte(rand.Uint32())
		for i := range own { // the race detector sees a late writer here
			own[i] = mark
		}
		time.Sleep(2 * time.Millisecond)
		for i, b := range own {
			if b != mark {
				t.Fatalf("byte %d changed after the fence", i)
			}
		}
		table.Reopen(at...)
		time.Sleep(time.Millisecond)
	}
	stop()
	wg.Wait()
	if !met() {
		t.Errorf("%d batches done, %d refused: the fence met no writer", done.Load(), refused.Load())
	}
	t.Logf("%d batches done, %d refused in part, %d connections cut", done.Load(), refused.Load(), cuts)
}

// begin opens a data connection and sends a write of n bytes but for the last
// rest of them.
func begin(t *testing.T, target *Target, addr uint64, n, rest int) *net.TCPConn {
	t.Helper()
	c := dialData(t, target)
	c.Write(append(header{uint64(n), addr, opWrite | opAcked}.appendTo(nil), make([]byte, n-rest)...))
	waitClaims(t, target.Table(), 1)
	return c
}

func dialData(t testing.TB, target *Target) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", target.data.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(60 * time.Second))
	return c.(*net.TCPConn)
}

// waitClaims waits until n connections hold a write claim.
func waitClaims(t testing.TB, table *Table, n int) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(time.Millisecond) {
		got := 0
		table.mu.Lock()
		for c := range table.mu.users {
			c.mu.Lock()
			if c.mu.write.Len > 0 {
				got++
			}
			c.mu.Unlock()
		}
		table.mu.Unlock()
		if got == n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d write claims, want %d", got, n)
		}
	}
}

// A fence waits for a write in progress that touches it, and for no other.
func TestFenceWaits(t *testing.T) {
	target, mem := listen(t, 1<<20, TargetOptions{})
	table := target.Table()
	c := begin(t, target, testBase+4096, 8192, 1)
	table.Fence(t.Context(), Range{testBase, 4096}, Range{testBase + 4096 + 8192, 10}) // beside it
	fenced := make(chan int, 1)
	go func() { fenced <- table.Fence(t.Context(), Range{testBase + 4096 + 8191, 1}) }()
	select {
	case <-fenced:
		t.Fatal("the fence did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	c.Write([]byte{7})
	if cut := <-fenced; cut != 0 || mem[4096+8191] != 7 {
		t.Fatalf("%d connections cut, last byte %d", cut, mem[4096+8191])
	}
	got := make([]byte, statusBytes)
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, okFrame[:]) {
		t.Fatalf("acknowledgement %x, %v", got, err)
	}
}

// When the patience of a fence ends, it cuts.
func TestFenceCuts(t *testing.T) {
	target, mem := listen(t, 1<<20, TargetOptions{})
	c := begin(t, target, testBase, 8192, 1)
	cut := target.Table().Fence(timeout(t, 20*time.Millisecond), Range{testBase, 1})
	if cut != 1 {
		t.Fatalf("%d connections cut", cut)
	}
	c.Write([]byte{7})
	if n, err := c.Read(make([]byte, 1)); err == nil || n > 0 {
		t.Fatal("the connection lives")
	}
	if mem[8191] != 0 {
		t.Fatal("a byte came after the fence")
	}
	if got := target.Stats(); got.Broken+got.Writes > 1 {
		t.Fatalf("%+v", got)
	}
}

// Fenced ranges refuse writes and serve reads; Reopen undoes it, in parts too.
func TestFenceReopen(t *testing.T) {
	target, _ := listen(t, 1<<16, TargetOptions{})
	table, c := target.Table(), client(t, Options{})
	f := func(off, n int, want error) {
		t.Helper()
		err := c.Write(timeout(t, 60*time.Second), target.Name(), []Entry{{make([]byte, n), testBase + uint64(off)}})
		if !errors.Is(err, want) {
			t.Errorf("write %d + %d: %v, want %v", off, n, err, want)
		}
		if err := c.Read(timeout(t, 60*time.Second), target.Name(), []Entry{{make([]byte, n), testBase + uint64(off)}}); err != nil {
			t.Errorf("read %d + %d: %v", off, n, err)
		}
	}
	table.Fence(t.Context(), Range{testBase + 100, 100})
	table.Fence(t.Context(), Range{testBase + 150, 100}, Range{}, Range{0, 5}, Range{1 << 63, 1 << 63})
	f(0, 100, nil)
	f(0, 101, ErrRejected)
	f(249, 1, ErrRejected)
	f(250, 50, nil)
	f(0, 1000, ErrRejected)
	table.Reopen(Range{testBase + 120, 10})
	f(120, 10, nil)
	f(119, 2, ErrRejected)
	f(129, 2, ErrRejected)
	table.Reopen(Range{testBase, 1 << 16})
	f(0, 1000, nil)
	if s := target.Stats(); s.RejectedFence != 5 || s.RejectedAddress != 0 {
		t.Errorf("%+v", s)
	}
}

// Close of a region waits for readers too, refuses later requests, and leaves
// the address free for another.
func TestRegionClose(t *testing.T) {
	table := NewTable()
	mem := make([]byte, 64<<20)
	region, err := table.Register(testBase, mem)
	if err != nil {
		t.Fatal(err)
	}
	target, err := Listen(TargetOptions{}, table)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	c := dialData(t, target) // asks for more than the sockets hold and reads nothing
	c.Write(header{uint64(len(mem)), testBase, opRead | opAcked}.appendTo(nil))
	io.ReadFull(c, make([]byte, statusBytes))
	if cut := region.Close(timeout(t, 30*time.Millisecond)); cut != 1 {
		t.Fatalf("%d connections cut", cut)
	}
	if region.Close(t.Context()) != 0 {
		t.Fatal("closed twice")
	}
	clear(mem) // the race detector sees a late reader
	cl := client(t, Options{})
	if err := cl.Read(timeout(t, 60*time.Second), target.Name(), []Entry{{make([]byte, 8), testBase}}); !errors.Is(err, ErrRejected) {
		t.Fatal(err)
	}
	if _, err := table.Register(testBase, mem); err != nil {
		t.Fatal(err)
	}
	if err := cl.Read(timeout(t, 60*time.Second), target.Name(), []Entry{{make([]byte, 8), testBase}}); err != nil {
		t.Fatal(err)
	}
}

// gate is a region of callbacks that stops in each call until it is let go.
type gate struct {
	entered, let chan struct{}
	err          error
	calls        atomic.Int64
}

func (g *gate) WriteAt(p []byte, _ int64) (int, error) { return g.pass(p) }
func (g *gate) ReadAt(p []byte, _ int64) (int, error)  { return g.pass(p) }

func (g *gate) pass(p []byte) (int, error) {
	g.calls.Add(1)
	g.entered <- struct{}{}
	<-g.let
	if g.err != nil {
		return 0, g.err
	}
	return len(p), nil
}

// A fence and a Close wait for callbacks: nothing is called after they return.
func TestCallbacksAreFenced(t *testing.T) {
	f := func(op byte, end func(*Table, *Region)) {
		t.Helper()
		table := NewTable()
		g := &gate{entered: make(chan struct{}, 100), let: make(chan struct{})}
		region, err := table.RegisterFunc(Range{testBase, 1 << 30}, g, g)
		if err != nil {
			t.Fatal(err)
		}
		target, err := Listen(TargetOptions{}, table)
		if err != nil {
			t.Fatal(err)
		}
		defer target.Close()
		c := dialData(t, target)
		c.Write(header{8 * callbackChunk, testBase + 100, op | opAcked}.appendTo(nil))
		go io.Copy(io.Discard, c)
		if op == opWrite {
			go c.Write(make([]byte, 8*callbackChunk))
		}
		<-g.entered
		ended := make(chan struct{})
		go func() { end(table, region); close(ended) }()
		g.let <- struct{}{} // the first piece is through, the request is not
		<-g.entered
		select {
		case <-ended:
			t.Fatal("ended with a callback in progress")
		case <-time.After(30 * time.Millisecond):
		}
		close(g.let)
		<-ended
		before := g.calls.Load()
		time.Sleep(10 * time.Millisecond)
		if after := g.calls.Load(); after != before || after != 8 {
			t.Errorf("%d calls, then %d", before, after)
		}
	}
	f(opWrite, func(table *Table, _ *Region) { table.Fence(t.Context(), Range{testBase + 100, 1}) })
	f(opWrite, func(_ *Table, r *Region) { r.Close(t.Context()) })
	f(opRead, func(_ *Table, r *Region) { r.Close(t.Context()) })
}
