// SPDX-License-Identifier: Apache-2.0

package tables_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

func check(t *testing.T, name string, o tables.CheckOptions) *tables.Check {
	t.Helper()
	got, err := tables.RunCheck(t.Context(), name, o)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// The test names the limits of held-out tables that are known to be missed; all others are kept. After a change of
// either, change docs/measured/accuracy.md too.
func TestHeldOutTables(t *testing.T) {
	f := func(name string, rows int, missed ...string) {
		t.Helper()
		got := check(t, name, tables.CheckOptions{})
		if len(got.Rows) != rows || got.Table != name || got.Source == "" {
			t.Errorf("%s: %d rows, want %d", name, len(got.Rows), rows)
		}
		for _, l := range got.Limits {
			want := true
			for _, m := range missed {
				want = want && !strings.Contains(l.What, m)
			}
			if l.Kept != want || l.Kept != (l.Value <= l.Limit) {
				t.Errorf("%s: %+v", name, l)
			}
		}
		var b bytes.Buffer
		if err := got.Print(&b); err != nil {
			t.Fatal(err)
		}
		if strings.Count(b.String(), "MISSED") != len(missed) {
			t.Errorf("%s does not print what is missed:\n%s", name, b.String())
		}
	}
	f("T1", 18)
	if testkit.Race {
		return // one goroutine counts, ten times as long
	}
	f("T3", 27, "wrong order")
	f("T5", 32, "ratio")
	f("T6", 6)
}

// The rows from which constants were calibrated are marked, and do not count as predictions.
func TestCalibratedRowsAreNotJudged(t *testing.T) {
	calibrated := 0
	for _, r := range check(t, "T1", tables.CheckOptions{}).Rows {
		if r.Row == "512" || r.Row == "8192" {
			calibrated++
			if r.Use != "calibrated" {
				t.Errorf("%+v", r)
			}
		} else if r.Use != "judged" {
			t.Errorf("%+v", r)
		}
	}
	if calibrated != 4 {
		t.Errorf("%d figures are calibrated", calibrated)
	}
}

// The terms of a TTFT and the unexplained rest add up to the original's TTFT.
func TestTermsAddUp(t *testing.T) {
	got := check(t, "T1", tables.CheckOptions{})
	for i, m := range got.Terms {
		sum := m.Hops + m.Host + m.Linear + m.Attention + m.Weights + m.AllReduce + m.Transfer
		ours, original := got.Rows[2*i].Ours, got.Rows[2*i].Original
		if d := sum + m.Rest - original; d > 1e-9 || d < -1e-9 {
			t.Errorf("%+v", m)
		}
		if sum/ours > 1.001 || sum/ours < 0.999 {
			t.Errorf("%d tokens: the terms are %v, the run has %v", m.Tokens, sum, ours)
		}
	}
}

// Both ends of each assumed range are run, with the calibrated constants fitted for each end.
func TestRanges(t *testing.T) {
	if testkit.Race {
		t.Skip("one goroutine computes, ten times as long: TestHeldOutTables runs the same code")
	}
	got := check(t, "T6", tables.CheckOptions{Options: tables.Options{Seeds: 1}, Ranges: []string{"hop_ms"}})
	ends := map[string]int{}
	for _, r := range got.Ranges {
		ends[r.Constant]++
		if r.Problem == "" && (r.MAPE <= 0 || r.Worst == "") {
			t.Errorf("%+v", r)
		}
	}
	if len(ends) != 1 || ends["hop_ms"] != 2 {
		t.Errorf("%v", ends)
	}
	if got.Ranges[0].MAPE == got.Ranges[1].MAPE {
		t.Errorf("both ends give the same: %+v", got.Ranges)
	}
}

func TestCheckRefuses(t *testing.T) {
	if _, err := tables.RunCheck(t.Context(), "T2", tables.CheckOptions{}); !errors.Is(err, tables.ErrTable) || !strings.Contains(err.Error(), "T6") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, name := range tables.CheckNames {
		if _, err := tables.RunCheck(ctx, name, tables.CheckOptions{}); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
