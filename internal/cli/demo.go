package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/pool"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim"
	"github.com/kvasir-kv/kvasir/store"
)

// demoCmd plays a workload on a server of its own.
type demoCmd struct {
	Trace    string  `help:"Play this trace file instead of the built-in conversations: JSON lines with timestamp, input_length and hash_ids." placeholder:"FILE"`
	Requests int     `help:"Requests to play." default:"600"`
	Workers  int     `help:"Simulated engines." default:"2"`
	PoolGB   float64 `name:"l1-size-gb" help:"Pool size in GiB." default:"0.5"`
	Chunk    int     `name:"chunk-size" help:"Tokens per chunk." default:"256"`
	ChunkKiB int     `name:"chunk-kib" help:"KV bytes per chunk, in KiB." default:"1024"`
}

// Help implements kong's detailed help.
func (demoCmd) Help() string {
	return `Starts a server with a pool of its own, and simulated engines that look prompts up, load what is
kept, check every byte, and store the rest: the real protocol through real shared memory, no model.

Examples:
  kvasir demo
  kvasir demo --requests 2000 --l1-size-gb 1
  kvasir demo --trace conversation_trace.jsonl --requests 300 --chunk-kib 128`
}

// Run plays the workload and prints the table.
func (c *demoCmd) Run(e *env) error {
	if c.Requests < 1 || c.Workers < 1 || c.Workers > 64 || c.Chunk < 16 || c.Chunk > 4096 || c.ChunkKiB < 1 || c.ChunkKiB > 1<<20 {
		return fmt.Errorf("%w: need --requests >= 1, --workers 1 to 64, --chunk-size 16 to 4096, --chunk-kib 1 to 1048576", errUsage)
	}
	layout := kv.Layout{SinglePlane: true, Layers: 1, Slots: c.Chunk, Hidden: max(1, c.ChunkKiB<<10/c.Chunk), DType: "uint8"}
	chunkBytes, err := layout.Bytes()
	if err != nil {
		return err
	}
	poolBytes := int64(c.PoolGB * (1 << 30))
	if poolBytes < chunkBytes {
		return fmt.Errorf("%w: --l1-size-gb %v holds no chunk of %s", errUsage, c.PoolGB, kv.FormatBytes(chunkBytes))
	}
	requests, err := c.requests()
	if err != nil {
		return err
	}
	p, err := pool.Open(pool.Options{Name: fmt.Sprintf("%skvasir_demo_%d", lmcachePrefix, os.Getpid()), Bytes: poolBytes, ChunkTokens: c.Chunk})
	if err != nil {
		if errors.Is(err, pool.ErrNoSpace) {
			err = fmt.Errorf("%w: try --l1-size-gb 0.1 --chunk-kib 64", err)
		}
		return err
	}
	st := store.New(p, store.Options{})
	srv := server.New(st, server.Options{ChunkTokens: c.Chunk, PopulateRate: 1 << 30, Logger: quiet(e.log), Version: Version()})
	report, err := c.play(e, srv, requests, layout)
	stats := st.Stats()
	err = errors.Join(err, srv.Close(), st.Remove(), st.Close())
	if err == nil && e.ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if report != nil && report.Requests > 0 {
		printDemo(e.stdout, report, &stats, chunkBytes)
		if report.WrongBytes > 0 {
			err = errors.Join(err, fmt.Errorf("%d wrong bytes", report.WrongBytes))
		}
	}
	return err
}

func (c *demoCmd) requests() ([]sim.Request, error) {
	if c.Trace == "" {
		return sim.Chats(c.Requests, 7), nil
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return sim.ReadTrace(f, c.Requests)
}

func (c *demoCmd) play(e *env, srv *server.Server, requests []sim.Request, layout kv.Layout) (*sim.Report, error) {
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
		addr, len(requests), c.Workers, kv.FormatBytes(int64(c.ChunkKiB)<<10), c.Chunk)
	return sim.Play(ctx, requests, sim.Options{
		URL: "tcp://" + addr, Model: "demo", Layout: layout, Workers: c.Workers, Progress: progress(e.stderr),
	})
}

// progress returns a function that prints how far a run is, at most twice a
// second: on one line of a terminal, else every tenth of the way.
func progress(w io.Writer) func(done, total int) {
	var last time.Time
	tenth := 0
	terminal := isTerminal(w)
	return func(done, total int) {
		switch {
		case terminal && (time.Since(last) > 500*time.Millisecond || done == total):
			last = time.Now()
			fmt.Fprintf(w, "\r%d of %d requests", done, total)
			if done == total {
				fmt.Fprintln(w)
			}
		case !terminal && done*10/total > tenth:
			tenth = done * 10 / total
			fmt.Fprintf(w, "%d of %d requests\n", done, total)
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

func printDemo(w io.Writer, r *sim.Report, st *store.Stats, chunkBytes int64) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	row("requests", "%d in %.1f s", r.Requests, r.Elapsed.Seconds())
	row("prompt tokens", "%d", r.PromptTokens)
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
