// SPDX-License-Identifier: Apache-2.0

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

	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// SenderStats are counters since NewSender; the first three are current values.
type SenderStats struct {
	Transfers int64 // offered, expected, or waited for by a pull, now
	Pulls     int64 // waiting or running now
	Ready     int64 // transfers whose blocks wait for a pull now

	Pushed        int64 // batches written
	Bytes         int64 // written
	Descriptors   int64 // written, before the transfer engine merges them
	FailedPushes  int64
	FailedPulls   int64 // requests that were answered as failed
	Expired       int64 // requests that no D pulled in time
	Refused       int64 // pulls answered StatusError
	Disconnected  int64 // pulls that ended because D's connection did
	LayoutMisses  int64
	PlanningNanos int64 // from the last received byte of a pull to its first pushed byte, without the waiting for P
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
	out := SenderStats{
		Transfers: n, Pulls: int64(s.gate.Len()), Ready: ready, FailedPulls: s.stats.failedPulls.Load(),
		Expired: s.stats.expired.Load(), Refused: s.stats.refused.Load(), Disconnected: s.stats.disconnected.Load(),
		LayoutMisses: s.stats.layoutMisses.Load(),
	}
	s.push.Count(&out)
	return out
}

// pullAnswer answers one pull. Owned by its goroutine, except wake.
type pullAnswer struct {
	s           *Sender
	peer        *zmtp.Peer
	pull        *wire.Pull
	plan        *PushPlan
	paired      []int         // D's TP ranks that pull from this worker
	wake        chan struct{} // cap 1
	ticket      *Ticket
	ctx         context.Context // ends when P or D's connection ends, and when the Gate evicts the pull
	cancel      context.CancelCauseFunc
	waiting     map[string]*offer // by D's request id
	memory      uint64            // hash of the addresses and strides of D's regions
	refilled    []string          // requests that an earlier pull filled, whose answer D did not get
	lostReplies []string          // requests of which P learns later that an earlier pull filled them; guarded by Sender.mu
	empty       []string          // requests without a transfer id
	ended       []string          // requests whose transfer has ended
	unknown     map[string]bool   // the requests of waiting whose transfer P does not know yet
	spent       time.Duration     // time spent on planning
}

func (p *pullAnswer) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// handle receives one message of D. It runs on the goroutine that reads the peer's connection.
func (s *Sender) handle(peer *zmtp.Peer, m zmtp.Message) {
	if len(m) != 1 {
		s.refuse(peer, fmt.Errorf("%w: %d frames instead of one", wire.ErrMessage, len(m)))
		return
	}
	start := time.Now()
	pull, err := wire.DecodePull(m[0], 0)
	if err != nil {
		s.refuse(peer, err)
		return
	}
	p := &pullAnswer{s: s, peer: peer, pull: pull, wake: make(chan struct{}, 1)}
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

// PeerKey returns a text that names the D worker of a pull, by which a Gate counts pulls: the host of its connection, and the address
// to which its blocks go.
func PeerKey(peer *zmtp.Peer, host string, port int) string {
	from, _, err := net.SplitHostPort(peer.RemoteAddr().String())
	if err != nil {
		from = peer.RemoteAddr().String()
	}
	return from + " " + net.JoinHostPort(host, strconv.Itoa(port))
}

// refuse answers a whole pull with StatusError and err, counts it and logs it.
func (s *Sender) refuse(peer *zmtp.Peer, err error) {
	s.stats.refused.Add(1)
	s.warn.Warn(s.log, "mooncake: pull refused", "from", peer.RemoteAddr(), "err", err)
	s.reply(peer, &wire.Reply{Status: wire.StatusError, Message: err.Error()})
}

// reply sends y to the peer. If that fails, it only logs: the router closes such a peer.
func (s *Sender) reply(peer *zmtp.Peer, y *wire.Reply) {
	if err := peer.Send(wire.AppendReply(nil, y)); err != nil {
		s.log.Debug("mooncake: reply", "to", peer.RemoteAddr(), "err", err)
		return
	}
	peer.Flush()
}

func (p *pullAnswer) reply(y *wire.Reply) {
	y.Kvasir = p.pull.DeadlineMillis > 0
	if y.Status != wire.StatusLayoutMiss {
		y.LayoutID = p.pull.LayoutID
	}
	p.s.reply(p.peer, y)
}

// serve answers one pull. In rounds, it waits until P has computed some of the requests, pushes their blocks, and replies.
func (p *pullAnswer) serve() {
	start := time.Now()
	err := p.s.prepare(p)
	p.spent += time.Since(start)
	switch {
	case errors.Is(err, errLayoutMiss):
		p.s.stats.layoutMisses.Add(1)
		p.reply(&wire.Reply{Status: wire.StatusLayoutMiss, Message: err.Error()})
		return
	case err != nil:
		p.s.refuse(p.peer, err)
		return
	}
	p.memory = p.plan.memory()
	if err := p.joinTransfers(); err != nil {
		p.s.refuse(p.peer, err)
		return
	}
	defer p.leaveTransfers()
	p.s.wg.Go(func() {
		select {
		case <-p.peer.Done():
			p.cancel(errDGone) // D may give the memory to other requests
		case <-p.ctx.Done():
		}
	})
	p.pushRounds(p.ctx)
}

var errDGone = errors.New("mooncake: D went away")

// endBroken ends a pull whose context has ended before its last reply. If the Gate has evicted the pull, D gets a refusal; else D's
// connection has ended, which is only counted.
func (p *pullAnswer) endBroken() {
	if why := context.Cause(p.ctx); errors.Is(why, errEvicted) {
		p.s.refuse(p.peer, why)
		return
	}
	p.s.stats.disconnected.Add(1)
}

// waitLimit returns how long a pull waits for its next request to be ready: AbortTimeout, or the time after which D gives up, if less.
func (p *pullAnswer) waitLimit() time.Duration {
	t := p.s.o.AbortTimeout
	if d := time.Duration(p.pull.DeadlineMillis) * time.Millisecond; d > 0 {
		t = min(t, d)
	}
	return t
}

func (p *pullAnswer) pushRounds(ctx context.Context) {
	timer := time.NewTimer(p.waitLimit())
	defer timer.Stop()
	if p.answerEarly(false) {
		return
	}
	if p.pull.DeadlineMillis > 0 && len(p.unknown) > 0 {
		p.reply(&wire.Reply{Status: wire.StatusContinue, Unknown: slices.Sorted(maps.Keys(p.unknown))})
	}
	for len(p.waiting) > 0 {
		ready, known, gone := p.takeReady()
		p.ticket.Idle(len(p.waiting) > 0 && len(p.unknown) == len(p.waiting))
		if len(known) > 0 && p.pull.DeadlineMillis > 0 && len(ready)+len(gone) == 0 {
			p.reply(&wire.Reply{Status: wire.StatusContinue, Known: known})
		}
		if len(p.refilled) > 0 && p.answerEarly(len(ready)+len(gone) > 0) {
			return
		}
		if len(ready)+len(gone) > 0 {
			if !p.pushRound(ctx, ready, gone) {
				return
			}
			timer.Reset(p.waitLimit())
			continue
		}
		select {
		case <-p.wake:
		case <-ctx.Done():
			p.endBroken()
			return
		case <-timer.C:
			late := slices.Sorted(maps.Keys(p.waiting))
			p.s.stats.failedPulls.Add(int64(len(late)))
			p.s.warn.Warn(p.s.log, "mooncake: P side not ready in time", "requests", SomeNames(late), "timeout", p.waitLimit())
			p.reply(&wire.Reply{Status: wire.StatusFinish, Failed: late, Message: "Timeout waiting for P side ready."})
			return
		}
	}
}

// answerEarly answers the requests that need no push: those that an earlier pull filled, those without a transfer id, and those whose
// transfer has ended. more means that the caller is about to push other requests. all means that the pull has ended.
func (p *pullAnswer) answerEarly(more bool) (all bool) {
	empty, ended := p.empty, p.ended
	failed := slices.Concat(empty, ended)
	y := wire.Reply{Status: wire.StatusContinue, OK: p.refilled, Failed: failed}
	p.refilled, p.empty, p.ended = nil, nil, nil // each is answered once
	if all = len(p.waiting) == 0 && !more; all {
		y.Status = wire.StatusFinish
	}
	switch {
	case len(empty) > 0:
		y.Message = "no transfer_id"
	case len(ended) > 0:
		y.Message = errGaveUp.Error()
	}
	p.s.stats.failedPulls.Add(int64(len(failed)))
	if len(ended) > 0 {
		p.s.warn.Warn(p.s.log, "mooncake: pull of transfers that P does not have any more", "from", p.peer.RemoteAddr(), "requests", SomeNames(ended))
	}
	if all || len(y.OK)+len(failed) > 0 {
		p.reply(&y)
	}
	return all
}

var errUnknownFull = errors.New("mooncake: too many pulls wait for transfers that P does not know")

// joinTransfers adds the pull to each transfer that it names. If too many transfers would then wait that P does not know, it adds the pull
// to none and returns errUnknownFull.
func (p *pullAnswer) joinTransfers() error {
	s := p.s
	p.waiting, p.unknown = make(map[string]*offer), make(map[string]bool)
	s.mu.Lock()
	defer s.mu.Unlock()
	mine := 0 // unknown transfers that this pull adds
	for id, w := range p.pull.Wanted {
		if w.TransferID == "" {
			p.empty = append(p.empty, id)
			continue
		}
		e := s.mu.transfers[w.TransferID]
		if e == nil {
			if before := s.mu.done.find(w.TransferID, p.worker(), p.delivery(id)); before != nil {
				if !before.stillConnected() {
					p.refilled = append(p.refilled, id)
					continue
				}
				s.wg.Go(func() { p.awaitDisconnect(id, before) })
			} else if s.mu.done.has(w.TransferID) {
				p.ended = append(p.ended, id)
				continue
			}
			if mine++; s.mu.unknown >= s.o.MaxTransfers || mine > max(1, s.o.MaxTransfers/4) {
				p.leaveTransfersLocked()
				return errUnknownFull
			}
			e = &offer{id: w.TransferID}
			s.mu.transfers[w.TransferID] = e
			s.mu.unknown++
		}
		if e.waiting == nil {
			e.waiting = make(map[*pullAnswer]struct{})
		}
		e.waiting[p] = struct{}{}
		p.waiting[id] = e
		if e.request == "" {
			p.unknown[id] = true
		}
	}
	return nil
}

func (p *pullAnswer) leaveTransfers() {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.leaveTransfersLocked()
}

// leaveTransfersLocked takes the pull out of all transfers that it still waits for.
func (p *pullAnswer) leaveTransfersLocked() {
	for _, e := range p.waiting {
		p.leaveTransferLocked(e)
		p.shortenExpiryLocked(e)
	}
	clear(p.waiting)
}

// leaveTransferLocked takes the pull out of the transfer e. If P does not know e and no other pull waits for it, e is removed.
func (p *pullAnswer) leaveTransferLocked(e *offer) {
	delete(e.waiting, p)
	if e.request == "" && len(e.waiting) == 0 && !e.gone && p.s.mu.transfers[e.id] == e {
		delete(p.s.mu.transfers, e.id)
		p.s.mu.unknown--
	}
}

// shortenExpiryLocked lets e's blocks, whose pull failed, expire after RetryTimeout if D is Kvasir. A Kvasir D tries again soon or
// never.
func (p *pullAnswer) shortenExpiryLocked(e *offer) {
	if p.pull.DeadlineMillis == 0 {
		return
	}
	e.short = true
	if t := time.Now().Add(p.s.o.RetryTimeout); t.Before(e.expires) {
		e.expires = t
	}
}

// takeReady takes two kinds of requests out of p.waiting: those whose blocks are ready, which it marks as being pushed, and those whose
// transfer is gone. known are the requests whose transfers have become known to P since the last call.
func (p *pullAnswer) takeReady() (ready map[string]*offer, known, gone []string) {
	s := p.s
	ready = make(map[string]*offer)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range p.lostReplies {
		if e := p.waiting[id]; e != nil && e.request == "" {
			delete(p.waiting, id)
			delete(p.unknown, id)
			p.leaveTransferLocked(e)
			p.refilled = append(p.refilled, id)
		}
	}
	p.lostReplies = nil
	for id, e := range p.waiting {
		switch {
		case e.gone || s.mu.transfers[e.id] != e:
			gone = append(gone, id)
		case e.ready:
			e.busy++
			if e.need == 0 {
				e.need, e.sent = p.needed(), make(map[dWorker]delivery)
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
		p.leaveTransferLocked(e)
	}
	slices.Sort(known)
	slices.Sort(gone)
	return ready, known, gone
}

// pushRound pushes the ready requests in one batch and replies. It returns false when
// the pull's context has ended.
func (p *pullAnswer) pushRound(ctx context.Context, ready map[string]*offer, gone []string) bool {
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
		fail(id, errGaveUp)
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
		errs, err := s.push.Write(ctx, net.JoinHostPort(p.pull.Host, strconv.Itoa(p.pull.Port)), batch, p.spent)
		p.spent = 0
		first := 0
		for i, id := range ids {
			if first < ends[i] { // it has descriptors
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
	p.recordRound(ready, failed)
	if ctx.Err() != nil {
		p.endBroken()
		return false
	}
	p.replyRound(ids, failed, why)
	return true
}

// replyRound sends D the results of the requests ids. failed names the failed ones, and why is the reason.
func (p *pullAnswer) replyRound(ids []string, failed map[string]bool, why error) {
	y := wire.Reply{Status: wire.StatusContinue}
	if len(p.waiting) == 0 {
		y.Status = wire.StatusFinish
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
		p.s.warn.Warn(p.s.log, "mooncake: pull failed", "from", p.peer.RemoteAddr(), "requests", SomeNames(y.Failed), "err", why)
	}
	p.reply(&y)
}

// firstError returns the first error among errs[from:to], or nil. errs may be nil or shorter than `to`.
func firstError(errs []error, from, to int) error {
	for i := from; i < min(to, len(errs)); i++ {
		if errs[i] != nil {
			return errs[i]
		}
	}
	return nil
}

// engineError is the error of a failed push. Its text is vLLM's.
type engineError struct{ err error }

func (e *engineError) Error() string { return "Mooncake transfer engine returned -1: " + e.err.Error() }
func (e *engineError) Unwrap() error { return e.err }

// recordRound records in the transfers which of the requests in ready were delivered and which failed.
func (p *pullAnswer) recordRound(ready map[string]*offer, failed map[string]bool) {
	s := p.s
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range ready {
		e.busy--
		if failed[id] {
			p.shortenExpiryLocked(e)
		} else {
			e.sent[p.worker()] = p.delivery(id)
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
