// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"
	"fmt"
	"io"
	"iter"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/plot"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/replay"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

type replayCmd struct {
	jsonFlag
	constantFlags

	Trace    string          `required:"" help:"Trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids; sessions of AIPerf; or agentic: made sessions of coding agents." placeholder:"FILE"`
	Format   workload.Format `name:"trace-format" help:"How lines are read: mooncake, timed (vLLM's timed_trace), or aiperf (sessions); default by the keys of each line." enum:",mooncake,timed,aiperf" default:"" placeholder:"NAME"`
	Block    int             `name:"block-tokens" help:"Tokens of a hash id." default:"512"`
	Requests int             `help:"Requests to play; 0 is all." default:"0" placeholder:"N"`
	Plot     string          `help:"Draw the hits over the trace into this SVG file, with --scheduled the times of tokens, too." placeholder:"FILE"`
	Capacity int             `name:"capacity-blocks" help:"Blocks that the cache holds, least recently used ones go; 0 is unlimited." default:"0" placeholder:"N"`

	Scheduled bool   `help:"Run the trace through prefill and decode engines in virtual time; the cache is then a store below them, and their own KV memory."`
	Prefill   int    `help:"Prefill engines; 0: decode engines do both." default:"8" group:"Scheduled"`
	Decode    int    `help:"Decode engines." default:"8" group:"Scheduled"`
	Profile   string `help:"Hardware profile of an engine." default:"h100-llama-3.1-8b" group:"Scheduled"`
	Scale     int    `help:"Play the trace at 1/N of its size: lengths, blocks, arrivals; and of engines the KV memory, tokens of a step and the longest sequence." default:"1" placeholder:"N" group:"Scheduled"`
	Bytes     bool   `help:"Schedule it with real KV bytes: blocks are carried from P to D, to and from the store, and readers compare every byte." group:"Scheduled"`
	HeadBytes int    `name:"head-bytes" help:"With bytes: K and V of a KV head and token, a multiple of 8. Layers and heads are the model's." default:"8" placeholder:"N" group:"Scheduled"`
	Corrupt   int    `name:"corrupt-block" help:"With bytes: flip a bit of the Nth block that arrives, to see that it is noticed." default:"0" placeholder:"N" group:"Scheduled"`
}

// Help returns the text that kvasir sim replay --help shows.
func (replayCmd) Help() string {
	return `A hit is a run of blocks from a prompt's start that the cache has. JSON: requests, blocks, hit_blocks, tokens,
seconds (that the replay took).

The trace may be longer than memory: it is read once, and again for --scheduled and --bytes. These keep the requests that have not
ended, 2 million at most, and with --json a record of each request, 4 million at most. Times of more than 4 million different values are
rounded. A pipe is copied to a temporary file without a name in $TMPDIR.

Examples:
  kvasir sim replay --trace conversation_trace.jsonl
  kvasir sim replay --trace conversation_trace.jsonl --capacity-blocks 50000 --json -
  kvasir sim replay --trace conversation_trace.jsonl --capacity-blocks 5000 --plot hits.svg
  kvasir sim replay --trace sessions.jsonl --trace-format aiperf
  kvasir sim replay --trace agentic --requests 5000 --scheduled --prefill 0 --decode 1
  kvasir sim replay --trace conversation_trace.jsonl --scheduled --prefill 8 --decode 8
  kvasir sim replay --trace conversation_trace.jsonl --requests 1000 --bytes --scale 32 --capacity-blocks 5000`
}

// replayed is the result of a replay.
type replayed struct {
	replay.Result
	Seconds float64 `json:"seconds"`       // how long the replay took
	Span    float64 `json:"trace_seconds"` // the span of the arrivals

	Scheduled *scheduled `json:"scheduled,omitempty"`
}

// scheduled is the result of running a trace through engines.
type scheduled struct {
	*cluster.Result
	Profile string          `json:"profile"`
	Scale   int             `json:"scale"` // lengths, blocks and arrivals were divided by it
	Prefill int             `json:"prefill"`
	Decode  int             `json:"decode"`
	Seconds float64         `json:"seconds"` // how long the run took
	Virtual float64         `json:"virtual_seconds"`
	Ratio   float64         `json:"ratio"` // Virtual / Seconds
	Figures cluster.Figures `json:"figures"`

	Cached     int64 `json:"cached_tokens"`        // prompt tokens that P did not compute
	Unfinished int   `json:"unfinished,omitempty"` // requests that did not end before an interruption; the figures count them as failed

	failed      int // number of the first request that failed
	firstFailed string
	times       tokenTimes // for --plot
}

// Run replays the trace and, with --scheduled, runs it through engines. It prints the results.
func (c *replayCmd) Run(e *Env) error {
	var f faults
	f.unless(c.Capacity >= 0, "--capacity-blocks %d is less than 0", c.Capacity)
	f.unless(c.Requests >= 0, "--requests %d is less than 0", c.Requests)
	f.unless(c.Block >= 1, "--block-tokens %d is less than 1", c.Block)
	f.unless(c.Scale >= 1, "--scale %d is less than 1", c.Scale)
	f.unless(c.HeadBytes >= 8, "--head-bytes %d is less than 8", c.HeadBytes)
	f.unless(c.Corrupt >= 0, "--corrupt-block %d is less than 0", c.Corrupt)
	f.unless(c.Bytes || c.Corrupt == 0, "--corrupt-block is for --bytes")
	if err := errors.Join(f.err(), writable(c.JSON, c.Plot)); err != nil {
		return err
	}
	began := time.Now()
	trace, err := workload.OpenTrace(c.Trace, workload.TraceOptions{BlockTokens: c.Block, Max: c.Requests, Format: c.Format})
	if err != nil {
		return asUsage(e, err)
	}
	defer trace.Close()
	requests := func() iter.Seq2[workload.Request, error] { return workload.Scale(trace.Requests(), c.Scale) }
	var out replayed
	out.Result, err = replay.Stream(e.Ctx, requests(), c.Capacity)
	out.Seconds, out.Span = time.Since(began).Seconds(), out.Result.Span.Seconds()
	if err == nil && (c.Scheduled || c.Bytes) {
		out.Scheduled, err = c.schedule(e, requests(), &out.Result)
	}
	if errors.Is(err, workload.ErrScale) {
		return usagef("--scale: %v", err)
	}
	if err != nil && e.Ctx.Err() == nil {
		return asUsage(e, err)
	}
	return errors.Join(c.write(e, &out, out.print), c.plot(e, &out), asUsage(e, err), out.wrong())
}

// plot draws the trace into the file of --plot, if there is one.
func (c *replayCmd) plot(e *Env, r *replayed) error {
	files := pointFiles{Plot: c.Plot}
	return files.writePoints(e, nil, func(w io.Writer) error { return plot.Write(w, r.panels()...) })
}

// panels returns the plots of the trace over its time. A line has one point for each part of the trace, which is a sixtieth of its
// time.
func (r *replayed) panels() []plot.Panel {
	const axis = "minutes of the trace"
	now, all := plot.Line{Name: "this part"}, plot.Line{Name: "so far"}
	blocks, hits := 0, 0
	for _, p := range r.Parts {
		blocks, hits = blocks+p.Blocks, hits+p.HitBlocks
		if p.Blocks > 0 {
			now.X, now.Y = append(now.X, p.To.Minutes()), append(now.Y, 100*float64(p.HitBlocks)/float64(p.Blocks))
			all.X, all.Y = append(all.X, p.To.Minutes()), append(all.Y, 100*float64(hits)/float64(blocks))
		}
	}
	out := []plot.Panel{{Title: "blocks hit, %", XLabel: axis, Lines: []plot.Line{now, all}, OverTime: true}}
	if r.Scheduled != nil {
		out = append(out, r.Scheduled.times.panels(axis)...)
	}
	return out
}

// tokenTimes holds, for each part of a trace, the times of tokens of the requests that were sent in this part.
type tokenTimes struct {
	span        time.Duration
	first, each [replay.MostParts]cluster.Values
}

// mostTimes is how many different times a part may have for its percentiles to be exact.
const mostTimes = 1 << 15

// add adds the times of one request, unless it failed.
func (t *tokenTimes) add(q *cluster.Record) {
	if q.Error != "" || q.Last == 0 {
		return
	}
	at := 0
	if t.span > 0 {
		at = min(int(float64(q.Sent)/float64(t.span)*replay.MostParts), replay.MostParts-1)
	}
	first, each := &t.first[at], &t.each[at]
	first.Most, each.Most = mostTimes, mostTimes
	first.Add((q.First - q.Sent).Seconds())
	if q.Output > 1 {
		each.Add(1000 * (q.Last - q.First).Seconds() / float64(q.Output-1))
	}
}

func (t *tokenTimes) panels(axis string) []plot.Panel {
	panel := func(title string, of *[replay.MostParts]cluster.Values) plot.Panel {
		half, worst := plot.Line{Name: "median"}, plot.Line{Name: "P99"}
		for i := range of {
			n := of[i].Len()
			if n == 0 {
				continue
			}
			x := t.span.Minutes() * float64(i+1) / replay.MostParts
			half.X, half.Y = append(half.X, x), append(half.Y, of[i].At(n/2))
			worst.X, worst.Y = append(worst.X, x), append(worst.Y, of[i].At((n*99)/100))
		}
		return plot.Panel{Title: title, XLabel: axis, Lines: []plot.Line{half, worst}, OverTime: true}
	}
	return []plot.Panel{panel("time to the first token, s", &t.first), panel("time per token, ms", &t.each)}
}

// wrong returns an error if any request got wrong KV bytes.
func (r *replayed) wrong() error {
	if s := r.Scheduled; s != nil && s.Bytes != nil && s.Bytes.Wrong > 0 {
		return fmt.Errorf("requests that were given wrong KV bytes: %d", s.Bytes.Wrong)
	}
	return nil
}

// schedule runs the trace through engines. counted is the result of the replay that read the same trace before.
func (c *replayCmd) schedule(e *Env, requests iter.Seq2[workload.Request, error], counted *replay.Result) (*scheduled, error) {
	began := time.Now()
	p, err := costmodel.Open(c.Profile)
	if err != nil {
		return nil, err
	}
	p.BlockTokens = c.Block
	if err := (&tables.Options{TokenBudget: c.Budget, Set: c.settings()}).Apply(p); err != nil {
		return nil, err
	}
	if n := c.Scale; n > 1 { // as many blocks and steps as without --scale
		p.Blocks = p.KVBlocks()
		p.BlockTokens, p.TokenBudget, p.MaxModel = c.Block/n, max(p.TokenBudget/n, 1), max(p.MaxModel/n, 2)
	}
	show, end := e.progress("requests")
	s := &scheduled{Profile: p.Name, Scale: c.Scale, Prefill: c.Prefill, Decode: c.Decode, times: tokenTimes{span: counted.Span}}
	o := cluster.Options{Profile: p, Prefill: c.Prefill, Decode: c.Decode, Progress: show, Total: counted.Requests, Records: c.JSON != ""}
	o.Ended = func(number int, q *cluster.Record) {
		if q.Error != "" && (s.firstFailed == "" || number < s.failed) {
			s.failed, s.firstFailed = number, q.Error
		}
		if c.Plot != "" {
			s.times.add(q)
		}
	}
	if c.Bytes {
		o.Bytes = &cluster.Bytes{HeadBytes: c.HeadBytes, Corrupt: c.Corrupt}
	}
	if c.Capacity > 0 {
		o.Store = cluster.Store{Blocks: c.Capacity, GBps: p.Constants.TransferGBps, Latency: time.Millisecond}
	}
	r, err := cluster.Stream(e.Ctx, requests, o)
	end()
	if errors.Is(err, cluster.ErrMemory) {
		return nil, usagef("%v: take a larger --scale, or fewer engines", err)
	}
	if r == nil {
		return nil, err
	}
	s.Result, s.Virtual, s.Figures, s.Cached, s.Unfinished = r, r.Duration.Seconds(), r.Figures(), r.Cached(), r.Unfinished
	s.Seconds = time.Since(began).Seconds()
	s.Ratio = s.Virtual / s.Seconds
	return s, err
}

func (r *replayed) print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	line("requests", "%s in %.0f s of the trace", thousands(uint64(r.Requests)), r.Span)
	line("prompt tokens", "%s", thousands(uint64(r.Tokens)))
	line("blocks", "%s", thousands(uint64(r.Blocks)))
	line("of these hits", "%s (%.1f %%)", thousands(uint64(r.HitBlocks)), 100*float64(r.HitBlocks)/float64(max(r.Blocks, 1)))
	line("blocks kept, evicted", "%s, %s", thousands(uint64(r.Kept)), thousands(uint64(r.Evicted)))
	line("replayed in", "%.2f s", r.Seconds)
	if s := r.Scheduled; s != nil {
		f := s.Figures
		line("", "")
		line("scheduled on", "%d P and %d D, %s", s.Prefill, s.Decode, s.Profile)
		if s.Scale > 1 {
			line("at 1/"+fmt.Sprint(s.Scale), "lengths, blocks, arrivals; KV memory, tokens of a step and the longest sequence of engines")
		}
		line("virtual time", "%.0f s in %.1f s: %s times as fast", s.Virtual, s.Seconds, ratio(s.Ratio))
		line("requests", "%d completed, %d failed, %d preemptions", f.Completed, f.Failed-s.Unfinished, s.Preemptions)
		if s.Unfinished > 0 {
			line("not finished", "%d", s.Unfinished)
		}
		if s.firstFailed != "" {
			line("the first that failed", "request %d: %s", s.failed+1, s.firstFailed)
		}
		line("prompt tokens not computed", "%s", thousands(uint64(s.Cached)))
		line("TTFT mean / median / P99", "%.0f / %.0f / %.0f ms", f.MeanTTFT, f.MedianTTFT, f.P99TTFT)
		line("TPOT mean / median / P99", "%.1f / %.1f / %.1f ms", f.MeanTPOT, f.MedianTPOT, f.P99TPOT)
		line("P, D busy", "%.0f %%, %.0f %%", 100*s.PrefillBusy, 100*s.DecodeBusy)
		if b := s.Bytes; b != nil {
			line("bytes of KV", "%s from P to D, %s to the store, %s from it", kv.FormatBytes(b.Moved), kv.FormatBytes(b.Stored), kv.FormatBytes(b.Loaded))
			line("compared by readers", "%s; requests with wrong bytes: %d", kv.FormatBytes(b.Checked), b.Wrong)
			line("KV memory", "%s", kv.FormatBytes(b.Memory))
		}
	}
	return t.Flush()
}

// ratio writes a number with at least two digits.
func ratio(v float64) string {
	if v < 10 {
		return fmt.Sprintf("%.2g", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// thousands writes a number with commas between groups of three digits.
func thousands(n uint64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
