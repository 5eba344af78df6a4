// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"bytes"
	"errors"
	"net"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// original is a P that answers as vLLM 0.13. When it does not know one request of a pull, it sends
// nothing of that pull and answers trans_done all the same.
type original struct {
	x  *pair
	at string

	mu    sync.Mutex
	knows map[string][]int
	pulls [][]string
}

func newOriginal(t *testing.T, x *pair, listen string) (*original, *zmtp.Router) {
	t.Helper()
	p := &original{x: x, knows: map[string][]int{}}
	r := zmtp.NewRouter(func(peer *zmtp.Peer, m zmtp.Message) {
		pull, err := wire.DecodePull013(m[len(m)-1])
		if err != nil {
			t.Error(err)
			return
		}
		go func() {
			if err := p.send(t, pull); err != nil {
				t.Error(err)
			}
			if peer.Send(nil, []byte(wire.Reply013Done)) == nil {
				peer.Flush()
			}
		}()
	}, zmtp.RouterOptions{})
	at, err := r.Listen(t.Context(), "tcp://"+listen)
	if err != nil {
		t.Fatal(err)
	}
	p.at = at.String()
	return p, r
}

func (p *original) know(id string, blocks ...int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.knows[id] = blocks
}

func (p *original) send(t *testing.T, pull *wire.Pull013) error {
	p.mu.Lock()
	p.pulls = append(p.pulls, pull.Requests)
	var own [][]int
	for _, id := range pull.Requests {
		if p.knows[id] == nil {
			p.mu.Unlock()
			return nil
		}
		own = append(own, p.knows[id])
	}
	for _, id := range pull.Requests {
		delete(p.knows, id)
	}
	p.mu.Unlock()
	m := memory{BlockBytes: p.x.p.Regions[0].Stride}
	for i := range p.x.p.Regions {
		m.Bases = append(m.Bases, p.x.p.Regions[i].Base)
	}
	batch, err := m.plan(nil, pull, own)
	if err != nil {
		return err
	}
	errs, err := mooncake.NewPusher(p.x.p, mooncake.SenderOptions{Transfer: p.x.client, Workers: 1}).Write(t.Context(), sessionOf(pull), batch, 0)
	return errors.Join(append(errs, err)...)
}

func (p *original) source() mooncake.Source {
	host, port, _ := net.SplitHostPort(p.at)
	n, _ := strconv.Atoi(port)
	return mooncake.Source{Host: host, Port: n}
}

// P says trans_done to a request that it never had. D trusts only the bytes that have arrived: before
// and after the first bytes of this P, and also after P's restart at the same port.
func TestDoneWithoutBytes(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{}, mooncake.ReceiverOptions{ArrivalTimeout: 300 * time.Millisecond})
	p, router := newOriginal(t, x, "127.0.0.1:*")
	x.from = p.source()
	none := func(id string, block int) {
		t.Helper()
		if err := x.pull(t, id, []int{block}); !errors.Is(err, mooncake.ErrPeer) {
			t.Fatalf("%s: %v", id, err)
		}
	}
	good := func(p *original, id string, to, from int) {
		t.Helper()
		p.know(id, from)
		if err := x.pull(t, id, []int{to}); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		if !bytes.Equal(block(x.d, to), block(x.p, from)) {
			t.Fatalf("%s: wrong bytes", id)
		}
	}
	none("a", 1)
	good(p, "b", 1, 4)
	none("c", 2)
	good(p, "d", 2, 5)
	none("e", 2) // into a block that is full of d
	router.Close()
	p, router = newOriginal(t, x, p.at)
	defer router.Close()
	none("f", 3)
	good(p, "g", 3, 6)
}

// One pull has requests that P knows and one that P does not know, so P sends none of them. D then asks for
// each alone, and those that P knows arrive.
func TestUnknownInCompanyOfTheOriginal(t *testing.T) {
	x := newPair(t, mooncake.SenderOptions{}, mooncake.ReceiverOptions{ArrivalTimeout: 300 * time.Millisecond})
	p, router := newOriginal(t, x, "127.0.0.1:*")
	defer router.Close()
	p.know("a", 10)
	p.know("b", 11)
	failed, err := x.receiver.Pull(t.Context(), p.source(), map[string]wire.Wanted{
		"a": {Blocks: [][]int{{1}}}, "b": {Blocks: [][]int{{2}}}, "never": {Blocks: [][]int{{3}}},
	})
	if err != nil || len(failed) != 1 || !errors.Is(failed["never"], mooncake.ErrPeer) {
		t.Fatal(err, failed)
	}
	for to, from := range map[int]int{1: 10, 2: 11} {
		if !bytes.Equal(block(x.d, to), block(x.p, from)) {
			t.Fatalf("block %d differs", to)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.pulls) != 4 || !slices.Equal(p.pulls[0], []string{"a", "b", "never"}) {
		t.Fatalf("pulls: %v", p.pulls)
	}
}
