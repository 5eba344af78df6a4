// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// Result has the figures of a run. Its JSON has the keys of vllm bench serve 0.32; figures that vLLM does not have follow under keys of
// their own.
type Result struct {
	Date           string  `json:"date"`
	EndpointType   string  `json:"endpoint_type"`
	Backend        string  `json:"backend"`
	Label          *string `json:"label"`
	Model          string  `json:"model_id"`
	Tokenizer      *string `json:"tokenizer_id"`
	NumPrompts     int     `json:"num_prompts"`
	Rate           Rate    `json:"request_rate"`
	Burstiness     Rate    `json:"burstiness"`
	MaxConcurrency *int    `json:"max_concurrency"`

	RampUp      string  `json:"ramp_up_strategy,omitempty"`
	RampUpStart float64 `json:"ramp_up_start_rps,omitempty"`
	RampUpEnd   float64 `json:"ramp_up_end_rps,omitempty"`

	Duration          float64  `json:"duration"` // in seconds
	Completed         int      `json:"completed"`
	Failed            int      `json:"failed"`
	TotalInput        int      `json:"total_input_tokens"`
	TotalOutput       int      `json:"total_output_tokens"`
	RequestThroughput float64  `json:"request_throughput"`
	RequestGoodput    *float64 `json:"request_goodput"`
	OutputThroughput  float64  `json:"output_throughput"`
	TotalThroughput   float64  `json:"total_token_throughput"`

	// Values per request; a result of vLLM without details has only these two.
	Latencies  []float64 `json:"latencies,omitempty"`
	QueueTimes []float64 `json:"queue_times,omitempty"`

	PeakOutput     float64 `json:"max_output_tokens_per_s"`
	PeakConcurrent int     `json:"max_concurrent_requests"`
	RTFx           float64 `json:"rtfx"` // used by vLLM for speech recognition; 0 here

	// In the JSON they are mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms and so on; nil: the result does not have them.
	TTFT          *Distribution `json:"-"`
	TPOT          *Distribution `json:"-"`
	ITL           *Distribution `json:"-"`
	E2EL          *Distribution `json:"-"`
	ClientQueue   *Distribution `json:"-"`
	E2ELWithQueue *Distribution `json:"-"` // E2EL together with the wait in the client's queue

	// Interrupted means that the run was ended before its last request. Unfinished is how many requests were in progress or had not
	// been sent then; Failed does not count them.
	Interrupted bool `json:"interrupted,omitempty"`
	Unfinished  int  `json:"unfinished,omitempty"`

	// InferenceX's figures: tokens per second and GPU, and tokens per second of one user.
	TotalPerGPU   float64 `json:"tput_per_gpu,omitempty"`
	OutputPerGPU  float64 `json:"output_tput_per_gpu,omitempty"` // per GPU that decodes
	InputPerGPU   float64 `json:"input_tput_per_gpu,omitempty"`  // per GPU that prefills
	Interactivity float64 `json:"intvty,omitempty"`              // 1000 ÷ mean TPOT
	PrefillGPUs   int     `json:"num_prefill_gpu,omitempty"`
	DecodeGPUs    int     `json:"num_decode_gpu,omitempty"`

	SLOs    []SLO             `json:"slos,omitempty"`
	Stages  []Stage           `json:"handover,omitempty"` // stages of the way from P to D, in order
	Engines []Engine          `json:"engines,omitempty"`
	Errors  map[string]int    `json:"error_summary,omitempty"` // number of failed requests by text, in which N stands for each number
	Meta    map[string]string `json:"-"`                       // notes of the user, with their keys in the JSON

	samples []Sample
}

// Stage is a part of the time from a prompt to its first token, as the engines report it: the mean over the run.
type Stage struct {
	Name   string  `json:"name"`
	Millis float64 `json:"mean_ms"`
}

// Engine is what an engine reported about itself during the run.
type Engine struct {
	Role    string  `json:"role"`             // P, D, or empty if all engines do both
	Queries int64   `json:"prefix_queries"`   // prompt tokens looked up in the prefix cache
	Hits    int64   `json:"prefix_hits"`      // prompt tokens found there
	Loaded  int64   `json:"external_hits"`    // prompt tokens loaded from elsewhere
	Points  []Point `json:"points,omitempty"` // state over time
	Error   string  `json:"error,omitempty"`  // why the engine reported nothing
}

// Point is the state of an engine at one moment.
type Point struct {
	At      float64 `json:"t"` // in seconds after the start
	Running int     `json:"running"`
	Waiting int     `json:"waiting"`
	Usage   float64 `json:"kv_usage"` // used part of the KV memory, 0 to 1
}

// Rate is a number that may be infinite; then its JSON is "inf".
type Rate float64

// MarshalJSON implements json.Marshaler.
func (r Rate) MarshalJSON() ([]byte, error) {
	if math.IsInf(float64(r), 1) {
		return []byte(`"inf"`), nil
	}
	return json.Marshal(float64(r))
}

// UnmarshalJSON implements json.Unmarshaler.
func (r *Rate) UnmarshalJSON(text []byte) error {
	if string(text) == `"inf"` {
		*r = Rate(math.Inf(1))
		return nil
	}
	return json.Unmarshal(text, (*float64)(r))
}

// limited reports whether requests were sent at a rate, and not all at the start.
func (r *Result) limited() bool { return !math.IsInf(float64(r.Rate), 1) }

// Samples returns the requests of the run; nil if the result was read without details.
func (r *Result) Samples() []Sample { return r.samples }

// distributions returns the populations in vLLM's order, with their keys and their names in the table.
func (r *Result) distributions() []named {
	return []named{
		{"ttft", "TTFT", "Time to First Token", &r.TTFT},
		{"tpot", "TPOT", "Time per Output Token (excl. 1st token)", &r.TPOT},
		{"itl", "ITL", "Inter-token Latency", &r.ITL},
		{"e2el", "E2EL", "End-to-end Latency", &r.E2EL},
		{"client_queue_time", "Client Queue Time", "Client-side Queueing", &r.ClientQueue},
		{"e2el_including_client_queue", "E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency", &r.E2ELWithQueue},
	}
}

type named struct {
	key, short, title string
	at                **Distribution
}

// detail is what a JSON result has per request besides latencies and queue_times.
type detail struct {
	Input  []int       `json:"input_lens"`
	Output []int       `json:"output_lens"`
	TTFT   []float64   `json:"ttfts"`
	ITL    [][]float64 `json:"itls"`
	Start  []float64   `json:"start_times"`
	Text   []string    `json:"generated_texts"`
	Error  []string    `json:"errors"`
	Cached []int       `json:"cached_lens,omitempty"`
}

// WriteJSON writes the result on one line; with detailed, it includes the requests.
func (r *Result) WriteJSON(w io.Writer, detailed bool) error {
	type plain Result
	text, err := json.Marshal((*plain)(r))
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	b := bytes.NewBuffer(text[:len(text)-1])
	add := func(key string, v any) {
		if err == nil {
			var value []byte
			if value, err = json.Marshal(v); err == nil {
				fmt.Fprintf(b, ",%q:%s", key, value)
			}
		}
	}
	for _, d := range r.distributions() {
		if *d.at == nil {
			continue
		}
		add("mean_"+d.key+"_ms", (*d.at).Mean)
		add("median_"+d.key+"_ms", (*d.at).Median)
		add("std_"+d.key+"_ms", (*d.at).Std)
		for _, p := range (*d.at).Percentiles {
			add("p"+word(p.P)+"_"+d.key+"_ms", p.Millis)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(r.Meta)) {
		add(k, r.Meta[k])
	}
	if detailed {
		var d []byte
		if d, err = json.Marshal(detailOf(r.samples)); err == nil {
			b.WriteByte(',')
			b.Write(d[1 : len(d)-1])
		}
	}
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	b.WriteString("}\n")
	_, err = w.Write(b.Bytes())
	return err
}

// word returns the text of a percentile in vLLM's keys and lines.
func word(p float64) string { return strconv.FormatFloat(p, 'f', -1, 64) }

func detailOf(samples []Sample) *detail {
	n := len(samples)
	d := &detail{make([]int, n), make([]int, n), make([]float64, n), make([][]float64, n), make([]float64, n), make([]string, n), make([]string, n), make([]int, n)}
	cached := false
	for i := range samples {
		s := &samples[i]
		d.Input[i], d.Output[i], d.TTFT[i], d.ITL[i], d.Start[i], d.Text[i], d.Error[i], d.Cached[i] = s.Input, s.Output, s.TTFT, s.ITL, s.Start, s.Text, s.Error, s.Cached
		cached = cached || s.Cached >= 0
		if s.Failed() {
			d.Output[i] = 0
		}
		if d.ITL[i] == nil {
			d.ITL[i] = []float64{}
		}
	}
	if !cached {
		d.Cached = nil
	}
	return d
}

// maxResult is the largest file of a result, in bytes. A larger one is an error.
const maxResult = 1 << 30

// ReadJSON reads one result, written by vllm bench serve or by WriteJSON. Errors name the line or the key.
func ReadJSON(in io.Reader) (*Result, error) {
	text, err := io.ReadAll(io.LimitReader(in, maxResult+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxResult {
		return nil, fmt.Errorf("it has more than %d bytes", maxResult)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	var keys map[string]json.RawMessage
	if err := dec.Decode(&keys); err != nil {
		return nil, options.ExplainJSON(text, err)
	}
	if dec.More() {
		return nil, fmt.Errorf("line %d: a second result: one file is to have one", options.JSONLine(text, dec.InputOffset()))
	}
	return parse(text, keys)
}

func parse(text []byte, keys map[string]json.RawMessage) (*Result, error) {
	for _, k := range []string{"duration", "completed", "total_input_tokens", "total_output_tokens"} {
		if _, ok := keys[k]; !ok {
			return nil, fmt.Errorf("key %s is missing: this is no result of vllm bench serve or kvasir bench", k)
		}
	}
	type plain Result
	r, d := &Result{}, &detail{}
	if err := json.Unmarshal(text, (*plain)(r)); err != nil {
		return nil, options.ExplainJSON(text, err)
	}
	if err := json.Unmarshal(text, d); err != nil {
		return nil, options.ExplainJSON(text, err)
	}
	for _, n := range r.distributions() {
		if err := readDistribution(n, keys); err != nil {
			return nil, err
		}
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	if d.TTFT == nil || d.Output == nil || r.Latencies == nil {
		return r, nil // the file has no figures of single requests
	}
	var err error
	r.samples, err = d.samples(r)
	return r, err
}

// maxNumber is the largest number in results: times in seconds or ms, tokens, rates. A larger number is an error, and sums of such
// numbers might not be finite.
const maxNumber = 1e15

func outside(v float64) bool { return !(v >= -maxNumber && v <= maxNumber) }

func (r *Result) check() error {
	for _, s := range r.Stages {
		if outside(s.Millis) {
			return fmt.Errorf("key handover: %.40q takes %v ms, which is impossible", s.Name, s.Millis)
		}
	}
	for _, e := range r.Engines {
		for _, p := range e.Points {
			if outside(p.At) || outside(p.Usage) || outside(float64(p.Running)) || outside(float64(p.Waiting)) {
				return fmt.Errorf("key engines: a point is impossible: %+v", p)
			}
		}
	}
	for _, v := range []float64{r.TotalPerGPU, r.OutputPerGPU, r.InputPerGPU, r.Interactivity, r.PeakOutput, float64(r.PeakConcurrent), r.RampUpStart, r.RampUpEnd} {
		if outside(v) {
			return fmt.Errorf("a figure per GPU, of a peak or of a ramp is %v, which is impossible", v)
		}
	}
	for i := range r.QueueTimes {
		if outside(r.QueueTimes[i]) {
			return fmt.Errorf("key queue_times: request %d waited %v s, which is impossible", i, r.QueueTimes[i])
		}
	}
	for i := range r.Latencies {
		if outside(r.Latencies[i]) {
			return fmt.Errorf("key latencies: request %d took %v s, which is impossible", i, r.Latencies[i])
		}
	}
	for _, v := range []struct {
		key   string
		value float64
	}{
		{"duration", r.Duration},
		{"completed", float64(r.Completed)},
		{"failed", float64(r.Failed)},
		{"total_input_tokens", float64(r.TotalInput)},
		{"total_output_tokens", float64(r.TotalOutput)},
		{"request_throughput", r.RequestThroughput},
		{"output_throughput", r.OutputThroughput},
		{"total_token_throughput", r.TotalThroughput},
	} {
		if !(v.value >= 0 && v.value <= maxNumber) {
			return fmt.Errorf("key %s is %v, which is impossible", v.key, v.value)
		}
	}
	return nil
}

// readDistribution reads the statistics of a population from the keys of a result.
func readDistribution(n named, keys map[string]json.RawMessage) error {
	if _, ok := keys["mean_"+n.key+"_ms"]; !ok {
		return nil
	}
	d := &Distribution{}
	for key, raw := range keys {
		name, ok := strings.CutSuffix(key, "_"+n.key+"_ms")
		if !ok {
			continue
		}
		var v float64
		if err := json.Unmarshal(raw, &v); err != nil || v < 0 || v > maxNumber {
			return fmt.Errorf("key %s is %.40s: want ms", key, raw)
		}
		switch name {
		case "mean":
			d.Mean = v
		case "median":
			d.Median = v
		case "std":
			d.Std = v
		default:
			if p, err := strconv.ParseFloat(strings.TrimPrefix(name, "p"), 64); err == nil && name[0] == 'p' && p >= 0 && p <= 100 {
				d.Percentiles = append(d.Percentiles, Percentile{p, v})
			}
		}
	}
	slices.SortFunc(d.Percentiles, func(a, b Percentile) int { return int(math.Copysign(1, a.P-b.P)) })
	*n.at = d
	return nil
}

// samples assembles the requests of a result that was read.
func (d *detail) samples(r *Result) ([]Sample, error) {
	n := len(d.TTFT)
	for _, c := range []struct {
		key string
		n   int
	}{
		{"input_lens", len(d.Input)}, {"output_lens", len(d.Output)}, {"itls", len(d.ITL)}, {"latencies", len(r.Latencies)}, {"start_times", len(d.Start)}, {"errors", len(d.Error)},
	} {
		if c.n != n {
			return nil, fmt.Errorf("key %s has %d requests, ttfts has %d", c.key, c.n, n)
		}
	}
	out := make([]Sample, n)
	for i := range out {
		s := &out[i]
		*s = Sample{Start: d.Start[i], TTFT: d.TTFT[i], Latency: r.Latencies[i], ITL: d.ITL[i], Input: d.Input[i], Output: d.Output[i], Error: d.Error[i], Cached: -1}
		if i < len(r.QueueTimes) {
			s.Queue = r.QueueTimes[i]
		}
		if i < len(d.Text) {
			s.Text = d.Text[i]
		}
		if i < len(d.Cached) {
			s.Cached = d.Cached[i]
		}
		if s.Error == "" && s.TTFT == 0 && s.Latency == 0 {
			s.Error = "failed" // vLLM has no text for an HTTP status without a reason
		}
		bad := func(v float64) bool { return v < 0 || v > maxNumber }
		if bad(s.TTFT) || bad(s.Latency) || bad(float64(s.Input)) || bad(float64(s.Output)) || outside(s.Start) || slices.ContainsFunc(s.ITL, bad) {
			return nil, fmt.Errorf("request %d has a time or length that is impossible", i)
		}
	}
	return out, nil
}

// Reserved reports whether key is a key of a Result's JSON.
func Reserved(key string) bool {
	for _, v := range []any{Result{}, detail{}} {
		t := reflect.TypeOf(v)
		for i := range t.NumField() {
			if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name == key {
				return true
			}
		}
	}
	return strings.HasSuffix(key, "_ms") || key == "-"
}

// WithoutSamples returns a copy of the result without its requests: it has only the figures.
func (r *Result) WithoutSamples() *Result {
	c := *r
	c.samples = nil
	return &c
}
