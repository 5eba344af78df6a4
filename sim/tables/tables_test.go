// SPDX-License-Identifier: Apache-2.0

package tables_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim/tables"
)

func play(t *testing.T, o tables.Options) *tables.Table {
	t.Helper()
	got, err := tables.Play(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// byFigure returns the rows of one row of the table.
func byFigure(rows []tables.Row, row string) map[string]tables.Row {
	out := make(map[string]tables.Row)
	for _, r := range rows {
		if r.Row == row {
			out[r.Figure] = r
		}
	}
	return out
}

func TestReferenceList(t *testing.T) {
	list := tables.Reference()
	var prompt, limit, first, second int
	for _, l := range list {
		prompt, limit, first, second = prompt+l.Prompt, limit+l.Limit, first+l.Output[0], second+l.Output[1]
	}
	if len(list) != 100 || prompt != 23260 || limit != 22061 || first != 21350 || second != 21881 {
		t.Errorf("%d requests: %d, %d, %d, %d tokens", len(list), prompt, limit, first, second)
	}
	if list[0].Prompt != 849 || list[99].Output[1] != 419 {
		t.Errorf("from %v to %v", list[0], list[99])
	}
}

// With the profile's constants the first row is within these limits of the original.
func TestOriginalTable(t *testing.T) {
	got := play(t, tables.Options{})
	limit := map[string]float64{
		"mean_ttft_ms": 0.005, "mean_itl_ms": 0.005, "mean_tpot_ms": 0.04, "median_tpot_ms": 0.04, "median_itl_ms": 0.04,
		"p99_tpot_ms": 0.06, "p99_itl_ms": 0.06, "duration": 0.06, "request_throughput": 0.06, "output_throughput": 0.06, "total_token_throughput": 0.06,
		"median_ttft_ms": 0.1, "p99_ttft_ms": 0.1,
	}
	first := byFigure(got.Rows, tables.Mooncake)
	for figure, most := range limit {
		if r, ok := first[figure]; !ok || math.Abs(r.Error) > most || math.Abs(r.Ours/r.Original-1-r.Error) > 1e-12 {
			t.Errorf("%+v: more than %v off", r, most)
		}
	}
	if got.MAPE[0].MAPE > 0.04 {
		t.Errorf("mean absolute error %v", got.MAPE[0].MAPE)
	}
	for figure, r := range byFigure(got.Rows, tables.P2pNccl) {
		if math.Abs(r.Error) > 0.1 {
			t.Errorf("second row: %s is %v off", figure, r.Error)
		}
	}
	difference := byFigure(got.Differences, "difference")
	if d := difference["mean_ttft_ms"]; math.Abs(d.Error) > 0.15 {
		t.Errorf("%+v", d)
	}
	if d := difference["p99_ttft_ms"]; math.Abs(d.Error) > 0.3 {
		t.Errorf("%+v", d)
	}
	for _, figure := range []string{"duration", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "p99_itl_ms"} {
		if d := difference[figure]; d.Ours*d.Original <= 0 {
			t.Errorf("the sign of the difference is wrong: %+v", d)
		}
	}
}

// Moving a calibrated constant by a tenth makes the row worse, so no better choice of constants reduces
// the error.
func TestMovedConstantsAreWorse(t *testing.T) {
	at := play(t, tables.Options{}).MAPE[0].MAPE
	for _, name := range []string{"prefill_efficiency", "bandwidth_efficiency"} {
		c, err := tables.Profile("a10-qwen2.5-7b", tables.Options{})
		if err != nil {
			t.Fatal(err)
		}
		v, err := c.Constants.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, factor := range []float64{0.9, 1.1} {
			moved := play(t, tables.Options{Set: []tables.Setting{{Name: name, Value: v * factor}}}).MAPE[0].MAPE
			if moved <= at {
				t.Errorf("%s x %v: mean absolute error %v, with the calibrated one %v", name, factor, moved, at)
			}
		}
	}
}

func TestGenerate(t *testing.T) {
	for seed := range uint64(50) {
		list := tables.Generate(seed, true)
		var prompt, limit, longest int
		var out [2]int
		for _, l := range list {
			prompt, limit, longest = prompt+l.Prompt, limit+l.Limit, max(longest, l.Output[0])
			for row := range out {
				out[row] += l.Output[row]
				if l.Output[row] < 1 || l.Output[row] > l.Limit {
					t.Errorf("seed %d: %+v", seed, l)
				}
			}
			if l.Prompt < 4 || l.Prompt > 1024 {
				t.Errorf("seed %d: %+v", seed, l)
			}
		}
		if len(list) != 100 || prompt != 23260 || limit != 22061 || out != [2]int{21350, 21881} || longest < 710 || longest > 840 {
			t.Errorf("seed %d: %d requests, %d, %d, %v tokens, longest output %d", seed, len(list), prompt, limit, out, longest)
		}
		if !reflect.DeepEqual(list, tables.Generate(seed, true)) || reflect.DeepEqual(list, tables.Generate(seed+1, true)) {
			t.Errorf("seed %d does not decide the list", seed)
		}
	}
}

func TestSpread(t *testing.T) {
	got := play(t, tables.Options{Seeds: 5})
	if len(got.Spread) != 2*2*13 {
		t.Fatalf("%d spreads", len(got.Spread))
	}
	for _, s := range got.Spread {
		if s.P5 > s.Median || s.Median > s.P95 || math.Abs(s.Error) > 0.3 {
			t.Errorf("%+v", s)
		}
	}
}

func TestReadLengths(t *testing.T) {
	got, err := tables.ReadLengths(strings.NewReader("prompt,limit,output\n10,20,20\n\n5, 9,3\r\n"))
	if err != nil || len(got) != 2 || got[1] != (tables.Length{Prompt: 5, Limit: 9, Output: [2]int{3, 3}}) {
		t.Errorf("%v, %v", got, err)
	}
	for text, want := range map[string]string{
		"": "no line", "1,2": "line 1", "3,4,4\n1,x,2": "line 2", "1,2,3": "beyond", "0,1,1": "line 1", "-1,1,1": "line 1", "9999999,2,1": "line 1", strings.Repeat("1", 2<<20): "bytes",
	} {
		if _, err := tables.ReadLengths(strings.NewReader(text)); !errors.Is(err, tables.ErrLengths) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
}

func TestPrint(t *testing.T) {
	var b bytes.Buffer
	if err := play(t, tables.Options{Seeds: 1}).Print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"MooncakeConnector", "2692.51", "P2pNccl less Mooncake", "710 to 840"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not printed", want)
		}
	}
}

// patience is a context that is canceled after left calls of Err.
type patience struct {
	context.Context
	left int
}

func (p *patience) Err() error {
	if p.left--; p.left < 0 {
		return context.Canceled
	}
	return nil
}

// Results from before an interruption are kept: the workloads of both rows, and rows of a held-out table.
func TestInterruptedLater(t *testing.T) {
	got, err := tables.Play(&patience{t.Context(), 12}, tables.Options{Seeds: 50})
	if !errors.Is(err, context.Canceled) || got == nil || len(got.Rows) != 30 || len(got.Spread) != 2*13 {
		t.Fatalf("%v, %+v", err, got)
	}
	for _, s := range got.Spread {
		if s.Seeds != got.Spread[0].Seeds || s.Seeds < 1 || s.Seeds >= 50 || s.P5 > s.Median {
			t.Errorf("%+v", s)
		}
	}
	check, err := tables.RunCheck(&patience{t.Context(), 12}, "T1", tables.CheckOptions{})
	if !errors.Is(err, context.Canceled) || check == nil || len(check.Rows) == 0 || len(check.Rows) >= 18 || len(check.Limits) != 0 || len(check.Notes) != 1 {
		t.Fatalf("%v, %+v", err, check)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tables.Play(ctx, tables.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
