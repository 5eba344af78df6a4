package mooncake

import (
	"fmt"
	"maps"
	"slices"
)

// Metadata is what the workers are told at a step.
type Metadata struct {
	Pulls []PullMeta // D
	Sends []SendMeta // P

	// Aborted are requests that ended during their pull, which D's workers may
	// give up; they report it in any case. A Faithful Scheduler has none.
	Aborted []string

	// NotProcessed are transfers that P will not send: transfer ids, in V1
	// request ids (never those of a Faithful Scheduler). They may be unknown to
	// the workers. Sorted; Sends come before them.
	NotProcessed []string
}

// PullMeta is a pull that D's workers are to start.
type PullMeta struct {
	RequestID string
	// Blocks to fill, one list per transferred group. Without any, P only frees
	// its blocks; nothing is reported to Update.
	Blocks [][]int

	TransferID, EngineID, BootstrapAddr string // V2

	Host string // V1: P's side channel
	Port int    // V1: of TP rank 0
}

// SendMeta is a transfer that D will ask P's workers for.
type SendMeta struct {
	RequestID  string
	TransferID string // V1: the request id
	// Blocks to send, one list per transferred group; nil says that they will be
	// known later, if at all. A worker may get them without that announcement.
	Blocks [][]int
}

// pending is a request that the next Build tells about.
type pending struct {
	req    *Request
	blocks [][]int
	from   PullMeta // the pull's source, TransferID of a send; not in a Faithful Scheduler
}

// queue holds pending requests in the order they came, each once.
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

// source reads from r's params where to pull from. Only a Faithful Scheduler can
// miss a key here; it takes a value of another type for an empty one.
func (s *Scheduler) source(r *Request) (PullMeta, error) {
	if key := r.Params.missing(s.o.Dialect); key != "" {
		return PullMeta{}, &Error{CodeMissing, keyError, "'" + key + "'", fmt.Sprintf("kv_transfer_params of request %q", r.ID)}
	}
	var m PullMeta
	if s.o.Dialect == V1 {
		m.Host, _ = r.Params.Text(keyHost)
		m.Port, _ = r.Params.port(keyPort)
		return m, nil
	}
	m.TransferID, _ = r.Params.Text(keyTransfer)
	m.EngineID, _ = r.Params.Text(keyEngine)
	m.BootstrapAddr, _ = r.Params.Text(keyBootstrap)
	return m, nil
}

// Build returns what the workers are to be told at this step, all that came since
// the last. The caller owns it. Only a Faithful Scheduler fails; all that is
// pending then stays.
//
// vLLM: build_connector_meta.
func (s *Scheduler) Build() (*Metadata, error) {
	m := new(Metadata)
	if s.o.Role != Producer {
		for _, p := range s.recv.list {
			if s.o.Faithful {
				var err error
				if p.from, err = s.source(p.req); err != nil {
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
	if s.o.Role != Consumer {
		for _, p := range s.send.list {
			id := p.from.TransferID
			if s.o.Faithful {
				id, _ = s.transferOf(p.req)
			} else {
				s.owners[id] = owner{p.req.ID, true}
			}
			m.Sends = append(m.Sends, SendMeta{p.req.ID, id, p.blocks})
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

func (s *Scheduler) started(m *PullMeta) {
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
	// KeepBlocks says that workers may still read or write the request's blocks:
	// they are freed when Update names the request.
	KeepBlocks bool
	// Params are for the response, nil for none: V1's P tells where D finds it.
	Params *KVTransferParams
}

// Finish ends r. blocks are its block ids, one list per KV cache group; they are
// not kept. It may be called again.
//
// vLLM: request_finished.
func (s *Scheduler) Finish(r *Request, status RequestStatus, blocks [][]int) (Finished, error) {
	if s.o.Faithful {
		return s.finishFaithful(r, status, blocks)
	}
	out := Finished{KeepBlocks: s.fenced(r)}
	switch {
	case r.Params.DoRemotePrefill(): // never scheduled
		if r.Params.DoRemoteDecode() {
			r.Params.Set(keyDecode, false)
		}
		if err := s.mayPull(r); err != nil {
			return out, err
		}
		s.pull(r, nil)
	case r.Params.DoRemoteDecode():
		if out.KeepBlocks { // it ends during its own pull: there is nothing to send
			status = Aborted
		}
		kept, err := s.finishSend(r, status, blocks)
		kept.KeepBlocks = kept.KeepBlocks || out.KeepBlocks
		return kept, err
	}
	return out, nil
}

// fenced reports whether workers may touch the blocks of r, which has ended.
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

// finishSend ends a prefill for a D: its blocks wait for D, or the workers hear
// that there is nothing to wait for.
func (s *Scheduler) finishSend(r *Request, status RequestStatus, blocks [][]int) (Finished, error) {
	if s.o.Role == Consumer {
		return Finished{}, s.refuse(r, keyDecode, asserted(CodeRole, "request %q prefilled for a D on a %v", r.ID, s.o.Role))
	}
	id, ok := s.transferOf(r)
	if !ok {
		r.Params.Set(keyDecode, false)
		return Finished{}, nil
	}
	if err := s.maySend(r, id); err != nil {
		return Finished{}, err
	}
	r.Params.Set(keyDecode, false)
	ids, err := s.clip(blocks)
	if err != nil {
		s.n.refused.Add(1)
	}
	if err != nil || status != LengthCapped || !anyBlock(ids) {
		s.send.drop(r.ID)
		s.drop(id)
		return Finished{}, err
	}
	s.own(id, r)
	s.send.put(r, ids).from.TransferID = id
	s.n.delayed.Add(1)
	out := Finished{KeepBlocks: true}
	if s.o.Dialect == V1 {
		out.Params = RemotePrefillV1(s.o.Host, s.o.Port)
	}
	return out, nil
}

// drop says that transfer id will not be sent. Of transfers that workers have not
// heard of, it says so of MaxTransfers between two Builds: more are for D's deadline.
func (s *Scheduler) drop(id string) {
	told := s.owners[id].told
	delete(s.owners, id)
	if !s.dropped[id] && (s.o.Faithful || told || len(s.dropped) < s.o.MaxTransfers) {
		s.dropped[id] = true
		s.n.notProcessed.Add(1)
	}
}

// finishFaithful decides as the original does.
func (s *Scheduler) finishFaithful(r *Request, status RequestStatus, blocks [][]int) (out Finished, err error) {
	v2 := s.o.Dialect == V2
	if r.Params.Len() == 0 || v2 && !r.Params.Truthy(keyTransfer) {
		return out, nil
	}
	if r.Params.DoRemotePrefill() {
		if err := s.mayPull(r); err != nil {
			return out, err
		}
		s.pull(r, nil)
		return out, nil
	}
	if !r.Params.DoRemoteDecode() || !v2 && status != LengthCapped {
		return out, nil
	}
	if s.o.Role == Consumer {
		return out, s.refuse(r, keyDecode, asserted(CodeRole, "request %q prefilled for a D on a %v", r.ID, s.o.Role))
	}
	if status != LengthCapped {
		id, _ := s.transferOf(r)
		s.drop(id)
		return out, nil
	}
	if anyBlock(blocks) {
		ids, err := s.clip(blocks)
		if err != nil {
			return out, err
		}
		s.send.put(r, ids)
		s.n.delayed.Add(1)
		out.KeepBlocks = true
	}
	if !v2 {
		out.Params = RemotePrefillV1(s.o.Host, s.o.Port)
	}
	return out, nil
}

// WorkerOutput is what one worker reports after a step. Each worker reports each
// transfer; what it reports twice counts once.
type WorkerOutput struct {
	Worker int // rank, 0 to SchedulerOptions.Workers-1

	Sent     []string // P's requests whose blocks it no longer reads: sent, or their lease is over
	Received []string // D's requests whose blocks it no longer writes to, failed ones included

	// What failed to load, by request or by block; reported not later than in
	// Received.
	Failed       []string
	FailedBlocks []int
}

// Update is what follows from a WorkerOutput, once every worker has reported.
type Update struct {
	Loaded []string // D's requests whose KV is complete
	Failed []string // D's requests to be computed: nothing in their pulled blocks is of use
	Freed  []string // requests that have ended and whose blocks were kept: they may be used again
}

// Update takes a worker's report. Requests that are in no transfer are counted,
// and ignored. The only error is a worker out of range.
//
// vLLM: update_connector_output, with the counting of KVOutputAggregator.
func (s *Scheduler) Update(o WorkerOutput) (Update, error) {
	var u Update
	if o.Worker < 0 || o.Worker >= s.o.Workers {
		return u, refusef(CodeRange, "worker %d of %d", o.Worker, s.o.Workers)
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
		t := s.settle(s.receiving, id, o.Worker)
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
		if t := s.settle(s.sending, id, o.Worker); t != nil {
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

// settle notes that a worker is done with a transfer, and returns it when all are.
func (s *Scheduler) settle(in map[string]*transferState, id string, worker int) *transferState {
	t := in[id]
	if t == nil {
		s.n.unknown.Add(1)
		return nil
	}
	if t.told == nil {
		t.told = make([]uint64, (s.o.Workers+63)/64)
	}
	word, bit := &t.told[worker/64], uint64(1)<<(worker%64)
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

// Len returns how many requests are pending, in transfer, or kept for one. It is
// zero when all have ended and all workers have reported.
func (s *Scheduler) Len() int {
	n := len(s.recv.list) + len(s.receiving) + len(s.dropped)
	if s.o.Faithful {
		return n + len(s.send.list) + len(s.sending)
	}
	return n + len(s.owners)
}
