// SPDX-License-Identifier: Apache-2.0

// Package demo plays conversations through a whole deployment on one machine: a cache server
// in a process of its own, a registry, a prefill engine (P), a decode engine (D) and a router
// that sends each request to both. The engines are simulated, their KV bytes and the protocols
// between all of them are real. The server is killed in the middle. Play sends a workload to one
// server instead.
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

// Options configures Run. A zero field means its default.
type Options struct {
	Requests []workload.Request
	InFlight int // requests at a time; default 8

	// Server returns the command that serves LMCache clients at a port of 127.0.0.1, the pool kept
	// from one life to the next.
	Server func(port int) *exec.Cmd
	// KillAfter is how many requests are done when the server is killed; default half of them.
	KillAfter int

	Progress func(done, total int) // called from one goroutine at a time
	Log      *slog.Logger          // nil discards
}

// Report is what a run did.
type Report struct {
	Requests     int
	PromptTokens int64
	Computed     int64 // prompt tokens that P computed with the cache server
	Alone        int64 // prompt tokens that a P without it would compute, with a prefix cache of the same size
	FromCache    int64 // prompt tokens that P loaded from the server
	Pushed       int64 // prompt tokens whose KV D got from P
	Generated    int64 // by D
	WrongBytes   int64 // requests that were given KV that is not theirs
	Failed       int64 // requests without an answer
	Differ       int64 // requests whose answer differs from that of an engine alone
	KilledAfter  int   // requests; 0: not killed
	BackAfter    time.Duration
	Elapsed      time.Duration
}

// geometry is the model of the demo: 1 KiB of KV per token, a P that keeps two or three
// conversations itself.
func geometry() kvmem.Geometry {
	return kvmem.Geometry{Layers: 4, Heads: 4, HeadBytes: 64, BlockTokens: 16, Blocks: 1500, TPSize: 1}
}

// TokenBytes is the KV of one token.
const TokenBytes = 4 * 4 * 64

// run is one run.
type run struct {
	o        Options
	p, d     *engine.Engine
	alone    *engine.Engine
	registry string
	port     int
	server   *exec.Cmd
	report   Report
}

// Run plays the requests. It ends early when ctx does, with what was done so far and no error.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	o.InFlight = cmp.Or(o.InFlight, 8)
	o.KillAfter = cmp.Or(o.KillAfter, len(o.Requests)/2)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	r := &run{o: o}
	stop, err := r.start(ctx)
	defer func() { err = errors.Join(err, stop()) }()
	if err != nil {
		return nil, err
	}
	started := time.Now()
	err = r.play(ctx)
	r.report.Elapsed = time.Since(started)
	p, d, alone := r.p.Stats(), r.d.Stats(), r.alone.Stats()
	r.report.Computed, r.report.FromCache = p.PromptTokens-p.CachedTokens, p.LoadedTokens
	r.report.Alone = alone.PromptTokens - alone.CachedTokens
	r.report.Pushed, r.report.Generated = d.LoadedTokens, d.Generated
	r.report.WrongBytes = p.WrongBytes + d.WrongBytes + alone.WrongBytes
	return &r.report, err
}

// start starts everything; stop ends what was started, in reverse order.
func (r *run) start(ctx context.Context) (stop func() error, err error) {
	var closers []func() error
	stop = func() error {
		var errs []error
		for i := len(closers) - 1; i >= 0; i-- {
			errs = append(errs, closers[i]())
		}
		return errors.Join(errs...)
	}
	if r.port, err = freePort(); err != nil {
		return stop, err
	}
	if err := r.serve(ctx); err != nil {
		return stop, err
	}
	closers = append(closers, func() error { return r.end(os.Interrupt) })
	registry, err := bootstrap.Open(bootstrap.Options{Log: r.o.Log})
	if err != nil {
		return stop, err
	}
	closers = append(closers, registry.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return stop, err
	}
	serving, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = registry.Serve(serving, l) }) // it ends with serving
	closers = append(closers, func() error { cancel(); wg.Wait(); return nil })
	r.registry = "http://" + l.Addr().String()

	cache := fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",
		"kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":"engine_driven",
		"lmcache.mp.mq_timeout":5,"lmcache.mp.heartbeat_interval":0.2}}`, r.port)
	prefill := fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","engine_id":"P","kv_connector_extra_config":{"connectors":[
		{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":{"bootstrap_server_address":%q}},%s]}}`, l.Addr(), cache)
	decode := `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute"}`
	for _, e := range []struct {
		to     **engine.Engine
		config string
	}{{&r.p, prefill}, {&r.d, decode}, {&r.alone, ""}} {
		o := engine.Options{Model: "demo", KV: geometry(), MaxModel: 16384, Log: r.o.Log}
		if e.config != "" {
			if o.Connectors, err = kvconfig.Parse([]byte(e.config)); err != nil {
				panic("BUG: demo: " + err.Error())
			}
		}
		if *e.to, err = engine.Open(ctx, o); err != nil {
			return stop, err
		}
		closers = append(closers, (*e.to).Close)
	}
	return stop, nil
}

// freePort returns a port without a listener. It is none of those that Linux gives to connections
// and to listeners that ask for any, so it stays free until the server's first life and its second.
func freePort() (port int, err error) {
	for range 100 {
		port = 20000 + rand.IntN(32768-20000)
		var l net.Listener
		if l, err = net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, err
}

// serve starts the server and waits until it answers.
func (r *run) serve(ctx context.Context) error {
	cmd := r.o.Server(r.port)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	r.server = cmd
	client, err := lmcache.NewClient("tcp://127.0.0.1:" + strconv.Itoa(r.port))
	if err != nil {
		return errors.Join(err, r.end(os.Kill))
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err = client.ChunkTokens(ctx); err == nil {
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the server does not answer at port %d: %w", r.port, err), r.end(os.Kill))
		}
	}
}

// end ends the server's process.
func (r *run) end(signal os.Signal) error {
	if r.server == nil {
		return nil
	}
	_ = r.server.Process.Signal(signal) // it may have ended
	err := r.server.Wait()
	r.server = nil
	if signal == os.Kill || err == nil {
		return nil
	}
	return fmt.Errorf("the server ended: %w", err)
}

// play is the router: each request goes to P and then to D, several at a time.
func (r *run) play(ctx context.Context) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex // guards report and errs
	var errs []error
	half := make(chan struct{})
	for range r.o.InFlight {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(r.o.Requests) {
					return
				}
				got, err := r.ask(ctx, i)
				if ctx.Err() != nil {
					return
				}
				mu.Lock()
				r.report.Requests++
				r.report.PromptTokens += int64(r.o.Requests[i].Input)
				switch {
				case err != nil:
					r.report.Failed++
					errs = append(errs, fmt.Errorf("request %d: %w", i, err))
				case !got:
					r.report.Differ++
				}
				if r.o.Progress != nil {
					r.o.Progress(r.report.Requests, len(r.o.Requests))
				}
				if r.report.Requests == r.o.KillAfter {
					close(half)
				}
				mu.Unlock()
			}
		})
	}
	var killed error
	over := make(chan struct{})
	var killer sync.WaitGroup
	killer.Go(func() {
		select {
		case <-half:
		case <-over:
			return
		}
		start := time.Now()
		killed = errors.Join(r.end(os.Kill), r.serve(ctx))
		mu.Lock()
		r.report.KilledAfter, r.report.BackAfter = r.o.KillAfter, time.Since(start)
		mu.Unlock()
	})
	wg.Wait()
	close(over)
	killer.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return errors.Join(append(errs[:min(len(errs), 3)], killed)...)
}

// ask sends request i to P and then to D, and compares the answer with that of an engine alone.
func (r *run) ask(ctx context.Context, i int) (same bool, err error) {
	q := &r.o.Requests[i]
	tokens, id := q.Tokens(), strconv.Itoa(i)
	output := min(max(q.Output, 1), 16)
	if _, err := complete(ctx, r.p, engine.Request{ID: "p" + id, Tokens: tokens, MaxTokens: 1, Params: wire.RemoteDecode(id)}); err != nil {
		return false, fmt.Errorf("engine P: %w", err)
	}
	got, err := complete(ctx, r.d, engine.Request{ID: "d" + id, Tokens: tokens, MaxTokens: output, Params: wire.RemotePrefill(r.registry, "P", id)})
	if err != nil {
		return false, fmt.Errorf("engine D: %w", err)
	}
	want, err := complete(ctx, r.alone, engine.Request{ID: id, Tokens: tokens, MaxTokens: output})
	if err != nil {
		return false, fmt.Errorf("an engine alone: %w", err)
	}
	for j := range want {
		if j >= len(got) || got[j] != want[j] {
			return false, nil
		}
	}
	return true, nil
}

func complete(ctx context.Context, e *engine.Engine, r engine.Request) ([]uint32, error) {
	s, err := e.Submit(ctx, r)
	if err != nil {
		return nil, err
	}
	tokens, end, err := s.Wait(ctx)
	if err != nil {
		return nil, err
	}
	return tokens, end.Err
}
