// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	benchmark "github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/load"
	"github.com/kvasir-kv/kvasir/bench/workload"
	benchtool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/bench"
)

// flags are the defaults of the command.
func flags(url string) *benchtool.Flags {
	return &benchtool.Flags{
		BaseURL: url, Host: "127.0.0.1", Port: 8000, Backend: "openai", Timeout: time.Minute, Dataset: "random", Prompts: 6, Input: 20, Output: 3, Vocabulary: 100,
		TraceBlock: 512, TraceSecond: 0.001, SelfTimed: true, Rate: math.Inf(1), Burstiness: 1, Metrics: "ttft,tpot,itl", Percentiles: "99", Format: "vllm", NoProgress: true,
	}
}

// endpoint answers requests with two tokens each, up to request number bad. Later ones fail. With held, each
// later one sends to held and waits until the client leaves.
func endpoint(t *testing.T, bad int64, held chan<- struct{}) string {
	t.Helper()
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // then the server notices when the client leaves
		switch {
		case r.URL.Path == "/v1/models":
			fmt.Fprint(w, `{"data":[{"id":"org/m"}]}`)
		case r.URL.Path != "/v1/completions":
			http.NotFound(w, r)
		case n.Add(1) > bad:
			if held != nil {
				held <- struct{}{}
				<-r.Context().Done()
				return
			}
			http.Error(w, "broken", http.StatusInternalServerError)
		default:
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"length\"}]}\n\n"+
				"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n")
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func run(t *testing.T, c *benchtool.Flags) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	err = c.Run(t.Context(), &out, &errs)
	return out.String(), errs.String(), err
}

func saved(t *testing.T, path string) *benchmark.Result {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := benchmark.ReadJSON(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A run prints vLLM's table, saves the requested files under vLLM's file name, and counts and
// reports failures. The command fails only when no request succeeded.
func TestRun(t *testing.T) {
	dir := t.TempDir()
	c := flags(endpoint(t, 5, nil))
	c.Dir, c.Save, c.Detailed, c.Report, c.Label, c.Meta = filepath.Join(dir, "new", "dir"), true, true, filepath.Join(dir, "r.html"), "test", benchtool.Words{"tp=4"}
	c.Goodput, c.Rate, c.Concurrency = benchtool.Words{"ttft:100000"}, 1000, 1
	stdout, stderr, err := run(t, c)
	if err != nil || !strings.HasPrefix(stdout, "============ Serving Benchmark Result ============\nSuccessful requests:                     5         \n") ||
		!strings.Contains(stdout, "1 failed: HTTP 500: broken") || !strings.Contains(stdout, "Request goodput (req/s):") {
		t.Fatalf("%v\n%s%s", err, stdout, stderr)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "new", "dir", "test-1000.0qps-concurrency1-m-*.json"))
	if page, _ := os.ReadFile(c.Report); len(files) != 1 || !bytes.Contains(page, []byte("org/m")) {
		t.Fatalf("%v\n%s", files, stderr)
	}
	if r := saved(t, files[0]); r.Completed != 5 || r.Failed != 1 || len(r.Samples()) != 6 || r.Model != "org/m" || r.Rate != 1000 || *r.MaxConcurrency != 1 || r.TotalInput != 100 {
		t.Errorf("%+v", r)
	}
	if text, _ := os.ReadFile(files[0]); !bytes.Contains(text, []byte(`"tp":"4"`)) {
		t.Errorf("%s", text)
	}
	left, _ := filepath.Glob(filepath.Join(dir, "*", "*", ".kvasir*"))
	if more, _ := filepath.Glob(filepath.Join(dir, ".kvasir*")); len(left)+len(more) > 0 {
		t.Errorf("left behind: %v %v", left, more)
	}

	c = flags(endpoint(t, 0, nil))
	c.File = filepath.Join(dir, "none.json")
	if stdout, _, err = run(t, c); err == nil || err.Error() != "no request succeeded: HTTP 500: broken" || !strings.Contains(stdout, "Failed requests:                         6") {
		t.Errorf("%v\n%s", err, stdout)
	}
	if r := saved(t, c.File); r.Failed != 6 || r.TTFT.Mean != 0 {
		t.Errorf("%+v", r)
	}
}

// With the JSON on standard output, nothing else is there.
func TestJSONOnStandardOutput(t *testing.T) {
	for _, format := range []string{"vllm", "aiperf"} {
		c := flags(endpoint(t, 100, nil))
		c.File, c.Format, c.Dir = "-", format, ""
		stdout, stderr, err := run(t, c)
		if err != nil || !json.Valid([]byte(stdout)) || !strings.Contains(stderr, "Serving Benchmark Result") {
			t.Errorf("%s: %v\n%s%s", format, err, stdout, stderr)
		}
	}
}

// broken is a standard output whose reader has gone.
type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

// The result is saved before the table is printed, so a broken standard output does not lose it. A
// result that cannot be saved is still printed, and no line says that it was written.
func TestSavedBeforePrinted(t *testing.T) {
	dir := t.TempDir()
	c := flags(endpoint(t, 100, nil))
	c.File = filepath.Join(dir, "r.json")
	if err := c.Run(t.Context(), broken{}, io.Discard); err == nil || !strings.Contains(err.Error(), "broken pipe") {
		t.Error(err)
	}
	if r := saved(t, c.File); r.Completed != 6 {
		t.Errorf("%+v", r)
	}
	gone := filepath.Join(dir, "gone")
	held := make(chan struct{}, 1)
	c = flags(endpoint(t, 5, held))
	c.File, c.Concurrency = filepath.Join(gone, "r.json"), 1
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-held
		_ = os.RemoveAll(gone)
		cancel()
	}()
	var out, errs bytes.Buffer
	if err := c.Run(ctx, &out, &errs); err == nil || !strings.Contains(out.String(), "Successful requests:                     5 ") || strings.Contains(errs.String(), "wrote") {
		t.Errorf("%v\n%s%s", err, out.String(), errs.String())
	}
}

// An interrupted run keeps the requests that have ended, in the table and in the file, and says how far
// it came.
func TestInterruptedRunIsKept(t *testing.T) {
	held := make(chan struct{}, 2)
	c := flags(endpoint(t, 4, held))
	c.File, c.Detailed, c.Report, c.Concurrency = filepath.Join(t.TempDir(), "r.json"), true, filepath.Join(t.TempDir(), "r.html"), 2
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-held
		<-held
		cancel()
	}()
	var out, errs bytes.Buffer
	err := c.Run(ctx, &out, &errs)
	r := saved(t, c.File)
	if !r.Interrupted || r.Completed != 4 || r.Failed != 0 || r.Unfinished != 2 || len(r.Samples()) != 4 {
		t.Errorf("%+v", r)
	}
	if err == nil || err.Error() != "interrupted after 4 of 6 requests" || !strings.Contains(out.String(), "Interrupted; requests not finished:") {
		t.Errorf("%v\n%s", err, out.String())
	}
	if page, _ := os.ReadFile(c.Report); !bytes.Contains(page, []byte("interrupted: ")) {
		t.Error("the report does not say it")
	}
}

// Unusable options fail before any request is sent. An endpoint that is down is reported in one
// line.
func TestUnusableOptionsFailBeforeSending(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.jsonl")
	if err := os.WriteFile(bad, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	sent := endpoint(t, 100, nil)
	f := func(usage bool, want string, change func(c *benchtool.Flags)) {
		t.Helper()
		c := flags(sent)
		change(c)
		stdout, _, err := run(t, c)
		var u benchtool.UsageError
		if err == nil || errors.As(err, &u) != usage || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") || stdout != "" {
			t.Errorf("%v, want %q\n%s", err, want, stdout)
		}
	}
	f(true, "--num-prompts 0 is outside 1 to 16777216; --burstiness 0 is not above 0", func(c *benchtool.Flags) { c.Prompts, c.Burstiness = 0, 0 })
	f(true, "--request-rate NaN", func(c *benchtool.Flags) { c.Rate = math.NaN() })
	f(true, `--goodput "ttft:0": no request can keep it`, func(c *benchtool.Flags) { c.Goodput = benchtool.Words{"ttft:0"} })
	f(true, `no metric "x"`, func(c *benchtool.Flags) { c.Metrics = "ttft,x" })
	f(true, `"101" is not a number from 0 to 100`, func(c *benchtool.Flags) { c.Percentiles = "50,101" })
	f(true, "needs --dataset-path", func(c *benchtool.Flags) { c.Dataset = "sharegpt" })
	f(true, "has no effect with", func(c *benchtool.Flags) { c.Path = "x" })
	f(true, "no http URL", func(c *benchtool.Flags) { c.BaseURL = "localhost:8000" })
	f(true, "--ramp-up-strategy needs", func(c *benchtool.Flags) { c.RampUp = "linear" })
	f(true, "exclude each other", func(c *benchtool.Flags) { c.RampUp, c.RampStart, c.RampEnd, c.Rate = "linear", 1, 2, 3 })
	f(true, "--extra-body", func(c *benchtool.Flags) { c.ExtraBody = "[1]" })
	f(true, "--header", func(c *benchtool.Flags) { c.Header = benchtool.Words{"a\nb=c"} })
	f(true, "--metadata", func(c *benchtool.Flags) { c.Meta = benchtool.Words{"duration=3"} })
	f(true, "go together", func(c *benchtool.Flags) { c.PrefillURL = "http://x" })
	f(true, "--save-detailed needs", func(c *benchtool.Flags) { c.Detailed, c.Format = true, "aiperf" })
	f(true, "--compare takes two results, got 1", func(c *benchtool.Flags) { c.Compare = benchtool.Words{"a"} })
	f(false, "bad.jsonl: workload: bad trace: line 1: input_length is missing", func(c *benchtool.Flags) { c.Dataset, c.Path = "timed_trace", bad })
	f(false, "absent", func(c *benchtool.Flags) { c.Dataset, c.Path = "sharegpt", filepath.Join(dir, "absent") })
	f(false, "not a directory", func(c *benchtool.Flags) { c.File = filepath.Join(bad, "x", "r.json") })
	f(false, "is not a regular file", func(c *benchtool.Flags) { c.Report = dir })
	f(false, "no endpoint at http://127.0.0.1:1: dial: connect: connection refused", func(c *benchtool.Flags) { c.BaseURL = "http://127.0.0.1:1" })
	f(false, "bad.jsonl: key duration is missing", func(c *benchtool.Flags) { c.Compare = benchtool.Words{bad, bad} })
	f(false, "absent: no such file", func(c *benchtool.Flags) { c.Compare = benchtool.Words{filepath.Join(dir, "absent"), bad} })
}

// Saved results are compared, as a table or as JSON, and drawn together.
func TestCompare(t *testing.T) {
	dir := t.TempDir()
	url := endpoint(t, 1000, nil)
	var names benchtool.Words
	for i := range 3 {
		c := flags(url)
		c.Prompts, c.Detailed, c.File = 12, true, filepath.Join(dir, fmt.Sprintf("%d.json", i))
		if _, _, err := run(t, c); err != nil {
			t.Fatal(err)
		}
		names = append(names, c.File)
	}
	c := flags(url)
	c.Compare = names[:2]
	if stdout, _, err := run(t, c); err != nil || !strings.Contains(stdout, "Mean TTFT (ms)") || !strings.Contains(stdout, "95 % interval") {
		t.Errorf("%v\n%s", err, stdout)
	}
	c.File = "-"
	var ratios []benchmark.Ratio
	if stdout, _, err := run(t, c); err != nil || json.Unmarshal([]byte(stdout), &ratios) != nil || len(ratios) < 10 || ratios[3].High == 0 {
		t.Errorf("%v\n%s", err, stdout)
	}
	c = flags(url)
	c.Compare, c.Report = names, filepath.Join(dir, "r.html")
	if stdout, _, err := run(t, c); err != nil || stdout != "" {
		t.Errorf("%v\n%s", err, stdout)
	}
	if page, err := os.ReadFile(c.Report); err != nil || !bytes.Contains(page, []byte("3 runs")) {
		t.Error(err)
	}
	c.Report = filepath.Join(dir, "r.SVG")
	if _, _, err := run(t, c); err != nil {
		t.Fatal(err)
	}
	if picture, err := os.ReadFile(c.Report); err != nil || !bytes.HasPrefix(picture, []byte("<svg ")) || !bytes.Contains(picture, []byte("Time to first token")) {
		t.Errorf("%.80s, %v", picture, err)
	}
}

// Every workload can be sent, timed or at a rate.
func TestWorkloads(t *testing.T) {
	dir := t.TempDir()
	trace, gpt := filepath.Join(dir, "t.jsonl"), filepath.Join(dir, "s.json")
	for file, text := range map[string]string{
		trace: `{"timestamp": 9, "input_length": 700, "output_length": 2, "hash_ids": [7, 8]}` + "\n" + `{"timestamp": 3, "input_length": 4, "hash_ids": [7]}` + "\n",
		gpt:   `[{"conversations":[{"from":"human","value":"How do I bake bread at home?"},{"from":"gpt","value":"Take flour, water, salt."}]}]`,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := func(dataset, path string, n int, rate float64) {
		t.Helper()
		c := flags(endpoint(t, 1000, nil))
		c.Dataset, c.Path, c.Rate, c.SelfTimed, c.OutputLen, c.WarmUps = dataset, path, rate, rate > 1e9, 2, 1
		stdout, stderr, err := run(t, c)
		if want := fmt.Sprintf("Successful requests:                     %d ", n); err != nil || !strings.Contains(stdout, want) {
			t.Errorf("%s: %v\n%s%s", dataset, err, stdout, stderr)
		}
	}
	f("random", "", 6, 500)
	f("multi-turn", "", 6, math.Inf(1))
	f("agentic", "", 6, 500)
	f("timed_trace", trace, 2, math.Inf(1))
	f("timed_trace", trace, 2, 500)
	f("sharegpt", gpt, 1, math.Inf(1))
}

// A trace is sent like requests in memory: in the order of the arrivals, or with a rate in the order of the file, from a file or a pipe,
// with a warm-up of the first request. When the file changes meanwhile, the run ends with an error and the result of the requests that were
// sent.
func TestTraceIsSentWhileItIsRead(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	dir := t.TempDir()
	file, pipe, cut := filepath.Join(dir, "t.jsonl"), filepath.Join(dir, "pipe"), filepath.Join(dir, "cut.jsonl")
	var text strings.Builder
	for i := range 40 {
		fmt.Fprintf(&text, `{"timestamp": %d, "input_length": 30, "output_length": %d, "hash_ids": [%d, 7]}`+"\n", i*13%40, 1+i, i)
	}
	pad := strings.Repeat(" ", 40<<10) // then the file is read in several parts
	for name, text := range map[string]string{file: text.String(), cut: strings.ReplaceAll(text.String(), "\n", pad+"\n")} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip("no named pipe can be made here:", err)
	}
	var bodies []string // of requests one after another
	sent := func(int) {}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
			return
		}
		if r.URL.Path != "/v1/completions" {
			http.NotFound(w, r)
			return
		}
		bodies = append(bodies, string(body))
		sent(len(bodies))
		fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n")
	}))
	defer s.Close()
	play := func(path string, timed bool, outputLen, prompts int) (string, error) {
		bodies = nil
		c := flags(s.URL)
		c.Dataset, c.Path, c.SelfTimed, c.OutputLen, c.Prompts, c.Concurrency, c.WarmUps, c.TraceBlock, c.TraceFormat = "timed_trace", path, timed, outputLen, prompts, 1, 1, 16, workload.FormatMooncake
		stdout, _, err := run(t, c)
		return stdout, err
	}
	for _, timed := range []bool{true, false} {
		list, err := workload.ReadTrace(strings.NewReader(text.String()), workload.TraceOptions{BlockTokens: 16, Max: 33})
		if err != nil {
			t.Fatal(err)
		}
		if timed {
			slices.SortStableFunc(list, func(a, b workload.Request) int { return cmp.Compare(a.Arrival, b.Arrival) })
		}
		for i := range list {
			list[i].Output, list[i].Arrival = 5, 0
		}
		g, err := load.New(load.Options{BaseURL: s.URL, Model: "m", IgnoreEOS: true, MaxConcurrency: 1, Vocabulary: 100})
		if err != nil {
			t.Fatal(err)
		}
		bodies = nil
		if err := g.WarmUp(t.Context(), list, 1); err != nil {
			t.Fatal(err)
		}
		g.Run(t.Context(), list)
		g.Close()
		want := bodies
		written := make(chan error, 1)
		go func() { written <- os.WriteFile(pipe, []byte(text.String()), 0o600) }()
		for _, path := range []string{file, pipe} {
			if out, err := play(path, timed, 5, 33); err != nil || !slices.Equal(bodies, want) || len(bodies) != 34 {
				t.Errorf("%s: %v\n%s\n%q, want %q", path, err, out, bodies, want)
			}
		}
		if err := <-written; err != nil {
			t.Error(err)
		}
	}
	sent = func(n int) {
		if n == 5 {
			_ = os.WriteFile(cut, []byte(text.String()[:100]), 0o600)
		}
	}
	out, err := play(cut, false, 0, 40)
	if err == nil || !regexp.MustCompile(`^ended after 2\d of 40 requests: .*cut\.jsonl: workload: bad trace: `).MatchString(err.Error()) || !strings.Contains(out, "Successful requests:                     2") {
		t.Errorf("%v\n%s", err, out)
	}
}
