package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/transfer"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// front is the side channel of one engine of P towards D. All TP and PP ranks have
// the one address: whichever rank D asks, the relay pulls from all that D needs.
type front struct {
	r      *Relay
	engine bootstrap.Engine // P's
	id     string           // the engine id that D sees
	router *zmtp.Router
	addr   string
	gate   *mooncake.Gate // of D's pulls
}

// front returns the engine's front, a new one if the engine is new or has moved.
func (r *Relay) front(e bootstrap.Engine) (*front, error) {
	r.mu.Lock()
	old, closed := r.mu.fronts[e.ID], r.mu.closed
	r.mu.Unlock()
	if closed {
		return nil, errors.New("relay: closed")
	}
	if old != nil && reflect.DeepEqual(old.engine, e) {
		return old, nil
	}
	f := &front{
		r: r, engine: e, id: "relay-" + e.ID, gate: mooncake.NewGate(r.o.MaxPulls),
	}
	f.router = zmtp.NewRouter(f.handle, zmtp.RouterOptions{
		MaxFrameBytes: mooncake.MaxPullBytes, MaxMessageBytes: mooncake.MaxPullBytes, MaxPeers: 4 * r.o.MaxPulls, Logger: r.log,
	})
	at, err := f.router.Listen(r.ctx, "tcp://"+net.JoinHostPort(r.o.Host, "*"))
	if err != nil {
		return nil, fmt.Errorf("relay: side channel: %w", err)
	}
	f.addr = "tcp://" + at.String()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.closed {
		_ = f.router.Close()
		return nil, errors.New("relay: closed")
	}
	r.mu.fronts[e.ID] = f
	if old != nil {
		r.wg.Go(func() { _ = old.router.Close() })
	}
	r.log.Info("relay: engine of P", "engine", e.ID, "tp", e.TPSize(), "relayed_as", f.id, "side_channel", f.addr)
	return f, nil
}

// handle takes one message of D; it runs on the peer's reading goroutine.
func (f *front) handle(peer *zmtp.Peer, m zmtp.Message) {
	pull, err := f.take(m)
	ctx, cancel := context.WithCancelCause(f.r.ctx)
	var ticket *mooncake.Ticket
	if err == nil {
		ticket, err = f.gate.Enter(mooncake.PeerKey(peer, pull.Host, pull.Port), len(m[0]), cancel)
	}
	if err != nil {
		f.r.stats.failed.Add(1)
		f.r.log.Warn("relay: pull refused", "from", peer.RemoteAddr(), "err", err)
		send(peer, &mooncake.Reply{Status: mooncake.StatusError, Message: err.Error()})
		cancel(nil)
		return
	}
	f.r.wg.Go(func() {
		defer cancel(nil)
		defer ticket.Leave()
		f.serve(ctx, peer, pull)
	})
}

// take decodes and checks a pull.
func (f *front) take(m zmtp.Message) (*mooncake.Pull, error) {
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
			return fmt.Errorf("%w: region %d: %d bytes of KV in blocks of %d", mooncake.ErrMessage, i, r.Payload, r.Stride)
		case r.Base == 0 || r.Base > 1<<63 || r.Stride > 1<<63-r.Base:
			return fmt.Errorf("%w: region %d: no block of %d bytes fits at %#x", mooncake.ErrMessage, i, r.Stride, r.Base)
		}
	}
	return nil
}

// result is what became of one request of a pull.
type result struct {
	id  string
	err error
}

// serve answers one pull of D: its requests go their ways, each is reported when it
// is done.
func (f *front) serve(ctx context.Context, peer *zmtp.Peer, pull *mooncake.Pull) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if pull.DeadlineMillis > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(pull.DeadlineMillis)*time.Millisecond)
		defer cancel()
	}
	done := make(chan result, len(pull.Wanted))
	for _, id := range slices.Sorted(maps.Keys(pull.Wanted)) {
		f.r.wg.Go(func() { done <- result{id, f.one(ctx, pull, pull.Wanted[id])} })
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
			f.report(peer, pull, res, left == 0)
		case <-away:
			cancel() // nobody to push to
			away = nil
		}
	}
}

// report tells D, and the log, of one request.
func (f *front) report(peer *zmtp.Peer, pull *mooncake.Pull, res result, last bool) {
	y := mooncake.Reply{Status: mooncake.StatusContinue}
	if last {
		y.Status = mooncake.StatusFinish
	}
	if res.err != nil {
		f.r.stats.failed.Add(1)
		y.Failed, y.Message = []string{res.id}, res.err.Error()
		f.r.log.Warn("relay: request failed", "request", res.id, "transfer", pull.Wanted[res.id].TransferID, "err", res.err)
	} else {
		f.r.stats.served.Add(1)
		y.OK = []string{res.id}
	}
	send(peer, &y)
}

func send(peer *zmtp.Peer, y *mooncake.Reply) {
	if peer.Send(mooncake.AppendReply(nil, y)) == nil {
		peer.Flush()
	}
}

// one serves one request of D: from memory, or through P.
func (f *front) one(ctx context.Context, pull *mooncake.Pull, want mooncake.Wanted) error {
	transferID, _, _ := strings.Cut(want.TransferID, "#")
	if !slices.ContainsFunc(want.Blocks, func(g []int) bool { return len(g) > 0 }) {
		return f.letGo(ctx, pull, transferID)
	}
	k, loaded, err := f.keep(ctx, pull, transferID, want.Blocks)
	if err != nil {
		return err
	}
	defer f.r.release(k)
	start := time.Now()
	n, err := f.push(ctx, pull, k, want.Blocks)
	if err != nil {
		return err
	}
	source := "P"
	if !loaded {
		source = "memory"
		f.r.stats.fromMemory.Add(1)
	}
	f.r.log.Info("relay: served", "transfer", want.TransferID, "from", source, "bytes", n, "push", time.Since(start).Round(10*time.Microsecond))
	return nil
}

// entries lists what fills D's blocks from kept KV, and its bytes.
func (k *kept) entries(pull *mooncake.Pull, blocks [][]int) (entries []transfer.Entry, total int64, err error) {
	self := mooncake.Peer{TPRank: pull.TPRank, TPSize: pull.TPSize, PPSize: pull.PPSize} // what D's own rank holds
	plan, err := mooncake.PlanPush(k.cache, self, self, pull.Regions)
	if err != nil {
		return nil, 0, err
	}
	list, err := plan.Append(nil, k.blocks, blocks)
	if err != nil {
		return nil, 0, err
	}
	entries = make([]transfer.Entry, len(list))
	for i, d := range list {
		mem := k.cache.Bytes(d.Src, d.Len)
		if mem == nil {
			return nil, 0, fmt.Errorf("relay: %d bytes at %#x are not kept", d.Len, d.Src)
		}
		entries[i] = transfer.Entry{Local: mem, Remote: d.Dst}
		total += int64(len(mem))
	}
	return entries, total, nil
}

// push writes kept KV into D's blocks.
func (f *front) push(ctx context.Context, pull *mooncake.Pull, k *kept, blocks [][]int) (int64, error) {
	entries, total, err := k.entries(pull, blocks)
	if err != nil {
		return 0, err
	}
	start := time.Now()
	if err := f.r.client.Write(ctx, net.JoinHostPort(pull.Host, strconv.Itoa(pull.Port)), entries); err != nil {
		return 0, fmt.Errorf("relay: push to D: %w", err)
	}
	f.r.o.Metrics.Pushed(time.Since(start), total, len(entries))
	f.r.stats.pushed.Add(total)
	return total, nil
}
