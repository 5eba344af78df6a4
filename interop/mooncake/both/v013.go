// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/v013"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// engine013 is the engine between a P and a D of vLLM 0.13.
type engine013 struct {
	ctx        context.Context
	log        *slog.Logger
	from       mooncake.Source
	blockBytes uint64
	target     *transfer.Target
	client     *transfer.Client
	front      front

	mu       sync.Mutex
	receiver *mooncake.Receiver
	sender   *v013.Sender
	next     int // block id
	unknown  int // requests that P did not have
}

// blocks013 is how many blocks its cache has.
const blocks013 = 512

func run013(ctx context.Context, pPort, port int, blockBytes uint64) error {
	if blockBytes == 0 {
		return errors.New("both: --p-port needs --block-bytes")
	}
	e := &engine013{
		ctx: ctx, log: newLog(), from: mooncake.Source{Host: "127.0.0.1", Port: pPort}, blockBytes: blockBytes,
		client: transfer.New(transfer.Options{}), next: 1,
	}
	defer e.client.Close()
	var err error
	if e.target, err = transfer.Listen(transfer.TargetOptions{}, transfer.NewTable()); err != nil {
		return err
	}
	defer e.target.Close()
	_, err = e.front.listen(ctx, fmt.Sprintf("tcp://127.0.0.1:%d", port), e.see, func(err error) { e.log.Error("pull", "err", err) })
	if err != nil {
		return err
	}
	<-ctx.Done()
	e.front.router.Close()
	return e.finish()
}

func (e *engine013) finish() error {
	e.mu.Lock()
	s, r, unknown := e.sender, e.receiver, e.unknown
	e.mu.Unlock()
	if s == nil {
		return errors.New("both: no pull came")
	}
	a, b := s.Stats(), r.Stats()
	fmt.Printf("  both, 0.13: received %d requests, pushed %d batches, %d bytes; %d requests of its own free, %d left, %d unknown to P, %d failed\n",
		b.Received, a.Pushed, a.Bytes, len(s.Finished()), a.Transfers, unknown, a.FailedPulls+b.Failed)
	err := errors.Join(s.Close(), r.Close())
	if b.Received == 0 || a.Pushed == 0 || a.Transfers > 0 || int(b.Failed) != unknown || int(a.FailedPulls) != unknown {
		err = errors.Join(err, errors.New("both: not all went well"))
	}
	return err
}

// see reads a pull of D, promises its requests, and has them computed.
func (e *engine013) see(m zmtp.Message) (string, error) {
	pull, err := wire.DecodePull013(m[len(m)-1])
	if err == nil {
		err = e.open(pull)
	}
	if err != nil {
		return "", err
	}
	for i, id := range pull.Requests {
		e.sender.Apply(&wire.Metadata{Sends: []wire.SendMeta{{RequestID: id}}})
		go e.prefill(id, len(pull.Blocks[i]))
	}
	return e.sender.Addr(), nil
}

// open makes the engine's memory: as many regions as D has.
func (e *engine013) open(pull *wire.Pull013) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sender != nil {
		return nil
	}
	c := &mooncake.Cache{Kinds: []mooncake.GroupKind{mooncake.Attention}}
	for i := range pull.Bases {
		base := uint64(i+1) << 36
		c.Storages = append(c.Storages, mooncake.Storage{Addr: base, Mem: make([]byte, blocks013*e.blockBytes)})
		c.Regions = append(c.Regions, wire.Region{
			Layer: fmt.Sprint("region ", i), Index: i, Base: base, Stride: e.blockBytes, Payload: e.blockBytes, RowOffset: wire.NoRow,
		})
	}
	var err error
	if e.receiver, err = v013.NewReceiver(c, mooncake.ReceiverOptions{Target: e.target, Log: e.log}); err != nil {
		return err
	}
	s, err := v013.NewSender(c, mooncake.SenderOptions{Transfer: e.client, Log: e.log})
	if err != nil {
		return err
	}
	e.sender = s
	return s.Start(e.ctx)
}

// prefill gets a request's KV, n blocks, from the real P, and offers it.
func (e *engine013) prefill(id string, n int) {
	e.mu.Lock()
	var own []int
	for range n {
		own = append(own, e.next)
		e.next = after(e.next, blocks013)
	}
	e.mu.Unlock()
	began := time.Now()
	failed, err := e.receiver.Pull(e.ctx, e.from, map[string]wire.Wanted{id: {Blocks: [][]int{own}}})
	if err = errors.Join(err, failed[id]); err == nil {
		e.sender.Apply(&wire.Metadata{Sends: []wire.SendMeta{{RequestID: id, Blocks: [][]int{own}}}})
		return
	}
	e.log.Error("prefill", "after", time.Since(began), "err", err)
	if errors.Is(err, mooncake.ErrPeer) {
		e.mu.Lock()
		e.unknown++
		e.mu.Unlock()
	}
	e.sender.Apply(&wire.Metadata{NotProcessed: []string{id}})
}
