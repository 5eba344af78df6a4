// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// PlayOptions configures Play.
type PlayOptions struct {
	URL      string // of the server
	Model    string
	Layout   kv.Layout
	Workers  int // number of simulated engines, each with its own connection; default 2
	ShmDir   string
	Requests int                   // number of requests that will come, for Progress
	Progress func(done, total int) // called from time to time, from one goroutine at a time
}

// PlayReport is the result of playing a workload.
type PlayReport struct {
	Requests     int
	PromptTokens int64
	HitTokens    int64
	StoredBytes  int64
	LoadedBytes  int64
	StoreTime    time.Duration // sum over the workers, with the time for copying
	LoadTime     time.Duration
	Lookups      []time.Duration // sorted
	WrongBytes   int64           // loaded bytes that differ from what was stored
	FailedLoads  int             // hits whose chunks could not be read in time
	Elapsed      time.Duration
}

// Quantile returns the q-quantile of the lookup times, for 0 <= q <= 1.
func (r *PlayReport) Quantile(q float64) time.Duration {
	if len(r.Lookups) == 0 {
		return 0
	}
	return r.Lookups[min(int(q*float64(len(r.Lookups))), len(r.Lookups)-1)]
}

// Play sends the requests of a workload to a server, through simulated engines with real bytes in real shared memory. For each request
// an engine looks up the prompt, loads the chunks that the server has and checks every byte, "computes" the rest and stores it. Play
// reads a request when an engine is free for it, and keeps only its lookup time. When ctx ends, or the requests have an error, Play
// ends early and returns the report so far.
func Play(ctx context.Context, requests iter.Seq2[workload.Request, error], o PlayOptions) (*PlayReport, error) {
	if o.Workers <= 0 {
		o.Workers = 2
	}
	started := time.Now()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // guards done, total, errs, and the calls of Progress
		done  int
		total PlayReport
		errs  []error
	)
	todo, stop := pull(requests)
	defer stop()
	for i := range o.Workers {
		wg.Go(func() {
			e, err := openWorker(ctx, i, o)
			for err == nil {
				at, q, more, broken := todo()
				if err = broken; !more || err != nil || ctx.Err() != nil {
					break
				}
				err = e.serve(ctx, at, q.Tokens())
				mu.Lock()
				if done++; o.Progress != nil {
					o.Progress(done, max(o.Requests, done))
				}
				mu.Unlock()
			}
			mu.Lock()
			defer mu.Unlock()
			if e != nil {
				total.add(&e.report)
				err = errors.Join(err, e.close())
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("engine %d: %w", i, err))
			}
		})
	}
	wg.Wait()
	total.Elapsed = time.Since(started)
	slices.Sort(total.Lookups)
	return &total, errors.Join(errs...)
}

// pull returns two functions. Several goroutines may call take, which returns the next request and its number; stop ends the sequence.
// After the last request, and after an error, take returns no more.
func pull(requests iter.Seq2[workload.Request, error]) (take func() (at int, q workload.Request, more bool, err error), stop func()) {
	var mu sync.Mutex
	next, stop := iter.Pull2(requests)
	n := 0
	return func() (int, workload.Request, bool, error) {
		mu.Lock()
		defer mu.Unlock()
		q, err, more := next()
		if err != nil {
			stop()
		}
		n++
		return n - 1, q, more, err
	}, stop
}

func (r *PlayReport) add(o *PlayReport) {
	r.Requests += o.Requests
	r.PromptTokens += o.PromptTokens
	r.HitTokens += o.HitTokens
	r.StoredBytes += o.StoredBytes
	r.LoadedBytes += o.LoadedBytes
	r.StoreTime += o.StoreTime
	r.LoadTime += o.LoadTime
	r.Lookups = append(r.Lookups, o.Lookups...)
	r.WrongBytes += o.WrongBytes
	r.FailedLoads += o.FailedLoads
}

// worker is one simulated engine with one worker.
type worker struct {
	id          int
	client      *lmcache.Client
	worker      *connector.PoolClient
	chunkTokens int
	chunkBytes  int64
	report      PlayReport
}

func openWorker(ctx context.Context, id int, o PlayOptions) (*worker, error) {
	client, err := lmcache.NewClient(o.URL)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*worker, error) { return nil, errors.Join(err, client.Close()) }
	chunkTokens, err := client.ChunkTokens(ctx)
	if err != nil {
		return fail(err)
	}
	o.Layout.Slots = chunkTokens
	bytes, err := o.Layout.Bytes()
	if err != nil {
		return fail(err)
	}
	w, err := connector.OpenPoolClient(ctx, client, connector.PoolClientOptions{Model: o.Model, Layout: o.Layout, ShmDir: o.ShmDir})
	if err != nil {
		return fail(err)
	}
	return &worker{id: id, client: client, worker: w, chunkTokens: chunkTokens, chunkBytes: bytes}, nil
}

func (e *worker) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return errors.Join(e.worker.Close(ctx), e.client.Close())
}

// serve runs one request.
func (e *worker) serve(ctx context.Context, n int, tokens []uint32) error {
	end := len(tokens) / e.chunkTokens * e.chunkTokens
	k := lmcache.Key{Tokens: tokens, End: end, RequestID: fmt.Sprintf("sim-%d-%d", e.id, n), Readers: 1}
	hashes := kv.ChunkHashes(tokens[:end], e.chunkTokens)

	start := time.Now()
	hit, err := e.worker.Lookup(ctx, k)
	if err != nil {
		return err
	}
	e.report.Lookups = append(e.report.Lookups, time.Since(start))
	e.report.Requests++
	e.report.PromptTokens += int64(len(tokens))

	if hit = min(hit, len(hashes)); hit > 0 {
		if hit, err = e.load(ctx, k, hashes[:hit]); err != nil {
			return err
		}
	}
	if hit < len(hashes) {
		k.Start = hit * e.chunkTokens
		start = time.Now()
		stored, err := e.worker.Store(ctx, k, e.chunkTokens, func(i int, b []byte) { fillChunk(b, hashes[hit+i]) })
		if err != nil {
			return err
		}
		e.report.StoreTime += time.Since(start)
		e.report.StoredBytes += int64(stored) * e.chunkBytes
	}
	return e.client.EndSession(ctx, k.RequestID)
}

// load loads and checks the chunks with the given hashes. It returns how many it loaded: all or none.
func (e *worker) load(ctx context.Context, k lmcache.Key, hashes []kv.Hash) (int, error) {
	k.End = len(hashes) * e.chunkTokens
	start := time.Now()
	var wrong int64
	ok, err := e.worker.Retrieve(ctx, k, e.chunkTokens, func(i int, b []byte) { wrong += wrongBytes(b, hashes[i]) })
	if err != nil {
		return 0, err
	}
	if !ok {
		e.report.FailedLoads++
		return 0, nil
	}
	e.report.WrongBytes += wrong
	e.report.LoadTime += time.Since(start)
	e.report.LoadedBytes += int64(len(hashes)) * e.chunkBytes
	e.report.HitTokens += int64(k.End)
	return len(hashes), nil
}

// The content of a simulated chunk follows from its hash: it is a multiplicative sequence of eight-byte words that begins with the
// hash's first word.

func fillChunk(b []byte, h kv.Hash) {
	w := binary.LittleEndian.Uint64(h[:])
	for ; len(b) >= 8; b = b[8:] {
		binary.LittleEndian.PutUint64(b, w)
		w = w*0x9e3779b97f4a7c15 + 1
	}
	for i := range b {
		b[i] = byte(w >> (8 * i))
	}
}

func wrongBytes(b []byte, h kv.Hash) (wrong int64) {
	w := binary.LittleEndian.Uint64(h[:])
	for ; len(b) >= 8; b = b[8:] {
		if got := binary.LittleEndian.Uint64(b); got != w {
			for d := got ^ w; d != 0; d >>= 8 {
				if d&0xff != 0 {
					wrong++
				}
			}
		}
		w = w*0x9e3779b97f4a7c15 + 1
	}
	for i := range b {
		if b[i] != byte(w>>(8*i)) {
			wrong++
		}
	}
	return wrong
}
