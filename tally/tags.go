package tally

import (
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store"
)

// MaxTags bounds the tags that have figures of their own, by name and value. Later ones share those of Other.
const MaxTags = 256

// tagCounts are the figures of lookups with one tag.
type tagCounts struct{ lookups, asked, hit atomic.Uint64 }

// Tagged are the tags of one request. It is safe for concurrent use.
type Tagged struct {
	of   []*tagCounts
	text string
}

// Tagged returns what counts for a request with tags: nil for one without.
func (t *Tally) Tagged(tags []lmcache.Tag) *Tagged {
	if len(tags) == 0 {
		return nil
	}
	out := &Tagged{}
	var text strings.Builder
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, tag := range tags {
		if i > 0 {
			text.WriteString(", ")
		}
		text.Write(tag.Name)
		text.WriteByte('=')
		text.Write(tag.Value)
		k := pair{string(tag.Name), string(tag.Value)}
		c := t.mu.tags[k]
		switch {
		case c != nil:
		case len(t.mu.tags) > MaxTags || !utf8.Valid(tag.Name) || !utf8.Valid(tag.Value): // a label is a text
			c = t.mu.tags[pair{Other, Other}]
		default:
			c = new(tagCounts)
			t.mu.tags[k] = c
		}
		out.of = append(out.of, c)
	}
	out.text = text.String()
	return out
}

// Count counts a lookup that was searched for, once it has its result, for each of its tags.
func (x *Tagged) Count(got *store.LookupResult, chunkTokens int) {
	if x == nil {
		return
	}
	for _, c := range x.of {
		c.lookups.Add(1)
		c.asked.Add(uint64(got.Asked * chunkTokens))
		c.hit.Add(uint64(got.Hit * chunkTokens))
	}
}

// String returns the tags as name=value, ...; they are anybody's text.
func (x *Tagged) String() string {
	if x == nil {
		return ""
	}
	return x.text
}
