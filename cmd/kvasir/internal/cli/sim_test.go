// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// The table as JSON: both rows, every figure, nothing else on standard output.
func TestSimTableJSON(t *testing.T) {
	code, out, errs := run(t, "sim", "table", "--seeds", "2", "--json", "-")
	var got struct {
		Rows []struct {
			Row, Figure           string
			Original, Ours, Error float64
		}
		Seeds  int
		Spread []map[string]any
	}
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil {
		t.Fatalf("%d, %v: %s", code, err, errs)
	}
	seen := map[string]float64{}
	for _, r := range got.Rows {
		seen[r.Row+" "+r.Figure] = r.Original
	}
	if len(seen) != 30 || seen["mooncake mean_ttft_ms"] != 2692.51 || seen["p2pnccl p99_itl_ms"] != 46.06 || got.Seeds != 2 || len(got.Spread) == 0 {
		t.Errorf("%v, %d seeds, %d spreads", seen, got.Seeds, len(got.Spread))
	}
}

func TestSimReplay(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	const lines = `{"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2]}
{"timestamp": 900, "input_length": 1500, "output_length": 3, "hash_ids": [1, 2, 3]}
`
	if err := os.WriteFile(trace, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := run(t, "sim", "replay", "--trace", trace, "--scheduled", "--prefill", "1", "--decode", "1", "--json", "-")
	var got struct {
		Requests, Blocks, Tokens int
		Hits                     int `json:"hit_blocks"`
		Seconds                  float64
		Scheduled                struct {
			Ratio   float64
			Figures struct{ Completed int }
		}
	}
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil {
		t.Fatalf("%d, %v: %s", code, err, errs)
	}
	if got.Requests != 2 || got.Blocks != 5 || got.Hits != 2 || got.Tokens != 2500 || got.Seconds <= 0 || got.Scheduled.Figures.Completed != 2 || got.Scheduled.Ratio <= 0 {
		t.Errorf("%+v", got)
	}

	code, out, errs = run(t, "sim", "replay", "--trace", trace, "--scheduled", "--prefill", "1", "--decode", "1", "--profile", "a10-qwen2.5-7b", "--set", "activation_gib=5.97")
	if code != 0 || !strings.Contains(out, "the first that failed") || !strings.Contains(out, "the KV memory holds") {
		t.Errorf("a prompt beyond the KV memory: %d, %s%s", code, out, errs)
	}

	if err := os.WriteFile(trace, []byte(lines+`{"timestamp": 5, "input_length": 10, "hash_ids": [1, 2, 3]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	code, _, errs = run(t, "sim", "replay", "--trace", trace)
	if code != 2 || !strings.Contains(errs, "line 3") || !strings.Contains(errs, "hash_ids") || strings.Count(errs, "\n") != 1 {
		t.Errorf("%d: %q", code, errs)
	}
}

// A trace scheduled with bytes, at a fraction of its size: all of them are right, and a flipped bit is
// an error that says so.
func TestSimReplayBytes(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	var text strings.Builder
	for i := range 60 { // six conversations of ten turns
		turn, chat := i/6, i%6
		fmt.Fprintf(&text, `{"timestamp": %d, "input_length": %d, "output_length": 40, "hash_ids": [0`, i*2000, 512*(turn+2)-100)
		for b := range turn + 1 {
			fmt.Fprintf(&text, ", %d", 1000*(chat+1)+b)
		}
		fmt.Fprintln(&text, "]}")
	}
	if err := os.WriteFile(trace, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"sim", "replay", "--trace", trace, "--bytes", "--scale", "32", "--prefill", "2", "--decode", "2", "--profile", "a10-qwen2.5-7b", "--set", "activation_gib=5.4", "--capacity-blocks", "1000"}
	code, out, errs := run(t, append(args, "--json", "-")...)
	var got struct {
		Hits      int `json:"hit_blocks"`
		Tokens    int
		Scheduled struct {
			Scale   int
			Figures struct{ Completed int }
			Bytes   struct {
				Moved   int64 `json:"moved_bytes"`
				Loaded  int64 `json:"loaded_bytes"`
				Checked int64 `json:"checked_bytes"`
				Memory  int64 `json:"memory_bytes"`
				Wrong   int   `json:"wrong_requests"`
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil {
		t.Fatalf("%d, %v: %s", code, err, errs)
	}
	b := got.Scheduled.Bytes
	if got.Hits == 0 || got.Tokens > 60*12*16 || got.Scheduled.Scale != 32 || got.Scheduled.Figures.Completed != 60 || b.Moved == 0 || b.Loaded == 0 || b.Checked < b.Moved/2 || b.Wrong != 0 || b.Memory > 2<<30 {
		t.Errorf("%+v", got)
	}
	code, out, errs = run(t, append(args, "--corrupt-block", "17")...)
	if code != 1 || !strings.Contains(out, "wrong KV: kvmem: wrong bytes") || !strings.Contains(errs, "requests that were given wrong KV bytes: ") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	code, out, errs = run(t, args...)
	if code != 0 || !strings.Contains(out, "; requests with wrong bytes: 0\n") || !strings.Contains(out, "at 1/32") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
}

// Policies are compared as JSON, with the optimum among the rows and the server's default named.
func TestSimEvict(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	const lines = `{"timestamp": 0, "input_length": 1300, "output_length": 3, "hash_ids": [1, 2, 3]}
{"timestamp": 900, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 4]}
`
	if err := os.WriteFile(trace, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	svg, table := filepath.Join(dir, "r.svg"), filepath.Join(dir, "r.csv")
	code, out, errs := run(t, "sim", "evict", "--trace", trace, "--capacity-blocks", "1,10", "--json", "-", "--svg", svg, "--csv", table)
	var got struct {
		Default string
		Rows    []struct {
			Policy   string
			Capacity int     `json:"capacity_blocks"`
			Block    float64 `json:"block_hit"`
			Token    float64 `json:"token_hit"`
		}
	}
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil {
		t.Fatalf("%d, %v: %s", code, err, errs)
	}
	optimum := 0
	for _, r := range got.Rows {
		want := 0.5
		if r.Capacity == 1 {
			want = 0.25
		}
		if r.Block != want || r.Token != 4*512*want/2400 {
			t.Errorf("%+v, want %v of the blocks", r, want)
		}
		if r.Policy == "optimum" {
			optimum++
		}
	}
	if got.Default != "leaf-hazard" || optimum != 2 || len(got.Rows) != 12 {
		t.Errorf("%+v", got)
	}
	code, out, errs = run(t, "sim", "evict", "--trace", "agentic", "--requests", "200", "--policies", "lru", "--capacity-blocks", "99")
	if code != 0 || !strings.Contains(out, "200 requests") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	for _, name := range []string{svg, table} {
		if b, err := os.ReadFile(name); err != nil || len(b) < 100 {
			t.Error(name, len(b), err)
		}
	}
}

// An impossible value is refused in one line that names it.
func TestSimRefuses(t *testing.T) {
	testkit.LongAlone(t)
	f := func(want string, args ...string) {
		t.Helper()
		code, _, errs := run(t, append([]string{"sim"}, args...)...)
		if code == 0 || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: %d, %q, want %q", args, code, errs, want)
		}
	}
	trace := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(trace, []byte(`{"input_length": 600, "hash_ids": [1, 2]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	f("speed", "table", "--set", "speed=3")
	f("prefill_efficiency", "table", "--set", "prefill_efficiency=0")
	f("hop_ms", "table", "--set", "hop_ms=NaN")
	f("no KV", "profile", "a10-qwen2.5-7b", "--set", "activation_gib=20")
	f("a10-qwen2.5-7b", "profile", "a100")
	f("--seeds", "table", "--seeds", "-1")
	f("token budget", "table", "--token-budget", "99999999")
	f("no such file", "replay", "--trace", "/nonexistent")
	f("no such file", "table", "--lengths", "/nonexistent")
	f("--capacity-blocks", "replay", "--trace", os.DevNull, "--capacity-blocks", "-1")
	f("--pd", "sweep", "--pd", "2x1")
	f("0 decode", "sweep", "--pd", "1:0", "--requests", "1")
	f("--goodput", "sweep", "--goodput", "ttft:0")
	f("network", "sweep", "--link-gbps", "0")
	f("a10-qwen2.5-7b", "sweep", "--profile", "a100")
	f("T6", "check", "T9")
	f("capacity of 0", "evict", "--trace", os.DevNull, "--capacity-blocks", "1,0")
	f("mru", "evict", "--trace", trace, "--policies", "lru,mru")
	f("no requests", "evict", "--trace", os.DevNull)
	f("no requests", "replay", "--trace", os.DevNull)
	f("--scale", "replay", "--trace", trace, "--scale", "3")
	f("--scale", "replay", "--trace", trace, "--scale", "0")
	f("2 GiB at most: take a larger --scale", "replay", "--trace", trace, "--bytes")
	missing := filepath.Join(t.TempDir(), "none", "file")
	f("cannot be written", "replay", "--trace", trace, "--json", missing)
	f("cannot be written", "sweep", "--csv", missing)
	f("cannot be written", "table", "--report", missing)
	f("cannot be written", "check", "--json", missing)
	f("no such file", "accuracy", "--write", missing)
	f("cannot be written", "evict", "--trace", trace, "--svg", missing)
	f("is a directory", "sweep", "--plot", t.TempDir())
}

// A sweep writes its points as JSON, CSV and a plot.
func TestSimSweep(t *testing.T) {
	dir := t.TempDir()
	table, plot := filepath.Join(dir, "points.csv"), filepath.Join(dir, "plot.svg")
	code, out, errs := run(t, "sim", "sweep", "--pd", "1:1,0:2", "--rate", "1,2", "--requests", "20", "--csv", table, "--plot", plot, "--json", "-")
	var got []struct {
		Engines string
		Goodput float64 `json:"request_goodput"`
	}
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || len(got) != 4 || got[3].Engines != "2 regular" || got[0].Goodput <= 0 {
		t.Fatalf("%d, %v, %+v: %s", code, err, got, errs)
	}
	for path, lines := range map[string]int{table: 5, plot: 10} {
		if text, err := os.ReadFile(path); err != nil || strings.Count(string(text), "\n") < lines {
			t.Errorf("%s: %v, %d bytes", path, err, len(text))
		}
	}
}

// The picture of a trace has its hits, and with --scheduled the times of tokens. Of a trace without times it has one point.
func TestSimReplayPlot(t *testing.T) {
	picture := filepath.Join(t.TempDir(), "hits.svg")
	for args, titles := range map[string][]string{
		"":                                   {"blocks hit, %"},
		"--scheduled --prefill 1 --decode 1": {"blocks hit, %", "time to the first token, s", "time per token, ms"},
	} {
		line := append([]string{"sim", "replay", "--trace", "agentic", "--requests", "40", "--block-tokens", "256", "--plot", picture}, strings.Fields(args)...)
		if code, _, errs := run(t, line...); code != 0 {
			t.Fatal(errs)
		}
		text, err := os.ReadFile(picture)
		if err != nil || strings.Count(string(text), `font-weight="bold"`) != len(titles) || !strings.Contains(string(text), "so far") {
			t.Errorf("%s: %v, %.200s", args, err, text)
		}
		for _, title := range titles {
			if !strings.Contains(string(text), title) {
				t.Errorf("%s: no %s", args, title)
			}
		}
	}
	still := filepath.Join(t.TempDir(), "still.jsonl")
	if err := os.WriteFile(still, []byte(`{"input_length":512,"hash_ids":[1]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errs := run(t, "sim", "replay", "--trace", still, "--plot", "-"); code != 0 || !strings.Contains(out, "<svg") || strings.Contains(out, "NaN") {
		t.Errorf("%d: %s%s", code, out, errs)
	}
}

// A report of the table is one page without references to other servers.
func TestSimTableReport(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.html")
	args := []string{"sim", "table", "--report", path}
	if testkit.Race { // a short list
		lengths := filepath.Join(t.TempDir(), "lengths.csv")
		if err := os.WriteFile(lengths, []byte("prompt,limit,output\n"+strings.Repeat("100,50,50\n", 20)), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--lengths", lengths)
	}
	if code, _, errs := run(t, args...); code != 0 {
		t.Fatal(errs)
	}
	page, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(page), "p2pnccl") || strings.Contains(string(page), "src=\"http") {
		t.Errorf("%v, %d bytes", err, len(page))
	}
}

// A profile that is fitted to a result is one that sim and engine take.
func TestCalibrateFromResult(t *testing.T) {
	testkit.LongAlone(t)
	dir := t.TempDir()
	result, profile := filepath.Join(dir, "result.json"), filepath.Join(dir, "profile.json")
	const text = `{"date":"20260101-000000","endpoint_type":"openai","backend":"openai","label":null,"model_id":"m","tokenizer_id":"m","num_prompts":50,
		"request_rate":1.0,"burstiness":1.0,"max_concurrency":null,"duration":60.0,"completed":50,"failed":0,"total_input_tokens":50000,"total_output_tokens":5000,
		"request_throughput":0.8,"output_throughput":80.0,"total_token_throughput":900.0,
		"mean_ttft_ms":400.0,"median_ttft_ms":390.0,"std_ttft_ms":10.0,"p99_ttft_ms":600.0,"mean_tpot_ms":40.0,"median_tpot_ms":40.0,"std_tpot_ms":1.0,"p99_tpot_ms":45.0,
		"mean_itl_ms":40.0,"median_itl_ms":40.0,"std_itl_ms":1.0,"p99_itl_ms":45.0}`
	if err := os.WriteFile(result, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := run(t, "engine", "calibrate", result, "--write", profile, "--json", "-")
	var got []struct{ Got, Want float64 }
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || len(got) != 2 {
		t.Fatalf("%d, %v, %s: %s", code, err, out, errs)
	}
	if code, out, errs := run(t, "sim", "profile", profile); code != 0 || !strings.Contains(out, "results of vllm bench serve") {
		t.Errorf("%d, %s: %s", code, out, errs)
	}
	if code, out, errs := run(t, "engine", "--profile", profile, "--check-config"); code != 0 || !strings.Contains(out, profile) {
		t.Errorf("%d, %s: %s", code, out, errs)
	}
	f := func(want string, args ...string) {
		t.Helper()
		if code, _, errs := run(t, append([]string{"engine"}, args...)...); code != 2 || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: %d, %q, want %q", args, code, errs, want)
		}
	}
	f("a10-qwen2.5-7b", "--profile", "a100", "--check-config")
	f("--step-time", "--profile", profile, "--step-time", "1s", "--check-config")
	f("profile.json", "calibrate", result, profile) // a profile is no result
	f(".json", "calibrate", result, "--write", "mine")
}

// Fleets as a table and as files; what is impossible is one line.
func TestSimFleet(t *testing.T) {
	dir := t.TempDir()
	csvFile, plot := filepath.Join(dir, "fleet.csv"), filepath.Join(dir, "fleet.svg")
	code, out, errs := run(t, "sim", "fleet", "--nodes", "1,2", "--requests", "30", "--pool-gib", "1", "--csv", csvFile, "--plot", plot)
	if code != 0 || !strings.Contains(out, "does not bind") || strings.Count(out, "\n") != 4 {
		t.Errorf("%d: %s%s", code, out, errs)
	}
	for _, name := range []string{csvFile, plot} {
		if b, err := os.ReadFile(name); err != nil || len(b) == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	trace := filepath.Join(dir, "trace.jsonl")
	lines := `{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]}` + "\n" + `{"timestamp": 9000, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 4]}` + "\n"
	if err := os.WriteFile(trace, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs = run(t, "sim", "fleet", "--nodes", "2", "--trace", trace, "--rate", "0.01", "--json", "-")
	var got []struct {
		Store int `json:"store_blocks"`
		Gets  int
		Puts  int
	}
	if err := json.Unmarshal([]byte(out), &got); code != 0 || err != nil || len(got) != 1 || got[0].Store != 2 || got[0].Gets != 2 || got[0].Puts != 2 {
		t.Errorf("%d, %v: %s%s", code, err, out, errs)
	}
	for _, wrong := range [][]string{{"--nodes", "0"}, {"--nodes", "4,2"}, {"--rate", "0"}, {"--rate", "1e-300"}, {"--rate", "1e-300", "--trace", trace}, {"--requests", "1000000"}, {"--read-gbps", "-1"}, {"--pool-gib", "0"}, {"--profile", "none"}} {
		if code, _, errs := run(t, append([]string{"sim", "fleet"}, wrong...)...); code != 2 || errs == "" {
			t.Errorf("%v: %d, %s", wrong, code, errs)
		}
	}
}
