// SPDX-License-Identifier: Apache-2.0

// Package bench is the work of kvasir bench: it makes a workload, sends it, and prints, saves and compares results.
package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/load"
	"github.com/kvasir-kv/kvasir/bench/workload"
)

// Words is the value of a flag that takes all words up to the next flag.
type Words []string

// Flags are the flags of the command. A flag that vllm bench serve also has has the same name.
type Flags struct {
	BaseURL    string        `name:"base-url" help:"The endpoint; default from --host and --port." placeholder:"URL" group:"Endpoint"`
	Host       string        `help:"Host of the endpoint." default:"127.0.0.1" group:"Endpoint"`
	Port       int           `help:"Port of the endpoint." default:"8000" group:"Endpoint"`
	Backend    string        `help:"Completions (openai, vllm), or chats (openai-chat)." enum:"openai,vllm,openai-chat" default:"openai" group:"Endpoint"`
	Endpoint   string        `help:"Path of the requests; default that of the backend." placeholder:"PATH" group:"Endpoint"`
	Model      string        `help:"Model in the requests; default the first that the endpoint names." group:"Endpoint"`
	Header     Words         `help:"Headers of every request, as KEY=VALUE. OPENAI_API_KEY is sent where it is set." placeholder:"KEY=VALUE" group:"Endpoint"`
	ExtraBody  string        `help:"Fields of every request." placeholder:"JSON" group:"Endpoint"`
	IgnoreEOS  *bool         `name:"ignore-eos" help:"Engines are to generate every token asked for; default for all workloads but sharegpt." negatable:"" group:"Endpoint"`
	Timeout    time.Duration `name:"request-timeout" help:"Of one request." default:"6h" group:"Endpoint"`
	ReadyCheck int           `name:"ready-check-timeout-sec" help:"Seconds to wait for an endpoint that is not up yet." default:"0" placeholder:"N" group:"Endpoint"`

	Dataset     string          `name:"dataset-name" aliases:"profile" help:"random, sharegpt, timed_trace, aiperf (sessions of its mooncake_trace), multi-turn, or agentic." enum:"random,sharegpt,timed_trace,aiperf,multi-turn,agentic" default:"random" group:"Workload"`
	Path        string          `name:"dataset-path" help:"File of sharegpt, timed_trace or aiperf." placeholder:"FILE" group:"Workload"`
	Prompts     int             `name:"num-prompts" help:"Requests." default:"1000" group:"Workload"`
	Input       int             `name:"random-input-len" help:"Prompt tokens of random." default:"1024" aliases:"input-len" group:"Workload"`
	Output      int             `name:"random-output-len" help:"Output tokens of random." default:"128" group:"Workload"`
	Range       float64         `name:"random-range-ratio" help:"Lengths of random spread by this fraction around the two, evenly." default:"0" group:"Workload"`
	OutputLen   int             `name:"output-len" help:"Output tokens of every workload; default those of the workload." placeholder:"N" group:"Workload"`
	Seed        uint64          `help:"One seed, one workload." default:"0" group:"Workload"`
	Vocabulary  int             `name:"vocab-size" help:"Token ids in prompts are below this." default:"32000" group:"Workload"`
	TraceBlock  int             `name:"timed-trace-chunk-hash-size" help:"Tokens of a hash id of timed_trace and aiperf." default:"512" group:"Workload"`
	TraceSecond float64         `name:"timed-trace-sec-multiplier" help:"Seconds of a unit of their times." default:"0.001" group:"Workload"`
	TraceFormat workload.Format `name:"timed-trace-format" help:"How lines of timed_trace are read: mooncake (hash ids for the whole prompt), or timed (as vLLM: a prompt ends with its last hash id; timestamp and output_length are needed)." enum:"mooncake,timed" default:"mooncake" group:"Workload"`
	SelfTimed   bool            `name:"self-timed" help:"Requests of timed_trace, aiperf and agentic come when these say; else at --request-rate." default:"true" negatable:"" group:"Workload"`

	Rate        float64 `name:"request-rate" help:"Requests per second; inf: all at once." default:"inf" group:"Traffic"`
	Burstiness  float64 `help:"1: a Poisson process; below 1 in bursts, above 1 more even." default:"1" group:"Traffic"`
	Concurrency int     `name:"max-concurrency" help:"Requests in progress at most; 0: no limit." default:"0" group:"Traffic"`
	RampUp      string  `name:"ramp-up-strategy" help:"linear or exponential: the rate changes over the run." enum:",linear,exponential" default:"" group:"Traffic"`
	RampStart   float64 `name:"ramp-up-start-rps" help:"Rate at the start of a ramp." default:"0" group:"Traffic"`
	RampEnd     float64 `name:"ramp-up-end-rps" help:"Rate at its end." default:"0" group:"Traffic"`
	WarmUps     int     `name:"num-warmups" help:"Requests before the run that are not measured." default:"0" group:"Traffic"`

	Goodput       Words  `help:"Count requests that keep limits, in ms: ttft:500 tpot:50 e2el:3000." placeholder:"METRIC:MS" group:"Figures"`
	Metrics       string `name:"percentile-metrics" help:"What the table shows: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue." default:"ttft,tpot,itl" group:"Figures"`
	Percentiles   string `name:"metric-percentiles" help:"Percentiles." default:"99" group:"Figures"`
	PrefillGPUs   int    `name:"num-prefill-gpu" help:"GPUs of P, for figures per GPU; of all engines where there is one kind." default:"0" group:"Figures"`
	DecodeGPUs    int    `name:"num-decode-gpu" help:"GPUs of D." default:"0" group:"Figures"`
	PrefillURL    string `name:"prefill-metrics" help:"P's metrics: with D's, the time to the first token is divided among them." placeholder:"URL" group:"Figures"`
	DecodeURL     string `name:"decode-metrics" help:"D's metrics." placeholder:"URL" group:"Figures"`
	EngineMetrics string `name:"engine-metrics" help:"Metrics of an engine that does both; default those of the endpoint." placeholder:"URL" group:"Figures"`

	Save       bool   `name:"save-result" help:"Save the result as JSON." group:"Output"`
	Detailed   bool   `name:"save-detailed" help:"Save it with its requests, which --compare needs for intervals." group:"Output"`
	Dir        string `name:"result-dir" help:"Directory of the JSON." placeholder:"DIR" group:"Output"`
	File       string `name:"result-filename" help:"File of the JSON; - is standard output, and the table goes to standard error." placeholder:"FILE" group:"Output"`
	Format     string `help:"JSON of vllm bench serve, or of AIPerf." enum:"vllm,aiperf" default:"vllm" group:"Output"`
	Label      string `help:"Label of the result, and the beginning of its file's name." group:"Output"`
	Meta       Words  `name:"metadata" help:"Keys and values for the JSON." placeholder:"KEY=VALUE" group:"Output"`
	Report     string `name:"plot" aliases:"report" help:"Write a page with distributions and a timeline: one HTML file that needs nothing else; or, where the name ends in .svg, its plots as a picture." placeholder:"FILE" group:"Output"`
	NoProgress bool   `name:"disable-tqdm" help:"No progress bar." aliases:"no-progress" group:"Output"`

	Compare Words `help:"Compare two saved results, and send nothing. With --plot, any number." placeholder:"A.json B.json" group:"Output"`
}

// Help is the help text of the command.
const Help = `Sends requests to an endpoint of the OpenAI API and measures times to first token, times per token and
throughputs as vllm bench serve does: the same flags, the same table, the same JSON. docs/reference/bench.md has the definitions.

A trace (timed_trace, aiperf) may be longer than memory: it is read once to check it, and again while it is sent. What remains of a request is its
result, about 200 bytes and 16 for each token. A pipe is copied to a temporary file without a name in $TMPDIR.

Examples:
  kvasir engine --port 8000 --prefill-tokens-per-second 20000 --step-time 10ms
  kvasir bench --num-prompts 50 --random-input-len 1024 --random-output-len 32 --request-rate 5
  kvasir bench --num-prompts 50 --max-concurrency 8 --goodput ttft:500 tpot:50 --plot run.html
  kvasir bench --dataset-name multi-turn --num-prompts 60 --save-result --save-detailed --result-filename a.json
  kvasir bench --profile agentic --num-prompts 300 --plot agents.html
  kvasir bench --dataset-name aiperf --dataset-path sessions.jsonl --num-prompts 500
  kvasir bench --compare a.json b.json`

// aiperf is the name of the dataset with AIPerf's sessions.
const aiperf = "aiperf"

// plan is the run that the flags describe, after they were checked.
type plan struct {
	load        load.Options
	slos        []bench.SLO
	metrics     []string
	percentiles []float64
	meta        map[string]string
}

// faults collects texts that say what is wrong with the flags.
type faults []string

func (f *faults) unless(ok bool, format string, args ...any) {
	if !ok {
		*f = append(*f, fmt.Sprintf(format, args...))
	}
}

// within adds a fault that names the flag unless n lies between `least` and `most`, both included.
func (f *faults) within(flag string, n, least, most int) {
	f.unless(least <= n && n <= most, "%s %d is outside %d to %d", flag, n, least, most)
}

// UsageError means that the command line cannot be used.
type UsageError string

// Error implements error.
func (e UsageError) Error() string { return string(e) }

// tableMetrics are the names that --percentile-metrics accepts.
var tableMetrics = []string{"ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"}

// plan checks the flags and returns the run that they describe.
func (c *Flags) plan() (p plan, err error) {
	var f faults
	c.checkNumbers(&f)
	c.checkCombinations(&f)
	p.load = c.loadOptions(&f)
	p.slos, err = bench.ParseSLOs(c.Goodput)
	f.unless(err == nil, "--goodput %v", err)
	p.metrics = strings.Split(c.Metrics, ",")
	for _, m := range p.metrics {
		f.unless(slices.Contains(tableMetrics, m), "--percentile-metrics %q: there is no metric %q, want some of %s", c.Metrics, m, strings.Join(tableMetrics, ", "))
	}
	for _, w := range strings.Split(c.Percentiles, ",") {
		v, err := strconv.ParseFloat(w, 64)
		f.unless(err == nil && v >= 0 && v <= 100 && !slices.Contains(p.percentiles, v), "--metric-percentiles %q: %q is not a number from 0 to 100, or there twice", c.Percentiles, w)
		p.percentiles = append(p.percentiles, v)
	}
	p.meta = map[string]string{}
	for _, w := range c.Meta {
		k, v, ok := strings.Cut(w, "=")
		f.unless(ok && k != "" && !bench.Reserved(k), "--metadata %q: want KEY=VALUE, with a key that results do not have", w)
		p.meta[k] = v
	}
	if len(f) > 0 {
		return p, UsageError(strings.Join(f, "; "))
	}
	return p, nil
}

// checkNumbers checks each flag with a number on its own.
func (c *Flags) checkNumbers(f *faults) {
	f.within("--port", c.Port, 1, 65535)
	f.within("--num-prompts", c.Prompts, 1, 1<<24)
	f.unless(c.Dataset != workload.Agentic || c.Prompts <= workload.MaxAgentic, "--num-prompts %d: %d requests of agentic at most", c.Prompts, workload.MaxAgentic)
	f.within("--random-input-len", c.Input, 1, 1<<21)
	f.within("--random-output-len", c.Output, 1, 1<<21)
	f.within("--output-len", c.OutputLen, 0, 1<<21)
	f.unless(c.Range >= 0 && c.Range <= 1, "--random-range-ratio %v is outside 0 to 1", c.Range)
	f.within("--vocab-size", c.Vocabulary, 2, 1<<30)
	f.unless(c.Rate > 0, "--request-rate %v is not above 0", c.Rate)
	f.unless(c.Burstiness > 0, "--burstiness %v is not above 0", c.Burstiness)
	f.within("--max-concurrency", c.Concurrency, 0, 1<<20)
	f.within("--num-warmups", c.WarmUps, 0, 1<<20)
	f.unless(c.Timeout > 0, "--request-timeout %v is not above 0", c.Timeout)
	f.within("--ready-check-timeout-sec", c.ReadyCheck, 0, 1<<20)
	f.unless(c.PrefillGPUs >= 0 && c.DecodeGPUs >= 0 && c.PrefillGPUs < 1<<20 && c.DecodeGPUs < 1<<20, "--num-prefill-gpu %d or --num-decode-gpu %d is outside 0 to %d", c.PrefillGPUs, c.DecodeGPUs, 1<<20)
}

// checkCombinations checks flags that need or exclude one another.
func (c *Flags) checkCombinations(f *faults) {
	f.unless((c.PrefillURL == "") == (c.DecodeURL == ""), "--prefill-metrics and --decode-metrics go together")
	f.unless(c.RampUp == "" || c.RampStart > 0 && c.RampEnd > 0 && !math.IsInf(c.RampStart+c.RampEnd, 0), "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0")
	f.unless(c.RampUp != "" || c.RampStart == 0 && c.RampEnd == 0, "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
	f.unless(c.RampUp == "" || math.IsInf(c.Rate, 1), "--request-rate and --ramp-up-strategy exclude each other")
	file := c.Dataset == "sharegpt" || c.Dataset == "timed_trace" || c.Dataset == aiperf
	f.unless(!file || c.Path != "", "--dataset-name %s needs --dataset-path", c.Dataset)
	f.unless(file || c.Path == "", "--dataset-path has no effect with --dataset-name %s: leave it out", c.Dataset)
	f.unless(c.Format == "vllm" || !c.Detailed, "--save-detailed needs --format vllm")
}

// loadOptions returns the options that say how requests are sent.
func (c *Flags) loadOptions(f *faults) load.Options {
	o := load.Options{
		BaseURL: cmp.Or(c.BaseURL, "http://"+net.JoinHostPort(c.Host, strconv.Itoa(c.Port))), Endpoint: c.Endpoint, Chat: c.Backend == "openai-chat", Model: c.Model,
		Header: http.Header{}, IgnoreEOS: c.Dataset != "sharegpt", MaxConcurrency: c.Concurrency, Timeout: c.Timeout, Vocabulary: c.Vocabulary,
		Turns: c.Dataset == "multi-turn" || c.Dataset == aiperf || c.Dataset == workload.Agentic, KeepText: c.Detailed,
	}
	if c.IgnoreEOS != nil {
		o.IgnoreEOS = *c.IgnoreEOS
	}
	if err := o.Validate(); err != nil {
		f.unless(false, "--base-url, --endpoint: %v", err)
	}
	if key := os.Getenv("OPENAI_API_KEY"); key != "" {
		o.Header.Set("Authorization", "Bearer "+key)
	}
	for _, w := range c.Header {
		k, v, ok := strings.Cut(w, "=")
		f.unless(ok && k != "" && !strings.ContainsAny(k+v, "\r\n\x00 ") || ok && k != "" && !strings.ContainsAny(k, "\r\n\x00 :") && !strings.ContainsAny(v, "\r\n\x00"), "--header %q: want KEY=VALUE", w)
		if ok {
			o.Header.Set(k, v)
		}
	}
	if c.ExtraBody != "" {
		f.unless(json.Unmarshal([]byte(c.ExtraBody), &o.ExtraBody) == nil, "--extra-body %q is no JSON object", c.ExtraBody)
	}
	return o
}

// requests holds the requests of a run, one after another in the order in which they are sent.
type requests struct {
	each  iter.Seq2[workload.Request, error]
	n     int
	first workload.Request
	close func() // closes the file from which they are read
}

// requests returns the workload with its arrivals. It reads a trace once to check that it is complete; the run reads the trace again
// while it sends.
func (c *Flags) requests(ctx context.Context) (out requests, err error) {
	timed := false
	out.close = func() {}
	switch c.Dataset {
	case "random":
		var list []workload.Request
		list, err = workload.Random(c.Prompts, c.Input, c.Output, c.Range, c.Seed)
		out.each = workload.Each(list)
	case "multi-turn":
		out.each = workload.Each(workload.Chats(c.Prompts, workload.ChatOptions{Seed: c.Seed}))
	case workload.Agentic:
		timed = c.SelfTimed
		out.each = workload.AgentRequests(c.Prompts, workload.AgentOptions{Seed: c.Seed})
	case "sharegpt":
		var list []workload.Request
		list, err = c.shareGPT()
		out.each = workload.Each(list)
	default:
		timed = c.SelfTimed
		var trace *workload.Trace
		if trace, err = c.trace(); err == nil {
			out.close = func() { _ = trace.Close() } // the file was only read, so the error does not matter
			if out.each = trace.Lines(); timed {
				out.each = trace.SelfTimed()
			}
		}
	}
	if err != nil {
		return out, err
	}
	for q, err := range out.each {
		if err == nil && out.n%1024 == 0 {
			err = ctx.Err()
		}
		if err != nil {
			return out, err
		}
		if out.n++; out.n == 1 {
			out.first = c.withOutput(q)
		}
	}
	each := out.each
	out.each = func(yield func(workload.Request, error) bool) {
		for q, err := range each {
			if !yield(c.withOutput(q), err) {
				return
			}
		}
	}
	if timed {
		return out, nil
	}
	out.first.Arrival = 0
	a := workload.Arrivals{Rate: c.Rate, Burstiness: c.Burstiness, Seed: c.Seed, RampUp: c.RampUp, Start: c.RampStart, End: c.RampEnd}
	out.each = workload.Scheduled(out.each, out.n, a)
	_, err = workload.Count(ctx, workload.Scheduled(workload.Each(nil), out.n, a))
	return out, err
}

// withOutput returns a request with the number of output tokens that the flags ask for.
func (c *Flags) withOutput(q workload.Request) workload.Request {
	if c.OutputLen > 0 {
		q.Output = c.OutputLen
	}
	return q
}

// trace opens the trace of the dataset timed_trace or aiperf.
func (c *Flags) trace() (*workload.Trace, error) {
	format := c.TraceFormat
	if c.Dataset == aiperf {
		format = workload.FormatAIPerf
	}
	trace, err := workload.OpenTrace(c.Path, workload.TraceOptions{Max: c.Prompts, BlockTokens: c.TraceBlock, Seconds: c.TraceSecond, Format: format})
	if errors.Is(err, workload.ErrTrace) {
		err = fmt.Errorf("%s: %w", c.Path, err)
	}
	return trace, err
}

// shareGPT reads the conversations of the dataset sharegpt.
func (c *Flags) shareGPT() ([]workload.Request, error) {
	f, err := os.Open(c.Path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	list, err := workload.ReadShareGPT(f, c.Prompts, nil)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Path, err)
	}
	return list, nil
}
