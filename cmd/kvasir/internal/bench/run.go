// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/load"
	"github.com/kvasir-kv/kvasir/bench/report"
	"github.com/kvasir-kv/kvasir/bench/workload"
)

// Run does what the flags say, until ctx ends. It prints the table to stdout, and everything else to stderr.
func (c *Flags) Run(ctx context.Context, stdout, stderr io.Writer) error {
	if len(c.Compare) > 0 {
		return c.compare(stdout)
	}
	p, err := c.plan()
	if err != nil {
		return err
	}
	requests, err := c.requests(ctx)
	defer requests.close()
	if err != nil {
		return interruptedOr(ctx, err)
	}
	for _, file := range []string{c.resultFile("", ""), c.Report} {
		if err := writable(file); err != nil {
			return err
		}
	}
	g, err := load.New(p.load)
	if err != nil {
		return err
	}
	defer g.Close()
	if err := g.Check(ctx, time.Duration(c.ReadyCheck)*time.Second); err != nil {
		return interruptedOr(ctx, err)
	}
	fmt.Fprintf(stderr, "%s: %d requests of %s to model %s\n", g.Endpoint(), requests.n, c.Dataset, g.Model())
	if at := requests.first.Arrival; at > time.Minute {
		fmt.Fprintf(stderr, "the first request comes after %v, as its timestamp says\n", at.Round(time.Second))
	}
	if c.WarmUps > 0 {
		fmt.Fprintf(stderr, "warming up with %d requests\n", c.WarmUps)
		if err := g.WarmUp(ctx, []workload.Request{requests.first}, c.WarmUps); err != nil {
			return interruptedOr(ctx, err)
		}
	}
	urls := map[string]string{load.Prefill: c.PrefillURL, load.Decode: c.DecodeURL}
	if c.PrefillURL == "" {
		urls[""] = cmp.Or(c.EngineMetrics, p.load.BaseURL)
	}
	w := g.Watch(ctx, urls)
	done := c.progress(g, stderr)
	run := g.Stream(ctx, requests.each, requests.n)
	done()

	r := bench.Measure(run.Samples, run.Seconds, bench.Options{
		Percentiles: p.percentiles, SLOs: p.slos, MaxConcurrency: c.Concurrency, Rate: c.Rate, GPUs: bench.GPUs{Prefill: c.PrefillGPUs, Decode: c.DecodeGPUs},
	})
	r.Engines, r.Stages = w.Stop(r.TTFT.Mean)
	if c.PrefillURL == "" && c.EngineMetrics == "" && len(r.Engines) > 0 && r.Engines[0].Error != "" {
		r.Engines = nil // the user did not ask for their figures
	}
	r.Date, r.Backend, r.EndpointType, r.Model = bench.Stamp(run.Began), c.Backend, c.Backend, g.Model()
	r.NumPrompts, r.Burstiness = requests.n, bench.Rate(c.Burstiness)
	r.RampUp, r.RampUpStart, r.RampUpEnd = c.RampUp, c.RampStart, c.RampEnd
	r.Interrupted, r.Unfinished, r.Meta = run.Unfinished > 0, run.Unfinished, p.meta
	if c.Label != "" {
		r.Label = &c.Label
	}
	return errors.Join(c.write(r, &p, stdout, stderr), outcome(r, run))
}

// outcome returns an error if the run failed, was interrupted before all requests ended, or had no request that succeeded; else nil.
func outcome(r *bench.Result, run *load.Run) error {
	if run.Err != nil {
		return fmt.Errorf("ended after %d of %d requests: %w", len(run.Samples), r.NumPrompts, run.Err)
	}
	if run.Unfinished > 0 {
		return fmt.Errorf("interrupted after %d of %d requests", len(run.Samples), r.NumPrompts)
	}
	if r.Completed == 0 {
		most, text := 0, ""
		for t, n := range r.Errors {
			if n > most || n == most && t < text {
				most, text = n, t
			}
		}
		return fmt.Errorf("no request succeeded: %s", text)
	}
	return nil
}

func interruptedOr(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errors.New("interrupted before the first request")
	}
	return err
}

// write saves a result, and prints it after that, because the reader of the table may close the pipe.
func (c *Flags) write(r *bench.Result, p *plan, stdout, stderr io.Writer) error {
	file := c.resultFile(r.Model, r.Date)
	table := stdout
	if file == "-" {
		table = stderr
	}
	var errs []error
	keep := func(name string, write func(io.Writer) error) {
		if name == "" {
			return
		}
		err := save(name, stdout, write)
		if errs = append(errs, err); err == nil && name != "-" {
			fmt.Fprintf(stderr, "wrote %s\n", name)
		}
	}
	keep(file, func(w io.Writer) error {
		if c.Format == "aiperf" {
			return r.WriteAIPerf(w)
		}
		return r.WriteJSON(w, c.Detailed)
	})
	keep(c.Report, func(w io.Writer) error { return c.draw(w, []report.Run{{Name: "run", Result: r}}) })
	return errors.Join(append(errs, r.Table(table, p.metrics), r.More(table))...)
}

// resultFile returns the file for the JSON result; empty: none is written. The name has the form of vllm bench serve.
func (c *Flags) resultFile(model, date string) string {
	name := c.File
	switch {
	case name == "-":
		return name
	case name == "" && !c.Save && !c.Detailed:
		return ""
	case name == "":
		rate := "inf"
		if !math.IsInf(c.Rate, 1) {
			if rate = strconv.FormatFloat(c.Rate, 'f', -1, 64); !strings.Contains(rate, ".") {
				rate += ".0"
			}
		}
		name = rate + "qps"
		if c.RampUp != "" {
			name = fmt.Sprintf("ramp-up-%s-%vqps-%vqps", c.RampUp, c.RampStart, c.RampEnd)
		}
		if c.Concurrency > 0 {
			name += fmt.Sprintf("-concurrency%d", c.Concurrency)
		}
		label := strings.ReplaceAll(cmp.Or(c.Label, c.Backend), "/", "_")
		name = fmt.Sprintf("%s-%s-%s-%s.json", label, name, strings.ReplaceAll(path.Base(model), "\x00", ""), date)
	}
	return filepath.Join(c.Dir, name)
}

// writable creates the directory of a file, and checks, before a long run, that files can be created in it.
func writable(file string) error {
	if file == "" || file == "-" {
		return nil
	}
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	if info, err := os.Stat(file); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", file)
	}
	f, err := os.CreateTemp(dir, ".kvasir-bench-*")
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// save writes what the function `write` writes to a file, completely or not at all; "-" means stdout.
func save(file string, stdout io.Writer, write func(io.Writer) error) (err error) {
	if file == "-" {
		return write(stdout)
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".kvasir-bench-*")
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Chmod(0o644), f.Close()); err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // the error above says more
	}
	return err
}

// draw writes the page of --plot, or only its plots if the file is an SVG.
func (c *Flags) draw(w io.Writer, runs []report.Run) error {
	if strings.EqualFold(filepath.Ext(c.Report), ".svg") {
		return report.WriteSVG(w, runs)
	}
	return report.Write(w, runs)
}

// compare compares saved results.
func (c *Flags) compare(stdout io.Writer) error {
	if len(c.Compare) != 2 && (c.Report == "" || len(c.Compare) < 1) {
		return UsageError(fmt.Sprintf("--compare takes two results, got %d (with --plot, any number)", len(c.Compare)))
	}
	var runs []report.Run
	for _, name := range c.Compare {
		r, err := read(name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		runs = append(runs, report.Run{Name: strings.TrimSuffix(filepath.Base(name), ".json"), Result: r})
	}
	if c.Report != "" {
		if err := writable(c.Report); err != nil {
			return err
		}
		if err := save(c.Report, stdout, func(w io.Writer) error { return c.draw(w, runs) }); err != nil {
			return err
		}
	}
	if len(runs) != 2 {
		return nil
	}
	ratios := bench.Compare(runs[0].Result, runs[1].Result)
	if c.File == "" {
		return bench.WriteRatios(stdout, ratios)
	}
	return save(filepath.Join(c.Dir, c.File), stdout, func(w io.Writer) error {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(ratios)
	})
}

func read(name string) (*bench.Result, error) {
	f, err := os.Open(name)
	if err != nil {
		if e, ok := errors.AsType[*os.PathError](err); ok {
			return nil, e.Err // the caller puts the file's name in front
		}
		return nil, err
	}
	defer f.Close()
	return bench.ReadJSON(f)
}
