// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// oldEngine writes as engines before 0.3.12 do: a connection per request, without
// acknowledgement.
type oldEngine struct {
	t    *testing.T
	data string
}

func (x *pair) oldEngine(t *testing.T) *oldEngine {
	d := x.target.Descriptor()
	return &oldEngine{t, fmt.Sprintf("127.0.0.1:%d", d.DataPort)}
}

// write sends the first n bytes of a block. It returns a function that sends the rest.
func (o *oldEngine) write(addr uint64, body []byte, n int) (rest func()) {
	c, err := net.Dial("tcp", o.data)
	if err != nil {
		o.t.Error(err)
		return func() {}
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(body)))
	b = binary.LittleEndian.AppendUint64(b, addr)
	b = append(b, 1, 0, 0, 0, 0, 0, 0, 0)
	_, _ = c.Write(append(b, body[:n]...))
	return func() {
		_, _ = c.Write(body[n:])
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = c.Read(make([]byte, 1))
		c.Close()
	}
}

// P's engine reports a write as done when the bytes have left P. D reports a request only when
// all of its blocks have arrived: request d1, of which half a block has arrived then, and request
// d2, of which nothing has.
func TestOldEngineSaysDoneTooEarly(t *testing.T) {
	x := newPair(t, testCache(2, 8, 64<<10), testCache(2, 8, 64<<10), SenderOptions{}, ReceiverOptions{ArrivalTimeout: 20 * time.Second})
	goOn := make(chan struct{}, 2)
	full := bytes.Repeat([]byte{0xCC}, 64<<10)
	old := x.oldEngine(t)
	x.more(map[string]string{"old": fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
		go func() {
			_, first := p.Wanted["d1"]
			var rests []func()
			for _, w := range p.Wanted {
				for i, g := range p.Regions {
					at := g.Base + uint64(w.Blocks[0][0])*g.Stride
					switch {
					case !first: // nothing yet
						rests = append(rests, func() { old.write(at, full, len(full))() })
					case i == 0:
						old.write(at, full, len(full))()
						old.write(at, full, len(full))() // again: its bytes count once
					default:
						rests = append(rests, old.write(at, full, len(full)/2))
					}
				}
			}
			ok(peer, p)
			<-goOn
			for _, rest := range rests {
				rest()
			}
		}()
	})})
	for i, id := range []string{"d2", "d1", "d1"} { // the last one into blocks that are full already
		done := make(chan error, 1)
		go func() {
			failed, err := x.receiver.Pull(t.Context(), x.source("old"), map[string]wire.Wanted{id: {TransferID: id, Blocks: [][]int{{1 + i%2}}}})
			done <- errors.Join(err, failed[id])
		}()
		select {
		case err := <-done:
			t.Fatalf("%s: reported while its bytes are on their way: %v", id, err)
		case <-time.After(100 * time.Millisecond):
		}
		goOn <- struct{}{}
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
		x.target.Table().Observe()
		if got := block(x.d, 0, 1+i%2); !bytes.Equal(got, bytes.Repeat(full, 2)) {
			t.Fatalf("%s: bytes are missing", id)
		}
	}
}

// A request fails when the blocks of an old engine do not arrive in time, and D refuses a block that
// arrives later. A request to a P whose engine confirms its writes is not delayed meanwhile.
func TestOldEngineLosesABlock(t *testing.T) {
	x := newPair(t, testCache(2, 8, 4096), testCache(2, 8, 4096), SenderOptions{}, ReceiverOptions{ArrivalTimeout: 200 * time.Millisecond})
	fill(x.p, 1)
	old := x.oldEngine(t)
	full := bytes.Repeat([]byte{0xCC}, 4096)
	late := make(chan uint64, 1)
	x.more(map[string]string{"old": fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
		if len(p.Wanted["d"].Blocks) == 0 {
			return
		}
		at := func(i int) uint64 { return p.Regions[i].Base + p.Regions[i].Stride }
		old.write(at(0), full, len(full))()
		old.write(at(0), full, len(full))() // as many bytes as were asked for
		late <- at(1)
		ok(peer, p)
	})})
	done := make(chan error, 1)
	go func() {
		failed, err := x.receiver.Pull(t.Context(), x.source("old"), map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}}}})
		done <- errors.Join(err, failed["d"])
	}()
	at := <-late
	x.sender.Offer("p", "y", [][]int{{3}})
	if err := x.pull(t, "e", "y", []int{2}); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, done); !errors.Is(err, ErrUnconfirmed) {
		t.Fatal(err)
	}
	before := bytes.Clone(block(x.d, 0, 1))
	old.write(at, full, len(full))()
	x.target.Table().Observe()
	if !bytes.Equal(block(x.d, 0, 1), before) {
		t.Fatal("a block of a failed request was written")
	}
}

// The bytes of writes without acknowledgement, against a map of single addresses.
func TestUnwrittenModel(t *testing.T) {
	table := transfer.NewTable()
	target, err := transfer.Listen(transfer.TargetOptions{}, table)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	regions, err := table.Publish(make([]byte, 4096), make([]byte, 4096))
	if err != nil {
		t.Fatal(err)
	}
	x := &pair{target: target}
	old := x.oldEngine(t)
	written := map[uint64]bool{}
	base := regions[0].Range().Addr
	for i := range uint64(40) {
		at, n := base+i*67%4000, 1+i*31%90
		old.write(at, make([]byte, n), int(n))()
		for a := at; a < at+n; a++ {
			written[a] = true
		}
		if i%7 == 3 {
			table.Forget(transfer.Range{Addr: at + 5, Len: 300})
			for a := at + 5; a < at+305; a++ {
				delete(written, a)
			}
		}
		want := uint64(0)
		for a := base + 10; a < base+3000; a++ {
			if !written[a] {
				want++
			}
		}
		got, _, stop := table.Unwritten(transfer.Range{Addr: base + 10, Len: 2990})
		stop()
		if got != want {
			t.Fatalf("after %d writes: %d bytes missing, want %d", i+1, got, want)
		}
	}
	if table.Confirmation(regions[0]) != transfer.Unconfirmed || table.Confirmation(regions[1]) != transfer.NoWrites {
		t.Fatal("who writes without acknowledgement is not known")
	}
}

// P says done before its first byte, so D does not know yet which engine P has. A request whose
// bytes come later is reported when they have arrived. A request whose bytes never come fails.
func TestUnknownEngineSaysDoneBeforeItsFirstByte(t *testing.T) {
	x := newPair(t, testCache(2, 8, 4096), testCache(2, 8, 4096), SenderOptions{}, ReceiverOptions{ArrivalTimeout: 4 * time.Second})
	old := x.oldEngine(t)
	full := bytes.Repeat([]byte{0xCC}, 4096)
	late := make(chan struct{})
	handler := func(comes bool) string {
		return fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
			w, asked := p.Wanted["d"]
			if !asked || len(w.Blocks) == 0 {
				return
			}
			ok(peer, p)
			go func() {
				if <-late; comes {
					for _, g := range p.Regions {
						old.write(g.Base+uint64(w.Blocks[0][0])*g.Stride, full, len(full))()
					}
				}
			}()
		})
	}
	x.more(map[string]string{"late": handler(true), "never": handler(false)})
	for _, from := range []string{"never", "late"} {
		done := make(chan error, 1)
		go func() {
			failed, err := x.receiver.Pull(t.Context(), x.source(from), map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}}}})
			done <- errors.Join(err, failed["d"])
		}()
		if from == "never" {
			if err := wait(t, done); !errors.Is(err, ErrUnconfirmed) {
				t.Fatalf("%s: %v", from, err)
			}
			continue
		}
		time.AfterFunc(500*time.Millisecond, func() { close(late) })
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
		x.target.Table().Observe()
		if got := block(x.d, 0, 1); !bytes.Equal(got, bytes.Repeat(full, 2)) {
			t.Fatal("reported before its bytes")
		}
	}
}
