// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// handle receives one message of D. It runs on the goroutine that reads the peer's connection.
func (c *channel) handle(peer *zmtp.Peer, m zmtp.Message) {
	r := c.e.r
	pull, err := decodePull(m, r.o.BlockBytes)
	ctx, cancel := context.WithCancelCause(r.ctx)
	var ticket *mooncake.Ticket
	if err == nil {
		ticket, err = r.gate.Enter(mooncake.PeerKey(peer, pull.Host, pull.Port), len(m[0]), cancel)
	}
	if err != nil {
		r.refuse(peer, err)
		cancel(nil)
		return
	}
	end := r.conns.Begin(peer)
	r.wg.Go(func() {
		defer end()
		defer cancel(nil)
		defer ticket.Leave()
		c.serve(ctx, cancel, peer, pull)
	})
}

// refusedSocket logs, once, that the side channel closes connections of SGLang, recognised by their PUSH sockets.
func (r *Relay) refusedSocket(peer *zmtp.Peer, socketType string) {
	if socketType == "PUSH" {
		r.sglang.Do(func() {
			r.log.Warn("relay: a connection of SGLang's side channel is closed: its P and D pair with each other, not with a relay", "from", peer.RemoteAddr())
		})
	}
}

func (r *Relay) refuse(peer *zmtp.Peer, err error) {
	r.stats.failed.Add(1)
	r.warn.Warn(r.log, "relay: pull refused", "from", peer.RemoteAddr(), "err", err)
	send(peer, &wire.Reply{Status: wire.StatusError, Message: err.Error()})
}

// decodePull decodes and checks a pull. blockBytes is the block size to assume for a D whose pulls do not carry it.
func decodePull(m zmtp.Message, blockBytes uint64) (*wire.Pull, error) {
	if len(m) != 1 {
		return nil, fmt.Errorf("%w: %d frames instead of one", wire.ErrMessage, len(m))
	}
	pull, err := wire.DecodePull(m[0], 0)
	if err != nil {
		return nil, err
	}
	if !pull.Release.BlockSizes() {
		if blockBytes == 0 {
			return nil, errNoSizes
		}
		for i := range pull.Regions {
			pull.Regions[i].Stride, pull.Regions[i].Payload = blockBytes, blockBytes
		}
	}
	return pull, checkRegions(pull.Regions)
}

var errNoSizes = fmt.Errorf("%w: D does not say how large its blocks are, as before vLLM 0.19: the relay needs --block-bytes", wire.ErrMessage)

// checkRegions refuses regions that cannot exist in any memory. The relay's address arithmetic relies on that check.
func checkRegions(regions []wire.Region) error {
	if len(regions) == 0 {
		return fmt.Errorf("%w: the pull has no regions of memory, and the relay has none of this D", wire.ErrMessage)
	}
	for i := range regions {
		r := &regions[i]
		switch {
		case r.Payload == 0 || r.Payload > r.Stride:
			return fmt.Errorf("%w: region %d: %d bytes of KV do not fit into blocks of %d",
				wire.ErrMessage, i, r.Payload, r.Stride)
		case r.Base == 0 || r.Base > 1<<63 || r.Stride > 1<<63-r.Base:
			return fmt.Errorf("%w: region %d: no block of %d bytes fits at %#x", wire.ErrMessage, i, r.Stride, r.Base)
		}
	}
	return nil
}

// maxTogether bounds how many requests of one pull are served at a time; the others wait. It is more than an engine computes at once, and
// small enough to be cheap if all of them fail.
const maxTogether = 256

// result is the outcome of one request of a pull.
type result struct {
	id  string
	err error
}

// serve answers one pull of D. It serves the pull's requests concurrently and reports each when it is done.
func (c *channel) serve(ctx context.Context, cancel context.CancelCauseFunc, peer *zmtp.Peer, pull *wire.Pull) {
	r := c.e.r
	if pull.DeadlineMillis > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, time.Duration(pull.DeadlineMillis)*time.Millisecond)
		defer stop()
	}
	done := make(chan result, len(pull.Wanted))
	memory := memoryOf(pull.Regions)
	next := make(chan string)
	r.wg.Go(func() {
		defer close(next)
		for _, id := range slices.Sorted(maps.Keys(pull.Wanted)) {
			next <- id
		}
	})
	for range min(len(pull.Wanted), maxTogether) {
		r.wg.Go(func() {
			for id := range next {
				done <- result{id, c.serveRequest(ctx, pull, memory, id)}
			}
		})
	}
	left := len(pull.Wanted)
	if left == 0 {
		send(peer, &wire.Reply{Status: wire.StatusFinish})
	}
	away := peer.Done()
	for left > 0 {
		select {
		case res := <-done:
			left--
			r.report(peer, pull, res, left == 0)
		case <-away:
			cancel(nil) // D is gone
			away = nil
		}
	}
}

// report sends D the result of one request of pull, counts it, and logs a failure. `last` means that no other request of the pull is left:
// the reply then ends the pull.
func (r *Relay) report(peer *zmtp.Peer, pull *wire.Pull, res result, last bool) {
	y := wire.Reply{Status: wire.StatusContinue}
	if last {
		y.Status = wire.StatusFinish
	}
	if res.err != nil {
		r.stats.failed.Add(1)
		y.Failed, y.Message = []string{res.id}, res.err.Error()
		r.warn.Warn(r.log, "relay: request failed", "request", res.id, "transfer", pull.Wanted[res.id].TransferID, "err", res.err)
	} else {
		r.stats.served.Add(1)
		y.OK = []string{res.id}
	}
	send(peer, &y)
}

func send(peer *zmtp.Peer, y *wire.Reply) {
	if peer.Send(wire.AppendReply(nil, y)) == nil {
		peer.Flush()
	}
}

// requestKey names a request of one D worker for the same blocks of its memory. D asks each of the P workers with which it is paired;
// the relay pushes once for all of them.
type requestKey struct {
	engine            string
	host              string
	port, rank        int
	request, transfer string
	memory            uint64
}

// request is the state of one requestKey, while it is served and for requestMemory after that.
type request struct {
	ctx    context.Context // ends when no pull waits for it any more
	cancel context.CancelFunc
	done   chan struct{} // closed at the end
	err    error         // valid when done is closed, like k
	k      *savedTransfer

	id   string             // D's request id
	peer string             // the D worker
	seen *transferlog.Entry // log entry of its progress; nil: D wants no blocks

	// Guarded by Relay.mu.
	late   bool                // D's deadline passed
	users  int                 // pulls that wait for it
	using  *savedTransfer      // the KV that is being pushed
	places map[workerRank]bool // workers at whose channels D has asked
	at     time.Time           // when it ended
}

const (
	maxRequests   = 4096             // most requests remembered; with more, all that have ended are forgotten
	requestMemory = 30 * time.Second // how long a request is remembered after its end
)

// memoryOf returns a hash of the addresses of D's regions.
func memoryOf(regions []wire.Region) uint64 {
	var b []byte
	for i := range regions {
		b = strconv.AppendUint(b, regions[i].Base, 36)
		b = append(b, ' ')
	}
	return xxh3.Hash(b)
}

// serveRequest answers the request id of a pull that came to this channel, and returns the error to report to D.
func (c *channel) serveRequest(ctx context.Context, pull *wire.Pull, memory uint64, id string) error {
	r, want := c.e.r, pull.Wanted[id]
	if want.TransferID == "" {
		return fmt.Errorf("%w: no transfer id", wire.ErrMessage)
	}
	for _, g := range want.Blocks {
		memory = memory*31 + xxh3.HashString(fmt.Sprint(g))
	}
	key := requestKey{c.e.id, pull.Host, pull.Port, pull.TPRank, id, want.TransferID, memory}
	r.mu.Lock()
	if len(r.mu.requests) > maxRequests {
		r.forgetRequestsLocked()
	}
	mine := r.mu.requests[key]
	// A second pull at the same channel means that D lost the answer, or tries again.
	if before := mine; mine == nil || mine.endingLocked() || isDone(mine.done) && (mine.places[c.at] || time.Since(mine.at) > requestMemory) {
		mine = &request{id: id, peer: net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), done: make(chan struct{}), places: make(map[workerRank]bool)}
		mine.ctx, mine.cancel = context.WithCancel(r.ctx)
		r.mu.requests[key] = mine
		a := mine
		r.wg.Go(func() { c.e.answer(a, pull, want, before) })
	}
	mine.places[c.at] = true
	mine.users++
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if mine.users--; mine.users == 0 {
			mine.cancel() // D is gone
		}
	}()
	select {
	case <-mine.done:
		return mine.err
	case <-ctx.Done():
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			r.mu.Lock()
			mine.late = true
			r.mu.Unlock()
		}
		return context.Cause(ctx)
	}
}

// endingLocked reports whether the request was cancelled but has not ended yet. D may pull again before the cancelled push has ended.
func (a *request) endingLocked() bool { return !isDone(a.done) && a.ctx.Err() != nil }

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// forgetRequestsLocked forgets the requests that ended at least requestMemory ago. While there are more than maxRequests, it also
// forgets others that have ended.
func (r *Relay) forgetRequestsLocked() {
	for key, a := range r.mu.requests {
		if isDone(a.done) && (time.Since(a.at) > requestMemory || len(r.mu.requests) > maxRequests) {
			delete(r.mu.requests, key)
		}
	}
}

// answer serves the request a, for which D's pull wants the blocks in `want`, and ends it. `before` is the request of an earlier pull of D
// for the same blocks, or nil. answer waits until `before` has ended, so that the two do not push at the same time.
func (e *engine) answer(a *request, pull *wire.Pull, want wire.Wanted, before *request) {
	defer a.cancel()
	var from *savedTransfer
	if before != nil {
		<-before.done // it has ended already, or was cancelled
		from = before.k
	}
	a.seen = e.beginEntry(a, pull, want)
	k, err := e.deliver(a, pull, want, from)
	e.r.mu.Lock()
	a.k, a.err, a.at = k, err, time.Now()
	late := a.late
	e.r.mu.Unlock()
	noteEnd(a.seen, err, late)
	close(a.done)
}

// deliver gets the KV of one request and pushes it into D's blocks in `want`. It returns the KV that it pushed, also when the push fails.
// `before` is the KV that this relay pushed for an earlier pull of the same request, or nil: it is used again if P does not give the KV once
// more.
func (e *engine) deliver(a *request, pull *wire.Pull, want wire.Wanted, before *savedTransfer) (*savedTransfer, error) {
	ctx, r, id := a.ctx, e.r, parseID(want.TransferID)
	if !slices.ContainsFunc(want.Blocks, func(g []int) bool { return len(g) > 0 }) {
		return nil, e.releaseAtP(ctx, pull, id)
	}
	k, source, err := e.findOrLoad(ctx, pull, id, want.Blocks, before, a.seen)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	a.using = k
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		a.using = nil
		r.mu.Unlock()
		r.release(k)
	}()
	start, sent := time.Now(), new(transfer.Progress)
	a.seen.From(source)
	a.seen.Next(transferlog.Sending, "relay sends to D", func() (time.Time, uint64) { return start, sent.Bytes() })
	n, err := r.push(ctx, pull, k, want.Blocks, sent)
	if err != nil {
		return k, err
	}
	if source == fromMemory {
		r.stats.fromMemory.Add(1)
	}
	r.log.Info("relay: served", "transfer", want.TransferID, "from", source, "bytes", n, "push", time.Since(start).Round(10*time.Microsecond))
	return k, nil
}

var (
	errGone      = errors.New("relay: the engine of P is not registered any more")
	errOtherLife = errors.New("relay: the engine of P restarted or changed since D asked")
	errNotProven = errors.New("relay: the engine of P may have restarted since D asked: it does not answer over the connection that the relay held")
)
