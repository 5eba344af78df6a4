// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A fleet is several P's and D's that live, die and come back, and what each block
// of a D must hold.
type fleet struct {
	t   *testing.T
	rnd *rand.Rand
	dir *directory
	web string

	ps   []*fleetP
	ds   []*fleetD
	made int

	arrived, failed, aborted, restarts int
}

// fleetP is a P in one of its lives. What it computes for block i of a transfer is
// kvOf(its life and the transfer, i).
type fleetP struct {
	name, id string
	life     int
	cache    *Cache
	client   *transfer.Client
	sender   *Sender
	gate     *gate // in front of the side channel
	free     []int
	held     map[string][]int // by request
	late     map[string][]int // D asks for them already: offered at some later step
}

// fleetD is a D in one of its lives. blocks says what each of its blocks must hold.
type fleetD struct {
	name     string
	life     int
	ports    transfer.TargetOptions
	cache    *Cache
	target   *transfer.Target
	receiver *Receiver
	blocks   []fleetBlock
	pulls    map[string]*fleetPull
}

type fleetBlock struct {
	pull   string // "" : free, or held after a pull that arrived
	holds  string // what it must hold, when it is not being filled: kvOf(holds, index)
	index  int
	filled bool // by a request that is still there
}

type fleetPull struct {
	p       *fleetP
	what    string
	blocks  []int
	pBlocks int
}

const fleetBlocks, fleetPayload = 40, 128

func newFleet(t *testing.T, seed uint64, ps, ds int) *fleet {
	f := &fleet{t: t, rnd: rand.New(rand.NewPCG(seed, 77)), dir: new(directory)}
	web := httptest.NewServer(f.dir)
	t.Cleanup(web.Close)
	f.web = web.URL
	for i := range ps {
		p := &fleetP{name: fmt.Sprint("P", i), cache: testCache(2, fleetBlocks, fleetPayload)}
		f.ps = append(f.ps, p)
		f.startP(p)
	}
	for i := range ds {
		d := &fleetD{name: fmt.Sprint("D", i), cache: testCache(2, fleetBlocks, fleetPayload)}
		f.ds = append(f.ds, d)
		f.startD(d)
	}
	t.Cleanup(func() {
		for _, d := range f.ds {
			d.receiver.Close()
			d.target.Close()
		}
		for _, p := range f.ps {
			p.sender.Close()
			p.client.Close()
		}
	})
	return f
}

// stamp writes what a block holds.
func stamp(c *Cache, b int, what string, index int) {
	for _, r := range c.Regions {
		copy(c.Bytes(r.Base+uint64(b)*r.Stride, r.Payload), kvOf(what, index, r.Payload))
	}
}

func (f *fleet) startP(p *fleetP) {
	p.life++
	if p.id = p.name; f.rnd.IntN(2) == 0 { // the engine id may stay
		p.id = fmt.Sprint(p.name, ".", p.life)
	}
	p.client = transfer.New(transfer.Options{SettleTimeout: 50 * time.Millisecond})
	var err error
	p.sender, err = NewSender(p.cache, SenderOptions{
		Engine: Engine{ID: p.id}, Transfer: p.client, Log: testLog(f.t),
		AbortTimeout: time.Second, RetryTimeout: 50 * time.Millisecond,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	if err := p.sender.Start(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	p.gate = newGate(f.t, strings.TrimPrefix(p.sender.Addr(), "tcp://"), f.rnd.IntN(2) == 0)
	p.free, p.held, p.late = nil, map[string][]int{}, map[string][]int{}
	for b := range fleetBlocks {
		p.free = append(p.free, b)
		stamp(p.cache, b, "free at P", b)
	}
	f.register()
}

// register shows each P in the directory, and a stalled one that will write late.
func (f *fleet) register() {
	text := ""
	for i, p := range f.ps {
		if p.gate != nil {
			text += fmt.Sprintf(`,"%d":{"engine_id":%q,"worker_addr":{"0":{"0":"tcp://%s"}}}`, i, p.id, p.gate.l.Addr())
		}
	}
	f.dir.mu.Lock()
	f.dir.text = "{" + strings.TrimPrefix(text, ",") + "}"
	f.dir.mu.Unlock()
}

func (f *fleet) startD(d *fleetD) {
	d.life++
	var err error
	if d.target, err = transfer.Listen(d.ports, transfer.NewTable()); err != nil {
		f.t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(d.target.Name())
	d.ports.HandshakePort, _ = strconv.Atoi(port)
	d.ports.DataPort = d.target.Descriptor().DataPort
	d.receiver, err = NewReceiver(d.cache, ReceiverOptions{
		Target: d.target, Log: testLog(f.t), Timeout: 2 * time.Second, UnknownTimeout: 200 * time.Millisecond,
		FenceTimeout: 50 * time.Millisecond, ConnectTimeout: time.Second,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	d.blocks, d.pulls = make([]fleetBlock, fleetBlocks), map[string]*fleetPull{}
	for b := range d.blocks {
		f.release(d, b)
	}
}

// release frees a block of D and fills it with a mark. A write into it is an error from then on.
func (f *fleet) release(d *fleetD, b int) {
	d.blocks[b] = fleetBlock{holds: fmt.Sprint("free in life ", d.life, " of ", d.name, " ", f.rnd.IntN(1<<30)), index: b}
	stamp(d.cache, b, d.blocks[b].holds, b)
}

// pull makes a prompt: P computes it now, later, or never; D asks.
func (f *fleet) pull() {
	p, d := f.ps[f.rnd.IntN(len(f.ps))], f.ds[f.rnd.IntN(len(f.ds))]
	n, more := 1+f.rnd.IntN(4), f.rnd.IntN(3)
	var blocks []int
	for _, b := range f.rnd.Perm(fleetBlocks) {
		if d.blocks[b].pull == "" && !d.blocks[b].filled && len(blocks) < n {
			blocks = append(blocks, b)
		}
	}
	if len(blocks) < n || len(p.free) < n+more {
		return
	}
	f.made++
	id := fmt.Sprint("x", f.made)
	q := &fleetPull{p: p, what: fmt.Sprint(p.name, ".", p.life, " ", id), blocks: blocks, pBlocks: n + more}
	own := p.free[:n+more]
	p.free = p.free[n+more:]
	switch f.rnd.IntN(10) {
	case 0: // never
		p.free = append(p.free, own...)
	case 1, 2, 3:
		p.sender.Expect(id, id)
		p.late[id] = own
	default:
		f.offer(p, id, q.what, own)
	}
	for i, b := range blocks {
		d.blocks[b] = fleetBlock{pull: id, holds: q.what, index: more + i}
	}
	d.pulls[id] = q
	if err := d.receiver.Start(Source{EngineID: p.id, Bootstrap: f.web}, map[string]wire.Wanted{id: {TransferID: id, Blocks: [][]int{blocks}}}); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleet) offer(p *fleetP, id, what string, own []int) {
	for i, b := range own {
		stamp(p.cache, b, what, i)
	}
	p.held[id] = own
	p.sender.Offer(id, id, [][]int{own})
}

// step lets things happen and compares.
func (f *fleet) step(busy bool) {
	if busy {
		f.pull()
		f.pull()
		switch f.rnd.IntN(60) {
		case 0:
			f.restartP(f.ps[f.rnd.IntN(len(f.ps))])
		case 1:
			f.restartD(f.ds[f.rnd.IntN(len(f.ds))])
		case 2, 3:
			f.ps[f.rnd.IntN(len(f.ps))].gate.budget.Store(int64(f.rnd.IntN(700)))
		case 4:
			f.register()
		}
	}
	for _, p := range f.ps {
		for id, own := range p.late {
			if f.rnd.IntN(4) == 0 || !busy {
				delete(p.late, id)
				f.offer(p, id, fmt.Sprint(p.name, ".", p.life, " ", id), own)
			}
		}
		for _, id := range p.sender.Finished() {
			for _, b := range p.held[id] {
				stamp(p.cache, b, "free at P", f.rnd.IntN(1<<30)) // a late push of this block sends wrong bytes
			}
			p.free = append(p.free, p.held[id]...)
			delete(p.held, id)
		}
	}
	for _, d := range f.ds {
		if busy && f.rnd.IntN(12) == 0 {
			for id := range d.pulls {
				d.receiver.Abort(id)
				break
			}
		}
		f.collect(d)
		f.compare(d)
	}
	time.Sleep(500 * time.Microsecond) // an engine computes
}

// collect takes the results of D's pulls: blocks of failed ones are given back.
func (f *fleet) collect(d *fleetD) {
	res := d.receiver.Results()
	d.target.Table().Observe()
	for _, id := range res.Received {
		q := d.pulls[id]
		delete(d.pulls, id)
		why := res.Failed[id]
		switch {
		case errors.Is(why, ErrAborted):
			f.aborted++
		case why != nil:
			f.failed++
		default:
			f.arrived++
		}
		for _, b := range q.blocks {
			if d.blocks[b].pull = ""; why != nil {
				f.release(d, b)
			} else {
				d.blocks[b].filled = true
			}
		}
	}
}

// compare looks at every block that is not being filled, and ends some requests.
func (f *fleet) compare(d *fleetD) {
	for b := range d.blocks {
		s := &d.blocks[b]
		if s.pull != "" {
			continue
		}
		for _, r := range d.cache.Regions {
			if got := d.cache.Bytes(r.Base+uint64(b)*r.Stride, r.Payload); !bytes.Equal(got, kvOf(s.holds, s.index, r.Payload)) {
				f.t.Fatalf("%s, life %d, block %d holds %.40q, must hold %.40q", d.name, d.life, b, got, kvOf(s.holds, s.index, r.Payload))
			}
		}
		if s.filled && f.rnd.IntN(6) == 0 {
			f.release(d, b)
		}
	}
}

func (f *fleet) restartP(p *fleetP) {
	f.restarts++
	p.sender.Close()
	p.client.Close()
	f.startP(p)
}

func (f *fleet) restartD(d *fleetD) {
	f.restarts++
	d.receiver.Close()
	d.target.Close()
	f.startD(d)
}

// Several P's and D's restart at random, with aborts, broken side channels, late offers and
// pulls that no P serves. One more P, the rogue, keeps every pull that it got and writes for
// it again and again. Each block of a D must hold the expected bytes at all times.
func TestFleet(t *testing.T) {
	for seed := range uint64(2) {
		f := newFleet(t, seed, 3, 3)
		var mu sync.Mutex
		var kept []*wire.Pull
		rogue := fakeP(t, func(_ *zmtp.Peer, p *wire.Pull) {
			mu.Lock()
			defer mu.Unlock()
			kept = append(kept, p)
		})
		f.ps[0].gate.l.Close() // the first P is the rogue: its pulls time out
		dead := f.ps[0]
		f.ps = f.ps[1:]
		dead.sender.Close()
		late := transfer.New(transfer.Options{MaxPeers: 16})
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		refused := 0
		stalled := map[string]bool{} // of the rogue's pulls, the transfers still in progress at D
		wg.Go(func() {
			garbage := bytes.Repeat([]byte{0xEE}, fleetPayload)
			for ctx.Err() == nil {
				mu.Lock()
				pulls := append([]*wire.Pull(nil), kept...)
				mu.Unlock()
				for _, p := range pulls {
					var batch []transfer.Entry
					for id, w := range p.Wanted {
						mu.Lock()
						now := stalled[id]
						mu.Unlock()
						if now { // it may still write: D waits for it
							continue
						}
						for _, b := range append([][]int{nil}, w.Blocks...) {
							for _, k := range b {
								for _, g := range p.Regions {
									batch = append(batch, transfer.Entry{Local: garbage, Remote: g.Base + uint64(k)*g.Stride})
								}
							}
						}
					}
					if len(batch) > 0 {
						err := late.Write(ctx, net.JoinHostPort(p.Host, strconv.Itoa(p.Port)), batch)
						var be *transfer.BatchError
						if errors.As(err, &be) {
							refused++
						} else if err == nil {
							t.Error("a late write was taken")
						}
					}
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
		rogues := 0
		for step := range 300 {
			if step%20 == 7 {
				d := f.ds[f.rnd.IntN(len(f.ds))]
				f.rogue(d, rogue, fmt.Sprint("rogue", seed, ".", step), &mu, stalled)
				rogues++
			}
			f.step(true)
			f.settleRogues(&mu, stalled)
		}
		end := time.Now().Add(60 * time.Second)
		for left := 1; left > 0; {
			f.step(false)
			f.settleRogues(&mu, stalled)
			left = 0
			for _, d := range f.ds {
				left += len(d.pulls)
			}
			for _, p := range f.ps {
				left += len(p.held) + len(p.late)
			}
			if time.Now().After(end) {
				t.Fatalf("seed %d: %d pulls and transfers are left", seed, left)
			}
		}
		stop()
		wg.Wait()
		late.Close()
		for _, p := range f.ps {
			testkit.Eventually(t, "P is idle", func() bool { p.sender.Finished(); s := p.sender.Stats(); return s.Transfers == 0 && s.Pulls == 0 })
			if len(p.free) != fleetBlocks {
				t.Errorf("seed %d: %s has %d of its blocks", seed, p.name, len(p.free))
			}
		}
		for _, d := range f.ds {
			testkit.Eventually(t, "D is idle", func() bool { s := d.receiver.Stats(); return s.Active == 0 && s.Windows <= 16 })
		}
		t.Logf("seed %d: %d pulls: %d arrived, %d failed, %d aborted; %d restarts, %d late batches of %d stalled pulls refused",
			seed, f.made, f.arrived, f.failed, f.aborted, f.restarts, refused, rogues)
		if f.arrived == 0 || f.aborted == 0 || f.restarts == 0 || refused == 0 {
			t.Fatalf("seed %d: something did not happen", seed)
		}
	}
}

// rogue lets D pull from the P that never answers.
func (f *fleet) rogue(d *fleetD, addr, id string, mu *sync.Mutex, stalled map[string]bool) {
	var blocks []int
	for _, b := range f.rnd.Perm(fleetBlocks) {
		if d.blocks[b].pull == "" && !d.blocks[b].filled && len(blocks) < 2 {
			blocks = append(blocks, b)
		}
	}
	if len(blocks) < 2 {
		return
	}
	for i, b := range blocks {
		d.blocks[b] = fleetBlock{pull: id, index: i}
	}
	d.pulls[id] = &fleetPull{blocks: blocks}
	mu.Lock()
	stalled[id] = true
	mu.Unlock()
	f.dir.mu.Lock()
	text := f.dir.text
	f.dir.text = fmt.Sprintf(`{"9":{"engine_id":"rogue","worker_addr":{"0":{"0":%q}}}}`, addr)
	f.dir.mu.Unlock()
	if err := d.receiver.Start(Source{EngineID: "rogue", Bootstrap: f.web}, map[string]wire.Wanted{id: {TransferID: id, Blocks: [][]int{blocks}}}); err != nil {
		f.t.Fatal(err)
	}
	for i := range 5000 {
		d.receiver.mu.Lock()
		_, known := d.receiver.mu.engines[Source{EngineID: "rogue", Bootstrap: f.web}]
		d.receiver.mu.Unlock()
		if known || i == 4999 {
			break
		}
		time.Sleep(100 * time.Microsecond)
	}
	f.dir.mu.Lock()
	f.dir.text = text
	f.dir.mu.Unlock()
}

// settleRogues removes pulls that have ended from stalled. The rogue writes for those.
func (f *fleet) settleRogues(mu *sync.Mutex, stalled map[string]bool) {
	mu.Lock()
	defer mu.Unlock()
	for id := range stalled {
		active := false
		for _, d := range f.ds {
			active = active || d.pulls[id] != nil
		}
		if !active {
			delete(stalled, id)
		}
	}
}
