// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"encoding/binary"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// dWorker names a worker of D, to distinguish the workers that pull one transfer. A pull carries neither D's engine id nor its pipeline
// stage. If D has one stage, the TP rank alone names the worker, so a D at a new address still counts as the same worker. If D has
// several stages, the address distinguishes them.
type dWorker struct {
	rank int
	host string // "" where D has one stage
	port int
}

func (p *pullAnswer) worker() dWorker {
	w := dWorker{rank: p.pull.TPRank}
	if p.perStage() {
		w.host, w.port = p.pull.Host, p.pull.Port
	}
	return w
}

// perStage reports whether each of D's pipeline stages pulls from this worker, which is so if D has several and P has another number.
func (p *pullAnswer) perStage() bool {
	return p.pull.PPSize > 1 && p.pull.PPSize != p.s.o.Self.PPSize
}

// needed returns how many workers of D must get the blocks from this worker: one per paired TP rank, or, if P and D have different
// pipelines, each of D's stages for each paired rank.
func (p *pullAnswer) needed() int {
	if p.perStage() {
		return len(p.paired) * p.pull.PPSize
	}
	return len(p.paired)
}

// delivery describes a push to one D worker: which blocks, and into which memory.
type delivery struct {
	host    string
	port    int
	memory  uint64     // hash of D's regions
	request string     // D's id
	blocks  uint64     // hash of D's block ids
	by      *zmtp.Peer // the connection of the pull
}

func (a *delivery) equal(b *delivery) bool {
	return a.host == b.host && a.port == b.port && a.memory == b.memory && a.request == b.request && a.blocks == b.blocks
}

func (p *pullAnswer) delivery(id string) delivery {
	return delivery{p.pull.Host, p.pull.Port, p.memory, id, hashBlocks(p.pull.Wanted[id].Blocks), p.peer}
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

// memory hashes the addresses and strides of D's regions.
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
	doneFor  = 30 * time.Second // how long a Sender remembers what it delivered of a transfer
	endedFor = 10 * time.Minute // how long it remembers that a transfer ended
	maxDone  = 4096             // ended transfers that it remembers; with more, it forgets the oldest
)

// doneTransfers remembers transfers that ended: every worker of D has the blocks, no D pulled in time, or P aborted. A later pull of
// such a transfer fails at once. (vLLM's P lets such a D wait for AbortTimeout, while D's blocks stay in use.) Exception: if D lost the
// connection before the last reply, D pulls the same blocks at the same addresses again; they are filled already, and P answers so.
// While D's connection stands, D has got the reply. Guarded by Sender.mu. The zero value is ready.
type doneTransfers struct {
	byID  map[string]*doneTransfer
	order []*doneTransfer // oldest first
}

type doneTransfer struct {
	id   string
	sent map[dWorker]delivery // nil unless all workers of D have the blocks
	at   time.Time
}

// stillConnected reports whether the connection of the earlier pull still stands. If it does, D has got the answer.
func (a *delivery) stillConnected() bool {
	select {
	case <-a.by.Done():
		return false
	default:
		return true
	}
}

func (d *doneTransfers) add(id string, sent map[dWorker]delivery) {
	if d.byID == nil {
		d.byID = make(map[string]*doneTransfer)
	}
	t := &doneTransfer{id, sent, time.Now()}
	d.byID[id] = t
	d.order = append(d.order, t)
	for len(d.order) > maxDone || time.Since(d.order[0].at) > endedFor {
		if old := d.order[0]; d.byID[old.id] == old {
			delete(d.byID, old.id)
		}
		d.order[0] = nil
		d.order = d.order[1:]
	}
}

// has reports whether the transfer id ended within the last endedFor. A transfer that P has begun again under the same id does not
// count.
func (d *doneTransfers) has(id string) bool {
	t := d.byID[id]
	return t != nil && time.Since(t.at) <= endedFor
}

func (d *doneTransfers) forget(id string) { delete(d.byID, id) }

// find returns the delivery to worker w of an earlier pull of the transfer id, if it equals a and is younger than doneFor; else nil.
func (d *doneTransfers) find(id string, w dWorker, a delivery) *delivery {
	t := d.byID[id]
	if t == nil || time.Since(t.at) > doneFor {
		return nil
	}
	if b, ok := t.sent[w]; ok && a.equal(&b) {
		return &b
	}
	return nil
}

// awaitDisconnect makes the pull answer its request id as filled once the connection of `before` has ended: the delivery with which an
// earlier pull filled the same blocks. P may notice that end only after D's second pull has come.
func (p *pullAnswer) awaitDisconnect(id string, before *delivery) {
	select {
	case <-before.by.Done():
	case <-p.ctx.Done():
		return
	}
	p.s.mu.Lock()
	p.lostReplies = append(p.lostReplies, id)
	p.s.mu.Unlock()
	p.wakeUp()
}
