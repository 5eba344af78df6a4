// SPDX-License-Identifier: Apache-2.0

// Command both is an engine of the role kv_both without a model: it pulls each
// transfer from a real P with a mooncake.Receiver, and offers it to a real D with a
// mooncake.Sender, from the same memory. run_mooncake_pd.py takes it as --relay,
// run_mooncake_pd_v013.py as --middle: there the sides are those of package v013.
//
// What a real engine knows of itself, its layers and block sizes, it learns from
// D's first pull, which it reads on its way to the Sender.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

func main() {
	upstream := flag.String("upstream", "", "P's bootstrap server")
	port := flag.Int("port", 0, "port of GET /query, or with --p-port of the side channel")
	pPort := flag.Int("p-port", 0, "port of the side channel of a P of vLLM 0.13")
	blockBytes := flag.Uint64("block-bytes", 0, "of a block of keys or values of engines before vLLM 0.19, which do not say it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if *pPort > 0 {
		err = run013(ctx, *pPort, *port, *blockBytes)
	} else {
		err = run(ctx, *upstream, *port, *blockBytes)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func newLog() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// blocks is how many blocks the engine's cache has.
const blocks = 4096

type engine struct {
	ctx    context.Context
	log    *slog.Logger
	up     *bootstrap.Client
	target *transfer.Target
	client *transfer.Client
	front  front // D's side; messages go on to the Sender
	addr   string

	blockBytes uint64 // where D does not say it

	mu       sync.Mutex
	receiver *mooncake.Receiver
	sender   *mooncake.Sender
	next     int // block id
}

func run(ctx context.Context, upstream string, port int, blockBytes uint64) error {
	e := &engine{
		ctx: ctx, log: newLog(), client: transfer.New(transfer.Options{}), next: 1, blockBytes: blockBytes,
	}
	defer e.client.Close()
	var err error
	if e.up, err = bootstrap.NewClient(upstream, bootstrap.ClientOptions{}); err != nil {
		return err
	}
	if e.target, err = transfer.Listen(transfer.TargetOptions{}, transfer.NewTable()); err != nil {
		return err
	}
	defer e.target.Close()
	if e.addr, err = e.front.listen(ctx, "tcp://127.0.0.1:*", e.see, func(err error) { e.log.Error("pull", "err", err) }); err != nil {
		return err
	}
	defer e.front.router.Close()
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	web := &http.Server{Handler: http.HandlerFunc(e.query), ReadHeaderTimeout: time.Second}
	go web.Serve(l)
	<-ctx.Done()
	web.Close()
	return e.finish()
}

// finish says what was done; an engine that served nothing has failed.
func (e *engine) finish() error {
	e.mu.Lock()
	s, r := e.sender, e.receiver
	e.mu.Unlock()
	if s == nil {
		return errors.New("both: no pull came")
	}
	eventually := time.Now().Add(5 * time.Second)
	for s.Stats().Transfers > 0 && time.Now().Before(eventually) {
		time.Sleep(10 * time.Millisecond)
	}
	a, b := s.Stats(), r.Stats()
	fmt.Printf("  both: received %d requests, pushed %d batches, %d bytes; %d requests of its own free, %d transfers left, %d failed\n",
		b.Received, a.Pushed, a.Bytes, len(s.Finished()), a.Transfers, a.FailedPulls+b.Failed)
	err := errors.Join(s.Close(), r.Close())
	if b.Received == 0 || a.Pushed == 0 || a.Transfers > 0 || a.FailedPulls+b.Failed > 0 {
		err = errors.Join(err, errors.New("both: not all went well"))
	}
	return err
}

func (e *engine) query(w http.ResponseWriter, r *http.Request) {
	d, err := e.up.Query(r.Context())
	if err != nil || len(d) == 0 {
		http.Error(w, fmt.Sprint(err), http.StatusServiceUnavailable)
		return
	}
	json.NewEncoder(w).Encode(map[string]any{"0": map[string]any{
		"engine_id": "both-" + d[0].ID, "worker_addr": map[string]any{"0": map[string]string{"0": e.addr}},
	}})
}

// see reads a pull of D and has its transfers computed. The Sender gets the pull before
// the KV is there, as from a proxy that asks both engines at once.
func (e *engine) see(m zmtp.Message) (string, error) {
	pull, err := wire.DecodePull(m[0], 0)
	if err == nil {
		err = e.open(pull)
	}
	if err != nil {
		return "", err
	}
	for _, w := range pull.Wanted {
		go e.prefill(w)
	}
	return e.sender.Addr(), nil
}

// open makes the engine's memory in D's layout: same layers, sizes and groups.
func (e *engine) open(pull *wire.Pull) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.sender != nil {
		return nil
	}
	c := &mooncake.Cache{}
	for i, r := range pull.Regions {
		if !pull.Release.BlockSizes() {
			r.Payload = e.blockBytes
		}
		if r.Group == wire.Unsent { // before 0.25: all regions are of one group
			r.Layer, r.Index, r.Group = cmp.Or(r.Layer, fmt.Sprint("region ", i)), i, 0
		}
		r.Stride, r.RowOffset = r.Payload, wire.NoRow
		r.Base = uint64(i+1) << 36
		c.Storages = append(c.Storages, mooncake.Storage{Addr: r.Base, Mem: make([]byte, blocks*r.Payload)})
		c.Regions = append(c.Regions, r)
		for len(c.Kinds) <= r.Group {
			c.Kinds = append(c.Kinds, mooncake.Attention)
		}
	}
	var err error
	if e.receiver, err = mooncake.NewReceiver(c, mooncake.ReceiverOptions{Target: e.target, Release: pull.Release, Log: e.log}); err != nil {
		return err
	}
	s, err := mooncake.NewSender(c, mooncake.SenderOptions{Transfer: e.client, Log: e.log})
	if err != nil {
		return err
	}
	e.sender = s
	return s.Start(e.ctx)
}

// after returns the block that is taken after block id, of n, a power of two: never its
// neighbour, and never 0, which is a placeholder in some groups.
func after(id, n int) int {
	return cmp.Or((id+7)%n, 7)
}

// prefill gets a transfer's KV, from the real P, and offers it.
func (e *engine) prefill(w wire.Wanted) {
	e.mu.Lock()
	s, r := e.sender, e.receiver
	own := make([][]int, len(w.Blocks))
	for g, ids := range w.Blocks {
		for range ids {
			own[g] = append(own[g], e.next)
			e.next = after(e.next, blocks)
		}
	}
	e.mu.Unlock()
	request := "p-" + w.TransferID
	s.Expect(request, w.TransferID)
	d, err := e.up.Query(e.ctx)
	if err == nil {
		var failed map[string]error
		failed, err = r.Pull(e.ctx, mooncake.Source{EngineID: d[0].ID, Bootstrap: e.up.Base()},
			map[string]wire.Wanted{request: {TransferID: w.TransferID, Blocks: own}})
		err = errors.Join(err, failed[request])
	}
	if err != nil {
		e.log.Error("prefill", "err", err)
		s.Abort(w.TransferID)
		return
	}
	s.Offer(request, w.TransferID, own)
}
