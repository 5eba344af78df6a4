// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
)

func points(last, n int) *admin.Points {
	p := &admin.Points{Last: last}
	for i := last - n + 1; i <= last; i++ {
		p.Asked, p.Hit, p.Took = append(p.Asked, 100), append(p.Hit, float64(i%100)), append(p.Took, 5)
		p.P50, p.P99 = append(p.P50, math.NaN()), append(p.P99, math.NaN())
	}
	return p
}

// An hour is the server's points, each once, the newest 720 of them.
func TestHourTakesEachPointOnce(t *testing.T) {
	var h hour
	h.add(nil)
	if len(h.asked) != 0 || h.rates(10) == nil && h.seconds() != 0 {
		t.Errorf("%+v", h)
	}
	h.add(points(700, 700))
	h.add(points(701, 2))
	h.add(points(701, 2))
	h.add(points(703, 2))
	if len(h.asked) != 703 || h.last != 703 || h.hit[702] != 3 || h.hit[701] != 2 || h.hit[700] != 1 || h.seconds() != 703*5 {
		t.Errorf("%d points, the last %v", len(h.asked), h.hit[len(h.hit)-3:])
	}
	h.add(points(1000, 2))
	h.add(points(1100, 100))
	if len(h.asked) != maxHour || h.hit[maxHour-1] != 0 {
		t.Errorf("%d points", len(h.asked))
	}
	if r := h.rates(72); len(r) != 72 || r[71] != 0.855 {
		t.Errorf("%v", r)
	}
	if r := h.rates(0); len(r) != 0 {
		t.Errorf("%v", r)
	}
	if _, _, ok := h.times(); ok {
		t.Error("no lookup took a time")
	}
	p := points(1101, 1)
	p.P50[0], p.P99[0] = 0.0001, 0.002
	h.add(p)
	if p50, p99, ok := h.times(); !ok || p50 != 0.0001 || p99 != 0.002 {
		t.Errorf("%v %v", p50, p99)
	}
	h.add(&admin.Points{Last: 5000, Asked: admin.Column{1}}) // an answer with columns missing
	if h.last != 1101 {
		t.Errorf("the last is %d", h.last)
	}
}

// The first line keeps how long the server runs, and leaves room for the clock.
func TestTitleFits(t *testing.T) {
	st := &admin.Status{}
	st.Version, st.PID = "v0.0.0-20261125163938-cac70bbbfafe+dirty", 16320
	for room, want := range map[int]string{
		100: "kvasir cac70bbb  http://127.0.0.1:8080  process 16320  up 1h0m0s",
		50:  "kvasir cac70bbb  http://127.0.0.1:8080  up 1h0m0s",
		30:  "kvasir cac70bbb  up 1h0m0s",
		5:   "kvasir cac70bbb",
	} {
		if got := title(&st.Status, "http://127.0.0.1:8080", time.Hour, room); got != want {
			t.Errorf("%d columns: %q", room, got)
		}
	}
	for _, v := range []string{"v1.2.3", "devel", "v1.2.3-rc1"} {
		if got := shortVersion(v); got != v {
			t.Errorf("%s: %s", v, got)
		}
	}
	for seconds, want := range map[float64]string{0.000123456: "123µs", 0.00123456: "1.23ms", 12.3456: "12.3s", 0: "0s"} {
		if got := shortTime(seconds); got != want {
			t.Errorf("%v: %s, want %s", seconds, got, want)
		}
	}
}

// The saved time stays printable with extreme costs from the server, and the hit rate of an interval is at most 1.
func TestWorthOfExtremes(t *testing.T) {
	at := time.Unix(1000, 0)
	snap := func(n int, asked, hit uint64) *Snapshot {
		s := &Snapshot{At: at.Add(time.Duration(n) * time.Second)}
		s.Status.PID, s.Status.ChunkTokens = 1, 16
		s.Status.Lookup.AskedTokens, s.Status.Lookup.HitTokens = asked, hit
		s.Live.Cost = admin.Cost{PrefillTokens: 1e-300, GPUHourPrice: 1}
		return s
	}
	s := Screen{}
	s.Add(snap(1, 1000, 0), nil, at)
	s.Add(snap(2, 2000, 1500), nil, at)
	if got := s.savings(); strings.Contains(got, "-") || !strings.Contains(got, "saved 2500000h") {
		t.Errorf("%q", got)
	}
	if got := percent(s.now.hitRate(s.before)); got != "100.0 %" {
		t.Errorf("%s", got)
	}
	if got := percentOf(3, 2); got != "100.0 %" {
		t.Errorf("%s", got)
	}
}

// top asks for the last hour until the server has answered: one lost answer does not lose the hour.
func TestTheHourIsAskedForUntilItIsThere(t *testing.T) {
	var asked []string
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/status":
			_, _ = w.Write([]byte(`{"pid": 1, "chunk_size": 16, "started": "2026-01-01T00:00:00Z"}`))
		case "/now":
			if asked = append(asked, r.URL.RawQuery); len(asked) == 1 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			_ = json.NewEncoder(w).Encode(admin.Live{AtMillis: 1, History: points(9, 3)})
		}
	}))
	defer web.Close()
	var a Asker
	for i := range 3 {
		if _, err := a.Take(t.Context(), web.URL, "", time.Unix(int64(1000+i), 0)); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"history=1", "history=1", ""}; !slices.Equal(asked, want) {
		t.Errorf("asked %q, want %q", asked, want)
	}
}
