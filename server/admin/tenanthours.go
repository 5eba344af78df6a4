// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/server/usage"
)

// The hour of a tenant has hourPoints points, one every hourEvery. maxTenantHours tenants have an hour of their own, those that asked for
// most; the others share one.
const (
	hourEvery      = time.Minute
	hourPoints     = 60
	maxTenantHours = 64
)

// tokens are tokens that prompts asked for, and those that hit.
type tokens struct{ asked, hit uint64 }

// hour has what a tenant asked for, in the ring of points of tenantHours.
type hour [hourPoints]tokens

func (h *hour) asked() (all uint64) {
	for i := range h {
		all += h[i].asked
	}
	return all
}

// tenantHours is the last hour by tenant. It takes 61 KiB at most, allocated as tenants come. All times count from the start of the
// History, whose mutex guards it. The zero tenantHours is empty.
type tenantHours struct {
	at     time.Duration     // end of the newest point
	last   map[string]tokens // counters by salt at that time; usage.MaxPairs bounds them
	n      int               // number of points since the start
	ends   [hourPoints]time.Duration
	took   [hourPoints]time.Duration // lengths of the points; 0: no point
	of     map[string]*hour          // points of each tenant, by salt
	others hour                      // sum of the tenants that have no hour of their own
}

// totalsOf returns the counters of a server by salt. Salts that package usage counts together are usage.Other.
func totalsOf(st usage.Stats) map[string]tokens {
	out := make(map[string]tokens)
	for of, asked := range st.Asked {
		t := out[of[1]]
		t.asked += asked
		t.hit += st.Hit[of]
		out[of[1]] = t
	}
	return out
}

// due reports whether a point is due at the time `at`: hourEvery after the last one. Half a tick less is enough, because a tick of the
// History may come early.
func (t *tenantHours) due(at time.Duration) bool { return at-t.at >= hourEvery-historyEvery/2 }

// add adds the point between the last counters and the counters `now`.
func (t *tenantHours) add(at time.Duration, now map[string]tokens) {
	slot := t.n % hourPoints
	for i := range t.ends {
		if i == slot || t.ends[i] <= at-time.Hour { // the new point replaces it, or it is more than an hour old
			t.clear(i)
		}
	}
	t.ends[slot], t.took[slot] = at, at-t.at
	grown := make(map[string]tokens)
	for salt, n := range now {
		was := t.last[salt]
		if asked := n.asked - min(was.asked, n.asked); asked > 0 {
			grown[salt] = tokens{asked, min(n.hit-min(was.hit, n.hit), asked)}
		}
	}
	for salt, h := range t.of {
		if h[slot] = grown[salt]; h.asked() == 0 { // the tenant has asked for nothing for an hour
			delete(t.of, salt)
		}
		delete(grown, salt)
	}
	for _, salt := range slices.SortedFunc(maps.Keys(grown), func(a, b string) int {
		return cmp.Or(cmp.Compare(grown[b].asked, grown[a].asked), cmp.Compare(a, b))
	}) {
		if h := t.place(salt, grown[salt].asked); h != nil {
			h[slot] = grown[salt]
			continue
		}
		t.others[slot].asked += grown[salt].asked
		t.others[slot].hit += grown[salt].hit
	}
	t.at, t.last = at, now
	t.n++
}

// clear removes point i of all tenants.
func (t *tenantHours) clear(i int) {
	t.ends[i], t.took[i], t.others[i] = 0, 0, tokens{}
	for _, h := range t.of {
		h[i] = tokens{}
	}
}

// place returns an hour for a new tenant that asked for `asked` tokens: a free one, or that of the tenant that asked for least in its whole
// hour, if that is less. It adds the tokens of the replaced tenant to others. nil means that there is no place.
func (t *tenantHours) place(salt string, asked uint64) *hour {
	if salt == usage.Other {
		return nil
	}
	if len(t.of) >= maxTenantHours {
		least := slices.MinFunc(slices.Sorted(maps.Keys(t.of)), func(a, b string) int { return cmp.Compare(t.of[a].asked(), t.of[b].asked()) })
		if t.of[least].asked() >= asked {
			return nil
		}
		for i, n := range t.of[least] {
			t.others[i].asked += n.asked
			t.others[i].hit += n.hit
		}
		delete(t.of, least)
	}
	if t.of == nil {
		t.of = make(map[string]*hour)
	}
	h := new(hour)
	t.of[salt] = h
	return h
}

// TenantHours has what tenants asked for and found in the last hour. Each column has one value for each point, the oldest first.
type TenantHours struct {
	At      Column       `json:"at_s"`   // end of the point, on the clock of the event's now_s
	Took    Column       `json:"took_s"` // length of the point
	Tenants []TenantHour `json:"tenants"`
}

// TenantHour is the hour of one tenant.
type TenantHour struct {
	Salt    string `json:"cache_salt"`       // as in /tenants; empty for the sum of others
	Others  bool   `json:"others,omitempty"` // it is the sum of the tenants that have no hour of their own
	Asked   Column `json:"asked_tokens"`     // tokens asked for in the point
	HitRate Column `json:"hit_rate"`         // null if nothing was asked for
}

// shown returns the hour as it is at the time `now`. The tenant that asked for most comes first, the sum of the others last.
func (t *tenantHours) shown(now time.Duration) TenantHours {
	out := TenantHours{At: Column{}, Took: Column{}, Tenants: []TenantHour{}}
	var slots []int
	for i := t.n - min(t.n, hourPoints); i < t.n; i++ {
		if slot := i % hourPoints; t.took[slot] > 0 && t.ends[slot] > now-time.Hour {
			slots = append(slots, slot)
			out.At = append(out.At, math.Round(t.ends[slot].Seconds()*10)/10)
			out.Took = append(out.Took, math.Round(t.took[slot].Seconds()*10)/10)
		}
	}
	show := func(name string, others bool, h *hour) {
		x, all := TenantHour{Salt: name, Others: others}, uint64(0)
		for _, slot := range slots {
			n := h[slot]
			rate := math.NaN()
			if n.asked > 0 {
				rate = float64(n.hit) / float64(n.asked)
			}
			all += n.asked
			x.Asked = append(x.Asked, float64(n.asked))
			x.HitRate = append(x.HitRate, rate)
		}
		if all > 0 {
			out.Tenants = append(out.Tenants, x)
		}
	}
	for _, salt := range slices.SortedFunc(maps.Keys(t.of), func(a, b string) int {
		return cmp.Or(cmp.Compare(t.of[b].asked(), t.of[a].asked()), cmp.Compare(a, b))
	}) {
		show(SaltName(salt), false, t.of[salt])
	}
	show("", true, &t.others)
	return out
}
