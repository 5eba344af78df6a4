// SPDX-License-Identifier: Apache-2.0

package usage_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/usage"
	"github.com/kvasir-kv/kvasir/store"
)

func tag(name, value string) lmcache.Tag {
	return lmcache.Tag{Name: []byte(name), Value: []byte(value)}
}

// counted are the series of a figure by tag=value.
func counted(of map[[2]string]uint64) map[string]uint64 {
	out := map[string]uint64{}
	for k, n := range of {
		out[k[0]+"="+k[1]] = n
	}
	return out
}

// Lookups count for each of their tags, by name and value, and where a tag is no text, for all others.
func TestTagsCount(t *testing.T) {
	n := usage.New()
	if x := n.Tagged("uid 1", nil); x != nil || x.String() != "" {
		t.Errorf("a request without tags has %v", x)
	}
	(*usage.Tagged)(nil).Count(found(16, store.LookupResult{Asked: 1}))
	x := n.Tagged("uid 1", []lmcache.Tag{tag("team", "a"), tag("stage", "b")})
	x.Count(found(16, store.LookupResult{Asked: 4, Hit: 3}))
	n.Tagged("uid 2", []lmcache.Tag{tag("team", "a")}).Count(found(16, store.LookupResult{Asked: 1}))
	if x.String() != "team=a, stage=b" {
		t.Errorf("%q", x)
	}
	n.Tagged("uid 1", []lmcache.Tag{tag("team", "\xff")}).Count(found(16, store.LookupResult{Asked: 2}))
	var out strings.Builder
	if err := metrics.Write(&out, n.Stats()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`kvasir_tag_lookups_total{tag="team",value="a"} 2`, `kvasir_tag_requested_tokens_total{tag="team",value="a"} 80`, `kvasir_tag_hit_tokens_total{tag="team",value="a"} 48`,
		`kvasir_tag_hit_tokens_total{tag="stage",value="b"} 48`, `kvasir_tag_lookups_total{tag="_other",value="_other"} 1`,
	} {
		if !strings.Contains(out.String(), want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}

// One name with ever new values, and one user with ever new names, have half of what others leave; tags of others
// still get in, and nothing is lost: what has no series counts for _other.
func TestOneTagKeepsNoOtherOut(t *testing.T) {
	n := usage.New()
	lookups := 0
	ask := func(owner string, name, value string) {
		n.Tagged(owner, []lmcache.Tag{tag(name, value)}).Count(found(16, store.LookupResult{Asked: 1}))
		lookups++
	}
	of := func(name string) (series int) {
		for k := range n.Stats().TagLookups {
			if k[0] == name {
				series++
			}
		}
		return series
	}
	for i := range 2 * usage.MaxTags {
		ask("uid 1", "request", fmt.Sprint(i))
	}
	if got := of("request"); got != usage.MaxTags/2 {
		t.Errorf("a name has %d values, want half of all", got)
	}
	for i := range 2 * usage.MaxTags {
		ask("uid 2", fmt.Sprint("name", i), "x")
	}
	series := len(n.Stats().TagLookups) - 1
	if series != usage.MaxTags/2+usage.MaxTags/4 {
		t.Errorf("%d series after two users, want three quarters of all", series)
	}
	ask("uid 1", "request", "7") // a series it has
	ask("uid 3", "team", "blue")
	ask("uid 3", "team", "blue")
	got := counted(n.Stats().TagLookups)
	if got["request=7"] != 2 || got["team=blue"] != 2 {
		t.Errorf("%v", got)
	}
	sum := 0
	for _, n := range got {
		sum += int(n)
	}
	if sum != lookups {
		t.Errorf("%d lookups are counted, want %d", sum, lookups)
	}
	for i := range 1000 { // as many users as one likes
		ask(fmt.Sprint("address ", i), fmt.Sprint("n", i), "x")
	}
	if got := len(n.Stats().TagLookups); got != usage.MaxTags+1 {
		t.Errorf("%d series, want %d and _other", got, usage.MaxTags)
	}
}

// A tag that no request has for an hour makes room when it is needed, and its figures stay in the sum.
func TestIdleTagsMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := usage.New()
		ask := func(value string) {
			n.Tagged("uid 1", []lmcache.Tag{tag("user", value)}).Count(found(16, store.LookupResult{Asked: 2, Hit: 1}))
		}
		const half = usage.MaxTags / 2
		for i := range half {
			ask(fmt.Sprint(i))
		}
		time.Sleep(usage.TagIdle - time.Minute)
		ask("3")
		ask("late")
		if got := counted(n.Stats().TagLookups); len(got) != half+1 || got["user=late"] != 0 || got["_other=_other"] != 1 {
			t.Errorf("what was used less than an hour ago has gone: %v", got)
		}
		time.Sleep(time.Minute)
		ask("late")
		got := n.Stats()
		if by := counted(got.TagLookups); len(by) != 3 || by["user=3"] != 2 || by["user=late"] != 1 || by["_other=_other"] != half {
			t.Errorf("%v", by)
		}
		if by := counted(got.TagHit); by["_other=_other"] != half*16 || counted(got.TagAsked)["_other=_other"] != half*32 {
			t.Errorf("%v", by)
		}
		for i := range half - 2 {
			ask(fmt.Sprint("new", i))
		}
		if by := counted(n.Stats().TagLookups); len(by) != half+1 || by["user=new0"] != 1 {
			t.Errorf("%d series after others took the room", len(by))
		}
	})
}

// A tag that a request has twice, and tags that have no series of their own, count its lookup once.
func TestTagsOfOneRequestCountOnce(t *testing.T) {
	n := usage.New()
	n.Tagged("uid 1", []lmcache.Tag{tag("team", "a"), tag("team", "a"), tag("x", "\xff"), tag("y", "\xff")}).Count(found(16, store.LookupResult{Asked: 4, Hit: 3}))
	st := n.Stats()
	if got := counted(st.TagLookups); got["team=a"] != 1 || got["_other=_other"] != 1 {
		t.Errorf("%v", got)
	}
	if got := counted(st.TagAsked); got["team=a"] != 64 || got["_other=_other"] != 64 {
		t.Errorf("%v", got)
	}
}
