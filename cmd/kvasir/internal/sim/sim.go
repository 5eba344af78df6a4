// SPDX-License-Identifier: Apache-2.0

// Package sim is kvasir sim. It turns flags into options of sim/tables, sim/replay, sim/sweep, sim/fleet and sim/cluster, and prints
// their results as text or JSON.
package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/report"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/fleet"
	"github.com/kvasir-kv/kvasir/sim/replay"
	"github.com/kvasir-kv/kvasir/sim/sweep"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

// Command is kvasir sim: it simulates deployments in virtual time.
type Command struct {
	Table     tableCmd     `cmd:"" help:"Play the original's table: 1P1D on two A10 servers, 100 prompts of ShareGPT."`
	Replay    replayCmd    `cmd:"" help:"Count what a prefix cache would have of a trace; with --scheduled, run it through engines."`
	Evict     evictCmd     `cmd:"" help:"Compare eviction policies on a trace, at several sizes, with the optimum."`
	Check     checkCmd     `cmd:"" help:"Play published tables that no constant is from."`
	Sweep     sweepCmd     `cmd:"" help:"Run a workload over many deployments: P and D, cache, network, tokens of a step, rate."`
	Fleet     fleetCmd     `cmd:"" help:"Play 1 to 256 nodes over one store: hits, bytes, requests, and where the store's bandwidth binds."`
	Profile   profileCmd   `cmd:"" help:"Show a hardware profile: its constants, where they are from, its arithmetic."`
	Accuracy  accuracyCmd  `cmd:"" help:"Play all tables with spreads and ranges, as Markdown (minutes): the figures of docs/measured/accuracy-tables.md."`
	Calibrate calibrateCmd `cmd:"" help:"Fit a profile to results of vllm bench serve; without any, the profiles' constants from their figures."`
}

// Help returns the text that kvasir sim --help shows.
func (Command) Help() string {
	return `Whole deployments in virtual time: prefill and decode engines with vLLM's scheduler, on modelled GPUs. No GPU,
no network, no waiting; the same run gives the same figures. docs/measured/accuracy.md says how near they are.

Examples:
  kvasir sim table
  kvasir sim table --seeds 50 --set prefill_efficiency=0.55 --json -
  kvasir sim replay --trace conversation_trace.jsonl --capacity-blocks 50000
  kvasir sim replay --trace conversation_trace.jsonl --scheduled --prefill 8 --decode 8
  kvasir sim profile a10-qwen2.5-7b`
}

// Aliases rewrites a command line: kvasir engine calibrate becomes kvasir sim calibrate.
func Aliases(args []string) []string {
	if len(args) >= 2 && args[0] == "engine" && args[1] == "calibrate" {
		return append([]string{"sim", "calibrate"}, args[2:]...)
	}
	return args
}

// Env is what a command needs from its process.
type Env struct {
	Ctx            context.Context // it ends at SIGINT or SIGTERM
	Stdout, Stderr io.Writer
	// Progress returns two functions: show prints how far a run is, and end ends the printed line. The text `of` names what show counts,
	// for example requests. nil: no progress is printed.
	Progress func(w io.Writer, of string) (show func(done, total int), end func())
}

func (e *Env) progress(of string) (show func(done, total int), end func()) {
	if e.Progress == nil {
		return nil, func() {}
	}
	return e.Progress(e.Stderr, of)
}

// UsageError is an error of the command line. Its text is followed by a hint to --help.
type UsageError struct{ text string }

func (e *UsageError) Error() string { return e.text }

// UsageErrorf returns a UsageError. Commands of other packages use it.
func UsageErrorf(format string, args ...any) error { return usagef(format, args...) }

func usagef(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

// faults collects texts that say what is wrong with a command line.
type faults []string

func (f *faults) unless(ok bool, format string, args ...any) {
	if !ok {
		*f = append(*f, fmt.Sprintf(format, args...))
	}
}

func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	return usagef("%s", strings.Join(f, "; "))
}

// jsonFlag is the flag --json of a command, which writes its result as JSON.
type jsonFlag struct {
	JSON string `name:"json" help:"Write the result as JSON to this file; - is standard output, instead of the table." placeholder:"FILE"`
}

// write prints a result as text, and writes it as JSON if --json is given. If the JSON goes to standard output, no text is printed.
func (f *jsonFlag) write(e *Env, result any, text func(io.Writer) error) error {
	if f.JSON != "-" {
		if err := text(e.Stdout); err != nil {
			return err
		}
	}
	if f.JSON == "" {
		return nil
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	if err := enc.Encode(result); err != nil {
		return err
	}
	if f.JSON == "-" {
		_, err := e.Stdout.Write(b.Bytes())
		return err
	}
	return os.WriteFile(f.JSON, b.Bytes(), 0o644)
}

// writable checks, before a long run, that files can be created: no file is a directory, and the directory of each exists.
func writable(files ...string) error {
	for _, file := range files {
		if file == "" || file == "-" {
			continue
		}
		if info, err := os.Stat(file); err == nil && info.IsDir() {
			return fmt.Errorf("%s is a directory, no file", file)
		}
		if _, err := os.Stat(filepath.Dir(file)); err != nil {
			return fmt.Errorf("%s cannot be written: %w", file, err)
		}
	}
	return nil
}

// constantFlags are the flags that change constants of a profile.
type constantFlags struct {
	Set    map[string]float64 `help:"Give a constant of the profile another value; again for more. kvasir sim profile lists them." placeholder:"CONSTANT=VALUE" group:"Profile"`
	Budget int                `name:"token-budget" help:"Tokens of a step (max_num_batched_tokens); default the profile's." placeholder:"N" group:"Profile"`
}

func (f *constantFlags) settings() []tables.Setting { return sortedSettings(f.Set) }

func sortedSettings(set map[string]float64) (out []tables.Setting) {
	for name, value := range set {
		out = append(out, tables.Setting{Name: name, Value: value})
	}
	slices.SortFunc(out, func(a, b tables.Setting) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// asUsage returns err as a UsageError if a flag caused it, and as "interrupted" if the user ended the run. It returns other errors as
// they are.
func asUsage(e *Env, err error) error {
	for _, wrong := range []error{costmodel.ErrConstant, costmodel.ErrProfile, cluster.ErrOptions, tables.ErrLengths, tables.ErrTable, tables.ErrMarkers, sweep.ErrOptions, fleet.ErrOptions, tables.ErrResult, workload.ErrTrace, replay.ErrOptions} {
		if errors.Is(err, wrong) {
			return usagef("%v", err)
		}
	}
	if errors.Is(err, context.Canceled) && e.Ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return err
}

type tableCmd struct {
	jsonFlag
	constantFlags

	Seeds   int    `help:"Number of generated workloads to play too, to show how the figures spread." default:"0" placeholder:"N"`
	Moves   bool   `name:"sensitivity" help:"Move every constant and the token budget, and show the mean errors."`
	Report  string `name:"plot" aliases:"report" help:"Write both rows as a page of HTML, with distributions and timelines." placeholder:"FILE"`
	Lengths string `help:"Play this list instead of the built-in one: lines of prompt,limit,output." placeholder:"FILE"`
}

// Help returns the text that kvasir sim table --help shows.
func (tableCmd) Help() string {
	return `The table of vLLM's pull request for the MooncakeConnector, both rows, figure by figure beside ours. Figures have the
keys and definitions of vllm bench serve; an error is ours / original - 1.

Examples:
  kvasir sim table
  kvasir sim table --seeds 50
  kvasir sim table --token-budget 8192 --set host_step_ms=5 --json -`
}

// Run plays the table, and prints its figures beside the original's.
func (c *tableCmd) Run(e *Env) error {
	var f faults
	f.unless(c.Seeds >= 0 && c.Seeds <= 10000, "--seeds %d is outside 0 to 10000", c.Seeds)
	f.unless(c.Budget >= 0, "--token-budget %d is less than 0", c.Budget)
	if err := errors.Join(f.err(), writable(c.JSON, c.Report)); err != nil {
		return err
	}
	o := tables.Options{Seeds: c.Seeds, TokenBudget: c.Budget, Set: c.settings(), Sensitivity: c.Moves}
	if c.Lengths != "" {
		file, err := os.Open(c.Lengths)
		if err != nil {
			return err
		}
		defer file.Close()
		if o.Lengths, err = tables.ReadLengths(file); err != nil {
			return asUsage(e, err)
		}
	}
	t, err := tables.Play(e.Ctx, o)
	if t == nil {
		return asUsage(e, err)
	}
	if c.Report != "" { // both rows are complete, even if a later part was interrupted
		var page bytes.Buffer
		if err := errors.Join(TableReport(&page, t), os.WriteFile(c.Report, page.Bytes(), 0o644)); err != nil {
			return err
		}
	}
	return errors.Join(c.write(e, t, t.Print), asUsage(e, err))
}

// TableReport writes both rows of the table as a page of HTML.
func TableReport(w io.Writer, t *tables.Table) error {
	var runs []report.Run
	for i, r := range t.Results {
		runs = append(runs, report.Run{Name: tables.Names[i], Result: r})
	}
	return report.Write(w, runs)
}

type profileCmd struct {
	jsonFlag
	constantFlags

	Name string `arg:"" optional:"" help:"The profile; without one, all are listed."`
}

// Run prints a profile, or a list of all profiles if none is named.
func (c *profileCmd) Run(e *Env) error {
	if c.Name == "" {
		return c.write(e, costmodel.Names, costmodel.List)
	}
	p, err := tables.Profile(c.Name, tables.Options{TokenBudget: c.Budget, Set: c.settings()})
	if err != nil {
		return asUsage(e, err)
	}
	return c.write(e, p, p.Print)
}

type calibrateCmd struct {
	jsonFlag
	constantFlags

	Results []string `arg:"" optional:"" help:"Results of vllm bench serve or kvasir bench (JSON), of one deployment; without any, the profiles' own constants are fitted from the published figures."`
	Profile string   `help:"Profile to fit: GPU, model and what is assumed are its." default:"a10-qwen2.5-7b"`
	Prefill int      `help:"Engines that prefilled; 0: those that decode did both." default:"0"`
	Decode  int      `help:"Engines that decoded." default:"1"`
	Write   string   `help:"Write the fitted profile to this file, for --profile; its name ends with .json." placeholder:"FILE"`
}

// Help returns the text that kvasir sim calibrate --help shows.
func (calibrateCmd) Help() string {
	return `Fits the two efficiencies of a profile: that of prefills from mean TTFT, that of the memory from mean ITL. With
--save-detailed results have the lengths of all requests; otherwise their means are taken. kvasir engine calibrate
is the same command.

Examples:
  vllm bench serve ... --save-result --save-detailed --result-filename mine.json
  kvasir engine calibrate mine.json --profile h100-llama-3.1-8b --write mine-profile.json
  kvasir sim sweep --profile mine-profile.json --pd 1:1,0:2`
}

// Run fits the constants of a profile to results.
func (c *calibrateCmd) Run(e *Env) error {
	err := writable(c.JSON, c.Write)
	if err != nil {
		return err
	}
	if len(c.Results) > 0 {
		return c.results(e)
	}
	var all []tables.Calibrated
	for _, calibration := range tables.Calibrations() {
		var got []tables.Calibrated
		if got, err = calibration.Recalibrate(e.Ctx); err != nil {
			break
		}
		all = append(all, got...)
	}
	if len(all) == 0 {
		return asUsage(e, err)
	}
	return errors.Join(c.write(e, all, func(w io.Writer) error { return tables.PrintCalibrated(w, all) }), asUsage(e, err))
}

func (c *calibrateCmd) results(e *Env) error {
	if c.Write != "" && !strings.HasSuffix(c.Write, ".json") {
		return usagef("--write %q does not end with .json", c.Write)
	}
	p, err := tables.Profile(c.Profile, tables.Options{TokenBudget: c.Budget, Set: c.settings()})
	if err != nil {
		return asUsage(e, err)
	}
	var results []*bench.Result
	for _, name := range c.Results {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		r, err := bench.ReadJSON(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return usagef("%s: %v", name, err)
		}
		results = append(results, r)
	}
	got, err := tables.FitResults(e.Ctx, p, cluster.Options{Prefill: c.Prefill, Decode: c.Decode}, c.Results, results)
	if err != nil {
		return asUsage(e, err)
	}
	if c.Write != "" {
		text, err := json.MarshalIndent(p, "", "  ")
		if err := errors.Join(err, os.WriteFile(c.Write, append(text, '\n'), 0o644)); err != nil {
			return err
		}
	}
	return c.write(e, got, func(w io.Writer) error { return tables.PrintCalibrated(w, got) })
}

type checkCmd struct {
	jsonFlag
	constantFlags

	Tables []string `arg:"" optional:"" help:"T1, T3, T5, T6; default all."`
	Seeds  int      `help:"Orders of arrivals that medians are over; 0 is 20." default:"0" placeholder:"N"`
	Ranges bool     `help:"Run both ends of the ranges of what is assumed of hosts and all-reduces."`
}

// Help returns the text that kvasir sim check --help shows.
func (checkCmd) Help() string {
	return `Published tables that no constant is from, each figure beside ours. docs/measured/accuracy.md says where they are from and
what is asked of them. A limit that is missed is printed; the exit code is 0 all the same.

Examples:
  kvasir sim check T6
  kvasir sim check T5 --ranges
  kvasir sim check --json -`
}

// Run plays the tables that no constant was fitted to, and prints each figure beside the published one.
func (c *checkCmd) Run(e *Env) error {
	if c.Seeds < 0 || c.Seeds > 10000 {
		return usagef("--seeds %d is outside 0 to 10000", c.Seeds)
	}
	if err := writable(c.JSON); err != nil {
		return err
	}
	names := c.Tables
	if len(names) == 0 {
		names = tables.CheckNames
	}
	var all []*tables.Check
	var err error
	for _, name := range names {
		var got *tables.Check
		o := tables.CheckOptions{Options: tables.Options{Seeds: c.Seeds, TokenBudget: c.Budget, Set: c.settings()}}
		if c.Ranges {
			o.Ranges = tables.Assumed
		}
		got, err = tables.RunCheck(e.Ctx, name, o)
		if got != nil {
			all = append(all, got)
		}
		if err != nil {
			break
		}
	}
	if len(all) == 0 {
		return asUsage(e, err)
	}
	var result any = all
	if len(names) == 1 {
		result = all[0]
	}
	text := func(w io.Writer) error {
		var errs []error
		for i, got := range all {
			if i > 0 {
				_, err := io.WriteString(w, "\n")
				errs = append(errs, err)
			}
			errs = append(errs, got.Print(w))
		}
		return errors.Join(errs...)
	}
	return errors.Join(c.write(e, result, text), asUsage(e, err))
}

type accuracyCmd struct {
	Write string `help:"Replace the tables in this document, between its two markers." placeholder:"FILE"`
}

// Run plays all tables. It prints their figures or, with --write, replaces the tables in a document.
func (c *accuracyCmd) Run(e *Env) error {
	if c.Write == "" {
		return asUsage(e, tables.Accuracy(e.Ctx, e.Stdout))
	}
	was, err := os.ReadFile(c.Write)
	if err != nil {
		return err
	}
	is, err := tables.WriteAccuracy(e.Ctx, was)
	if err != nil {
		return asUsage(e, err)
	}
	if bytes.Equal(was, is) {
		fmt.Fprintln(e.Stdout, c.Write, "is as it was")
		return nil
	}
	fmt.Fprintln(e.Stdout, c.Write, "has other figures now")
	return os.WriteFile(c.Write, is, 0o644)
}
