// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/fair"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lookup"
)

// MaxTags bounds the tags that have figures of their own, by name and value; the others share those of Other. The values of one name may be
// half of those that other names leave free, and so may the tags of one user or address: a tag with many values cannot starve others. A tag
// without requests for TagIdle gives its place to a new one, and its figures are added to Other.
const (
	MaxTags = 256
	TagIdle = time.Hour
)

// tagSweep is the least time between two searches for idle tags.
const tagSweep = time.Minute

// tags has the figures by tag.
type tags struct {
	of     map[pair]*tagCounts // by name and value
	other  *tagCounts          // figures of all other tags; also in `of`
	names  fair.Shares         // number of tags by name
	owners fair.Shares         // number of tags by the user or address that sent them first
	swept  time.Time
}

// tagCounts are the figures of lookups with one tag.
type tagCounts struct {
	lookups, asked, hit atomic.Uint64

	owner string    // the user or address that sent it first
	used  time.Time // time of the last request with it; guarded by Tally.mu
}

func (t *tags) init() {
	t.other = new(tagCounts)
	t.of = map[pair]*tagCounts{{Other, Other}: t.other}
}

// take returns the figures for a tag of a request of owner: those of the tag, or those of Other if its name or its owner has no share left.
func (t *tags) take(tag lmcache.Tag, owner string, now time.Time) *tagCounts {
	k := pair{string(tag.Name), string(tag.Value)}
	c := t.of[k]
	if c == nil {
		if !utf8.Valid(tag.Name) || !utf8.Valid(tag.Value) { // a label must be UTF-8
			return t.other
		}
		if !t.hasShare(k[0], owner) && !(t.sweep(now) && t.hasShare(k[0], owner)) {
			return t.other
		}
		c = &tagCounts{owner: owner}
		t.of[k] = c
		t.names.Add(k[0], fair.Amount{Count: 1})
		t.owners.Add(owner, fair.Amount{Count: 1})
	}
	c.used = now
	return c
}

func (t *tags) hasShare(name, owner string) bool {
	return t.names.MayCount(name, MaxTags) && t.owners.MayCount(owner, MaxTags)
}

// sweep adds the figures of idle tags to those of other and frees their places. It does so at most once in tagSweep: it reports false if it
// did nothing, because that time is not over.
func (t *tags) sweep(now time.Time) bool {
	if now.Sub(t.swept) < tagSweep {
		return false
	}
	t.swept = now
	for k, c := range t.of {
		if c == t.other || now.Sub(c.used) < TagIdle {
			continue
		}
		delete(t.of, k)
		t.names.Add(k[0], fair.Amount{Count: -1})
		t.owners.Add(c.owner, fair.Amount{Count: -1})
		hit := c.hit.Load()
		t.other.lookups.Add(c.lookups.Load())
		t.other.asked.Add(c.asked.Load())
		t.other.hit.Add(hit)
	}
	return true
}

// Tagged has the figures of one request's tags. It is safe for concurrent use.
type Tagged struct {
	of   []*tagCounts
	text string
}

// Tagged returns the figures of a request's tags; nil for a request without tags. owner is the user or address that sent the request.
func (t *Tally) Tagged(owner string, tags []lmcache.Tag) *Tagged {
	if len(tags) == 0 {
		return nil
	}
	out, now := &Tagged{}, time.Now()
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
		if c := t.mu.tags.take(tag, owner, now); !slices.Contains(out.of, c) { // a tag may come twice, and several may share Other
			out.of = append(out.of, c)
		}
	}
	out.text = text.String()
	return out
}

// Count adds a lookup with a search to the figures of each of its tags.
func (x *Tagged) Count(o *lookup.Outcome) {
	if x == nil {
		return
	}
	for _, c := range x.of {
		c.lookups.Add(1)
		c.asked.Add(uint64(o.AskedTokens()))
		c.hit.Add(uint64(o.HitTokens()))
	}
}

// String returns the tags as name=value, ... A client chooses this text.
func (x *Tagged) String() string {
	if x == nil {
		return ""
	}
	return x.text
}
