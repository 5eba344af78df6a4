// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	topview "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
)

// At 80 by 24 the screen shows the figures of the page: the hour before top was started, times, possible hits, savings, and tenants of the pool.
func TestScreenHasWhatThePageHas(t *testing.T) {
	hour := &admin.Points{Last: 720}
	for i := range 720 {
		hour.Asked, hour.Hit, hour.Took = append(hour.Asked, 1000), append(hour.Hit, float64(i)), append(hour.Took, 5)
		hour.P50, hour.P99 = append(hour.P50, 123e-6), append(hour.P99, math.NaN())
	}
	hour.P99[719] = 4.56e-3
	f := &fake{many: 1, model: "m", edit: func(st *admin.Status) {
		st.HitCurves = []hitcurve.Window{{}, {Asked: 10, Hit: 0.41, Ceiling: 0.63, Curve: []hitcurve.Point{{Bytes: 2 << 30, Rate: 0.33}, {Bytes: 4 << 30, Rate: 0.41}}, Tiers: []hitcurve.TierPoint{{Name: "fs", Rate: 0.6}}}}
		st.Lookup.HitTokens = 90_000_000
		st.Findings = []server.Finding{{What: "new prompts", Normal: true}, {What: "too small"}}
	}}
	f.liveEdit = func(e *admin.Live) {
		e.History, e.Cost = hour, admin.Cost{PrefillTokens: 10_000, GPUHourPrice: 2.5}
		e.Owners = []admin.PoolOwner{{Model: "m", Salt: "green", Known: true, Bytes: 3 << 30, Chunks: 3}, {Bytes: 1 << 30}}
	}
	check := func(view topview.View, wants ...string) {
		t.Helper()
		lines := seeView(t, f, view, "", 80, 24)
		all := strings.Join(lines, "\n")
		for _, want := range wants {
			if !strings.Contains(all, want) {
				t.Errorf("no %q in\n%s", want, all)
			}
		}
		for _, line := range lines {
			if utf8.RuneCountInString(line) > 80 {
				t.Errorf("%q is too long", line)
			}
		}
	}
	check(topview.Overview, "lookups   p50 123µs  p99 4.56ms   possible 63.0 % (1h)   saved 2h30m0s = 6.25", "hit rate  ▁▁▁", "▆ 60 min", "  - too small")
	check(topview.Pool, "  m, green", "75.0 %", "others, or not named since the start", "now 41.0 %, 2 GiB 33.0 %, 4 GiB 41.0 %, with tier fs 60.0 %, without end 63.0")
}
