// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/scheduler"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/v013"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// sender is a worker of P, of vLLM 0.13 or of later releases.
type sender interface {
	Start(ctx context.Context) error
	Addr() string
	Apply(m *wire.Metadata)
	Finished() []string
	Stats() mooncake.SenderStats
	Close() error
}

// mooncakeConn is vLLM's MooncakeConnector: one scheduler, and one worker per rank.
type mooncakeConn struct {
	e         *Engine
	sched     *scheduler.Scheduler
	metrics   *mooncake.Metrics // shared by all workers
	senders   []sender
	receivers []*mooncake.Receiver
	targets   []*transfer.Target
	client    *transfer.Client
	boot      *bootstrap.Client
	registry  func() // stops P's own registry; nil: it has none
	states    bool   // a group has recurrent states, so the last prompt token is left to D
	requests  map[string]*scheduler.Request
}

func newMooncake(e *Engine, c *kvconfig.Config) (_ *mooncakeConn, err error) {
	o, err := c.Mooncake(e.o.Getenv)
	if err != nil {
		return nil, err
	}
	if e.o.DPSize > 1 { // the name that vLLM gives to the engine of a rank
		o.EngineID = fmt.Sprintf("%s_dp%d", o.EngineID, e.o.DPRank)
	}
	if e.o.KV.Layout.Split() && !e.o.First {
		return nil, fmt.Errorf("engine: MooncakeConnector: layout %s has all keys before all values: only the dialect of 0.13 registers it; take flashinfer", e.o.KV.Layout)
	}
	k := &mooncakeConn{e: e, metrics: mooncake.NewMetrics(), requests: make(map[string]*scheduler.Request)}
	defer func() {
		if err != nil {
			err = errors.Join(err, k.close(context.Background()))
		}
	}()
	so := scheduler.Options{Role: o.Role, EngineID: o.EngineID, Workers: e.o.KV.TPSize, Log: e.log}
	for _, g := range e.o.Groups {
		c := coordinator.Group{Kind: coordinator.Full, Block: e.o.KV.BlockTokens}
		switch {
		case g.State:
			c.Kind = coordinator.Mamba
			k.states = true
		case g.Window > 0:
			c.Kind, c.Window = coordinator.SlidingWindow, g.Window
		}
		so.Groups = append(so.Groups, scheduler.CacheGroup{Group: c})
	}
	if e.o.First {
		so.Pairing = scheduler.RequestIDs(o.Host, v013.SidePort(o.BasePort, e.o.DPRank, e.o.KV.TPSize, 0))
	}
	if k.sched, err = scheduler.New(so); err != nil {
		return nil, err
	}
	if o.Role != wire.Consumer {
		if err = k.startSenders(o); err != nil {
			return nil, err
		}
	}
	if o.Role != wire.Producer {
		err = k.startReceivers(o)
	}
	return k, err
}

// cache returns the description of one rank's memory.
func (k *mooncakeConn) cache(rank int) (*mooncake.Cache, error) {
	g := &k.e.o.KV
	layers := k.e.mem.RankLayers(rank)
	var tensors []mooncake.Tensor
	c := mooncake.Cache{KVHeads: g.Heads}
	if g.Layout == kvmem.MLA {
		c.KVHeads = 0 // every rank has all heads
	}
	for group, sg := range k.e.o.Groups {
		kind := mooncake.Attention
		if sg.State {
			kind = mooncake.Mamba
		}
		c.Kinds = append(c.Kinds, kind)
		for i := range layers {
			tensors = append(tensors, k.tensor(group, i, sg.State))
		}
	}
	if k.e.o.First {
		return v013.NewCache(layers, tensors, c)
	}
	return mooncake.NewCache(layers, tensors, c)
}

// tensor returns one layer in the form in which the connector registers it.
func (k *mooncakeConn) tensor(group, i int, state bool) mooncake.Tensor {
	g := &k.e.o.KV
	n := group*g.Layers + i
	t := mooncake.Tensor{
		Layer: fmt.Sprintf("model.layers.%d.self_attn.attn", n), Index: n, Group: group, Storage: i, Element: 1, HeadAxis: 1, Shape: g.Shape(),
	}
	t.Stride = make([]int, len(t.Shape))
	for i, step := len(t.Shape)-1, 1; i >= 0; i-- {
		t.Stride[i] = step
		step *= t.Shape[i]
	}
	switch {
	case state:
		t.Layer, t.Kind, t.HeadAxis = fmt.Sprintf("model.layers.%d.mixer", n), mooncake.MambaTensor, 0
	case g.Layout == kvmem.MLA:
		t.Kind, t.HeadAxis = mooncake.MLATensor, 0
	case k.e.o.First && g.Layout == kvmem.Fused: // whole blocks, as with MLA: 0.13 knows no heads
		t.Kind, t.HeadAxis = mooncake.MLATensor, 0
	case k.e.o.First:
		t.HeadAxis = 0
	case g.Layout == kvmem.FlashInfer:
		t.HeadAxis = 3
	}
	return t
}

func (k *mooncakeConn) startSenders(o *kvconfig.Mooncake) error {
	k.client = transfer.New(transfer.Options{Secrets: k.e.o.Secrets})
	if !k.e.o.First {
		if err := k.register(o); err != nil {
			return err
		}
	}
	for rank := range k.e.o.KV.TPSize {
		cache, err := k.cache(rank)
		if err != nil {
			return err
		}
		so := mooncake.SenderOptions{
			Engine: mooncake.Engine{ID: o.EngineID}, Self: mooncake.Peer{TPRank: rank, TPSize: k.e.o.KV.TPSize}, Bootstrap: k.boot, DPRank: k.e.o.DPRank,
			Listen: "tcp://" + net.JoinHostPort(o.Host, "*"), Host: o.Host, Transfer: k.client, AbortTimeout: o.AbortTimeout,
			Workers: o.Workers, Networks: k.e.o.Networks, Metrics: k.metrics, Log: k.e.log,
		}
		var s sender
		if k.e.o.First {
			so.Listen = "tcp://" + net.JoinHostPort(o.Host, strconv.Itoa(v013.SidePort(o.BasePort, k.e.o.DPRank, k.e.o.KV.TPSize, rank)))
			s, err = v013.NewSender(cache, so)
		} else {
			s, err = mooncake.NewSender(cache, so)
		}
		if err != nil {
			return err
		}
		k.senders = append(k.senders, s)
		ctx, cancel := context.WithTimeout(k.e.ctx, o.ConnectTimeout)
		err = s.Start(ctx)
		cancel()
		if err != nil {
			return err
		}
		k.e.log.Debug("the worker of P listens", "rank", rank, "side_channel", s.Addr())
	}
	return nil
}

// register finds the registry, or starts P's own.
func (k *mooncakeConn) register(o *kvconfig.Mooncake) (err error) {
	url := o.Registry
	if url == "" && k.e.o.DPRank > 0 { // the registry is at rank 0
		url = "http://" + net.JoinHostPort(o.Host, strconv.Itoa(o.BasePort))
	}
	if url == "" {
		l, err := net.Listen("tcp", net.JoinHostPort(o.Host, strconv.Itoa(o.BasePort)))
		if err != nil {
			return fmt.Errorf("engine: the registry of P on port VLLM_MOONCAKE_BOOTSTRAP_PORT: %w", err)
		}
		r, err := bootstrap.Open(bootstrap.Options{Log: k.e.log})
		if err != nil {
			return errors.Join(err, l.Close())
		}
		ctx, stop := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := r.Serve(ctx, k.e.o.Networks.Listener(l)); err != nil && ctx.Err() == nil {
				k.e.log.Error("P's own registry ended", "err", err)
			}
		})
		k.registry = func() { stop(); wg.Wait(); _ = r.Close() } // the registry keeps nothing
		url = "http://" + l.Addr().String()
	}
	var co bootstrap.ClientOptions
	if url == o.Registry {
		co = k.e.o.Registry
	}
	k.boot, err = bootstrap.NewClient(url, co)
	return err
}

func (k *mooncakeConn) startReceivers(o *kvconfig.Mooncake) error {
	for rank := range k.e.o.KV.TPSize {
		cache, err := k.cache(rank)
		if err != nil {
			return err
		}
		t, err := transfer.Listen(transfer.TargetOptions{Host: o.Host, Networks: k.e.o.Networks, Secrets: k.e.o.Secrets}, transfer.NewTable())
		if err != nil {
			return err
		}
		k.targets = append(k.targets, t)
		ro := mooncake.ReceiverOptions{
			Engine: mooncake.Engine{ID: o.EngineID}, Self: mooncake.Peer{TPRank: rank, TPSize: k.e.o.KV.TPSize}, Target: t,
			Timeout: o.AbortTimeout, ConnectTimeout: min(o.ConnectTimeout, 5*time.Second), Metrics: k.metrics, Log: k.e.log,
			Bootstrap: bootstrap.ClientOptions{TLS: k.e.o.Registry.TLS},
		}
		open := mooncake.NewReceiver
		if k.e.o.First {
			open = v013.NewReceiver
		}
		r, err := open(cache, ro)
		if err != nil {
			return err
		}
		k.receivers = append(k.receivers, r)
	}
	return nil
}

func (k *mooncakeConn) begin(q *request) {
	if q.r.Params.Len() == 0 {
		return
	}
	r := &scheduler.Request{ID: q.r.ID, PromptTokens: len(q.r.Tokens), MaxTokens: q.r.MaxTokens, Params: q.r.Params, SkipPrefixCache: q.r.SkipCache}
	k.requests[q.r.ID] = r
	if k.sched.NewRequest(r) {
		q.shorten(r.PromptTokens, r.MaxTokens)
	}
}

func (k *mooncakeConn) match(q *request, local int) (external int, async, ok bool) {
	r := k.requests[q.r.ID]
	if r == nil {
		return 0, false, true
	}
	m, err := k.sched.Match(r, local)
	if err != nil {
		k.e.log.Warn("the request goes on without a transfer", "request", q.r.ID, "err", err)
		return 0, false, true
	}
	return m.Tokens, m.Async, true
}

// ids returns the block ids of each group, beginning with block `from`.
func ids(tables [][]sched.BlockID, from int) [][]int {
	out := make([][]int, len(tables))
	for g, table := range tables {
		table = table[min(from, len(table)):]
		out[g] = make([]int, len(table))
		for i, b := range table {
			out[g][i] = int(b)
		}
	}
	return out
}

func (k *mooncakeConn) allocated(q *request, external int) {
	r := k.requests[q.r.ID]
	if r == nil {
		return
	}
	if err := k.sched.Allocated(r, ids(q.s.Tables(), q.local/q.block), external); err != nil {
		k.e.log.Warn("the request goes on without a transfer", "request", q.r.ID, "err", err)
	}
}

// settle does nothing: blocks that are being sent stay with their request.
func (k *mooncakeConn) settle(*sched.Step) error { return nil }

func (k *mooncakeConn) build(*sched.Step) error {
	m, err := k.sched.Build()
	if err != nil {
		return err
	}
	if len(m.Pulls)+len(m.Sends)+len(m.Aborted)+len(m.NotProcessed) == 0 {
		return nil
	}
	for _, s := range k.senders {
		s.Apply(m)
	}
	var errs []error
	for _, r := range k.receivers {
		errs = append(errs, r.Apply(m))
	}
	return errors.Join(errs...)
}

func (k *mooncakeConn) computed(*sched.Step) {}

func (k *mooncakeConn) finish(q *request, why sched.Reason) bool {
	r := k.requests[q.r.ID]
	if r == nil {
		return false
	}
	delete(k.requests, q.r.ID)
	status := scheduler.Aborted
	if why == sched.Length {
		status = scheduler.LengthCapped
	}
	f, err := k.sched.Finish(r, status, ids(q.s.Tables(), 0))
	if err != nil {
		k.e.log.Warn("the request's KV is not sent", "request", q.r.ID, "err", err)
	}
	q.params = cmp.Or(f.Params, q.params)
	return f.KeepBlocks
}

func (k *mooncakeConn) poll([]string) (out sched.Output) {
	for rank := range k.e.o.KV.TPSize {
		w := scheduler.WorkerOutput{Worker: rank}
		if rank < len(k.senders) {
			w.Sent = k.senders[rank].Finished()
		}
		if rank < len(k.receivers) {
			r := k.receivers[rank].Results()
			w.Received, w.Failed = r.Received, slices.Collect(maps.Keys(r.Failed))
			for id, err := range r.Failed {
				k.e.log.Warn("KV was not received", "request", id, "rank", rank, "err", err)
			}
		}
		if len(w.Sent)+len(w.Received) == 0 {
			continue
		}
		u, err := k.sched.Update(w)
		if err != nil {
			k.e.log.Error("a worker's report cannot be used", "err", err)
			continue
		}
		out.Arrived = append(append(out.Arrived, u.Loaded...), u.Failed...)
		out.Failed = append(out.Failed, u.Failed...)
		out.Arrived = append(out.Arrived, u.Freed...) // the blocks of requests that ended during their load
		out.Sent = append(out.Sent, u.Freed...)
	}
	return out
}

func (k *mooncakeConn) collect(reg *metrics.Registry, labels map[string]string) {
	metrics.AddWith(reg, labels, k.sched.Stats)
	metrics.AddWith(reg, labels, k.metrics.Stats)
}

func (k *mooncakeConn) close(context.Context) error {
	var errs []error
	for rank, r := range k.receivers {
		k.e.log.Debug("the worker of D ends", "rank", rank, "figures", r.Stats())
		errs = append(errs, r.Close())
	}
	for _, t := range k.targets {
		errs = append(errs, t.Close())
	}
	for rank, s := range k.senders {
		k.e.log.Debug("the worker of P ends", "rank", rank, "figures", s.Stats())
		errs = append(errs, s.Close())
	}
	if k.client != nil {
		k.e.log.Debug("the transfer client ends", "figures", k.client.Stats())
		k.client.Close()
	}
	if k.sched != nil {
		k.e.log.Debug("the connector's scheduler ends", "requests", k.sched.Len())
	}
	if k.boot != nil {
		errs = append(errs, k.boot.Close())
	}
	if k.registry != nil {
		k.registry()
	}
	return errors.Join(errs...)
}
