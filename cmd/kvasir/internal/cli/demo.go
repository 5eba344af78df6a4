// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"runtime"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/demo"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// demoCmd plays a workload on a server of its own, and then a part of the workload through P and D.
type demoCmd struct {
	Trace    string  `help:"Play this trace file instead of the built-in conversations: JSON lines with timestamp, input_length and hash_ids." placeholder:"FILE"`
	Requests int     `help:"Requests to play." default:"600"`
	Workers  int     `help:"Simulated engines." default:"2"`
	PoolGB   gibSize `name:"l1-size-gb" help:"Pool size: GiB, or with a unit, as 256MiB." default:"0.5"`
	Chunk    int     `name:"chunk-size" help:"Tokens per chunk." default:"256"`
	Plot     string  `help:"Write the table of the last part as a page of HTML." placeholder:"FILE"`
	ChunkKiB kibSize `name:"chunk-kib" help:"KV bytes per chunk: KiB, or with a unit." default:"1024"`
}

// Help returns the text that kvasir demo --help shows. It implements kong's detailed help.
func (demoCmd) Help() string {
	return `First a server with a pool of its own and simulated workers that look prompts up, load what is kept,
check every byte, and store the rest: the real protocol through real shared memory, no model. Then the
whole picture: a server process, a registry, a prefill engine and a decode engine (kvasir engine), requests
through both, and kill -9 of the server in the middle. Every KV byte and every answer is checked.
A trace may be longer than memory: it is read once to check it, and again while it is played, 16.7 million requests at most.

Examples:
  kvasir demo
  kvasir demo --requests 2000 --l1-size-gb 1
  kvasir demo --plot table.html
  kvasir demo --trace conversation_trace.jsonl --requests 300 --chunk-kib 128`
}

// Run plays the workload and prints the table.
func (c *demoCmd) Run(e *env) error {
	var f faults
	f.unless(c.Requests >= 1, "--requests %d is less than 1", c.Requests)
	f.unless(c.Workers >= 1 && c.Workers <= 64, "--workers %d is outside 1 to 64", c.Workers)
	f.unless(c.Chunk >= 16 && c.Chunk <= 4096, "--chunk-size %d is outside 16 to 4096", c.Chunk)
	f.unless(c.ChunkKiB >= 1<<10 && c.ChunkKiB <= 1<<30, "--chunk-kib %v is outside 1KiB to 1GiB", c.ChunkKiB)
	if err := f.err(); err != nil {
		return err
	}
	layout := kv.Layout{SinglePlane: true, Layers: 1, Slots: c.Chunk, Hidden: max(1, int(c.ChunkKiB)/c.Chunk), DType: "uint8"}
	chunkBytes, err := layout.Bytes()
	if err != nil {
		return err
	}
	poolBytes := int64(c.PoolGB)
	if poolBytes < chunkBytes {
		return usagef("--l1-size-gb %v holds no chunk of %s", c.PoolGB, kv.FormatBytes(chunkBytes))
	}
	requests, err := c.requests(e.ctx)
	defer requests.close()
	if err != nil {
		return err
	}
	p, err := pool.Open(pool.Options{Name: fmt.Sprintf("%skvasir_demo_%d", lmcachePrefix, os.Getpid()), Bytes: poolBytes, ChunkTokens: c.Chunk})
	if err != nil {
		return adviseDemo(err)
	}
	log := quiet(e.ctx, e.log)
	st := store.New(p, store.Options{PopulateRate: 1 << 30, Log: log})
	srv := server.New(st, server.Options{ChunkTokens: c.Chunk, Log: log, Version: Version()})
	report, err := c.play(e, srv, &requests, layout)
	stats := st.Stats()
	closed := errors.Join(srv.Close(), st.Files().Remove(), st.Close())
	if e.ctx.Err() != nil {
		done := 0
		if report != nil {
			done = report.Requests
		}
		return errors.Join(fmt.Errorf("interrupted after %d of %d requests", done, requests.n), closed)
	}
	err = errors.Join(err, closed)
	if report != nil && report.Requests > 0 {
		printDemo(e.stdout, report, &stats, chunkBytes)
		if report.WrongBytes > 0 {
			err = errors.Join(err, fmt.Errorf("%d wrong bytes were read back", report.WrongBytes))
		}
	}
	if err != nil {
		return err
	}
	return c.deployment(e, requests.short)
}

// adviseDemo adds to an error of pool.Open the size of a pool that would fit: the largest power of two within half of the free memory,
// and a chunk size of which the pool has room for at least 512.
func adviseDemo(err error) error {
	space, ok := errors.AsType[*pool.SpaceError](err)
	if !ok {
		return err
	}
	size := int64(1 << 20)
	for size*2 <= space.Free/2 {
		size *= 2
	}
	if size > space.Free*9/10 {
		return fmt.Errorf("%w: enlarge it (containers: --shm-size or --ipc=host)", err)
	}
	chunk := min(max(size>>9, 4<<10), 1<<20)
	return fmt.Errorf("%w: try --l1-size-gb %v --chunk-kib %v, or enlarge it (containers: --shm-size or --ipc=host)", err, gibSize(size), kibSize(chunk))
}

// demoRequests are the requests of a demo.
type demoRequests struct {
	each  iter.Seq2[workload.Request, error]
	n     int
	short []workload.Request // requests for the second part
	close func()             // closes the file from which they are read
}

// maxDemoRequests is the largest number of requests of a trace, because 8 bytes of each are kept in memory. With more, the demo ends with
// an error before it plays any.
const maxDemoRequests = 1 << 24

// requests returns the requests to play. It reads a trace once to see that it is complete; the trace is read again while it is played.
func (c *demoCmd) requests(ctx context.Context) (out demoRequests, err error) {
	out.close = func() {}
	if c.Trace == "" {
		out.each = workload.Each(workload.Chats(c.Requests, workload.ChatOptions{Seed: 7, Turns: 1 << 10}))
	} else {
		trace, err := workload.OpenTrace(c.Trace, workload.TraceOptions{Max: c.Requests})
		if err != nil {
			return out, err
		}
		out.close = func() { _ = trace.Close() } // the file was only read, so the error does not matter
		out.each = trace.Lines()
	}
	for q, err := range out.each {
		switch {
		case err != nil:
			return out, err
		case ctx.Err() != nil:
			return out, errors.New("interrupted before the first request")
		case out.n == maxDemoRequests:
			return out, fmt.Errorf("there are more than %d requests: play fewer of them", maxDemoRequests)
		}
		if out.n++; q.Input <= deploymentTokens && len(out.short) < deploymentRequests {
			out.short = append(out.short, q)
		}
	}
	return out, nil
}

func (c *demoCmd) play(e *env, srv *server.Server, requests *demoRequests, layout kv.Layout) (*demo.PlayReport, error) {
	addr, err := srv.Listen(e.ctx, "tcp://127.0.0.1:*")
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(e.ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { srv.Run(ctx) })
	fmt.Fprintf(e.stderr, "server on %s, %d requests, %d simulated engines, %s per chunk of %d tokens\n",
		addr, requests.n, c.Workers, kv.FormatBytes(int64(c.ChunkKiB)), c.Chunk)
	show, end := progress(e.stderr, "requests")
	defer end()
	return demo.Play(ctx, requests.each, demo.PlayOptions{
		URL: "tcp://" + addr, Model: "demo", Layout: layout, Workers: c.Workers, Requests: requests.n, Progress: show,
	})
}

// progress returns two functions. show prints how far a run has come, at most twice a second: on one line of a terminal, or else every
// tenth of the run. The text `of` names what show counts, for example requests. end ends the line of a run that was not finished.
func progress(w io.Writer, of string) (show func(done, total int), end func()) {
	return progressOn(w, isTerminal(w), of)
}

func progressOn(w io.Writer, terminal bool, of string) (show func(done, total int), end func()) {
	var last time.Time
	tenth, open := 0, false
	show = func(done, total int) {
		switch {
		case terminal && (time.Since(last) > 500*time.Millisecond || done == total):
			last, open = time.Now(), done < total
			fmt.Fprintf(w, "\r%d of %d %s", done, total, of)
			if !open {
				fmt.Fprintln(w)
			}
		case !terminal && done*10/total > tenth:
			tenth = done * 10 / total
			fmt.Fprintf(w, "%d of %d %s\n", done, total, of)
		}
	}
	return show, func() {
		if open {
			fmt.Fprintln(w)
		}
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

func gbps(n int64, d time.Duration) string {
	if d <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f GB/s", float64(n)/d.Seconds()/1e9)
}

func printDemo(w io.Writer, r *demo.PlayReport, st *store.Stats, chunkBytes int64) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("requests", "%d in %.1f s, on %d processors", r.Requests, r.Elapsed.Seconds(), runtime.GOMAXPROCS(0))
	row("prompt tokens", "%s", thousands(uint64(r.PromptTokens)))
	row("of these to compute", "%s", thousands(uint64(r.PromptTokens-r.HitTokens)))
	row("token hit rate", "%.1f %%", 100*float64(r.HitTokens)/float64(max(r.PromptTokens, 1)))
	row("stored", "%s, %s per engine", kv.FormatBytes(r.StoredBytes), gbps(r.StoredBytes, r.StoreTime))
	row("loaded and checked", "%s, %s per engine", kv.FormatBytes(r.LoadedBytes), gbps(r.LoadedBytes, r.LoadTime))
	row("lookup p50 / p99", "%v / %v", r.Quantile(0.5).Round(time.Microsecond), r.Quantile(0.99).Round(time.Microsecond))
	row("chunks kept", "%d of %s (pool %s)", st.Resident, kv.FormatBytes(chunkBytes), kv.FormatBytes(st.Bytes))
	row("evictions", "%d chunks", st.EvictedChunks)
	row("failed loads", "%d", r.FailedLoads)
	row("wrong bytes", "%d", r.WrongBytes)
	_ = t.Flush()
}
