// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// fleet is several P's and D's with one relay in between, and the expected content of each
// block of a D. Transfer ids repeat, as from a proxy that counts them.
type fleet struct {
	*world
	rnd    *rand.Rand
	ps     []*fleetP
	ds     []*fleetD
	serial int

	arrived, fromMemory, failed, former int
}

type fleetP struct {
	id     string
	cache  *mooncake.Cache
	client *transfer.Client
	sender *mooncake.Sender
	held   map[string]bool   // requests whose blocks are in use
	what   map[string]string // what each transfer id stands for now; "" while it is being pulled
	asked  map[string]bool   // transfer ids being pulled
	former map[string]bool   // transfer ids that an earlier life sent and this one does not know
}

type fleetD struct {
	life     int
	ports    transfer.TargetOptions
	cache    *mooncake.Cache
	target   *transfer.Target
	receiver *mooncake.Receiver
	slots    []fleetSlot // block s of both groups
	pulls    map[string]*fleetPull
}

type fleetSlot struct {
	pull, holds string
	filled      bool
}

type fleetPull struct {
	p       *fleetP
	id      string // of the transfer at P
	what    string
	slots   []int
	recalls bool // from memory
	former  bool // of an earlier life of p: it must fail
}

// fleetIDs transfer ids per P, of two blocks in each group; P's blocks for id i are
// 4i and 4i+1.
const fleetIDs = 8

func content(what string, group, index int, n uint64) []byte {
	return bytes.Repeat([]byte(fmt.Sprintf("%s/%d/%d ", what, group, index)), int(n))[:n]
}

func stamp(c *mooncake.Cache, b int, what string, index int) {
	for _, r := range c.Regions {
		copy(c.Bytes(r.Base+uint64(b)*r.Stride, r.Payload), content(what, r.Group, index, r.Payload))
	}
}

func (f *fleet) startP(p *fleetP) {
	p.client = transfer.New(transfer.Options{SettleTimeout: 50 * time.Millisecond})
	var err error
	p.sender, err = mooncake.NewSender(p.cache, mooncake.SenderOptions{
		Engine: mooncake.Engine{ID: p.id}, Transfer: p.client, Log: logger(), AbortTimeout: time.Second, RetryTimeout: 50 * time.Millisecond,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	if err := p.sender.Start(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	p.held, p.what = map[string]bool{}, map[string]string{}
	if p.asked == nil { // pulls of an earlier life may go on, and find this one
		p.asked = map[string]bool{}
	}
}

func (f *fleet) register() {
	addrs := map[string]string{}
	for _, p := range f.ps {
		addrs[p.id] = p.sender.Addr()
	}
	f.show(addrs)
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
	d.receiver, err = mooncake.NewReceiver(d.cache, mooncake.ReceiverOptions{
		Target: d.target, Log: logger(), Timeout: 3 * time.Second, FenceTimeout: 50 * time.Millisecond, ConnectTimeout: time.Second,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	for _, q := range d.pulls {
		f.forget(q)
	}
	d.slots, d.pulls = make([]fleetSlot, blocks), map[string]*fleetPull{}
	for s := range d.slots {
		f.release(d, s)
	}
}

// forget removes a pull from the model, which does not know what the relay keeps of it.
func (f *fleet) forget(q *fleetPull) {
	delete(q.p.asked, q.id)
	if !q.recalls {
		q.p.what[q.id] = ""
	}
}

func (f *fleet) release(d *fleetD, s int) {
	f.serial++
	d.slots[s] = fleetSlot{holds: fmt.Sprint("free ", f.serial)}
	stamp(d.cache, s, d.slots[s].holds, s)
}

// ask begins a pull: of a new prompt under an old id, or of one that the relay has.
func (f *fleet) ask() {
	p, d := f.ps[f.rnd.IntN(len(f.ps))], f.ds[f.rnd.IntN(len(f.ds))]
	i := f.rnd.IntN(fleetIDs)
	id := fmt.Sprint("xfer-", i)
	var slots []int
	for _, s := range f.rnd.Perm(blocks) {
		if d.slots[s].pull == "" && !d.slots[s].filled && len(slots) < 2 {
			slots = append(slots, s)
		}
	}
	if len(slots) < 2 || p.asked[id] {
		return
	}
	if p.former[id] && f.rnd.IntN(2) == 0 {
		f.recallFormer(p, d, id, slots)
		return
	}
	f.serial++
	request := fmt.Sprint("r", f.serial)
	q := &fleetPull{p: p, id: id, slots: slots, recalls: p.what[id] != "" && f.rnd.IntN(2) == 0}
	transfer := id
	if q.recalls {
		transfer, q.what = fmt.Sprint(id, "#", f.serial), p.what[id]
	} else {
		if p.held[id] {
			return // P has not given the blocks back
		}
		q.what = fmt.Sprint(p.id, " ", f.serial)
		for k := range 2 {
			stamp(p.cache, 4*i+k, q.what, k)
		}
		p.held[id], p.what[id] = true, ""
		delete(p.former, id)
		p.sender.Offer(id, id, [][]int{{4 * i, 4*i + 1}, {4 * i, 4*i + 1}})
	}
	p.asked[id] = true
	for k, s := range slots {
		d.slots[s] = fleetSlot{pull: request, holds: fmt.Sprint(q.what, "|", k)}
	}
	d.pulls[request] = q
	wanted := map[string]wire.Wanted{request: {TransferID: transfer, Blocks: [][]int{slots, slots}}}
	if err := d.receiver.Start(mooncake.Source{EngineID: "relay-" + p.id, Bootstrap: f.web.URL}, wanted); err != nil {
		f.t.Fatal(err)
	}
}

// recallFormer asks the relay for a transfer that an earlier life of P sent. The relay must not serve it.
func (f *fleet) recallFormer(p *fleetP, d *fleetD, id string, slots []int) {
	f.serial++
	request := fmt.Sprint("r", f.serial)
	delete(p.former, id)
	p.asked[id] = true
	for _, s := range slots {
		d.slots[s].pull = request
	}
	d.pulls[request] = &fleetPull{p: p, id: id, slots: slots, recalls: true, former: true}
	wanted := map[string]wire.Wanted{request: {TransferID: fmt.Sprint(id, "#", f.serial), Blocks: [][]int{slots, slots}}}
	if err := d.receiver.Start(mooncake.Source{EngineID: "relay-" + p.id, Bootstrap: f.web.URL}, wanted); err != nil {
		f.t.Fatal(err)
	}
}

// restartP ends a life of P. What the relay kept of it is gone.
func (f *fleet) restartP(p *fleetP) {
	former, dropped := map[string]bool{}, f.relay.Stats().Dropped
	for id, what := range p.what {
		if what != "" {
			former[id] = true
		}
	}
	p.sender.Close()
	p.client.Close()
	if f.rnd.IntN(2) == 0 {
		p.id += "'"
	}
	for _, d := range f.ds { // pulls that are under way find another P, or none
		for _, q := range d.pulls {
			if q.p == p {
				q.what = ""
			}
		}
	}
	f.startP(p)
	f.register()
	if len(former) > 0 {
		testkit.Eventually(f.t, "the relay notices", func() bool { return f.relay.Stats().Dropped > dropped })
	}
	p.former = former
}

func (f *fleet) step(busy bool) {
	if busy {
		f.ask()
		f.ask()
		switch f.rnd.IntN(80) {
		case 0: // other weights under the same engine id, sometimes
			f.restartP(f.ps[f.rnd.IntN(len(f.ps))])
		case 1:
			d := f.ds[f.rnd.IntN(len(f.ds))]
			d.receiver.Close()
			d.target.Close()
			f.startD(d)
		}
	}
	for _, p := range f.ps {
		for _, id := range p.sender.Finished() {
			delete(p.held, id)
			i, _ := strconv.Atoi(strings.TrimPrefix(id, "xfer-"))
			f.serial++
			for k := range 2 {
				stamp(p.cache, 4*i+k, fmt.Sprint("free at P ", f.serial), k)
			}
		}
	}
	for _, d := range f.ds {
		if busy && f.rnd.IntN(15) == 0 {
			for request := range d.pulls {
				d.receiver.Abort(request)
				break
			}
		}
		f.collect(d)
		f.compare(d)
	}
	time.Sleep(time.Millisecond)
}

func (f *fleet) collect(d *fleetD) {
	res := d.receiver.Results()
	d.target.Table().Observe()
	for _, request := range res.Received {
		q, why := d.pulls[request], res.Failed[request]
		delete(d.pulls, request)
		switch {
		case q.former && why == nil:
			f.t.Fatalf("%s: what an earlier life of P sent was served", request)
		case why != nil:
			if q.former {
				f.former++
			}
			f.failed++
			f.forget(q)
		case q.what == "":
			f.forget(q) // it arrived just before P's end
		default:
			f.arrived++
			if q.recalls {
				f.fromMemory++
			}
			delete(q.p.asked, q.id)
			q.p.what[q.id] = q.what
		}
		for _, s := range q.slots {
			if d.slots[s].pull = ""; why != nil || q.what == "" {
				f.release(d, s)
			} else {
				d.slots[s].filled = true
			}
		}
	}
}

func (f *fleet) compare(d *fleetD) {
	for s := range d.slots {
		slot := &d.slots[s]
		if slot.pull != "" {
			continue
		}
		what, index := slot.holds, s
		if w, k, ok := strings.Cut(slot.holds, "|"); ok {
			what = w
			index, _ = strconv.Atoi(k)
		}
		for _, r := range d.cache.Regions {
			got, want := d.cache.Bytes(r.Base+uint64(s)*r.Stride, r.Payload), content(what, r.Group, index, r.Payload)
			if !bytes.Equal(got, want) {
				f.t.Fatalf("block %d of group %d holds %.40q, must hold %.40q", s, r.Group, got, want)
			}
		}
		if slot.filled && f.rnd.IntN(6) == 0 {
			f.release(d, s)
		}
	}
}

// sawAll reports whether each kind of event that the test is about happened.
func (f *fleet) sawAll() bool {
	return f.arrived > 0 && f.fromMemory > 0 && f.failed > 0 && f.former > 0 && f.relay.Stats().Dropped > 0
}

// Several P's and D's transfer through one relay, with restarts, aborts, repeated transfer ids
// and pulls from memory in random order. D gets the KV that P had under that id when D asked,
// or the relay's copy of it from the same life of P. Blocks without a request do not change.
func TestFleetThroughTheRelay(t *testing.T) {
	t.Parallel() // it waits for deadlines
	for seed := range uint64(testkit.Volume(2)) {
		f := &fleet{world: newWorld(t, relay.Options{Timeout: time.Second, MemoryBytes: 1 << 20}), rnd: rand.New(rand.NewPCG(seed, 5))}
		f.sender.Close()
		for i := range 2 {
			p := &fleetP{id: fmt.Sprint("p", i), cache: memory(payload)}
			f.startP(p)
			f.ps = append(f.ps, p)
		}
		f.register()
		for range 2 {
			d := &fleetD{cache: memory(payload)}
			f.startD(d)
			f.ds = append(f.ds, d)
		}
		// Which events happen in 400 steps depends on the machine, too: continue until each has happened.
		end := time.Now().Add(30 * time.Second)
		for i := 0; i < 400 || !f.sawAll() && time.Now().Before(end); i++ {
			f.step(true)
		}
		for end := time.Now().Add(30 * time.Second); len(f.ds[0].pulls)+len(f.ds[1].pulls) > 0; {
			if f.step(false); time.Now().After(end) {
				t.Fatal("pulls are left")
			}
		}
		for _, d := range f.ds {
			d.receiver.Close()
			d.target.Close()
		}
		for _, p := range f.ps {
			p.sender.Close()
			p.client.Close()
		}
		t.Logf("seed %d: %d arrived, %d of them from memory, %d failed; %+v", seed, f.arrived, f.fromMemory, f.failed, f.relay.Stats())
		if !f.sawAll() {
			t.Fatal("something did not happen")
		}
	}
}
