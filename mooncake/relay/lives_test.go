// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// fakeP is a P that does what handler does with each pull.
func fakeP(t *testing.T, handler func(peer *zmtp.Peer, p *wire.Pull)) string {
	r := zmtp.NewRouter(func(peer *zmtp.Peer, m zmtp.Message) {
		p, err := wire.DecodePull(m[0], 0)
		if err != nil {
			t.Error(err)
			return
		}
		handler(peer, p)
	}, zmtp.RouterOptions{Log: logger()})
	addr, err := r.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return "tcp://" + addr.String()
}

// entries is what P would push for a request: its blocks, filled with one byte.
func entries(p *wire.Pull, id string, fill byte) (list []transfer.Entry) {
	for _, g := range p.Regions {
		for _, b := range p.Wanted[id].Blocks[g.Group] {
			list = append(list, transfer.Entry{Local: bytes.Repeat([]byte{fill}, int(g.Payload)), Remote: g.Base + uint64(b)*g.Stride})
		}
	}
	return list
}

func reply(peer *zmtp.Peer, y wire.Reply) {
	_ = peer.Send(wire.AppendReply(nil, &y))
	peer.Flush()
}

// show puts engines, each of one worker, into P's registry.
func (w *world) show(addrs map[string]string) {
	text := ""
	dp := 0
	for id, addr := range addrs {
		text += fmt.Sprintf(`,"%d":{"engine_id":%q,"worker_addr":{"0":{"0":%q}}}`, dp, id, addr)
		dp++
	}
	w.mu.Lock()
	w.dir = "{" + strings.TrimPrefix(text, ",") + "}"
	w.mu.Unlock()
	time.Sleep(5 * time.Millisecond) // RefreshEvery
}

// Transfers in flight together, in pulls of their own and in one pull, all arrive,
// each with its own bytes, while one that P has never heard of waits.
func TestConcurrentTransfers(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 20 * time.Second})
	from := w.source()
	const n = 8
	for i := range 2 * n {
		w.sender.Expect(fmt.Sprint("p", i), fmt.Sprint("x", i))
	}
	pull := func(wanted map[string]wire.Wanted) error {
		failed, err := w.receiver.Pull(t.Context(), from, wanted)
		for id, why := range failed {
			err = fmt.Errorf("%s: %w", id, why)
		}
		return err
	}
	if err := w.receiver.Start(from, map[string]wire.Wanted{"never": {TransferID: "never", Blocks: [][]int{{63}, {63}}}}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	together := map[string]wire.Wanted{}
	for i := range n {
		want := func(i int) wire.Wanted {
			return wire.Wanted{TransferID: fmt.Sprint("x", i), Blocks: [][]int{{i}, {i}}}
		}
		together[fmt.Sprint("d", n+i)] = want(n + i)
		wg.Go(func() {
			if err := pull(map[string]wire.Wanted{fmt.Sprint("d", i): want(i)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Go(func() {
		if err := pull(together); err != nil {
			t.Error(err)
		}
	})
	for i := range 2 * n {
		w.sender.Offer(fmt.Sprint("p", i), fmt.Sprint("x", i), [][]int{{2*n - i}, {3*n - i}})
	}
	wg.Wait()
	for i := range 2 * n {
		w.check(0, []int{i}, []int{2*n - i})
		w.check(1, []int{i}, []int{3*n - i})
	}
	w.receiver.Abort("never")
}

// P goes on writing for a transfer that the relay has given up, while the next
// transfers arrive: its writes are refused, and those hold their own bytes.
func TestLateWritesOfAFailedTransfer(t *testing.T) {
	const timeout = 2 * time.Second
	w := newWorld(t, relay.Options{Timeout: timeout})
	p := transfer.New(transfer.Options{})
	defer p.Close()
	var mu sync.Mutex
	var silent, stale []*wire.Pull // silent: pulls without an answer; stale: those of them that have failed
	addr := fakeP(t, func(peer *zmtp.Peer, pull *wire.Pull) {
		for id, want := range pull.Wanted {
			if len(want.Blocks) == 0 {
				return
			}
			if strings.HasPrefix(id, "fails") {
				mu.Lock()
				silent = append(silent, pull)
				mu.Unlock()
				return // says nothing: the relay gives up
			}
			go func() {
				to := net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port))
				if err := p.Write(t.Context(), to, entries(pull, id, 0xBB)); err != nil {
					reply(peer, wire.Reply{Status: wire.StatusFinish, Failed: []string{id}, Message: err.Error()})
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for _, old := range stale {
					for late := range old.Wanted {
						if err := p.Write(t.Context(), to, entries(old, late, 0xAA)); err == nil {
							t.Error("a write for a failed transfer was taken")
						}
					}
				}
				reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{id}})
			}()
		}
	})
	w.show(map[string]string{"fake": addr})
	for i := range 3 {
		for try := 0; ; try++ {
			if err := w.pull(fmt.Sprintf("fails%d-%d", i, try), []int{1}, []int{2}); err == nil || !strings.Contains(err.Error(), "timed out") {
				t.Fatal(err)
			}
			mu.Lock()
			got := len(silent)
			stale, silent = append(stale, silent...), nil
			mu.Unlock()
			if got > 0 {
				break
			}
			if try == 5 { // on a busy machine P may not get the pull in time
				t.Fatal("P gets no pull")
			}
		}
		for try := 0; ; try++ {
			began := time.Now()
			err := w.pull(fmt.Sprintf("b%d-%d", i, try), []int{3 + i}, []int{4 + i})
			if err == nil {
				break
			}
			if took := time.Since(began); took < timeout*9/10 || try == 5 { // a late machine may take all of the time
				t.Fatalf("after %v: %v", took, err)
			}
		}
		w.target.Table().Observe()
		if got := block(w.d, 0, 3+i); !bytes.Equal(got, bytes.Repeat([]byte{0xBB}, len(got))) {
			t.Fatalf("D's block holds %x...", got[:8])
		}
	}
}

// An engine before 0.3.12 at P says that it is done when the bytes have left it, with
// the last block still on its way: what the relay serves, then and from memory, has
// no holes. Another transfer passes meanwhile.
func TestOldEngineBehindTheRelay(t *testing.T) {
	w := newWorld(t, relay.Options{})
	sent := make(chan struct{})
	addr := fakeP(t, func(peer *zmtp.Peer, p *wire.Pull) {
		if len(p.Wanted["old"].Blocks) == 0 {
			return
		}
		go func() {
			c := transfer.New(transfer.Options{})
			defer c.Close()
			d, err := c.Describe(t.Context(), net.JoinHostPort(p.Host, strconv.Itoa(p.Port)))
			if err != nil {
				t.Error(err)
				return
			}
			list := entries(p, "old", 0xCC)
			send := func(e transfer.Entry) {
				k, err := net.Dial("tcp", net.JoinHostPort(d.DataHost, strconv.Itoa(d.DataPort)))
				if err != nil {
					t.Error(err)
					return
				}
				defer k.Close()
				b := binary.LittleEndian.AppendUint64(nil, uint64(len(e.Local)))
				b = binary.LittleEndian.AppendUint64(b, e.Remote)
				_, _ = k.Write(append(append(b, 1, 0, 0, 0, 0, 0, 0, 0), e.Local...))
				_ = k.(*net.TCPConn).CloseWrite()
				_, _ = k.Read(make([]byte, 1))
			}
			for _, e := range list[:len(list)-1] {
				send(e)
			}
			reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{"old"}})
			<-sent
			send(list[len(list)-1])
		}()
	})
	w.show(map[string]string{"fake": addr})
	from := w.source()
	done := make(chan error, 1)
	go func() {
		failed, err := w.receiver.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: "old", Blocks: [][]int{{1}, {2}}}})
		if err == nil {
			err = failed["d"]
		}
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("served while a block is on its way: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(sent)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := w.pull("old#2", []int{5}, []int{6}); err != nil {
		t.Fatal(err)
	}
	w.target.Table().Observe()
	for _, b := range [][]byte{block(w.d, 0, 1), block(w.d, 1, 2), block(w.d, 0, 5), block(w.d, 1, 6)} {
		if !bytes.Equal(b, bytes.Repeat([]byte{0xCC}, len(b))) {
			t.Fatal("a hole was served")
		}
	}
}
