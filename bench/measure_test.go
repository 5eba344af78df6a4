// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
)

// recorded is a run of vLLM's own benchmark() over requests whose outcome was given;
// interop/bench/vectors.py makes them.
type recorded struct {
	Samples []struct {
		Start, TTFT, Latency float64
		ITL                  []float64
		Input, Output        int
		Error                string
	}
	Rate           bench.Rate
	MaxConcurrency int `json:"max_concurrency"`
	Metrics        []string
	Percentiles    []float64
	SLOs           []string
	Result         map[string]any
	Table          string
}

func load(t *testing.T, path string) *recorded {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var c recorded
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(path, err)
	}
	return &c
}

// measure measures what vLLM measured. The client's queue is vLLM's own: how long its
// tasks waited.
func (c *recorded) measure(t *testing.T) *bench.Result {
	t.Helper()
	queues, _ := c.Result["queue_times"].([]any)
	samples := make([]bench.Sample, len(c.Samples))
	for i, s := range c.Samples {
		samples[i] = bench.Sample{Start: s.Start, TTFT: s.TTFT, Latency: s.Latency, ITL: s.ITL, Input: s.Input, Output: s.Output, Error: s.Error, Cached: -1}
		samples[i].Queue = queues[i].(float64)
	}
	slos, err := bench.ParseSLOs(c.SLOs)
	if err != nil {
		t.Fatal(err)
	}
	return bench.Measure(samples, c.Result["duration"].(float64), bench.Options{
		Percentiles: c.Percentiles, SLOs: slos, MaxConcurrency: c.MaxConcurrency, Rate: float64(c.Rate),
	})
}

// Every figure, every key and every printed line is vLLM's.
func TestFiguresAndTableMatchVLLM(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.json")
	if len(files) < 5 {
		t.Fatalf("%d recorded runs", len(files))
	}
	for _, path := range files {
		c := load(t, path)
		r := c.measure(t)
		var text, table bytes.Buffer
		if err := r.WriteJSON(&text, true); err != nil {
			t.Fatal(path, err)
		}
		var got map[string]any
		if err := json.Unmarshal(text.Bytes(), &got); err != nil {
			t.Fatal(path, err)
		}
		for key, want := range c.Result {
			if have, ok := got[key]; !ok || !alike(have, want) {
				t.Errorf("%s: %s is %v, vLLM has %v", path, key, have, want)
			}
		}
		if err := r.Table(&table, c.Metrics); err != nil {
			t.Fatal(err)
		}
		if table.String() != c.Table {
			t.Errorf("%s:\n%s\nvLLM prints\n%s", path, table.String(), c.Table)
		}
	}
}

// alike compares JSON values; sums in another order differ in the last bits.
func alike(a, b any) bool {
	switch b := b.(type) {
	case float64:
		v, ok := a.(float64)
		return ok && math.Abs(v-b) <= 1e-9*max(math.Abs(v), math.Abs(b))
	case []any:
		v, ok := a.([]any)
		if !ok || len(v) != len(b) {
			return false
		}
		for i := range b {
			if !alike(v[i], b[i]) {
				return false
			}
		}
		return true
	}
	return a == b
}

// A written result is read back whole: figures, requests, and the parts for which vLLM has no keys.
func TestResultsAreReadBack(t *testing.T) {
	files, _ := filepath.Glob("testdata/*.json")
	for _, path := range files {
		r := load(t, path).measure(t)
		r.Model, r.Date, r.Interrupted, r.Unfinished = "m", "20260102-030405", true, 3
		r.Stages = []bench.Stage{{Name: "queue of P", Millis: 3}}
		var text bytes.Buffer
		if err := r.WriteJSON(&text, true); err != nil {
			t.Fatal(err)
		}
		back, err := bench.ReadJSON(&text)
		if err != nil {
			t.Fatal(path, err)
		}
		var a, b, one, two bytes.Buffer
		if err := r.Table(&a, nil); err != nil {
			t.Fatal(err)
		}
		if err := back.Table(&b, nil); err != nil {
			t.Fatal(err)
		}
		if a.String() != b.String() || len(back.Samples()) != r.NumPrompts || !back.Interrupted || back.Unfinished != 3 || len(back.Stages) != 1 {
			t.Errorf("%s: %+v\n%s", path, back, b.String())
		}
		_ = r.WriteJSON(&one, true)
		_ = back.WriteJSON(&two, true)
		if one.String() != two.String() {
			t.Errorf("%s: written again it differs:\n%s\n%s", path, one.String(), two.String())
		}
	}
}

// A file that is no result is refused with the line or the key, and the reason.
func TestReadJSONNamesWhatIsWrong(t *testing.T) {
	const good = `{"duration":1,"completed":2,"failed":0,"total_input_tokens":3,"total_output_tokens":4,"mean_ttft_ms":1,"median_ttft_ms":1,"p99_ttft_ms":2`
	f := func(text, want string) {
		t.Helper()
		_, err := bench.ReadJSON(strings.NewReader(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.80s: %v, want %q", text, err, want)
		}
	}
	if r, err := bench.ReadJSON(strings.NewReader(good + "}")); err != nil || r.TTFT.Median != 1 || r.TPOT != nil || r.Samples() != nil {
		t.Fatalf("%+v, %v", r, err)
	}
	f("", "line 1: empty")
	f("\n\n", "line 1: empty")
	f("{\n\n\"duration\": NaN}", "line 3")
	f("{\n\"duration\": Infinity}", "line 2")
	f("{\"duration\":1,\n", "line 2: the text ends")
	f("[1]", "the text is a list")
	f("{}", "key duration is missing")
	f(`{"duration":1}`, "key completed is missing")
	f("{\n"+`"duration":"x","completed":1,"total_input_tokens":1,"total_output_tokens":1}`, "line 2, byte 16: key duration is a string, a number is expected")
	f(strings.Replace(good, `"duration":1`, `"duration":1e999`, 1)+"}", "key duration is 1e999, a smaller number is expected")
	f(strings.Replace(good, `"duration":1`, `"duration":-1`, 1)+"}", "key duration is -1")
	f(strings.Replace(good, `"p99_ttft_ms":2`, `"p99_ttft_ms":"x"`, 1)+"}", `key p99_ttft_ms is "x"`)
	f(good+"}\n{}", "line 2: a second result")
	detail := `,"latencies":[1,2],"queue_times":[0,0],"ttfts":[1,2],"itls":[[],[1]],"input_lens":[1,2],"output_lens":[1,2],"start_times":[0,0],"generated_texts":["",""],"errors":["",""]}`
	if r, err := bench.ReadJSON(strings.NewReader(good + detail)); err != nil || len(r.Samples()) != 2 {
		t.Fatal(err)
	}
	f(good+strings.Replace(detail, `"itls":[[],[1]]`, `"itls":[[]]`, 1), "key itls has 1 requests, ttfts has 2")
	f(good+strings.Replace(detail, `"itls":[[],[1]]`, `"itls":[[],[-1]]`, 1), "request 1 has a time or length that is impossible")
	f(good+strings.Replace(detail, `"latencies":[1,2]`, `"latencies":[1,1e308]`, 1), "key latencies: request 1 took 1e+308 s")
	f(good+strings.Replace(detail, `"input_lens":[1,2]`, `"input_lens":[1,9223372036854775807]`, 1), "request 1 has a time or length that is impossible")
	f(good+`,"intvty":1e300}`, "of a ramp is 1e+300")
	f(good+strings.Replace(detail, `"errors":["",""]`, `"errors":[1,2]`, 1), "key errors is a number")
	f(good+strings.Replace(detail, `"start_times":[0,0]`, `"start_times":[0]`, 1), "key start_times has 1")
}

// Meaningless limits, and limits that no request can keep, are refused.
func TestParseSLOs(t *testing.T) {
	got, err := bench.ParseSLOs([]string{"ttft:500", "tpot:50.5"})
	if err != nil || len(got) != 2 || got[1] != (bench.SLO{Metric: "tpot", Millis: 50.5}) {
		t.Fatal(got, err)
	}
	for _, bad := range []string{"ttft", "ttft:", "ttft:x", "itl:5", "ttft:0", "ttft:-1", "ttft:NaN", "ttft:Inf", ":5", "ttft:1:2"} {
		if got, err := bench.ParseSLOs([]string{bad}); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
	if _, err := bench.ParseSLOs([]string{"ttft:5", "ttft:6"}); err == nil {
		t.Error("two limits for one metric")
	}
}

// When nothing was sent or no time has passed, the figures are 0 and the JSON has no NaN.
func TestNothingMeasured(t *testing.T) {
	for _, seconds := range []float64{0, -1, math.NaN()} {
		r := bench.Measure(nil, seconds, bench.Options{GPUs: bench.GPUs{Prefill: 1, Decode: 1}, SLOs: []bench.SLO{{Metric: "ttft", Millis: 1}}})
		if math.IsNaN(r.Duration) {
			r.Duration = 0
		}
		var text bytes.Buffer
		if err := r.WriteJSON(&text, true); err != nil {
			t.Fatal(err)
		}
		if back, err := bench.ReadJSON(&text); seconds == 0 && (err != nil || back.Completed != 0) {
			t.Fatal(err)
		}
		for _, err := range []error{r.Table(&text, nil), r.More(&text), r.WriteAIPerf(&text)} {
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// The peak counts tokens, not events: with several tokens an event it is not below the mean throughput. Events without a token of
// their own, such as the role of a chat, count as one, as in vLLM.
func TestPeakCountsTokens(t *testing.T) {
	f := func(output, events int, wantPeak float64) {
		t.Helper()
		var samples []bench.Sample
		for i := range 10 {
			s := bench.Sample{Start: float64(i) / 100, TTFT: 0.2, Latency: 0.2, Input: 5, Output: output}
			for range events - 1 {
				s.ITL, s.Latency = append(s.ITL, 0.01), s.Latency+0.01
			}
			samples = append(samples, s)
		}
		r := bench.Measure(samples, 1, bench.Options{})
		if r.PeakOutput != wantPeak || r.OutputThroughput > r.PeakOutput {
			t.Errorf("%d tokens in %d events: the peak is %v, the mean %v, want %v", output, events, r.PeakOutput, r.OutputThroughput, wantPeak)
		}
	}
	f(40, 40, 400)
	f(160, 40, 1600) // four tokens an event
	f(40, 1, 400)    // no stream
	f(39, 40, 400)   // with a role
	f(1, 1, 10)
}
