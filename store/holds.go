package store

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
)

// Transfer names, with a request id, one prepare and its commit. The chunk hash at
// the end covers all tokens.
type Transfer struct {
	Instance int64
	By       string // who answers for the instance: a user or an address
	Shard    Shard
	From, To int     // chunks
	Last     kv.Hash // of chunk To-1
	Load     bool

	// Numbers what no commit can name: the transfers that this process carries out,
	// and those of an earlier server.
	own uint64
}

// nameHash stands for a transfer's name and request in the pool's index, so that a
// server that takes over can tell whose commit arrives there. It is never 0.
func nameHash(name Transfer, requestID []byte) uint64 {
	var b [128]byte
	le := binary.LittleEndian
	le.PutUint64(b[0:], uint64(name.Instance))
	le.PutUint64(b[8:], uint64(name.Shard.World))
	le.PutUint64(b[16:], uint64(name.Shard.Index))
	le.PutUint64(b[24:], uint64(name.From))
	le.PutUint64(b[32:], uint64(name.To))
	copy(b[40:], name.Last[:])
	copy(b[72:], name.Shard.Namespace[:])
	return max(xxh3.HashSeed(requestID, xxh3.Hash(b[:])), 1)
}

// hold is a transfer in progress: a worker was told where slots are. One without
// slots is a debt only: a prepare that was refused, or whose slots were taken
// back, and whose commit may still come.
type hold struct {
	number    uint64 // in order of the prepares
	transfer  Transfer
	requestID string
	slots     []pool.Slot
	bytes     int64 // of the slots
	staged    int64 // what they take of the pool, of a store
	deadline  time.Time
	orphan    bool // the worker unregistered, was reaped or registered anew
}

// maxDebts bounds the commits that are waited for without slots to give back.
const maxDebts = 1 << 13

// prepared names what a commit can tell apart: LMCache sends the key of the
// prepare again, request id included, and nothing else.
type prepared struct {
	transfer  Transfer
	requestID string
}

// owing are the prepares of one name and request whose commits have not all come.
//
// With one of them, its commit ends it. With several, nobody knows which one a
// commit speaks of, so nothing ends before as many commits came as there are
// holds: only then has each worker thread finished its copy.
type owing struct {
	holds []*hold // oldest first
	came  int     // commits
}

// tally counts holds.
type tally struct {
	slots int // those with slots
	debts int // those without
}

// holds finds transfers by what their commits say, and by worker.
type holds struct {
	byPrepared map[prepared]*owing
	byInstance map[int64]map[*hold]struct{}
	former     map[uint64][]time.Time // transfers of an earlier server, by the hash of their names; until when commits may come
	last       uint64
	of         map[string]tally // by Transfer.By; the sum of all is all
	all        tally

	// Pool bytes that workers were told to write and did not commit.
	staged   map[int64]int64  // by instance
	stagedBy map[string]int64 // by Transfer.By
	orphans  int
}

func (t *holds) init() {
	t.byPrepared = make(map[prepared]*owing)
	t.byInstance = make(map[int64]map[*hold]struct{})
	t.former = make(map[uint64][]time.Time)
	t.of = make(map[string]tally)
	t.staged = make(map[int64]int64)
	t.stagedBy = make(map[string]int64)
}

func (h *hold) prepared() prepared { return prepared{h.transfer, h.requestID} }

func (t *holds) add(h *hold) {
	t.last++
	h.number = t.last
	t.recognize(h.transfer, []byte(h.requestID))
	t.link(h)
}

// recognize finds out whether an earlier server began transfers of that name and
// request: their commits may arrive here, and are owed. Their slots wait for the
// end of the quarantine all the same.
func (t *holds) recognize(name Transfer, requestID []byte) {
	if len(t.former) == 0 || name.Load || name.own != 0 {
		return
	}
	hash := nameHash(name, requestID)
	for _, until := range t.former[hash] {
		t.link(&hold{transfer: name, requestID: string(requestID), deadline: until})
	}
	delete(t.former, hash)
}

func (t *holds) link(h *hold) {
	o := t.byPrepared[h.prepared()]
	if o == nil {
		o = &owing{}
		t.byPrepared[h.prepared()] = o
	}
	o.holds = append(o.holds, h)
	if len(h.slots) == 0 {
		t.tally(h, tally{debts: 1})
		return
	}
	t.tally(h, tally{slots: 1})
	t.count(&h.transfer, h.staged)
	of := t.byInstance[h.transfer.Instance]
	if of == nil {
		of = make(map[*hold]struct{})
		t.byInstance[h.transfer.Instance] = of
	}
	of[h] = struct{}{}
}

// remove forgets h. A commit that came before and could have meant h did: what is
// left in the group waits for commits of its own.
func (t *holds) remove(h *hold) {
	o := t.byPrepared[h.prepared()]
	for i := range o.holds {
		if o.holds[i] == h {
			o.holds = append(o.holds[:i], o.holds[i+1:]...)
			break
		}
	}
	o.came = max(0, o.came-1)
	if len(o.holds) == 0 {
		delete(t.byPrepared, h.prepared())
	}
	if len(h.slots) == 0 {
		t.tally(h, tally{debts: -1})
		return
	}
	t.unlist(h)
}

// count notes that the worker of a transfer may write n bytes more.
func (t *holds) count(of *Transfer, n int64) {
	if n == 0 {
		return
	}
	if t.staged[of.Instance] += n; t.staged[of.Instance] == 0 {
		delete(t.staged, of.Instance)
	}
	if t.stagedBy[of.By] += n; t.stagedBy[of.By] == 0 {
		delete(t.stagedBy, of.By)
	}
}

// tally counts what h's user or address has more.
func (t *holds) tally(h *hold, more tally) {
	of := t.of[h.transfer.By]
	of.slots, of.debts = of.slots+more.slots, of.debts+more.debts
	t.all.slots, t.all.debts = t.all.slots+more.slots, t.all.debts+more.debts
	if of == (tally{}) {
		delete(t.of, h.transfer.By)
	} else {
		t.of[h.transfer.By] = of
	}
}

// mayHave reports whether who has own of all may have one more, of limit: each may
// have half of what the others leave.
func mayHave(own, all, limit int) bool {
	return all < limit && own < max(1, (limit-(all-own))/2)
}

// busyLocked reports whether a transfer must be declined because too many are in
// progress.
func (s *Store) busyLocked(name *Transfer) bool {
	return s.mu.closed || !mayHave(s.mu.holds.of[name.By].slots, s.mu.holds.all.slots, s.opts.MaxHolds)
}

// unlist forgets that h keeps slots.
func (t *holds) unlist(h *hold) {
	t.count(&h.transfer, -h.staged)
	of := t.byInstance[h.transfer.Instance]
	delete(of, h)
	if len(of) == 0 {
		delete(t.byInstance, h.transfer.Instance)
	}
	t.tally(h, tally{slots: -1})
	if h.orphan {
		t.orphans--
	}
}

// commit notes a commit of name and request. It returns the holds that end with
// it: none while others of the same name are waited for. Found is false when
// nothing of that name and request waits for a commit: after a restart, or for a
// commit that was sent twice.
func (t *holds) commit(name Transfer, requestID []byte) (ended []*hold, out Committed) {
	t.recognize(name, requestID)
	o := t.byPrepared[prepared{name, string(requestID)}]
	if o == nil {
		return nil, Committed{}
	}
	for _, h := range o.holds {
		out.Late = out.Late || h.late()
	}
	out.Found = true
	if o.came++; o.came < len(o.holds) {
		return nil, out
	}
	return append(ended, o.holds...), out
}

// late reports whether the commit of h comes too late for anything to become
// visible.
func (h *hold) late() bool { return h.orphan || len(h.slots) == 0 && !h.transfer.Load }

func older(a, b *hold) int { return cmp.Compare(a.number, b.number) }

// which returns the holds that f chooses, oldest first.
func (t *holds) which(f func(*hold) bool) (out []*hold) {
	for _, o := range t.byPrepared {
		for _, h := range o.holds {
			if f(h) {
				out = append(out, h)
			}
		}
	}
	slices.SortFunc(out, older)
	return out
}

// oweLocked notes that a commit of name and request may come for which there are
// no slots to give back. Beyond the share of name.By in maxDebts none is noted.
func (s *Store) oweLocked(name Transfer, requestID []byte, until time.Time) {
	if mayHave(s.mu.holds.of[name.By].debts, s.mu.holds.all.debts, maxDebts) {
		s.mu.holds.add(&hold{transfer: name, requestID: string(requestID), deadline: until})
	}
}

// newHold is a transfer whose worker knows objects, all of them held in the pool
// already.
func (s *Store) newHold(name Transfer, requestID []byte, objects []object) *hold {
	h := &hold{
		transfer: name, requestID: string(requestID), slots: make([]pool.Slot, len(objects)),
		deadline: time.Now().Add(s.opts.Quarantine),
	}
	for i, o := range objects {
		h.slots[i] = o.slot
		h.bytes += o.bytes
		if !name.Load {
			h.staged += s.mu.pool.Round(o.bytes)
		}
	}
	return h
}

// end gives back the slots of a hold that is no longer in the table: the worker does
// not touch them any more. Staged ones become resident with publish, else they are
// dropped. It works in batches, tails first, so that heads are the more recently used
// and a chunk is a hit only once all before it are. It returns the chunks that became
// resident.
func (s *Store) end(h *hold, publish bool) (published int) {
	for to := len(h.slots); to > 0; to -= batch {
		published += s.endSome(h, max(0, to-batch), to, publish)
	}
	return published
}

func (s *Store) endSome(h *hold, from, to int, publish bool) int {
	s.lock()
	defer s.unlock()
	if s.mu.closed {
		return 0
	}
	return s.giveBackLocked(h, from, to, publish)
}

func (s *Store) giveBackLocked(h *hold, from, to int, publish bool) (published int) {
	for i := to - 1; i >= from; i-- {
		slot := h.slots[i]
		if s.mu.pool.StateOf(slot) == pool.Staged {
			if publish {
				s.mu.pool.Commit(slot)
				s.mu.n.StoredChunks++
				s.mu.n.StoredBytes += uint64(s.mu.pool.Length(slot))
				s.touchLocked(slot)
				s.unsummedLocked(slot)
				published++
				continue
			}
			s.dropLocked(slot, Failed)
		}
		s.mu.pool.Unhold(slot)
		s.touchLocked(slot)
	}
	return published
}

// Detach says that a worker instance unregistered, fell silent or registered
// anew. What it had reserved and not committed is never served; the memory that
// it may still touch stays out of use until its late commit or the end of the
// quarantine. It returns the number of transfers left in quarantine.
func (s *Store) Detach(instance int64) int {
	of := s.orphan(instance)
	for _, h := range of {
		s.dropKeys(h, Failed, pool.Staged)
	}
	return len(of)
}

// orphan marks the transfers of an instance, oldest first: their commits publish
// nothing from now on.
func (s *Store) orphan(instance int64) []*hold {
	s.lock()
	defer s.unlock()
	of := slices.SortedFunc(maps.Keys(s.mu.holds.byInstance[instance]), older)
	for _, h := range of {
		if !h.orphan {
			h.orphan = true
			s.mu.holds.orphans++
		}
		if h.transfer.own == 0 {
			h.deadline = time.Now().Add(s.opts.Quarantine)
		}
	}
	return of
}

// dropKeys drops the keys of what a transfer holds in one of these states, a batch at
// a time, for as long as it holds it. It returns their number.
func (s *Store) dropKeys(h *hold, why Reason, states ...pool.State) (n int) {
	for from, more := 0, true; more; from += dropBatch {
		var dropped int
		dropped, more = s.dropSome(h, from, why, states)
		n += dropped
	}
	return n
}

func (s *Store) dropSome(h *hold, from int, why Reason, states []pool.State) (n int, more bool) {
	s.lock()
	defer s.unlock()
	if _, holds := s.mu.holds.byInstance[h.transfer.Instance][h]; !holds || s.mu.closed {
		return 0, false
	}
	to := min(from+dropBatch, len(h.slots))
	for _, slot := range h.slots[from:to] {
		if slices.Contains(states, s.mu.pool.StateOf(slot)) {
			s.dropLocked(slot, why)
			n++
		}
	}
	return n, to < len(h.slots)
}

// expire ends holds whose time is over. A worker may be slower than that: its late
// commit still must not end a later hold of the same name.
func (s *Store) expire(now time.Time) {
	for _, h := range s.expired(now) {
		s.end(h, false)
	}
}

// expired takes the slots of holds whose time is over. What is left of them waits for
// its commit.
func (s *Store) expired(now time.Time) (ended []*hold) {
	s.lock()
	defer s.unlock()
	for hash, of := range s.mu.holds.former {
		if of = slices.DeleteFunc(of, now.After); len(of) == 0 {
			delete(s.mu.holds.former, hash)
		} else {
			s.mu.holds.former[hash] = of
		}
	}
	for _, h := range s.mu.holds.which(func(h *hold) bool { return !now.Before(h.deadline) }) {
		if len(h.slots) == 0 {
			s.mu.holds.remove(h)
			continue
		}
		s.mu.n.HoldsExpired++
		s.mu.holds.unlist(h)
		ended = append(ended, &hold{slots: h.slots})
		h.slots, h.orphan, h.deadline = nil, false, now.Add(s.opts.Quarantine)
		keep := h.transfer.own == 0 && mayHave(s.mu.holds.of[h.transfer.By].debts, s.mu.holds.all.debts, maxDebts)
		s.mu.holds.tally(h, tally{debts: 1})
		if !keep {
			s.mu.holds.remove(h)
		}
	}
	return ended
}
