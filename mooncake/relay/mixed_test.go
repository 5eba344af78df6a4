// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// P restarts with other weights, at the same address and under the same engine id, while the
// relay pulls the rest of a prompt. P's first life sent the first blocks of that prompt. D must not get
// a mixture of both lives: it gets all blocks from the second life, or an error. A prompt that the
// second life alone sent is served.
func TestPrefixOfOneLifeAndRestOfAnother(t *testing.T) {
	w := full(t, relay.Options{Prefixes: true, Timeout: 20 * time.Second})
	p := transfer.New(transfer.Options{})
	defer p.Close()
	var life atomic.Int32
	restart := make(chan struct{}, 1)
	serve := func(peer *zmtp.Peer, m zmtp.Message) {
		pull, err := wire.DecodePull(m[0], 0)
		if err != nil {
			t.Error(err)
			return
		}
		for id, want := range pull.Wanted {
			switch n := map[string]int{"A": 3, "B": 5, "C": 3}[id]; {
			case len(want.Blocks) == 0:
			case id == "B" && life.Load() == 1:
				restart <- struct{}{} // says nothing any more
			case len(want.Blocks[0]) > n:
				reply(peer, wire.Reply{Status: wire.StatusFinish, Failed: []string{id}, Message: "P num blocks less than D"})
			default:
				go func() {
					if err := p.Write(t.Context(), net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries(pull, id, byte(life.Load()))); err != nil { // the relay has given the pull up
						reply(peer, wire.Reply{Status: wire.StatusFinish, Failed: []string{id}, Message: err.Error()})
						return
					}
					reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{id}})
				}()
			}
		}
	}
	listen := func(at string) (*zmtp.Router, string) {
		life.Add(1)
		r := zmtp.NewRouter(serve, zmtp.RouterOptions{Log: logger()})
		addr, err := r.Listen(t.Context(), "tcp://"+at)
		if err != nil {
			t.Fatal(err)
		}
		return r, addr.String()
	}
	first, at := listen(fmt.Sprint("127.0.0.1:", testkit.FreePort(t)))
	w.show(map[string]string{"fake": "tcp://" + at})
	w.source()
	testkit.Eventually(t, "the relay watches it", func() bool { return w.relay.Watched("fake") })
	if err := w.pull("A", []int{31, 32, 33}); err != nil {
		t.Fatal(err)
	}
	from := w.source()
	done := make(chan error, 1)
	go func() {
		failed, err := w.receiver.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: "B^A:3", Blocks: [][]int{{41, 42, 43, 44, 45}}}})
		if err == nil {
			err = failed["d"]
		}
		done <- err
	}()
	<-restart
	first.Close()
	second, _ := listen(at)
	defer second.Close()
	err := <-done
	w.target.Table().Observe()
	if a, b := block(w.d, 0, 41)[0], block(w.d, 0, 45)[0]; err == nil && (a != 2 || b != 2) {
		t.Fatalf("D's first block is of life %d, its last of life %d", a, b)
	} else if err != nil && !strings.Contains(err.Error(), "restarted") {
		t.Fatal(err)
	}
	// The relay notices twice, by the registry and by the connection that broke: a pull in between fails.
	testkit.Eventually(t, "C is pulled from P's second life", func() bool { return w.pull("C^A:2", []int{51, 52, 53}) == nil })
	w.target.Table().Observe()
	if a, b := block(w.d, 0, 51)[0], block(w.d, 0, 53)[0]; a != 2 || b != 2 {
		t.Fatalf("D has %d and %d", a, b)
	}
}

// lateEnds forwards connections to one life of P. After restart, new connections go to the
// next life. The oldest connection, which is the relay's watch, then ends only when the relay
// sends something over it: the network has kept the end back. The others end at once.
type lateEnds struct {
	net.Listener
	mu    sync.Mutex
	to    string // host:port of the life of P
	conns []net.Conn
	late  net.Conn // the watch
	dead  bool     // the life that late belongs to has ended
}

func forwardWithLateEnds(t *testing.T, to string) *lateEnds {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &lateEnds{Listener: l, to: to}
	var wg sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		f.mu.Lock()
		for _, c := range append(f.conns, f.late) {
			if c != nil {
				c.Close()
			}
		}
		f.mu.Unlock()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f.mu.Lock()
			p, err := net.Dial("tcp", f.to)
			if err != nil { // the test is over
				c.Close()
				f.mu.Unlock()
				continue
			}
			watch := f.late == nil
			if watch {
				f.late = c
			} else {
				f.conns = append(f.conns, c, p)
			}
			f.mu.Unlock()
			wg.Go(func() { // from P
				_, _ = io.Copy(c, p)
				if !watch {
					c.Close()
				}
			})
			wg.Go(func() { // to P
				defer p.Close()
				defer c.Close()
				b := make([]byte, 4096)
				for {
					n, err := c.Read(b)
					f.mu.Lock()
					ended := watch && f.dead
					f.mu.Unlock()
					if err != nil || ended {
						return
					}
					if _, err := p.Write(b[:n]); err != nil {
						return
					}
				}
			})
		}
	})
	return f
}

// restart lets new connections go to another life of P.
func (f *lateEnds) restart(to string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.to, f.dead = to, true
	for _, c := range f.conns {
		c.Close()
	}
	f.conns = nil
}

// P restarts and the end of the relay's own connection comes late. Each time the first
// blocks of the prompt are in memory, of the first life. D gets no mixture of both lives,
// whether P restarted before D asked or while P's rest was under way.
func TestPrefixWhenTheEndOfALifeIsNoticedLate(t *testing.T) {
	f := func(name string, whileAsked bool) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := full(t, relay.Options{Prefixes: true, Timeout: 20 * time.Second})
			p := transfer.New(transfer.Options{})
			defer p.Close()
			asked := make(chan struct{}, 1)
			listen := func(life byte) string {
				r := zmtp.NewRouter(func(peer *zmtp.Peer, m zmtp.Message) {
					pull, err := wire.DecodePull(m[0], 0)
					if err != nil {
						t.Error(err)
						return
					}
					for id, want := range pull.Wanted {
						switch n := map[string]int{"A": 3, "B": 5}[id]; {
						case len(want.Blocks) == 0:
						case len(want.Blocks[0]) > n:
							reply(peer, wire.Reply{Status: wire.StatusFinish, Failed: []string{id}, Message: "P num blocks less than D"})
						case whileAsked && life == 1 && id == "B":
							asked <- struct{}{} // and dies
						default:
							go func() {
								if err := p.Write(t.Context(), net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries(pull, id, life)); err != nil {
									t.Error(err)
								}
								reply(peer, wire.Reply{Status: wire.StatusFinish, OK: []string{id}})
							}()
						}
					}
				}, zmtp.RouterOptions{Log: logger()})
				addr, err := r.Listen(t.Context(), "tcp://127.0.0.1:*")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { r.Close() })
				return addr.String()
			}
			way := forwardWithLateEnds(t, listen(1))
			second := listen(2)
			w.show(map[string]string{"fake": "tcp://" + way.Addr().String()})
			w.source()
			testkit.Eventually(t, "the relay watches P", func() bool { return w.relay.Watched("fake") })
			if err := w.pull("A", []int{31, 32, 33}); err != nil {
				t.Fatal(err)
			}
			if !whileAsked {
				way.restart(second)
			}
			done := make(chan error, 1)
			go func() { done <- w.pull("B^A:3", []int{41, 42, 43, 44, 45}) }()
			if whileAsked {
				<-asked
				way.restart(second)
			}
			err := <-done
			w.target.Table().Observe()
			a, b := block(w.d, 0, 41)[0], block(w.d, 0, 45)[0]
			if whileAsked && err == nil || !whileAsked && (err != nil || a != 2 || b != 2) {
				t.Fatalf("D's first block is of life %d, its last of life %d: %v", a, b, err)
			}
			if err := w.pull("B", []int{51, 52, 53, 54, 55}); err != nil {
				t.Fatal(err)
			}
		})
	}
	f("before D asks", false)
	f("while P sends the rest", true)
}
