// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"math"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// An hour is kept and no more, the newest last; every point has its time since the start.
func TestHistoryIsAnHour(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	handler := admin.Handler(s, admin.Options{History: h})
	ask := func() admin.Points {
		t.Helper()
		var e admin.Live
		if code, body := ask(handler, "GET", "http://localhost/now?history=1", ""); code != 200 || json.Unmarshal([]byte(body), &e) != nil || e.History == nil {
			t.Fatalf("%d %.300s", code, body)
		}
		return *e.History
	}
	if p := ask(); p.Last != 0 || len(p.At) != 0 {
		t.Errorf("a new server has %+v", p)
	}
	loadPrompt(s, "a") // 32 of 64 tokens
	h.AddPoint(5 * time.Second)
	for i := 2; i <= 1000; i++ {
		h.AddPoint(time.Duration(i) * 5 * time.Second)
		if i == 2 {
			p := ask()
			if p.Last != 2 || len(p.At) != 2 || p.At[0] != 5 || p.HitRate[0] != 0.5 || !math.IsNaN(p.HitRate[1]) || p.Asked[0] != 64.0/5 || p.Lookups[0] != 0.2 || p.Retrieved[0] == 0 || p.P50[0] <= 0 || p.P99[0] < p.P50[0] || !math.IsNaN(p.P50[1]) {
				t.Errorf("%+v", p)
			}
		}
	}
	p := ask()
	if p.Last != 1000 || len(p.At) != 720 || p.At[0] != 281*5 || p.At[719] != 5000 {
		t.Errorf("%d points to %d, from %v to %v", len(p.At), p.Last, p.At[0], p.At[len(p.At)-1])
	}
	for name, c := range map[string]admin.Column{"took": p.Took, "hit rate": p.HitRate, "hit": p.Hit, "stored": p.Stored, "below": p.Below, "evicted": p.Evicted, "used": p.Used, "p50": p.P50, "p99": p.P99} {
		if len(c) != 720 {
			t.Errorf("%s has %d values", name, len(c))
		}
	}
	h.AddPoint(4999 * time.Second) // before the newest
	if again := ask(); again.Last != 1000 {
		t.Errorf("a point of the past is taken: %d", again.Last)
	}
	if admin.HistoryBytes > 68<<10 {
		t.Errorf("the points take %d bytes", admin.HistoryBytes)
	}
}

// Points are taken without anybody who looks, at the clock that no one sets.
func TestHistoryRuns(t *testing.T) {
	s := newServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := admin.NewHistory(s)
		go h.Run(t.Context())
		time.Sleep(62 * time.Second)
		var e admin.Live
		if _, body := ask(admin.Handler(s, admin.Options{History: h}), "GET", "http://localhost/now?history=1", ""); json.Unmarshal([]byte(body), &e) != nil || e.History.Last != 12 || math.Abs(e.Now-62) > 0.01 {
			t.Errorf("%+v at %v", e.History, e.Now)
		}
	})
}

// The first event of a stream has the hour, each later one the newest two points.
func TestHistoryComesFirst(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	h.FillHistory(3600, func(int) uint64 { return 5000 }, func(int) uint64 { return 4000 })
	web := httptest.NewServer(admin.Handler(s, admin.Options{History: h}))
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	for range 2 {
		next, _ := events(t, web.URL)
		first, second := next(), next()
		if p := first.History; p == nil || len(p.At) != 720 || p.HitRate[700] != 0.8 || p.Asked[700] != 1000 || first.Now < 3600 || first.Now > 3700 {
			t.Errorf("first: %+v", p)
		}
		if p := second.History; p == nil || len(p.At) != 2 || p.Last < 720 || second.Now <= first.Now {
			t.Errorf("second: %+v", p)
		}
	}
}

// A point whose lookups asked in the point before, or counted between two looks, has no more hits than it has tokens asked for.
func TestHistoryHasNoHitRateAbove1(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	h.FillHistory(15, func(i int) uint64 { return []uint64{5000, 1000, 0}[i] }, func(i int) uint64 { return []uint64{0, 4000, 1000}[i] })
	var e admin.Live
	if _, body := ask(admin.Handler(s, admin.Options{History: h}), "GET", "http://localhost/now?history=1", ""); json.Unmarshal([]byte(body), &e) != nil || len(e.History.HitRate) != 3 {
		t.Fatalf("%+v", e.History)
	}
	if p := e.History; p.HitRate[0] != 0 || p.HitRate[1] != 1 || p.Hit[1] != 200 || !math.IsNaN(p.HitRate[2]) || p.Hit[2] != 0 {
		t.Errorf("%+v", p)
	}
}
