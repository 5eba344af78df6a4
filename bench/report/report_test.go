// SPDX-License-Identifier: Apache-2.0

package report_test

import (
	"bytes"
	"encoding/xml"
	"io"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/report"
)

func result(n int, seed uint64) *bench.Result {
	rnd := rand.New(rand.NewPCG(seed, 1))
	samples := make([]bench.Sample, n)
	for i := range samples {
		s := &samples[i]
		*s = bench.Sample{Start: float64(i) / 5, Queue: rnd.Float64() / 10, TTFT: 0.1 + rnd.ExpFloat64()/10, Output: 12, Input: 900, Cached: 300}
		s.Latency = s.TTFT
		for range 11 {
			gap := 0.02 + rnd.ExpFloat64()/200
			s.ITL, s.Latency = append(s.ITL, gap), s.Latency+gap
		}
		if i%17 == 5 {
			*s = bench.Sample{Start: float64(i) / 5, Error: `<script>alert("x")</script>`}
		}
	}
	r := bench.Measure(samples, float64(n)/5+1, bench.Options{MaxConcurrency: 4, SLOs: []bench.SLO{{Metric: "ttft", Millis: 300}}, GPUs: bench.GPUs{Prefill: 1, Decode: 2}})
	r.Model, r.Date = `a<b>&"c'`, "20260102-030405"
	r.Stages = []bench.Stage{{Name: "queue of P", Millis: 12}, {Name: "prefill", Millis: 80}, {Name: "transfer", Millis: 0}}
	for i := range 12 {
		r.Engines = append(r.Engines[:0], bench.Engine{Role: "P", Queries: 900, Hits: 300, Loaded: 100, Points: append(at(r), bench.Point{At: float64(i), Running: i, Waiting: 12 - i, Usage: 0.5})})
	}
	return r
}

func at(r *bench.Result) []bench.Point {
	if len(r.Engines) == 0 {
		return nil
	}
	return r.Engines[0].Points
}

// write writes a page and checks what every page must be: well-formed, without a script and
// without an address to load from.
func write(t *testing.T, runs ...report.Run) string {
	t.Helper()
	var b bytes.Buffer
	if err := report.Write(&b, runs); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	d := xml.NewDecoder(strings.NewReader(page))
	d.Strict, d.AutoClose, d.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, page)
		}
		if e, ok := token.(xml.StartElement); ok {
			for _, a := range e.Attr {
				if name := a.Name.Local; name == "src" || name == "action" || name == "href" && a.Value != "data:," || strings.HasPrefix(name, "on") {
					t.Errorf("<%s %s=%q>", e.Name.Local, name, a.Value)
				}
			}
			if e.Name.Local == "script" {
				t.Error("a script")
			}
		}
	}
	for _, bad := range []string{"NaN", "Inf", "ZgotmplZ", "http://", "https://", "url(", "@import", "%!"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	return page
}

// The page of one run has all parts. The error of a failed request is shown as text, never as HTML.
func TestOneRun(t *testing.T) {
	page := write(t, report.Run{Name: "one", Result: result(60, 1)})
	for _, want := range []string{
		"Benchmark of a&lt;b&gt;&amp;&#34;c&#39;", "Time to first token (TTFT)", "Between tokens (ITL, all gaps)", "Timeline", "waits in the client", "to the last token (D)",
		"failed: &lt;script&gt;", "P: requests running and waiting", "From prompt to first token", "queue of P", "prefix cache of P", "Throughput against interactivity",
		"output tok/s and GPU", "P99 TTFT (ms)", "TTFT ≤ 300 ms",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	if n := strings.Count(page, `class="prefill"`); n != 56 {
		t.Errorf("%d requests in the timeline", n)
	}
}

// Several runs share their plots, and two runs have ratios. Runs that were saved without
// single requests, and runs without a successful request, still have their figures.
func TestSeveralRuns(t *testing.T) {
	var text bytes.Buffer
	if err := result(40, 3).WriteJSON(&text, false); err != nil {
		t.Fatal(err)
	}
	small, err := bench.ReadJSON(&text)
	if err != nil {
		t.Fatal(err)
	}
	none := bench.Measure([]bench.Sample{{Error: "refused"}, {Error: "refused"}}, 0, bench.Options{})
	page := write(t, report.Run{Name: "a", Result: result(60, 1)}, report.Run{Name: "b", Result: result(50, 2)})
	if !strings.Contains(page, "95 % interval") || !strings.Contains(page, "no difference shown") || !strings.Contains(page, `class="joined"`) || strings.Count(page, "Timeline of") != 2 {
		t.Error(page)
	}
	write(t, report.Run{Name: "a", Result: result(60, 1)}, report.Run{Name: "small", Result: small}, report.Run{Name: "none", Result: none})
	if page := write(t, report.Run{Name: "small", Result: small}); !strings.Contains(page, "--save-detailed") {
		t.Error("nothing says why there are no distributions")
	}
	write(t, report.Run{Name: "none", Result: none})
	write(t, report.Run{Name: "empty", Result: bench.Measure(nil, 0, bench.Options{})})
	if err := report.Write(io.Discard, nil); err == nil {
		t.Error("a page of nothing")
	}
}

// A long run makes a page of bounded size.
func TestLongRun(t *testing.T) {
	if page := write(t, report.Run{Name: "long", Result: result(5000, 1)}); len(page) > 400<<10 || !strings.Contains(page, "Every 17th request is shown") {
		t.Errorf("%d bytes", len(page))
	}
}

// A result file of another program may have any number.
func TestStrangeNumbers(t *testing.T) {
	strange := `{"duration":1e14,"completed":2,"failed":-0,"total_input_tokens":3,"total_output_tokens":4,"request_throughput":1e14,"output_throughput":1e14,
		"mean_ttft_ms":1e14,"median_ttft_ms":0,"p99_ttft_ms":1e14,"mean_tpot_ms":1e-308,"median_tpot_ms":1,"latencies":[1e14,1],"queue_times":[-1e14,1e14],"ttfts":[1e14,2],
		"itls":[[1e14,1e14,1e14,1e14,1e14,1e14],[1,1e-308]],"input_lens":[1,900000000000000],"output_lens":[2,900000000000000],"start_times":[-1e14,1e14],
		"generated_texts":["",""],"errors":["",""],"engines":[{"role":"P","prefix_queries":1,"prefix_hits":-5,"points":[{"t":-1e14},{"t":1e14,"running":-9,"kv_usage":1e14}]}],
		"handover":[{"name":"x","mean_ms":1e14},{"name":"y","mean_ms":-1e14}]}`
	r, err := bench.ReadJSON(strings.NewReader(strange))
	if err != nil {
		t.Fatal(err)
	}
	page := write(t, report.Run{Name: "strange", Result: r}, report.Run{Name: "a", Result: result(10, 1)})
	for _, d := range regexp.MustCompile(` d="([^"]*)"`).FindAllStringSubmatch(page, -1) {
		if regexp.MustCompile(`\d{7}`).MatchString(d[1]) {
			t.Errorf("drawn outside: %.80s", d[1])
		}
	}
}
