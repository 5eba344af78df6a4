// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// pending is a request that waits for the next Build.
type pending struct {
	req    *Request
	blocks [][]int
	from   wire.PullMeta // for a pull: its source; for a send: only TransferID is set
}

// queue holds pending requests in the order in which they came, each once.
type queue struct {
	list []*pending
	by   map[string]*pending
}

func (q *queue) put(r *Request, blocks [][]int) *pending {
	p := q.by[r.ID]
	if p == nil {
		if q.by == nil {
			q.by = make(map[string]*pending)
		}
		p = new(pending)
		q.by[r.ID] = p
		q.list = append(q.list, p)
	}
	p.req, p.blocks = r, blocks
	return p
}

func (q *queue) drop(id string) {
	if p := q.by[id]; p != nil {
		i := slices.Index(q.list, p)
		q.list = slices.Delete(q.list, i, i+1)
		delete(q.by, id)
	}
}

func (q *queue) clear() {
	clear(q.list)
	q.list = q.list[:0]
	clear(q.by)
}

// missing returns the first key that a pull needs but r's params lack; "" if they have all.
func (s *Scheduler) missing(r *Request) string {
	for _, key := range s.o.Pairing.required {
		if !r.Params.Has(key) {
			return key
		}
	}
	return ""
}

// source reads from r's params from which P r is pulled. On an error, m has the keys that it could read.
func (s *Scheduler) source(r *Request) (m wire.PullMeta, err error) {
	if key := s.missing(r); key != "" {
		return m, &wire.Error{Code: wire.CodeMissing, Class: wire.ClassKey, Text: "'" + key + "'", Detail: fmt.Sprintf("kv_transfer_params of request %q", r.ID)}
	}
	err = s.o.Pairing.source(r.Params, &m)
	return m, err
}

// Build returns the orders to the workers for this step: all that was queued since the last Build. The caller owns the result. Build
// fails only with a Release, and then keeps everything queued.
//
// vLLM: build_connector_meta.
func (s *Scheduler) Build() (*wire.Metadata, error) {
	m := new(wire.Metadata)
	if s.o.Role != wire.Producer {
		for _, p := range s.recv.list {
			if s.follows(readsParamsAtBuild) {
				var err error
				if p.from, err = s.source(p.req); errors.Is(err, wire.ErrMissing) {
					s.n.refused.Add(1)
					return nil, err
				}
			}
			pull := p.from
			pull.RequestID, pull.Blocks = p.req.ID, p.blocks
			m.Pulls = append(m.Pulls, pull)
		}
		for i := range m.Pulls {
			s.started(&m.Pulls[i])
		}
		s.recv.clear()
		m.Aborted, s.aborted = s.aborted, nil
	}
	if s.o.Role != wire.Consumer {
		for _, p := range s.send.list {
			id := p.from.TransferID
			if !s.follows(trusting) {
				s.owners[id] = owner{p.req.ID, true}
			}
			m.Sends = append(m.Sends, wire.SendMeta{RequestID: p.req.ID, TransferID: id, Blocks: p.blocks})
			if p.blocks != nil {
				s.sending[p.req.ID] = s.newTransfer(nil, id)
			}
		}
		s.send.clear()
		m.NotProcessed = slices.Sorted(maps.Keys(s.dropped))
		clear(s.dropped)
	}
	return m, nil
}

func (s *Scheduler) newTransfer(blocks [][]int, id string) *transferState {
	return &transferState{blocks: blocks, transfer: id, left: s.o.Workers}
}

func (s *Scheduler) started(m *wire.PullMeta) {
	if !anyBlock(m.Blocks) {
		s.n.emptyPulls.Add(1)
		return
	}
	s.n.pulls.Add(1)
	blocks := make([][]int, len(m.Blocks)) // the caller owns m
	for i, list := range m.Blocks {
		blocks[i] = slices.Clone(list)
	}
	s.receiving[m.RequestID] = s.newTransfer(blocks, "")
}

// Finished is the answer to Finish.
type Finished struct {
	// KeepBlocks means that workers may still read or write the request's blocks. The engine must keep the blocks until Update names
	// the request.
	KeepBlocks bool
	// Params are the kv_transfer_params for the response; nil means none. In 0.13 they carry P's address.
	Params *wire.KVTransferParams
}

// Finish must be called when r has ended. blocks are its block ids, one list per KV cache group; Finish does not keep the slices. It
// may be called again for the same request.
//
// vLLM: request_finished.
func (s *Scheduler) Finish(r *Request, status RequestStatus, blocks [][]int) (Finished, error) {
	s.debug("MooncakeConnector request_finished", r, "request_status", status.String())
	var out Finished
	if s.follows(endNeedsTransferID) && !r.Params.Truthy(wire.KeyTransfer) {
		return out, nil
	}
	if !s.follows(freesDuringPull) {
		out.KeepBlocks = s.fenced(r)
	}
	switch {
	case r.Params.DoRemotePrefill(): // it was never scheduled
		if r.Params.DoRemoteDecode() && !s.follows(keepsFlags) {
			r.Params.Set(wire.KeyDecode, false)
		}
		if err := s.mayPull(r); err != nil {
			return out, err
		}
		s.pull(r, nil)
	case r.Params.DoRemoteDecode():
		if out.KeepBlocks { // r ends during its own pull, so its blocks hold nothing that could be sent
			status = Aborted
		}
		kept, err := s.finishSend(r, status, blocks)
		kept.KeepBlocks = kept.KeepBlocks || out.KeepBlocks
		return kept, err
	}
	return out, nil
}

// fenced reports whether workers may still touch the blocks of r, which has ended. If they are pulling r, it queues an abort of the
// pull.
func (s *Scheduler) fenced(r *Request) bool {
	if t := s.receiving[r.ID]; t != nil {
		if !t.finished {
			t.finished = true
			s.aborted = append(s.aborted, r.ID)
			s.n.fenced.Add(1)
		}
		return true
	}
	if p := s.recv.by[r.ID]; p != nil {
		p.blocks = nil
	}
	return s.delays(r)
}

// finishSend ends a prefill for a D. Either P keeps the blocks for D, or the workers are told that no send will follow.
func (s *Scheduler) finishSend(r *Request, status RequestStatus, blocks [][]int) (out Finished, err error) {
	if status != LengthCapped && s.follows(endsSilently) {
		return out, nil
	}
	if s.o.Role == wire.Consumer {
		return out, s.refuse(r, wire.KeyDecode, wire.Asserted(wire.CodeRole, "request %q prefilled for a D on a %v", r.ID, s.o.Role))
	}
	id, ok := s.transferOf(r)
	if ok {
		if err := s.maySend(r, id); err != nil {
			return out, err
		}
	}
	if !s.follows(keepsFlags) {
		r.Params.Set(wire.KeyDecode, false)
	}
	if !ok {
		return out, nil
	}
	if status != LengthCapped {
		s.withdraw(r, id)
		return out, nil
	}
	var ids [][]int
	if anyBlock(blocks) {
		ids, err = s.clip(blocks)
	}
	switch {
	case err != nil:
		s.n.refused.Add(1)
		if !s.follows(raisesOnGroups) {
			s.withdraw(r, id)
		}
		return out, err
	case anyBlock(ids) || ids != nil && s.follows(sendsEmptyLists):
		s.claim(id, r)
		s.send.put(r, ids).from.TransferID = id
		s.n.delayed.Add(1)
		out.KeepBlocks = true
	case !s.follows(keepsAnnouncement):
		s.withdraw(r, id)
	}
	if out.KeepBlocks || s.follows(alwaysAnswers) {
		out.Params = s.response()
	}
	return out, nil
}

// response returns the params for D that P's answer to the proxy carries; nil if the Pairing has none.
func (s *Scheduler) response() *wire.KVTransferParams {
	if s.o.Pairing.response == nil {
		return nil
	}
	return s.o.Pairing.response()
}

// withdraw cancels the send of r under the transfer id: it takes the announcement back if no Build has taken it yet, and lets the workers
// know that nothing will be sent.
func (s *Scheduler) withdraw(r *Request, id string) {
	if !s.follows(keepsAnnouncement) {
		s.send.drop(r.ID)
	}
	s.drop(id)
}

// drop queues, for the next Build, the message to the workers that the transfer id will not be sent. Between two Builds it queues at
// most MaxTransfers ids that the workers do not know; for ids beyond that, D waits until its deadline.
func (s *Scheduler) drop(id string) {
	announced := s.owners[id].announced
	delete(s.owners, id)
	if !s.dropped[id] && (announced || len(s.dropped) < s.o.MaxTransfers || s.follows(trusting)) {
		s.dropped[id] = true
		s.n.notProcessed.Add(1)
	}
}

// WorkerOutput is what one worker reports after a step. Every worker must report each transfer; reports after the first do not count.
type WorkerOutput struct {
	Worker int // rank, 0 to Options.Workers-1

	Sent     []string // P's requests whose blocks the worker does not read any more: they were sent, or their lease is over
	Received []string // D's requests into whose blocks the worker writes no more; failed requests are included

	// Failed and FailedBlocks are what could not be loaded, by request or by block. A worker reports them not later than the request's
	// entry in Received.
	Failed       []string
	FailedBlocks []int
}

// Update is the outcome of the transfers that a WorkerOutput completed: those that every worker has reported.
type Update struct {
	Loaded []string // D's requests whose KV is complete
	Failed []string // D's requests to be computed: the blocks pulled for them are not valid
	Freed  []string // ended requests with KeepBlocks, whose blocks may be reused now
}

// Update takes in one worker's report. It counts requests that are in no transfer, and otherwise ignores them. It returns an error only
// for a worker out of range.
//
// vLLM: update_connector_output, with the counting of KVOutputAggregator.
func (s *Scheduler) Update(o WorkerOutput) (Update, error) {
	var u Update
	if o.Worker < 0 || o.Worker >= s.o.Workers {
		return u, wire.Refusef(wire.CodeRange, "worker %d is outside 0 to %d", o.Worker, s.o.Workers-1)
	}
	for _, id := range o.Failed {
		if t := s.receiving[id]; t != nil {
			t.failed = true
		} else {
			s.n.unknown.Add(1)
		}
	}
	s.failBlocks(o.FailedBlocks)
	for _, id := range o.Received {
		t := s.workerDone(s.receiving, id, o.Worker)
		switch {
		case t == nil:
			continue
		case t.failed:
			s.n.failed.Add(1)
		default:
			s.n.loaded.Add(1)
		}
		switch {
		case t.finished:
			u.Freed = append(u.Freed, id)
		case t.failed:
			u.Failed = append(u.Failed, id)
		default:
			u.Loaded = append(u.Loaded, id)
		}
	}
	for _, id := range o.Sent {
		if t := s.workerDone(s.sending, id, o.Worker); t != nil {
			if s.owners[t.transfer].request == id {
				delete(s.owners, t.transfer)
			}
			s.n.sent.Add(1)
			u.Freed = append(u.Freed, id)
		}
	}
	return u, nil
}

func (s *Scheduler) failBlocks(blocks []int) {
	if len(blocks) == 0 {
		return
	}
	bad := make(map[int]bool, len(blocks))
	for _, b := range blocks {
		bad[b] = true
	}
	for _, t := range s.receiving {
		for _, list := range t.blocks {
			t.failed = t.failed || slices.ContainsFunc(list, func(b int) bool { return bad[b] })
		}
	}
}

// workerDone records that a worker has finished the transfer of request id. `in` is the table that has the transfer: s.receiving or
// s.sending. Once all workers have finished the transfer, workerDone removes it from the table and returns it; before that, it returns nil.
func (s *Scheduler) workerDone(in map[string]*transferState, id string, worker int) *transferState {
	t := in[id]
	if t == nil {
		s.n.unknown.Add(1)
		return nil
	}
	if t.reported == nil {
		t.reported = make([]uint64, (s.o.Workers+63)/64)
	}
	word, bit := &t.reported[worker/64], uint64(1)<<(worker%64)
	if *word&bit != 0 {
		return nil
	}
	*word |= bit
	if t.left--; t.left > 0 {
		return nil
	}
	delete(in, id)
	return t
}

// Len returns how many requests are queued, in transfer, or kept because of a transfer. It is zero once all requests have ended and all
// workers have reported.
func (s *Scheduler) Len() int {
	n := len(s.recv.list) + len(s.receiving) + len(s.dropped)
	if s.follows(trusting) {
		return n + len(s.send.list) + len(s.sending)
	}
	return n + len(s.owners)
}
