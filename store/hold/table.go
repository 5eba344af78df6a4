// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/fair"
)

// MaxDebts bounds the commits that a Table expects although there are no slots to release. Further ones are not expected; Commit finds
// nothing for them.
const MaxDebts = 1 << 13

// Forever is longer than any copy takes: the life of a hold that its owner ends.
const Forever = 100 * 365 * 24 * time.Hour

// owing has the holds of one name and request whose commits have not all come.
//
// A single hold ends with its commit. With several holds a commit does not tell which of them it means. So all of them end together, once
// as many commits as holds have come: only then has each worker thread finished its copy.
type owing struct {
	holds []*Hold // oldest first
	came  int     // number of commits that came
}

// Table finds the holds of transfers by what their commits say, and by worker.
type Table struct {
	life time.Duration
	max  int

	byPrepared map[prepared]*owing
	byInstance map[int64]map[*Hold]struct{}
	former     map[uint64][]time.Time // transfers of an earlier server, by Transfer.Name: until when their commits may come
	last       uint64
	own        uint64          // number of holds so far that no commit can mean
	staged     map[int64]int64 // by instance: pool bytes that workers may write and have not committed
	transfers  fair.Shares     // holds with slots, by Transfer.By; their size is the staged bytes
	debts      fair.Shares     // holds without slots
	orphans    int
}

// NewTable returns a table in which MayBegin allows `most` holds. Each hold lives for `life` after its prepare, or after the end of its
// worker.
func NewTable(life time.Duration, most int) *Table {
	return &Table{
		life: life, max: most,
		byPrepared: make(map[prepared]*owing), byInstance: make(map[int64]map[*Hold]struct{}),
		former: make(map[uint64][]time.Time), staged: make(map[int64]int64),
	}
}

// MayBegin reports whether the user or address `by` may have one more transfer. If not, too many are in progress, and the caller must refuse
// it.
func (t *Table) MayBegin(by string) bool { return t.transfers.MayCount(by, t.max) }

// Number returns the next number in the order of prepares.
func (t *Table) Number() uint64 {
	t.last++
	return t.last
}

// Add adds a hold.
func (t *Table) Add(h *Hold) {
	h.number = t.Number()
	t.recognize(h.Transfer, []byte(h.RequestID))
	t.link(h)
}

// AddOwn adds a hold of this process itself. No commit can mean it, and it lives until it is removed.
func (t *Table) AddOwn(h *Hold) {
	t.own++
	h.Transfer.own = t.own
	t.Add(h)
	h.Deadline = h.Deadline.Add(Forever)
}

// AddFormer adds a hold of an earlier server's worker, in quarantine. With a name, a commit may come for it once the same transfer is begun
// here.
func (t *Table) AddFormer(h *Hold, name uint64) {
	if name != 0 {
		t.former[name] = append(t.former[name], h.Deadline.Add(t.life))
	}
	h.former = true
	t.AddLoan(h)
}

// FormerDue reports whether the deadline of any hold of an earlier server's worker is over.
func (t *Table) FormerDue(now time.Time) bool {
	return len(t.filter(func(h *Hold) bool { return h.former && !now.Before(h.Deadline) })) > 0
}

// AddLoan adds a hold that no commit ends. It lives until its deadline or its removal, and counts as in quarantine.
func (t *Table) AddLoan(h *Hold) {
	t.own++
	h.Transfer.own, h.orphan = t.own, true
	t.Add(h)
	t.orphans++
}

// Owe records that a commit of name and request may come for which there are no slots to release. It does nothing if name.By has its share
// of MaxDebts.
func (t *Table) Owe(name Transfer, requestID []byte, now time.Time) {
	if t.debts.MayCount(name.By, MaxDebts) {
		t.Add(&Hold{Transfer: name, RequestID: string(requestID), Deadline: now.Add(t.life)})
	}
}

// recognize finds out whether an earlier server began transfers of that name and request. If so, their commits may arrive here and are
// expected. Their slots still wait for the end of the quarantine.
func (t *Table) recognize(name Transfer, requestID []byte) {
	if len(t.former) == 0 || name.Load || name.own != 0 {
		return
	}
	hash := name.Name(requestID)
	for _, until := range t.former[hash] {
		t.link(&Hold{Transfer: name, RequestID: string(requestID), Deadline: until})
	}
	delete(t.former, hash)
}

func (t *Table) link(h *Hold) {
	o := t.byPrepared[h.prepared()]
	if o == nil {
		o = &owing{}
		t.byPrepared[h.prepared()] = o
	}
	o.holds = append(o.holds, h)
	if len(h.Slots) == 0 {
		t.debts.Add(h.Transfer.By, fair.Amount{Count: 1})
		return
	}
	t.transfers.Add(h.Transfer.By, fair.Amount{Count: 1})
	t.Count(&h.Transfer, h.Staged)
	of := t.byInstance[h.Transfer.Instance]
	if of == nil {
		of = make(map[*Hold]struct{})
		t.byInstance[h.Transfer.Instance] = of
	}
	of[h] = struct{}{}
}

// Remove removes h. If a commit came before that could have meant h, it counts as h's: the other holds wait for commits of their own.
func (t *Table) Remove(h *Hold) {
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
	if len(h.Slots) == 0 {
		t.debts.Add(h.Transfer.By, fair.Amount{Count: -1})
		return
	}
	t.unlist(h)
}

// unlist removes h from the holds with slots.
func (t *Table) unlist(h *Hold) {
	t.Count(&h.Transfer, -h.Staged)
	of := t.byInstance[h.Transfer.Instance]
	delete(of, h)
	if len(of) == 0 {
		delete(t.byInstance, h.Transfer.Instance)
	}
	t.transfers.Add(h.Transfer.By, fair.Amount{Count: -1})
	if h.orphan {
		t.orphans--
	}
}

// Count records that the worker of the transfer `of` may write n bytes more. The table itself counts the bytes that its holds stage.
func (t *Table) Count(of *Transfer, n int64) {
	if n == 0 {
		return
	}
	if t.staged[of.Instance] += n; t.staged[of.Instance] == 0 {
		delete(t.staged, of.Instance)
	}
	t.transfers.Add(of.By, fair.Amount{Size: n})
}

// StagedBy returns the bytes that the worker of the transfer `of` may write, and those that all workers of its user or address may write.
func (t *Table) StagedBy(of *Transfer) (worker, by int64) {
	return t.staged[of.Instance], t.transfers.Of(of.By).Size
}

// Share is the part of a pool that a worker, and all workers of its user or address together, may stage by evicting objects of others.
type Share struct{ Worker, By float64 }

// MayStage returns how many bytes the transfer `of` may stage, with the share `may` of a pool of `pool` bytes and chunks of `chunk` bytes.
// limit applies where staging evicts. first applies to the first chunk, which is allowed even if it is larger than the share. most applies
// where memory is free; in a pool of many chunks it leaves an eighth for other workers. counted is how many of these bytes the table counts
// already.
func (t *Table) MayStage(of *Transfer, counted, pool, chunk int64, may Share) (limit, first, most int64) {
	worker, by := t.StagedBy(of)
	worker, by = worker-counted, by-counted
	most = pool - by
	if rest := pool / 8; rest >= 8*chunk {
		most -= rest
	}
	first = int64(float64(pool)*may.By) - by
	limit = min(int64(float64(pool)*may.Worker)-worker, first)
	switch {
	case by == 0:
		first = pool
	case worker > 0:
		first = limit
	}
	return limit, first, most
}

// Commit records a commit of name and request. It removes and returns the holds that end with it: none while commits of other holds of the
// same name are expected. found is false if nothing of that name and request waits for a commit, as after a restart, or for a commit that
// was sent twice. late is true if any of the holds ended too late.
func (t *Table) Commit(name Transfer, requestID []byte) (ended []*Hold, found, late bool) {
	t.recognize(name, requestID)
	o := t.byPrepared[preparedAs(name, string(requestID))]
	if o == nil {
		return nil, false, false
	}
	for _, h := range o.holds {
		late = late || h.Late()
	}
	if o.came++; o.came < len(o.holds) {
		return nil, true, late
	}
	ended = slices.Clone(o.holds)
	for _, h := range ended {
		t.Remove(h)
	}
	return ended, true, late
}

// InProgress returns the holds with slots, oldest first.
func (t *Table) InProgress() []*Hold {
	return t.filter(func(h *Hold) bool { return len(h.Slots) > 0 })
}

// Keeps reports whether h is in the table and has its slots.
func (t *Table) Keeps(h *Hold) bool {
	_, keeps := t.byInstance[h.Transfer.Instance][h]
	return keeps
}

func older(a, b *Hold) int { return cmp.Compare(a.number, b.number) }

// filter returns the holds that f chooses, oldest first.
func (t *Table) filter(f func(*Hold) bool) (out []*Hold) {
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

// Orphans marks the transfers of an instance that is gone, and returns them, oldest first. Their commits publish nothing from now on, and
// their quarantine begins.
func (t *Table) Orphans(instance int64, now time.Time) []*Hold {
	of := slices.SortedFunc(maps.Keys(t.byInstance[instance]), older)
	for _, h := range of {
		if !h.orphan {
			h.orphan = true
			t.orphans++
		}
		if h.Transfer.own == 0 {
			h.Deadline = now.Add(t.life)
		}
	}
	return of
}

// EndQuarantine ends the quarantine of an instance's transfers at once, and returns the number of these transfers.
func (t *Table) EndQuarantine(instance int64, now time.Time) (n int) {
	for h := range t.byInstance[instance] {
		if h.orphan && h.Transfer.own == 0 {
			h.Deadline = now
			n++
		}
	}
	return n
}

// Expire removes the slots from holds whose deadline is over, and returns these slots as holds that are in no table. The hold itself stays
// and waits for its commit: a worker may be that slow, and its late commit must not end a later hold of the same name. With keepFormer,
// holds of an earlier server's workers do not expire.
func (t *Table) Expire(now time.Time, keepFormer bool) (ended []*Hold) {
	for hash, of := range t.former {
		if of = slices.DeleteFunc(of, now.After); len(of) == 0 {
			delete(t.former, hash)
		} else {
			t.former[hash] = of
		}
	}
	for _, h := range t.filter(func(h *Hold) bool { return !now.Before(h.Deadline) && !(keepFormer && h.former) }) {
		if len(h.Slots) == 0 {
			t.Remove(h)
			continue
		}
		t.unlist(h)
		ended = append(ended, &Hold{Slots: h.Slots, Reads: h.Reads})
		h.Slots, h.orphan, h.Deadline = nil, false, now.Add(t.life)
		keep := h.Transfer.own == 0 && t.debts.MayCount(h.Transfer.By, MaxDebts)
		t.debts.Add(h.Transfer.By, fair.Amount{Count: 1})
		if !keep {
			t.Remove(h)
		}
	}
	return ended
}

// Stats are figures of a Table.
type Stats struct {
	Transfers   int // holds with slots
	Quarantined int // of those, holds of detached workers
	Debts       int // commits that are expected without slots to release
}

// Stats returns the figures of the table.
func (t *Table) Stats() Stats {
	return Stats{Transfers: t.transfers.All().Count, Quarantined: t.orphans, Debts: t.debts.All().Count}
}

// Empty reports whether the table has no hold, debt or count at all.
func (t *Table) Empty() bool {
	return t.transfers.Empty() && t.debts.Empty() && t.orphans == 0 && len(t.byPrepared) == 0 && len(t.byInstance) == 0 &&
		len(t.former) == 0 && len(t.staged) == 0
}
