// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"maps"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type inner struct {
	Up bool `gauge:"x_up" help:"Whether."`
}

type stats struct {
	inner

	Hits   uint64                      `counter:"x_hits_total" help:"Hits."`
	Bytes  int                         `gauge:"x_bytes" help:"Bytes."`
	Age    time.Duration               `gauge:"x_age_seconds" help:"Age."`
	Missed map[string]uint64           `counter:"x_missed_total" label:"reason" help:"Misses."`
	Took   map[string]histogram.Counts `histogram:"x_seconds" label:"deed" help:"Time."`
	Pairs  map[[2]string]int           `gauge:"x_pairs" label:"first,second" always:"a=1,b=2" help:"Pairs."`
	Hidden int
}

// Every kind of field becomes the samples that its tag says, and there are no other samples.
func TestWrite(t *testing.T) {
	h := histogram.Times()
	h.Took(20 * time.Microsecond)
	h.Took(time.Hour)
	s := stats{
		inner: inner{Up: true}, Hits: 3, Bytes: -4, Age: 1500 * time.Millisecond, Missed: map[string]uint64{"a": 1, "b": 0},
		Took: map[string]histogram.Counts{"read": h.Counts()}, Pairs: map[[2]string]int{{"x", "y"}: 7}, Hidden: 9,
	}
	var out strings.Builder
	if err := metrics.Write(&out, &s); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"# TYPE x_up gauge\nx_up 1\n", "# HELP x_hits_total Hits.\n# TYPE x_hits_total counter\nx_hits_total 3\n", "x_bytes -4\n", "x_age_seconds 1.5\n",
		`x_missed_total{reason="a"} 1`, `x_missed_total{reason="b"} 0`, `x_seconds_bucket{deed="read",le="1e-05"} 0`,
		`x_seconds_bucket{deed="read",le="3e-05"} 1`, `x_seconds_bucket{deed="read",le="10"} 1`, `x_seconds_bucket{deed="read",le="+Inf"} 2`, `x_seconds_count{deed="read"} 2`,
		`x_seconds_sum{deed="read"} 3600.00002`, `x_pairs{a="1",b="2",first="x",second="y"} 7`,
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), " 9\n") || strings.Contains(strings.ToLower(out.String()), "hidden") {
		t.Errorf("a field without a tag is there:\n%s", &out)
	}
}

// Values returns the same samples by name, without histograms.
func TestValues(t *testing.T) {
	got := metrics.Values(&stats{inner: inner{Up: true}, Hits: 3, Bytes: -4, Age: 1500 * time.Millisecond, Missed: map[string]uint64{"a": 1, "b": 0}, Pairs: map[[2]string]int{{"x", "y"}: 7}, Hidden: 9})
	want := map[string]float64{"x_up": 1, "x_hits_total": 3, "x_bytes": -4, "x_age_seconds": 1.5, `x_missed_total{reason="a"}`: 1, `x_missed_total{reason="b"}`: 0, `x_pairs{first="x",second="y"}`: 7}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Two libraries share one page of metrics. It names the build, and passes the lint.
func TestHandler(t *testing.T) {
	r := metrics.New("v1.2.3")
	hits := uint64(0)
	metrics.Add(r, func() stats { hits++; return stats{Hits: hits} })
	type ratio struct {
		N float64 `gauge:"y_ratio" help:"Share."`
	}
	metrics.Add(r, func() *ratio { return &ratio{0.5} })
	page := func() string {
		w := httptest.NewRecorder()
		r.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		return w.Body.String()
	}
	first := page()
	for _, want := range []string{`version="v1.2.3"`, "y_ratio 0.5\n", "x_hits_total ", "go_goroutines ", "process_open_fds "} {
		if !strings.Contains(first, want) {
			t.Errorf("no %q", want)
		}
	}
	if first == page() {
		t.Error("the figures are not read again")
	}
	problems, err := promlint.New(strings.NewReader(first)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// A tag that does not fit its field is a bug, and adding the library reports it.
func TestBadTags(t *testing.T) {
	f := func(what string, stats any) {
		t.Helper()
		defer func() {
			if v, _ := recover().(string); !strings.HasPrefix(v, "BUG: metrics: ") {
				t.Errorf("%s: %v", what, v)
			}
		}()
		_ = metrics.Write(&strings.Builder{}, stats)
	}
	f("a text", struct {
		S string `gauge:"x" help:"x"`
	}{})
	f("a histogram that is none", struct {
		N int `histogram:"x" help:"x"`
	}{})
	f("two labels and one value", struct {
		N map[string]int `gauge:"x" label:"a,b" help:"x"`
	}{})
	f("one label and two values", struct {
		N map[[2]string]int `gauge:"x" label:"a" help:"x"`
	}{})
	f("nothing", struct{ N int }{})
}
