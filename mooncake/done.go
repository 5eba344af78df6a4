package mooncake

import (
	"encoding/binary"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// dWorker names a worker of D among those that pull one transfer. A pull says neither
// D's engine nor its pipeline stage, so where D has one stage the TP rank is the
// name: a D that came back at another address is the same worker. Where it has more,
// each stage has an address of its own.
type dWorker struct {
	rank int
	host string // "" where D has one stage
	port int
}

func (p *pulling) worker() dWorker {
	w := dWorker{rank: p.pull.TPRank}
	if p.perStage() {
		w.host, w.port = p.pull.Host, p.pull.Port
	}
	return w
}

// perStage says whether each of D's pipeline stages pulls from this worker.
func (p *pulling) perStage() bool {
	return p.pull.PPSize > 1 && p.pull.PPSize != p.s.o.Self.PPSize
}

// needed is how many workers of D must have the blocks: one per paired TP rank, and
// if the pipelines differ, each of D's stages.
func (p *pulling) needed() int {
	if p.perStage() {
		return len(p.paired) * p.pull.PPSize
	}
	return len(p.paired)
}

// answered is what was pushed: to whom, and where.
type answered struct {
	host    string
	port    int
	memory  uint64     // which regions
	request string     // D's
	blocks  uint64     // which ones, hashed
	by      *zmtp.Peer // who asked
}

func (a *answered) equal(b *answered) bool {
	return a.host == b.host && a.port == b.port && a.memory == b.memory && a.request == b.request && a.blocks == b.blocks
}

func (p *pulling) answered(id string) answered {
	return answered{p.pull.Host, p.pull.Port, p.memory, id, hashBlocks(p.pull.Wanted[id].Blocks), p.peer}
}

func hashBlocks(blocks [][]int) uint64 {
	var h xxh3.Hasher
	var b [8]byte
	for _, ids := range blocks {
		for _, id := range append([]int{len(ids)}, ids...) {
			binary.LittleEndian.PutUint64(b[:], uint64(id))
			_, _ = h.Write(b[:]) // never fails
		}
	}
	return h.Sum64()
}

// memory hashes where D's regions are.
func (plan *PushPlan) memory() uint64 {
	var h xxh3.Hasher
	var b [8]byte
	for i := range plan.pairs {
		for _, v := range []uint64{plan.pairs[i].d.Base, plan.pairs[i].d.Stride} {
			binary.LittleEndian.PutUint64(b[:], v)
			_, _ = h.Write(b[:]) // never fails
		}
	}
	return h.Sum64()
}

const (
	doneFor = 30 * time.Second // how long a finished transfer is remembered
	maxDone = 4096             // how many are
)

// doneTransfers remembers transfers whose blocks were freed because all who pull them
// have them. A D that lost the last reply, with its connection, asks again, for the same
// blocks at the same addresses: they are filled. A D whose connection stands has heard. Guarded by Sender.mu. The zero value is ready.
type doneTransfers struct {
	byID  map[string]*doneTransfer
	order []*doneTransfer // oldest first
}

type doneTransfer struct {
	id   string
	sent map[dWorker]answered
	at   time.Time
}

// heard says whether D has the answer: its connection has not broken since.
func (a *answered) heard() bool {
	select {
	case <-a.by.Done():
		return false
	default:
		return true
	}
}

func (d *doneTransfers) add(id string, sent map[dWorker]answered) {
	if d.byID == nil {
		d.byID = make(map[string]*doneTransfer)
	}
	t := &doneTransfer{id, sent, time.Now()}
	d.byID[id] = t
	d.order = append(d.order, t)
	for len(d.order) > maxDone || time.Since(d.order[0].at) > doneFor {
		if old := d.order[0]; d.byID[old.id] == old {
			delete(d.byID, old.id)
		}
		d.order[0] = nil
		d.order = d.order[1:]
	}
}

func (d *doneTransfers) forget(id string) { delete(d.byID, id) }

// find returns the answer to an earlier pull of the same, or nil.
func (d *doneTransfers) find(id string, w dWorker, a answered) *answered {
	t := d.byID[id]
	if t == nil || time.Since(t.at) > doneFor {
		return nil
	}
	if b, ok := t.sent[w]; ok && a.equal(&b) {
		return &b
	}
	return nil
}

// awaitUnheard answers a request when the connection that had its answer turns out to
// be broken: P may see that after D has asked again.
func (p *pulling) awaitUnheard(id string, before *answered) {
	select {
	case <-before.by.Done():
	case <-p.ctx.Done():
		return
	}
	p.s.mu.Lock()
	p.unheard = append(p.unheard, id)
	p.s.mu.Unlock()
	p.poke()
}
