// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// hourOf returns the hour of a tenant; nil: it has none.
func hourOf(h *admin.TenantHours, salt string) *admin.TenantHour {
	for i := range h.Tenants {
		if x := &h.Tenants[i]; x.Salt == salt && x.Others == (salt == "") {
			return x
		}
	}
	return nil
}

// A tenant has a point for each minute, under the name that /tenants gives it: what it asked for and which part of that hit.
func TestTenantHours(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	if got := h.Hours(0); len(got.At) != 0 || len(got.Tenants) != 0 {
		t.Errorf("a new server has %+v", got)
	}
	loadPrompt(s, "a") // 32 of 64 tokens, of no salt
	h.AddHours(50 * time.Second)
	if got := h.Hours(50 * time.Second); len(got.At) != 0 {
		t.Errorf("a point that is not due is taken: %+v", got)
	}
	h.AddHours(time.Minute)
	h.AddHours(time.Minute + time.Millisecond) // two looks at once
	h.AddHours(2 * time.Minute)
	got := h.Hours(2 * time.Minute)
	x := hourOf(&got, "_default")
	if len(got.At) != 2 || got.At[0] != 60 || got.Took[1] != 60 || x == nil || len(got.Tenants) != 1 || x.Asked[0] != 64 || x.HitRate[0] != 0.5 || x.Asked[1] != 0 || !math.IsNaN(x.HitRate[1]) {
		t.Errorf("%+v", got)
	}
}

// An hour is kept and no more. A tenant without a prompt for an hour leaves, and comes again.
func TestTenantsThatAreGoneLeave(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	f := func(now time.Duration, points int, salts ...string) {
		t.Helper()
		got := h.Hours(now)
		var names []string
		for _, x := range got.Tenants {
			names = append(names, x.Salt)
		}
		if len(got.At) != points || fmt.Sprint(names) != fmt.Sprint(salts) {
			t.Errorf("at %v: %d points of %q, want %d of %q", now, len(got.At), names, points, salts)
		}
	}
	loadPrompt(s, "a")
	for i := 1; i <= 60; i++ {
		h.AddHours(time.Duration(i) * time.Minute)
	}
	f(time.Hour, 60, "_default")
	f(time.Hour+30*time.Second, 60, "_default")
	h.AddHours(61 * time.Minute)
	f(61*time.Minute, 60)
	loadPrompt(s, "b")
	h.AddHours(62 * time.Minute)
	f(62*time.Minute, 60, "_default")
	f(121*time.Minute, 1, "_default") // nobody has looked since
	f(122*time.Minute, 0)

	// A clock that jumps by an hour: one point stands for all of it, and those before it are gone.
	loadPrompt(s, "c")
	h.AddHours(123 * time.Minute)
	f(123*time.Minute, 1, "_default")
	if got := h.Hours(123 * time.Minute); got.Took[0] != 61*60 || got.Tenants[0].Asked[0] != 64 {
		t.Errorf("%+v", got)
	}
	h.AddHours(122 * time.Minute) // backwards
	f(123*time.Minute, 1, "_default")
}

// 64 tenants have an hour, those that ask for most. The others share one, with what those had that lost their place; nothing is counted twice or lost.
func TestOtherTenantsShareAnHour(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	var salts []string
	for i := range 200 {
		salts = append(salts, fmt.Sprintf("tenant-%03d", i))
	}
	asked := func(i int, salt string) uint64 {
		var n int
		_, _ = fmt.Sscanf(salt, "tenant-%d", &n)
		switch {
		case n < 100: // in the first minute
			return uint64(100-n) * 1000 * uint64(1-min(i, 1))
		case n == 150 && i == 5: // asks for more than most of those
			return 99_500
		case n == 151 && i == 5: // and for less
			return 500
		}
		return 0
	}
	h.FillTenants(10, salts, asked, func(i int, salt string) uint64 { return asked(i, salt) / 4 })
	got := h.Hours(0)
	if len(got.Tenants) != 65 || got.Tenants[0].Salt != "tenant-000" || got.Tenants[1].Salt != "tenant-150" || hourOf(&got, "tenant-062") == nil || hourOf(&got, "tenant-063") != nil || hourOf(&got, "tenant-151") != nil {
		t.Fatalf("%d tenants, %+v", len(got.Tenants), got.Tenants[:2])
	}
	others, all := hourOf(&got, ""), 0.0
	for _, x := range got.Tenants {
		for _, n := range x.Asked {
			all += n
		}
	}
	if want := 1000.0*100*101/2 + 99_500 + 500; others == nil || all != want || others.HitRate[0] != 0.25 || others.Asked[0] != 1000.0*37*38/2 || others.Asked[5] != 500 {
		t.Errorf("%v of %v tokens; others %+v", all, want, others)
	}
}

// Tenants' hours come with the first event of a stream and with /now?history=1, and in a stream again after a minute; they take what History says.
func TestTenantHoursAreSent(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	var salts []string
	for i := range 100 {
		salts = append(salts, strings.Repeat("x", 60)+fmt.Sprint(i))
	}
	h.FillTenants(60, salts, func(i int, _ string) uint64 { return 100_000 + uint64(i)*777 }, func(i int, _ string) uint64 { return 50_000 + uint64(i)*333 })
	if admin.HoursBytes > 61<<10 {
		t.Errorf("the hours take %d bytes", admin.HoursBytes)
	}
	text, err := json.Marshal(h.Hours(0))
	if err != nil || len(text) > 64<<10 {
		t.Errorf("%d bytes of JSON, %v", len(text), err)
	}
	handler := admin.Handler(s, admin.Options{History: h})
	var e admin.Live
	if _, body := ask(handler, "GET", "http://localhost/now", ""); json.Unmarshal([]byte(body), &e) != nil || e.Hours != nil {
		t.Errorf("/now has %+v", e.Hours)
	}
	if _, body := ask(handler, "GET", "http://localhost/now?history=1", ""); json.Unmarshal([]byte(body), &e) != nil || e.Hours == nil || len(e.Hours.Tenants) != 65 || len(e.Hours.At) != 60 {
		t.Errorf("/now?history=1 has %+v", e.Hours)
	}
	web := httptest.NewServer(handler)
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	next, _ := events(t, web.URL)
	if first, second := next(), next(); first.Hours == nil || len(first.Hours.Tenants) != 65 || second.Hours != nil {
		t.Errorf("%+v, then %+v", first.Hours, second.Hours)
	}
	h.FillTenants(1, salts[:3], func(int, string) uint64 { return 1000 }, func(int, string) uint64 { return 1000 })
	for range 3 {
		if e := next(); e.Hours != nil {
			x := hourOf(e.Hours, salts[0])
			if x == nil || len(x.HitRate) < 2 || x.HitRate[len(x.HitRate)-1] != 1 {
				t.Errorf("%+v", x)
			}
			return
		}
	}
	t.Error("a new minute is not sent")
}

// Points of tenants are taken without anybody who looks, one a minute.
func TestTenantHoursRun(t *testing.T) {
	s := newServer(t)
	synctest.Test(t, func(t *testing.T) {
		h := admin.NewHistory(s)
		go h.Run(t.Context())
		time.Sleep(5*time.Minute + 2*time.Second)
		if got := h.Hours(5 * time.Minute); len(got.At) != 5 || got.At[4] != 300 {
			t.Errorf("%+v", got)
		}
	})
}
