package mooncake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// SenderStats are counters since NewSender, but for the first three.
type SenderStats struct {
	Transfers int64 // known or asked for now
	Pulls     int64 // waiting or running now
	Ready     int64 // transfers whose blocks wait for a pull now

	Pushed        int64 // batches written
	Bytes         int64 // written
	Descriptors   int64 // written, before the transfer engine merges them
	FailedPushes  int64
	FailedPulls   int64 // requests answered as failed
	Expired       int64 // requests that nobody pulled in time
	Refused       int64 // pulls answered StatusError
	Disconnected  int64 // pulls that ended because D went away
	LayoutMisses  int64
	PlanningNanos int64 // from a pull's last byte to its first one pushed, without waiting for P
	PushingNanos  int64 // in the transfer engine
}

type senderStats struct {
	failedPulls, expired, refused, disconnected, layoutMisses atomic.Int64
}

// Stats returns the counters.
func (s *Sender) Stats() SenderStats {
	s.mu.Lock()
	n, ready := int64(len(s.mu.transfers)), int64(0)
	for _, e := range s.mu.transfers {
		if e.ready {
			ready++
		}
	}
	s.mu.Unlock()
	return SenderStats{
		Transfers: n, Pulls: int64(s.gate.Len()), Ready: ready,
		Pushed: s.push.pushed.Load(), Bytes: s.push.bytes.Load(), Descriptors: s.push.descriptors.Load(),
		FailedPushes: s.push.failed.Load(), FailedPulls: s.stats.failedPulls.Load(),
		Expired: s.stats.expired.Load(), Refused: s.stats.refused.Load(), Disconnected: s.stats.disconnected.Load(),
		LayoutMisses: s.stats.layoutMisses.Load(), PlanningNanos: s.push.planning.Load(), PushingNanos: s.push.pushing.Load(),
	}
}

// pulling is one pull being answered. Owned by its goroutine but for wake.
type pulling struct {
	s       *Sender
	peer    *zmtp.Peer
	pull    *Pull
	plan    *PushPlan
	paired  []int         // D's TP ranks that pull from this worker
	wake    chan struct{} // cap 1
	ticket  *Ticket
	ctx     context.Context // ends with P, with D's connection, and when the pull makes room
	cancel  context.CancelCauseFunc
	waiting map[string]*sending // by D's request id
	memory  uint64              // of D, hashed
	again   []string            // filled by an earlier pull, whose answer D did not hear
	unheard []string            // the same, found out later; guarded by Sender.mu
	empty   []string            // requests without a transfer id
	unknown map[string]bool     // of them, not yet P's
	spent   time.Duration       // planning
}

func (p *pulling) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// handle takes one message; it runs on the peer's reading goroutine.
func (s *Sender) handle(peer *zmtp.Peer, m zmtp.Message) {
	if len(m) != 1 {
		s.refuse(peer, fmt.Errorf("%w: %d frames instead of one", ErrMessage, len(m)))
		return
	}
	start := time.Now()
	pull, err := DecodePull(m[0], 0)
	if err != nil {
		s.refuse(peer, err)
		return
	}
	p := &pulling{s: s, peer: peer, pull: pull, wake: make(chan struct{}, 1)}
	p.ctx, p.cancel = context.WithCancelCause(s.ctx)
	if p.ticket, err = s.gate.Enter(PeerKey(peer, pull.Host, pull.Port), len(m[0]), p.cancel); err != nil {
		p.cancel(nil)
		s.refuse(peer, err)
		return
	}
	p.spent = time.Since(start)
	end := s.conns.Begin(peer)
	s.wg.Go(func() {
		defer end()
		defer p.ticket.Leave()
		defer p.cancel(nil)
		p.serve()
	})
}

// PeerKey names the D worker of a pull, for shares: from where it speaks and where it
// wants its blocks.
func PeerKey(peer *zmtp.Peer, host string, port int) string {
	from, _, err := net.SplitHostPort(peer.RemoteAddr().String())
	if err != nil {
		from = peer.RemoteAddr().String()
	}
	return from + " " + net.JoinHostPort(host, strconv.Itoa(port))
}

// refuse ends a pull with an error.
func (s *Sender) refuse(peer *zmtp.Peer, err error) {
	s.stats.refused.Add(1)
	s.warn.Warn(s.log, "mooncake: pull refused", "from", peer.RemoteAddr(), "err", err)
	s.reply(peer, &Reply{Status: StatusError, Message: err.Error()})
}

// reply sends y. A peer that cannot take it is gone or will be closed.
func (s *Sender) reply(peer *zmtp.Peer, y *Reply) {
	if err := peer.Send(AppendReply(nil, y)); err != nil {
		s.log.Debug("mooncake: reply", "to", peer.RemoteAddr(), "err", err)
		return
	}
	peer.Flush()
}

func (p *pulling) reply(y *Reply) {
	y.Kvasir = p.pull.DeadlineMillis > 0
	if y.Status != StatusLayoutMiss {
		y.LayoutID = p.pull.LayoutID
	}
	p.s.reply(p.peer, y)
}

// serve answers one pull: it waits for P to compute, pushes what is ready, and
// replies after each round.
func (p *pulling) serve() {
	start := time.Now()
	err := p.s.prepare(p)
	p.spent += time.Since(start)
	switch {
	case errors.Is(err, errLayoutMiss):
		p.s.stats.layoutMisses.Add(1)
		p.reply(&Reply{Status: StatusLayoutMiss, Message: err.Error()})
		return
	case err != nil:
		p.s.refuse(p.peer, err)
		return
	}
	p.memory = p.plan.memory()
	if err := p.enter(); err != nil {
		p.s.refuse(p.peer, err)
		return
	}
	defer p.leave()
	p.s.wg.Go(func() {
		select {
		case <-p.peer.Done():
			p.cancel(errDLeft) // what D asked for is no longer D's to receive
		case <-p.ctx.Done():
		}
	})
	p.rounds(p.ctx)
}

var errDLeft = errors.New("mooncake: D went away")

// broken ends a pull whose context has ended.
func (p *pulling) broken() {
	if why := context.Cause(p.ctx); errors.Is(why, errEvicted) {
		p.s.refuse(p.peer, why)
		return
	}
	p.s.stats.disconnected.Add(1)
}

// patience is how long a pull waits for its next request to be ready.
func (p *pulling) patience() time.Duration {
	t := p.s.o.AbortTimeout
	if d := time.Duration(p.pull.DeadlineMillis) * time.Millisecond; d > 0 {
		t = min(t, d)
	}
	return t
}

func (p *pulling) rounds(ctx context.Context) {
	timer := time.NewTimer(p.patience())
	defer timer.Stop()
	if p.answerEarly(p.empty, false) {
		return
	}
	if p.pull.DeadlineMillis > 0 && len(p.unknown) > 0 {
		p.reply(&Reply{Status: StatusContinue, Unknown: slices.Sorted(maps.Keys(p.unknown))})
	}
	for len(p.waiting) > 0 {
		ready, known, gone := p.collect()
		p.ticket.Idle(len(p.waiting) > 0 && len(p.unknown) == len(p.waiting))
		if len(known) > 0 && p.pull.DeadlineMillis > 0 && len(ready)+len(gone) == 0 {
			p.reply(&Reply{Status: StatusContinue, Known: known})
		}
		if len(p.again) > 0 && p.answerEarly(nil, len(ready)+len(gone) > 0) {
			return
		}
		if len(ready)+len(gone) > 0 {
			if !p.round(ctx, ready, gone) {
				return
			}
			timer.Reset(p.patience())
			continue
		}
		select {
		case <-p.wake:
		case <-ctx.Done():
			p.broken()
			return
		case <-timer.C:
			late := slices.Sorted(maps.Keys(p.waiting))
			p.s.stats.failedPulls.Add(int64(len(late)))
			p.s.warn.Warn(p.s.log, "mooncake: P side not ready in time", "requests", some(late), "timeout", p.patience())
			p.reply(&Reply{Status: StatusFinish, Failed: late, Message: "Timeout waiting for P side ready."})
			return
		}
	}
}

// answerEarly answers what needs no push: requests that were filled before, and those
// without a transfer id. more says that others are about to be pushed. It says whether
// that was all.
func (p *pulling) answerEarly(empty []string, more bool) (all bool) {
	y := Reply{Status: StatusContinue, OK: p.again, Failed: empty}
	p.again = nil
	if all = len(p.waiting) == 0 && !more; all {
		y.Status = StatusFinish
	}
	if len(empty) > 0 {
		y.Message = "no transfer_id"
		p.s.stats.failedPulls.Add(int64(len(empty)))
	}
	if all || len(y.OK)+len(empty) > 0 {
		p.reply(&y)
	}
	return all
}

var errUnknownFull = errors.New("mooncake: too many transfers that P does not know")

// enter puts the pull in the list of each transfer that it asks for.
func (p *pulling) enter() error {
	s := p.s
	p.waiting, p.unknown = make(map[string]*sending), make(map[string]bool)
	s.mu.Lock()
	defer s.mu.Unlock()
	mine := 0 // of the unknown ones
	for id, w := range p.pull.Wanted {
		if w.TransferID == "" {
			p.empty = append(p.empty, id)
			continue
		}
		e := s.mu.transfers[w.TransferID]
		if e == nil {
			if before := s.mu.done.find(w.TransferID, p.worker(), p.answered(id)); before != nil {
				if !before.heard() {
					p.again = append(p.again, id)
					continue
				}
				s.wg.Go(func() { p.awaitUnheard(id, before) })
			}
			if mine++; s.mu.unknown >= s.o.MaxTransfers || mine > max(1, s.o.MaxTransfers/4) {
				p.leaveLocked()
				return errUnknownFull
			}
			e = &sending{id: w.TransferID}
			s.mu.transfers[w.TransferID] = e
			s.mu.unknown++
		}
		if e.waiting == nil {
			e.waiting = make(map[*pulling]struct{})
		}
		e.waiting[p] = struct{}{}
		p.waiting[id] = e
		if e.request == "" {
			p.unknown[id] = true
		}
	}
	return nil
}

func (p *pulling) leave() {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.leaveLocked()
}

// leaveLocked gives up what is still waited for.
func (p *pulling) leaveLocked() {
	for _, e := range p.waiting {
		p.leaveOneLocked(e)
		p.shortenLocked(e)
	}
	clear(p.waiting)
}

// leaveOneLocked takes the pull out of a transfer's list; a transfer that P never
// knew goes with its last pull.
func (p *pulling) leaveOneLocked(e *sending) {
	delete(e.waiting, p)
	if e.request == "" && len(e.waiting) == 0 && !e.gone && p.s.mu.transfers[e.id] == e {
		delete(p.s.mu.transfers, e.id)
		p.s.mu.unknown--
	}
}

// shortenLocked bounds the stay of blocks whose pull failed, if D is one that
// would come back soon.
func (p *pulling) shortenLocked(e *sending) {
	if p.pull.DeadlineMillis == 0 {
		return
	}
	e.short = true
	if t := time.Now().Add(p.s.o.RetryTimeout); t.Before(e.expires) {
		e.expires = t
	}
}

// collect takes the requests whose blocks are ready, as being pushed, and those
// whose transfer is gone; known are those that P has heard of since.
func (p *pulling) collect() (ready map[string]*sending, known, gone []string) {
	s := p.s
	ready = make(map[string]*sending)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range p.unheard {
		if e := p.waiting[id]; e != nil && e.request == "" {
			delete(p.waiting, id)
			delete(p.unknown, id)
			p.leaveOneLocked(e)
			p.again = append(p.again, id)
		}
	}
	p.unheard = nil
	for id, e := range p.waiting {
		switch {
		case e.gone || s.mu.transfers[e.id] != e:
			gone = append(gone, id)
		case e.ready:
			e.busy++
			if e.need == 0 {
				e.need, e.sent = p.needed(), make(map[dWorker]answered)
			}
			ready[id] = e
		default:
			if p.unknown[id] && e.request != "" {
				delete(p.unknown, id)
				known = append(known, id)
			}
			continue
		}
		delete(p.waiting, id)
		p.leaveOneLocked(e)
	}
	slices.Sort(known)
	slices.Sort(gone)
	return ready, known, gone
}

// round pushes the ready requests in one batch and replies. It returns false when D
// went away.
func (p *pulling) round(ctx context.Context, ready map[string]*sending, gone []string) bool {
	s := p.s
	start := time.Now()
	failed := make(map[string]bool)
	var why error
	fail := func(id string, err error) {
		failed[id] = true
		if why == nil {
			why = err
		}
	}
	for _, id := range gone {
		fail(id, errGivenUp)
	}
	ids := slices.Sorted(maps.Keys(ready))
	var batch []Descriptor
	ends := make([]int, len(ids)) // of each request in batch
	for i, id := range ids {
		before := len(batch)
		var err error
		if batch, err = p.plan.Append(batch, ready[id].blocks, p.pull.Wanted[id].Blocks); err != nil {
			batch = batch[:before]
			fail(id, err)
		}
		ends[i] = len(batch)
	}
	p.spent += time.Since(start)
	if len(batch) > 0 {
		errs, err := s.push.write(ctx, net.JoinHostPort(p.pull.Host, strconv.Itoa(p.pull.Port)), batch, p.spent)
		p.spent = 0
		first := 0
		for i, id := range ids {
			if first < ends[i] { // else it asked for no bytes
				if bad := cmp.Or(err, firstError(errs, first, ends[i])); bad != nil {
					fail(id, &engineError{bad})
				}
			}
			first = ends[i]
		}
	}
	if ctx.Err() != nil {
		for _, id := range ids {
			failed[id] = true
		}
	}
	p.settle(ready, failed)
	if ctx.Err() != nil {
		p.broken()
		return false
	}
	p.conclude(ids, failed, why)
	return true
}

// conclude tells D how a round went.
func (p *pulling) conclude(ids []string, failed map[string]bool, why error) {
	y := Reply{Status: StatusContinue}
	if len(p.waiting) == 0 {
		y.Status = StatusFinish
	}
	for _, id := range ids {
		if !failed[id] {
			y.OK = append(y.OK, id)
		}
	}
	if len(failed) > 0 {
		y.Failed = slices.Sorted(maps.Keys(failed))
		y.Message = why.Error()
		p.s.stats.failedPulls.Add(int64(len(failed)))
		p.s.warn.Warn(p.s.log, "mooncake: pull failed", "from", p.peer.RemoteAddr(), "requests", some(y.Failed), "err", why)
	}
	p.reply(&y)
}

// firstError returns the first error of errs[from:to]; errs may be nil.
func firstError(errs []error, from, to int) error {
	for i := from; i < min(to, len(errs)); i++ {
		if errs[i] != nil {
			return errs[i]
		}
	}
	return nil
}

// engineError is a push that failed, with vLLM's words for it.
type engineError struct{ err error }

func (e *engineError) Error() string { return "Mooncake transfer engine returned -1: " + e.err.Error() }
func (e *engineError) Unwrap() error { return e.err }

// settle counts the results of a round at its transfers.
func (p *pulling) settle(ready map[string]*sending, failed map[string]bool) {
	s := p.s
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range ready {
		e.busy--
		if failed[id] {
			p.shortenLocked(e)
		} else {
			e.sent[p.worker()] = p.answered(id)
		}
		switch {
		case e.gone: // aborted during the push
			s.finishLocked(e)
		case len(e.sent) >= e.need && s.mu.transfers[e.id] == e && e.busy == 0:
			delete(s.mu.transfers, e.id)
			s.mu.done.add(e.id, e.sent)
			e.gone = true
			s.finishLocked(e)
		}
	}
}
