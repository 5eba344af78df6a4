package tally_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/tally"
)

func tag(name, value string) lmcache.Tag {
	return lmcache.Tag{Name: []byte(name), Value: []byte(value)}
}

// Lookups count for each of their tags, by name and value, and beyond the limit, or where a tag is no text, for all others.
func TestTagsCount(t *testing.T) {
	n := tally.New()
	if x := n.Tagged(nil); x != nil || x.String() != "" {
		t.Errorf("a request without tags has %v", x)
	}
	(*tally.Tagged)(nil).Count(&store.LookupResult{Asked: 1}, 16)
	x := n.Tagged([]lmcache.Tag{tag("team", "a"), tag("stage", "b")})
	x.Count(&store.LookupResult{Asked: 4, Hit: 3}, 16)
	n.Tagged([]lmcache.Tag{tag("team", "a")}).Count(&store.LookupResult{Asked: 1}, 16)
	if x.String() != "team=a, stage=b" {
		t.Errorf("%q", x)
	}
	n.Tagged([]lmcache.Tag{tag("team", "\xff")}).Count(&store.LookupResult{Asked: 2}, 16)
	for i := range 2 * tally.MaxTags {
		n.Tagged([]lmcache.Tag{tag("user", fmt.Sprint(i))}).Count(&store.LookupResult{Asked: 1}, 16)
	}
	var out strings.Builder
	if err := metrics.Write(&out, n.Stats()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`kvasir_tag_lookups_total{tag="team",value="a"} 2`, `kvasir_tag_requested_tokens_total{tag="team",value="a"} 80`, `kvasir_tag_hit_tokens_total{tag="team",value="a"} 48`,
		`kvasir_tag_hit_tokens_total{tag="stage",value="b"} 48`, `kvasir_tag_lookups_total{tag="user",value="253"} 1`,
		fmt.Sprintf(`kvasir_tag_lookups_total{tag="_other",value="_other"} %d`, 1+2*tally.MaxTags-(tally.MaxTags-2)),
	} {
		if !strings.Contains(out.String(), want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if got := strings.Count(out.String(), "\nkvasir_tag_lookups_total{"); got != tally.MaxTags+1 {
		t.Errorf("%d series of tags", got)
	}
}
