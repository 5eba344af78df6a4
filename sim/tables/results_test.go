// SPDX-License-Identifier: Apache-2.0

package tables_test

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/cluster"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

// The fit finds the constants of two results again from their JSON, with and without details.
func TestFitResults(t *testing.T) {
	made, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		t.Fatal(err)
	}
	made.Constants.PrefillEfficiency, made.Constants.BandwidthEfficiency = 0.4, 0.7
	f := func(detailed bool, tolerance float64) {
		t.Helper()
		var results []*bench.Result
		for i, rate := range []float64{0.5, 1} {
			list, err := workload.Random(40, 900, 40, 0, uint64(i))
			if err != nil {
				t.Fatal(err)
			}
			if err := workload.Arrive(list, rate, 1, 1); err != nil {
				t.Fatal(err)
			}
			r, err := cluster.Run(t.Context(), list, cluster.Options{Profile: made, Decode: 1})
			if err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			if err := r.Measure(bench.Options{Rate: rate}).WriteJSON(&b, detailed); err != nil {
				t.Fatal(err)
			}
			back, err := bench.ReadJSON(&b)
			if err != nil {
				t.Fatal(err)
			}
			results = append(results, back)
		}
		p, err := costmodel.Get(costmodel.A10Qwen)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tables.FitResults(t.Context(), p, cluster.Options{Decode: 1}, []string{"a", "b"}, results)
		if err != nil || len(got) != 2 {
			t.Fatalf("%v, %v", got, err)
		}
		if c := p.Constants; math.Abs(c.PrefillEfficiency/0.4-1) > tolerance || math.Abs(c.BandwidthEfficiency/0.7-1) > tolerance {
			t.Errorf("%v and %v are found, 0.4 and 0.7 made the results", c.PrefillEfficiency, c.BandwidthEfficiency)
		}
		if !strings.Contains(p.Calibrated["prefill_efficiency"], "2 results") {
			t.Errorf("%v", p.Calibrated)
		}
	}
	f(true, 0.01)
	if !testkit.Race { // the same once more
		f(false, 0.02)
	}
}

func TestFitResultsRefuses(t *testing.T) {
	p, err := costmodel.Get(costmodel.A10Qwen)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tables.FitResults(t.Context(), p, cluster.Options{Decode: 1}, []string{"a.json"}, []*bench.Result{{}}); !errors.Is(err, tables.ErrResult) || !strings.Contains(err.Error(), "a.json") {
		t.Errorf("%v", err)
	}
	if _, err := tables.FitResults(t.Context(), p, cluster.Options{Decode: 1}, nil, nil); !errors.Is(err, tables.ErrResult) {
		t.Errorf("%v", err)
	}
	fast := &bench.Result{Completed: 1, TotalInput: 1000, TotalOutput: 1, TTFT: &bench.Distribution{Mean: 0.01}}
	if _, err := tables.FitResults(t.Context(), p, cluster.Options{Decode: 1}, []string{"fast"}, []*bench.Result{fast}); err == nil || !strings.Contains(err.Error(), "prefill_efficiency") {
		t.Errorf("a TTFT that no GPU reaches: %v", err)
	}
}
