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

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// handle takes one message of D; it runs on the peer's reading goroutine.
func (c *channel) handle(peer *zmtp.Peer, m zmtp.Message) {
	r := c.e.r
	pull, err := take(m)
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

func (r *Relay) refuse(peer *zmtp.Peer, err error) {
	r.stats.failed.Add(1)
	r.warn.Warn(r.log, "relay: pull refused", "from", peer.RemoteAddr(), "err", err)
	send(peer, &mooncake.Reply{Status: mooncake.StatusError, Message: err.Error()})
}

// take decodes and checks a pull.
func take(m zmtp.Message) (*mooncake.Pull, error) {
	if len(m) != 1 {
		return nil, fmt.Errorf("%w: %d frames instead of one", mooncake.ErrMessage, len(m))
	}
	pull, err := mooncake.DecodePull(m[0], 0)
	if err == nil {
		err = checkRegions(pull.Regions)
	}
	return pull, err
}

// checkRegions refuses memory that cannot be D's: all else that the relay computes
// relies on it.
func checkRegions(regions []mooncake.Region) error {
	if len(regions) == 0 {
		return fmt.Errorf("%w: no regions, and the relay has never said that it kept them", mooncake.ErrMessage)
	}
	for i := range regions {
		r := &regions[i]
		switch {
		case r.Payload == 0 || r.Payload > r.Stride:
			return fmt.Errorf("%w: region %d: %d bytes of KV in blocks of %d (vLLM before 0.19 sends no lengths)",
				mooncake.ErrMessage, i, r.Payload, r.Stride)
		case r.Base == 0 || r.Base > 1<<63 || r.Stride > 1<<63-r.Base:
			return fmt.Errorf("%w: region %d: no block of %d bytes fits at %#x", mooncake.ErrMessage, i, r.Stride, r.Base)
		}
	}
	return nil
}

// maxTogether bounds the requests of one pull that are served at a time: more than an
// engine computes at once, and no burden where none of them leads to anything.
const maxTogether = 256

// result is what became of one request of a pull.
type result struct {
	id  string
	err error
}

// serve answers one pull of D: its requests go their ways, each is reported when it
// is done.
func (c *channel) serve(ctx context.Context, cancel context.CancelCauseFunc, peer *zmtp.Peer, pull *mooncake.Pull) {
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
				done <- result{id, c.one(ctx, pull, memory, id)}
			}
		})
	}
	left := len(pull.Wanted)
	if left == 0 {
		send(peer, &mooncake.Reply{Status: mooncake.StatusFinish})
	}
	away := peer.Done()
	for left > 0 {
		select {
		case res := <-done:
			left--
			r.report(peer, pull, res, left == 0)
		case <-away:
			cancel(nil) // nobody to push to
			away = nil
		}
	}
}

// report tells D, and the log, of one request.
func (r *Relay) report(peer *zmtp.Peer, pull *mooncake.Pull, res result, last bool) {
	y := mooncake.Reply{Status: mooncake.StatusContinue}
	if last {
		y.Status = mooncake.StatusFinish
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

func send(peer *zmtp.Peer, y *mooncake.Reply) {
	if peer.Send(mooncake.AppendReply(nil, y)) == nil {
		peer.Flush()
	}
}

// askKey names a request of one D worker for one piece of its memory. D asks each of
// the P workers that it is paired with; the relay pushes once for all of them.
type askKey struct {
	engine            string
	host              string
	port, rank        int
	request, transfer string
	memory            uint64
}

// ask is such a request being served, or served.
type ask struct {
	ctx    context.Context // ends when nobody waits
	cancel context.CancelFunc
	done   chan struct{} // closed at the end
	err    error         // valid when done, as is k
	k      *kept

	peer string // the D worker

	// Guarded by Relay.mu.
	users  int            // that wait
	using  *kept          // being pushed
	places map[place]bool // where D has asked
	at     time.Time      // when it ended
}

const (
	maxAsks  = 4096
	askedFor = 30 * time.Second // how long a request that ended is remembered
)

// memoryOf hashes where D's regions are.
func memoryOf(regions []mooncake.Region) uint64 {
	var b []byte
	for i := range regions {
		b = strconv.AppendUint(b, regions[i].Base, 36)
		b = append(b, ' ')
	}
	return xxh3.Hash(b)
}

// one serves one request of D that came to this channel.
func (c *channel) one(ctx context.Context, pull *mooncake.Pull, memory uint64, id string) error {
	r, want := c.e.r, pull.Wanted[id]
	if want.TransferID == "" {
		return fmt.Errorf("%w: no transfer id", mooncake.ErrMessage)
	}
	for _, g := range want.Blocks {
		memory = memory*31 + xxh3.HashString(fmt.Sprint(g))
	}
	key := askKey{c.e.id, pull.Host, pull.Port, pull.TPRank, id, want.TransferID, memory}
	r.mu.Lock()
	if len(r.mu.asks) > maxAsks {
		r.forgetAsksLocked()
	}
	mine := r.mu.asks[key]
	// D asks a worker a second time when it has not heard the answer, or tries again.
	if before := mine; mine == nil || mine.endingLocked() || isDone(mine.done) && (mine.places[c.at] || time.Since(mine.at) > askedFor) {
		mine = &ask{peer: net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), done: make(chan struct{}), places: make(map[place]bool)}
		mine.ctx, mine.cancel = context.WithCancel(r.ctx)
		r.mu.asks[key] = mine
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
			mine.cancel() // nobody to push to
		}
	}()
	select {
	case <-mine.done:
		return mine.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// endingLocked says whether the request is being given up: D may be back before its
// push has ended.
func (a *ask) endingLocked() bool { return !isDone(a.done) && a.ctx.Err() != nil }

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// forgetAsksLocked keeps the memory of ended requests short.
func (r *Relay) forgetAsksLocked() {
	for key, a := range r.mu.asks {
		if isDone(a.done) && (time.Since(a.at) > askedFor || len(r.mu.asks) > maxAsks) {
			delete(r.mu.asks, key)
		}
	}
}

// answer serves a request and ends it. before is the same request as D asked earlier,
// or nil: no two push at a time.
func (e *engine) answer(a *ask, pull *mooncake.Pull, want mooncake.Wanted, before *ask) {
	defer a.cancel()
	var from *kept
	if before != nil {
		<-before.done // ended, or told to
		from = before.k
	}
	k, err := e.deliver(a, pull, want, from)
	e.r.mu.Lock()
	a.k, a.err, a.at = k, err, time.Now()
	e.r.mu.Unlock()
	close(a.done)
}

// deliver gets one request's KV and pushes it to D. It returns what it pushed from, also
// when the push fails. before is what an earlier answer was pushed from, or nil.
func (e *engine) deliver(a *ask, pull *mooncake.Pull, want mooncake.Wanted, before *kept) (*kept, error) {
	ctx, r, id := a.ctx, e.r, parseID(want.TransferID)
	if !slices.ContainsFunc(want.Blocks, func(g []int) bool { return len(g) > 0 }) {
		return nil, e.letGo(ctx, pull, id)
	}
	k, source, err := e.find(ctx, pull, id, want.Blocks, before)
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
	start := time.Now()
	n, err := r.push(ctx, pull, k, want.Blocks)
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
	errOtherLife = errors.New("relay: the engine of P is not what it was when D asked")
)
