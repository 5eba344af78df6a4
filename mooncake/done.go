package mooncake

import (
	"encoding/binary"
	"time"

	"github.com/zeebo/xxh3"
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
	memory  uint64 // which regions
	request string // D's
	blocks  uint64 // which ones, hashed
}

func (p *pulling) answered(id string) answered {
	return answered{p.pull.Host, p.pull.Port, p.memory, id, hashBlocks(p.pull.Wanted[id].Blocks)}
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
// have them. A D that lost the last reply asks again, for the same blocks at the same
// addresses: they are filled. Guarded by Sender.mu. The zero value is ready.
type doneTransfers struct {
	byID  map[string]*doneTransfer
	order []*doneTransfer // oldest first
}

type doneTransfer struct {
	id   string
	sent map[dWorker]answered
	at   time.Time
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

// has says whether what is asked for was pushed before.
func (d *doneTransfers) has(id string, w dWorker, a answered) bool {
	t := d.byID[id]
	if t == nil || time.Since(t.at) > doneFor {
		return false
	}
	b, ok := t.sent[w]
	return ok && a == b
}
