// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// subscribe_kv_events opens a stream: batches of events under one uid, each sent after the client acknowledged the one before. A stream
// begins with all chunks that its model has in memory, because clients ask from the beginning whenever they connect. If the records that it
// needs next are no longer kept, it begins again with all chunks, and marks the batch as lost.

// Limits on streams.
const (
	maxStreams    = 1024    // open streams; a user or address may have half of those that others leave free; others are declined
	streamBytes   = 4 << 20 // about how many bytes a batch has; later records follow in the next one
	bytesPerToken = 5       // most bytes that a token takes in a batch
)

// streamKey identifies a subscriber: an instance id of one user or address.
type streamKey struct {
	by access.Principal
	id int64
}

// stream is one subscription. A goroutine of its own sends its batches.
type stream struct {
	key     streamKey
	peer    *zmtp.Peer
	uid, op []byte // frames of its replies
	model   string
	limit   int         // events per batch
	tenants *auth.Limit // the tenants whose events it gets
	credit  chan struct{}
	cancel  context.CancelFunc
	silent  atomic.Bool  // it ends without a message to the client
	seen    atomic.Int64 // Unix nanoseconds of its last sign of life

	book    *events.Book
	cursor  uint64 // number of the last record that was sent
	chunks  []*events.Chunk
	resume  uint64 // the cursor after chunks are sent
	records []events.Record
}

// streams has the open streams.
type streams struct {
	running sync.WaitGroup
	some    atomic.Bool // there are streams, or were

	mu struct { // a leaf
		sync.Mutex
		closed bool
		of     map[streamKey]*stream
		byUID  map[*zmtp.Peer]map[string]*stream
		shares map[string]int
	}
}

// begin adds a stream, and ends an earlier one of the same subscriber. It reports false when there are too many, or after stop.
func (l *streams) begin(st *stream) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.of == nil {
		l.mu.of, l.mu.byUID, l.mu.shares = make(map[streamKey]*stream), make(map[*zmtp.Peer]map[string]*stream), make(map[string]int)
	}
	if old := l.mu.of[st.key]; old != nil {
		l.removeLocked(old)
		old.cancel()
	}
	share := st.key.by.String()
	own := l.mu.shares[share]
	if l.mu.closed || own >= max(1, (maxStreams-(len(l.mu.of)-own))/2) || len(l.mu.of) >= maxStreams {
		return false
	}
	if old := l.mu.byUID[st.peer][string(st.uid)]; old != nil { // its replies would be indistinguishable from the new one's
		old.silent.Store(true)
		l.removeLocked(old)
		old.cancel()
	}
	if l.mu.byUID[st.peer] == nil {
		l.mu.byUID[st.peer] = make(map[string]*stream)
	}
	l.mu.of[st.key] = st
	l.mu.byUID[st.peer][string(st.uid)] = st
	l.mu.shares[share]++
	l.some.Store(true)
	l.running.Add(1)
	return true
}

func (l *streams) removeLocked(st *stream) {
	if l.mu.of[st.key] != st {
		return
	}
	delete(l.mu.of, st.key)
	if delete(l.mu.byUID[st.peer], string(st.uid)); len(l.mu.byUID[st.peer]) == 0 {
		delete(l.mu.byUID, st.peer)
	}
	share := st.key.by.String()
	if l.mu.shares[share]--; l.mu.shares[share] == 0 {
		delete(l.mu.shares, share)
	}
}

func (l *streams) remove(st *stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.removeLocked(st)
}

// control handles `what` a client sends about the stream uid: a cancel ends the stream, anything else is an ack, after which the next batch
// may be sent. It ignores those that belong to no stream of the connection.
func (l *streams) control(p *zmtp.Peer, uid, what []byte) {
	if p == nil || !l.some.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.mu.byUID[p][string(uid)]
	if st == nil {
		return
	}
	st.seen.Store(time.Now().UnixNano())
	if string(what) == lmcache.StreamCancel {
		st.cancel()
		return
	}
	select {
	case st.credit <- struct{}{}:
	default: // at most one batch is in flight
	}
}

// notePing records that a worker pinged.
func (l *streams) notePing(key streamKey) {
	if !l.some.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if st := l.mu.of[key]; st != nil {
		st.seen.Store(time.Now().UnixNano())
	}
}

// end ends the streams for which `which` reports true. With silent their clients get no message about it.
func (l *streams) end(silent bool, which func(*stream) bool) {
	if !l.some.Load() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, st := range l.mu.of {
		if which(st) {
			st.silent.Store(silent)
			st.cancel()
		}
	}
}

// stop ends all streams and allows no more to begin. Clients notice by the end of their connections: a client that knew sooner would
// subscribe again at once.
func (l *streams) stop() {
	l.mu.Lock()
	l.mu.closed = true
	l.mu.Unlock()
	l.end(true, func(*stream) bool { return true })
	l.running.Wait()
}

func (l *streams) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.mu.of)
}

// subscribe answers subscribe_kv_events.
func (s *Server) subscribe(sc *scratch, r *lmcache.SubscribeRequest) error {
	if s.opts.Events == nil {
		return errUnsupported
	}
	if err := sc.caller().MayOpen(); err != nil { // a caller that may open the pool can read all of it anyway
		return fmt.Errorf("%w: %w", errTokens, err)
	}
	if sc.peer == nil { // a stream needs a connection
		return errUnsupported
	}
	sc.silent = true // the stream sends all answers
	if s.draining.Load() {
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	st := &stream{
		key: streamKey{sc.caller().By, r.InstanceID}, peer: sc.peer, uid: bytes.Clone(sc.frames[0]), op: bytes.Clone(sc.frames[1]),
		model: string(r.Model), limit: min(r.MaxEvents, 1+streamBytes/(bytesPerToken*s.opts.ChunkTokens)), // for chunks of other sizes see fitting
		credit: make(chan struct{}, 1), cancel: cancel, book: s.opts.Events, cursor: r.Cursor,
	}
	st.tenants = s.limitOf(sc)
	st.seen.Store(time.Now().UnixNano())
	if !s.streams.begin(st) {
		cancel()
		sc.silent = false
		return errStreams
	}
	s.opts.Events.Activate()
	go s.runStream(ctx, st)
	return nil
}

func (s *Server) runStream(ctx context.Context, st *stream) {
	defer s.streams.running.Done()
	defer s.streams.remove(st)
	defer st.cancel()
	err := s.contain(lmcache.OpSubscribeKVEvents, func() error {
		for first := true; ; first = false {
			batch, ok := st.next(ctx, first, s.Incarnation())
			if !ok {
				return nil
			}
			if !s.sendBatch(ctx, st, batch.Append(nil)) {
				return nil
			}
		}
	})
	if err != nil {
		s.refuse(lmcache.OpSubscribeKVEvents, err)
	}
	if !st.silent.Load() {
		s.send(st.peer, st.uid, st.op)
	}
}

// features returns the optional features for the answer to get_experimental.
func (s *Server) features() []string {
	if s.opts.Events == nil {
		return nil
	}
	return []string{lmcache.KVEventStream}
}

// sendBatch sends a batch and waits until its client has consumed it. It reports false if the stream ends.
func (s *Server) sendBatch(ctx context.Context, st *stream, batch []byte) bool {
	for errors.Is(st.peer.SendOwned(st.uid, st.op, batch), zmtp.ErrQueueFull) {
		select {
		case <-time.After(time.Second): // other replies wait for this client, too
		case <-ctx.Done():
			return false
		}
	}
	select {
	case <-st.credit:
		return true
	case <-ctx.Done():
		return false
	}
}

// Incarnation returns a number that is different for each start of the server.
func (s *Server) Incarnation() uint64 { return uint64(s.started.UnixNano()) }

// next waits until there is something to send. ok is false if the stream ends. With `first` it returns a batch at once, even one without
// events.
func (st *stream) next(ctx context.Context, first bool, incarnation uint64) (batch lmcache.KVEventBatch, ok bool) {
	batch = lmcache.KVEventBatch{Enabled: true, Incarnation: incarnation}
	for {
		changed := st.book.Changed()
		if first && st.cursor == 0 {
			st.snapshot()
		} else if len(st.chunks) == 0 {
			st.records, st.resume, batch.Lost = st.book.Read(st.cursor, st.limit, st.records[:0], st.isVisible)
			if batch.Lost {
				st.snapshot()
			}
		}
		switch {
		case len(st.chunks) > 0 || batch.Lost:
			batch.Events = st.fromSnapshot()
		default:
			st.records = st.fitting(st.records)
			batch.Events = fromRecords(st.records)
		}
		st.records = st.records[:0]
		if len(st.chunks) == 0 {
			st.cursor = st.resume
		}
		batch.NextCursor = st.cursor
		if first || batch.Lost || len(batch.Events) > 0 {
			return batch, true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return batch, false
		}
	}
}

// isVisible reports whether the client gets a record. A client that is limited to some tenants gets the records of each of these tenants.
// It must not learn from a record that another tenant has the chunk, too.
func (st *stream) isVisible(r *events.Record) bool {
	if r.Medium != events.InPool || r.Model != st.model || r.Group >= 0 { // engines with LMCache do not use the rows of vLLM
		return false
	}
	if st.tenants.Limited() {
		return st.tenants.Allows(r.Salt)
	}
	return r.OfModel
}

// snapshot reads all chunks that the stream's model has in memory; a chunk of several salts once.
func (st *stream) snapshot() {
	limited := st.tenants.Limited()
	st.chunks, st.resume = st.book.Snapshot(st.model, !limited)
	if !limited {
		return
	}
	st.chunks = slices.DeleteFunc(st.chunks, func(c *events.Chunk) bool { return !st.tenants.Allows(c.Salt) })
	st.chunks = slices.CompactFunc(st.chunks, func(a, c *events.Chunk) bool { return a.Hash == c.Hash })
}

// fromSnapshot returns the next chunks of the snapshot. While some are left, the cursor stays: a client that asks again from there gets the
// snapshot again.
func (st *stream) fromSnapshot() (out []lmcache.KVEventRecord) {
	n := 0
	for room := int64(streamBytes); n < min(st.limit, len(st.chunks)) && (n == 0 || room > 0); n++ {
		out = append(out, stored(st.chunks[n], st.resume))
		room -= int64(len(st.chunks[n].Tokens))
	}
	if st.chunks = st.chunks[n:]; len(st.chunks) == 0 {
		st.chunks = nil
	}
	return out
}

// fitting returns the first records whose tokens fit into a batch, at least one. The stream then continues with the next record.
func (st *stream) fitting(records []events.Record) []events.Record {
	room := int64(streamBytes)
	for i, r := range records {
		if i > 0 && room <= 0 {
			st.resume = records[i-1].Seq
			return records[:i]
		}
		if !r.Removed {
			room -= int64(len(r.Chunk.Tokens))
		}
	}
	return records
}

// fromRecords returns records as events. Chunks that were removed one after the other share an event.
func fromRecords(records []events.Record) (out []lmcache.KVEventRecord) {
	for _, r := range records {
		last := len(out) - 1
		switch {
		case !r.Removed:
			out = append(out, stored(r.Chunk, r.Seq))
		case last >= 0 && out[last].Removed:
			out[last].Seq, out[last].Hashes = r.Seq, append(out[last].Hashes, r.Hash)
		default:
			out = append(out, lmcache.KVEventRecord{Seq: r.Seq, Removed: true, Model: r.Model, Hashes: []kv.Hash{r.Hash}})
		}
	}
	return out
}

func stored(c *events.Chunk, seq uint64) lmcache.KVEventRecord {
	r := lmcache.KVEventRecord{Seq: seq, Model: c.Model, Hashes: []kv.Hash{c.Hash}, Tokens: c.Tokens}
	if c.Index > 0 {
		r.Parent = c.Parent[:]
	}
	return r
}

// announce describes the first `chunks` chunks of a prompt to the Book. A worker has stored those from number `from` on.
func (s *Server) announce(chunk *chunking, k *lmcache.KeyView, sh *object.Shard, from, chunks int) {
	if book := s.opts.Events; book != nil && book.Active() {
		hashes := k.Hashes[:min(chunks, len(k.Hashes))]
		var text events.Text
		text.Head, text.Tokens, text.Ends = chunk.memo.Tokens(k)
		book.Announce(k.Model, k.Salt, sh, hashes, min(from, len(hashes)), &text)
	}
}

// announceFound is announce for a lookup. It has news only for chunks of an earlier server, chunks that were stored before the first
// subscription, and shards with different layouts.
func (s *Server) announceFound(chunk *chunking, k *lmcache.KeyView, sh *object.Shard) {
	if book := s.opts.Events; book != nil && book.Active() && (book.HasUnannounced() || sh.Each != nil) {
		s.announce(chunk, k, sh, len(k.Hashes), len(k.Hashes))
	}
}
