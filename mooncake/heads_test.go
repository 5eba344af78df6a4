// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// order is how a rank's tensor lies: its shape by what the axes count, and the axes
// from the outermost in memory to the innermost.
type order struct {
	name  string
	axes  string // b blocks, p keys and values, t tokens, h heads, e elements of a head
	outer string
	slice bool // whether engines of unequal TP size can exchange blocks
}

var orders = []order{
	{"heads first", "bhte", "bhte", true},
	{"tokens first", "bthe", "bthe", false},
	{"tokens first, lying heads first", "bthe", "bhte", true},
	{"heads first, lying tokens first", "bhte", "bthe", false},
	{"FlashInfer", "bpthe", "bpthe", false},
	{"FlashInfer, heads first", "bphte", "bphte", false},
	{"heads before keys and values", "bhpte", "bhpte", true},
}

const headsInAll, tokensOfBlock, blocksOfRank, elements = 4, 3, 6, 2

// headTensor is one rank's tensor; visit calls f for each element with what it is: the
// head counts through all ranks.
func headTensor(o order, rank, size int) (x Tensor, visit func(mem []byte, f func(what [5]int, at *byte))) {
	extent := map[byte]int{'b': blocksOfRank, 'p': 2, 't': tokensOfBlock, 'h': max(1, headsInAll/size), 'e': elements}
	stride := map[byte]int{}
	n := 1
	for i := len(o.outer) - 1; i >= 0; i-- {
		stride[o.outer[i]] = n
		n *= extent[o.outer[i]]
	}
	x = Tensor{Layer: "l", Element: 1}
	for i := range o.axes {
		a := o.axes[i]
		x.Shape, x.Stride = append(x.Shape, extent[a]), append(x.Stride, stride[a])
		if a == 'h' {
			x.HeadAxis = i
		}
	}
	first := rank * headsInAll / size
	visit = func(mem []byte, f func(what [5]int, at *byte)) {
		planes := 1
		if strings.Contains(o.axes, "p") {
			planes = 2
		}
		for b := range extent['b'] {
			for p := range planes {
				for t := range extent['t'] {
					for h := range extent['h'] {
						for e := range extent['e'] {
							f([5]int{b, p, t, first + h, e}, &mem[b*stride['b']+p*stride['p']+t*stride['t']+h*stride['h']+e*stride['e']])
						}
					}
				}
			}
		}
	}
	return x, visit
}

// value is what P computes for an element of a block.
func value(what [5]int) byte {
	b, p, t, h, e := what[0], what[1], what[2], what[3], what[4]
	return byte(1 + e + elements*(h+headsInAll*(t+tokensOfBlock*(p+2*b))))
}

// P and D of equal and unequal TP size, with tensors in every order: each head of each
// token is where D's rank wants it, or the pull is refused with the reason.
func TestHeadsOfUnequalTP(t *testing.T) {
	f := func(o order, pSize, dSize int) {
		t.Helper()
		dir := new(directory)
		web := httptest.NewServer(dir)
		defer web.Close()
		client := transfer.New(transfer.Options{})
		defer client.Close()
		var addrs []string
		build := func(rank, size int) (*Cache, []byte, func([]byte, func([5]int, *byte))) {
			x, visit := headTensor(o, rank, size)
			n := 1
			for _, e := range x.Shape {
				n *= e
			}
			mem := make([]byte, n)
			c, err := NewCache([][]byte{mem}, []Tensor{x}, Cache{Kinds: []GroupKind{Attention}, KVHeads: headsInAll})
			if err != nil {
				t.Fatal(err)
			}
			return c, mem, visit
		}
		for rank := range pSize {
			c, mem, visit := build(rank, pSize)
			visit(mem, func(what [5]int, at *byte) { *at = value(what) })
			s, err := NewSender(c, SenderOptions{Engine: Engine{ID: "e"}, Self: Peer{TPRank: rank, TPSize: pSize}, Transfer: client, Log: testLog(t)})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			s.Offer("p", "x", [][]int{{1, 4}})
			addrs = append(addrs, s.Addr())
		}
		dir.show("e", addrs...)
		for rank := range dSize {
			c, mem, visit := build(rank, dSize)
			if !o.slice && rank == 1 {
				c.Unsliced = "" // as a D that does not check: P refuses
			}
			target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
			if err != nil {
				t.Fatal(err)
			}
			r, err := NewReceiver(c, ReceiverOptions{Self: Peer{TPRank: rank, TPSize: dSize}, Target: target, Log: testLog(t), Timeout: 20 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			failed, err := r.Pull(t.Context(), Source{EngineID: "e", Bootstrap: web.URL}, map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{2, 3}}}})
			if err != nil {
				t.Fatal(err)
			}
			target.Table().Observe()
			if why := failed["d"]; (why == nil) != (o.slice || pSize == dSize) {
				t.Errorf("%s, TP %d to %d, rank %d: %v", o.name, pSize, dSize, rank, why)
			} else if why != nil && !strings.Contains(why.Error(), "do not lie one after the other") {
				t.Errorf("%s: no reason: %v", o.name, why)
			} else if why == nil {
				wrong := 0
				visit(mem, func(what [5]int, at *byte) {
					want := byte(0)
					if from := map[int]int{2: 1, 3: 4}[what[0]]; from > 0 {
						what[0] = from
						want = value(what)
					}
					if *at != want {
						wrong++
					}
				})
				if wrong > 0 {
					t.Errorf("%s, TP %d to %d, rank %d: %d elements are wrong", o.name, pSize, dSize, rank, wrong)
				}
			}
			r.Close()
			target.Close()
		}
	}
	for _, o := range orders {
		f(o, 1, 1)
		f(o, 2, 2)
		f(o, 1, 2)
		f(o, 2, 1)
		f(o, 4, 2)
		f(o, 1, 4)
	}
}

// A tensor without a head axis can be exchanged only between engines of equal TP size.
func TestUnknownHeadsAreNotCut(t *testing.T) {
	x, _ := headTensor(orders[0], 0, 1)
	x.HeadAxis = 0
	mem := make([]byte, 1024)
	c, err := NewCache([][]byte{mem}, []Tensor{x}, Cache{Kinds: []GroupKind{Attention}, KVHeads: headsInAll})
	if err != nil {
		t.Fatal(err)
	}
	half := c.Regions[0]
	half.Payload, half.Stride = half.Payload/2, half.Stride/2
	if _, err := PlanPush(c, Peer{TPSize: 1}, Peer{TPSize: 2}, []wire.Region{half}); err == nil || !strings.Contains(err.Error(), "not known") {
		t.Fatal(err)
	}
	if _, err := PlanPush(c, Peer{TPSize: 1}, Peer{TPSize: 1}, c.Regions); err != nil {
		t.Fatal(err)
	}
}
