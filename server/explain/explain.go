// SPDX-License-Identifier: Apache-2.0

// Package explain explains why the hits of lookups ended where they did. A Book counts all lookups by reason, and remembers the last ones
// that found less than they asked for.
package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// timeFormat is RFC 3339 with milliseconds.
const timeFormat = "2006-01-02T15:04:05.000Z07:00"

// Explanation explains why the hits of lookups ended where they did: the answer to GET /explain.
type Explanation struct {
	Kept    int               `json:"kept"`    // number of lookups that are remembered, miss.MaxEnded at most
	Reasons map[string]uint64 `json:"reasons"` // number of lookups since the start by the label of the reason; only reasons that occurred
	Lookups []Lookup          `json:"lookups"` // the newest first
	Advice  map[string]Advice `json:"advice"`  // by the label of each reason in Lookups

	Requests []Timeline `json:"requests"` // the newest first: the last MaxTimelines requests, also those that found everything
}

// Advice says what a reason means, and what to do about it.
type Advice struct {
	What string `json:"what"`
	Do   string `json:"do"`
}

// Book remembers lookups. Its methods are safe for concurrent use.
type Book struct {
	names  *tier.Names // model and salt of each namespace
	counts [miss.NumReasons]atomic.Uint64
	lost   [miss.NumReasons]atomic.Uint64 // tokens that lookups asked for and did not find
	log    miss.Log
	lines  timelines
}

// Took records an operation of a request, from began to ended. It ignores an operation without a request id.
func (b *Book) Took(operation string, request []byte, began, ended time.Time) {
	if len(request) > 0 {
		b.lines.took(operation, request, began, ended)
	}
}

// Requests returns the timelines of the last requests, the newest first, `most` at most.
func (b *Book) Requests(most int) []Timeline { return b.lines.last("", most) }

// New returns an empty Book. names has the model and salt of each namespace.
func New(names *tier.Names) *Book {
	return &Book{names: names}
}

// Count returns how many lookups ended for a reason.
func (b *Book) Count(why miss.Reason) uint64 { return b.counts[why].Load() }

// LostTokens returns how many tokens lookups asked for and did not find, for a reason.
func (b *Book) LostTokens(why miss.Reason) uint64 { return b.lost[why].Load() }

// Lookup is one lookup that found less than it asked for.
type Lookup struct {
	At          string     `json:"at"` // RFC 3339
	Request     string     `json:"request_id"`
	Model       string     `json:"model_name"`
	Salt        string     `json:"cache_salt"`
	AskedTokens int        `json:"asked_tokens"`
	HitTokens   int        `json:"hit_tokens"`
	Reason      string     `json:"reason"` // label of the reason
	Text        string     `json:"text"`   // the reason in words
	Chunk       string     `json:"chunk_hash,omitempty"`
	Shard       int        `json:"shard"`
	Group       int        `json:"object_group"`
	Tier        string     `json:"tier,omitempty"`
	Tags        string     `json:"tags,omitempty"` // tags of the request: name=value, …
	Gone        *GoneChunk `json:"gone,omitempty"`
	Other       *OtherName `json:"other,omitempty"`
}

// GoneChunk says how the chunk that ended a hit was lost.
type GoneChunk struct {
	At      string  `json:"at"`
	Before  float64 `json:"seconds_before"` // seconds before the lookup
	By      string  `json:"by,omitempty"`   // the user or address that needed its room
	ByModel string  `json:"by_model,omitempty"`
	BySalt  string  `json:"by_salt,omitempty"`
}

// OtherName is another name under which the missing chunk is stored.
type OtherName struct {
	Model     string `json:"model_name"`
	Salt      string `json:"cache_salt"`
	WorldSize int    `json:"world_size"`
}

// resolve returns the request id that a client's id means: the id itself if it is known, else the only known one that begins with it and a
// dash. Engines add a dash and a number for each prompt of a request.
func (b *Book) resolve(request string) string {
	if request == "" || len(b.log.Of(request, 1)) > 0 || len(b.lines.last(request, 1)) > 0 {
		return request
	}
	found := ""
	for _, id := range b.ids() {
		if !strings.HasPrefix(id, request+"-") || id == found {
			continue
		}
		if found != "" {
			return request // more than one matches
		}
		found = id
	}
	return cmp.Or(found, request)
}

// ids returns the request ids that are remembered.
func (b *Book) ids() (out []string) {
	for _, e := range b.log.Last(b.log.Len()) {
		out = append(out, e.Request)
	}
	for _, l := range b.lines.last("", MaxTimelines) {
		out = append(out, l.Request)
	}
	return out
}

// ExplainTo is Explain for a reader who may see only some salts. It reveals nothing of lookups under other salts, nor whether a chunk is
// stored under another salt, nor for whom a chunk was evicted.
func (b *Book) ExplainTo(request string, most int, allows func(salt string) bool) Explanation {
	out := Explanation{Reasons: map[string]uint64{}, Lookups: []Lookup{}, Advice: map[string]Advice{}, Requests: []Timeline{}}
	request = b.resolve(request)
	list := b.log.Last(b.log.Len())
	if request != "" {
		list = b.log.Of(request, b.log.Len())
	}
	for _, e := range list {
		if len(out.Lookups) == most {
			break
		}
		if e.Why == miss.Unsigned || e.Why == miss.ForeignTenant || !allows(e.Salt) { // the tenant of lookups with the first two reasons is not known
			continue
		}
		if e.OtherWorld > 0 && !allows(e.OtherSalt) {
			e.Why, e.OtherWorld, e.OtherModel, e.OtherSalt = miss.NeverStored, 0, "", ""
		}
		if !allows(e.GoneSalt) {
			e.GoneBy, e.GoneModel, e.GoneSalt = "", "", ""
		}
		l := explained(&e)
		out.Lookups = append(out.Lookups, l)
		out.Advice[l.Reason] = Advice{What: e.Why.String(), Do: Do(e.Why.String())}
	}
	out.Kept = len(out.Lookups)
	for _, l := range b.lines.last(request, MaxTimelines) {
		if l.Model != "" && allows(l.Salt) && len(out.Requests) < most { // without a model there was no lookup, and the salt is not known
			out.Requests = append(out.Requests, l)
		}
	}
	return out
}

// Explain returns why the last lookups of a request id found no more, or those of all requests if the id is empty; `most` lookups at most.
// An unknown id stands for the only known one that begins with it and a dash. advise returns the advice for a reason.
func (b *Book) Explain(request string, most int, advise func(miss.Reason) string) Explanation {
	out := Explanation{Kept: b.log.Len(), Reasons: map[string]uint64{}, Lookups: []Lookup{}, Advice: map[string]Advice{}}
	for i := range b.counts {
		if n := b.counts[i].Load(); n > 0 {
			out.Reasons[miss.Reason(i).Label()] = n
		}
	}
	request = b.resolve(request)
	list := b.log.Last
	if request != "" {
		list = func(most int) []miss.Ended { return b.log.Of(request, most) }
	}
	for _, e := range list(most) {
		l := explained(&e)
		out.Lookups = append(out.Lookups, l)
		if _, ok := out.Advice[l.Reason]; !ok {
			out.Advice[l.Reason] = Advice{What: e.Why.String(), Do: advise(e.Why)}
		}
	}
	out.Requests = b.lines.last(request, most)
	return out
}

func explained(e *miss.Ended) Lookup {
	l := Lookup{
		At: e.At.UTC().Format(timeFormat), Request: e.Request, Model: e.Model, Salt: e.Salt, AskedTokens: e.Asked, HitTokens: e.Hit,
		Reason: e.Why.Label(), Shard: e.Shard, Group: int(e.Missing.Group), Tier: e.Tier, Tags: e.Tags,
	}
	if e.Missing.Chunk != (kv.Hash{}) {
		l.Chunk = e.Missing.Chunk.String()
	}
	if !e.GoneAt.IsZero() {
		l.Gone = &GoneChunk{At: e.GoneAt.UTC().Format(timeFormat), Before: e.At.Sub(e.GoneAt).Seconds(), By: e.GoneBy, ByModel: e.GoneModel, BySalt: e.GoneSalt}
	}
	if e.OtherWorld > 0 {
		l.Other = &OtherName{e.OtherModel, e.OtherSalt, e.OtherWorld}
	}
	l.Text = sentence(e)
	return l
}

// sentence describes a lookup in words.
func sentence(e *miss.Ended) string {
	var b strings.Builder
	switch e.Why {
	case miss.Short:
		fmt.Fprintf(&b, "the prompt was shorter than a chunk: %s", e.Detail)
	case miss.Unregistered, miss.Declined:
		fmt.Fprintf(&b, "the lookup was declined: %s", e.Detail)
	case miss.SkipLoad, miss.Unsigned, miss.ForeignTenant:
		b.WriteString(e.Why.String())
	default:
		fmt.Fprintf(&b, "%d of %d tokens hit; the next chunk: %s", e.Hit, e.Asked, e.Why)
	}
	if e.Why == miss.Window || e.Missing.Group > 0 {
		fmt.Fprintf(&b, " (object group %d)", e.Missing.Group)
	}
	if e.Tier != "" {
		fmt.Fprintf(&b, " (tier %s)", e.Tier)
	}
	if !e.GoneAt.IsZero() {
		fmt.Fprintf(&b, ", %s before", e.At.Sub(e.GoneAt).Round(time.Millisecond))
	}
	if e.GoneBy != "" {
		fmt.Fprintf(&b, ", to make room for %s", e.GoneBy)
		if e.GoneModel != "" {
			fmt.Fprintf(&b, ", model %s%s", e.GoneModel, withSalt(e.GoneSalt))
		}
	}
	if e.OtherWorld > 0 {
		fmt.Fprintf(&b, ": it is there of model %q, world size %d%s", e.OtherModel, e.OtherWorld, withSalt(e.OtherSalt))
	}
	if e.Shard > 0 {
		fmt.Fprintf(&b, "; missing in shard %d", e.Shard)
	}
	return safelog.Text(b.String(), 1024)
}

func withSalt(salt string) string {
	if salt == "" {
		return ", no salt"
	}
	return fmt.Sprintf(", salt %q", salt)
}

// Lookup records the outcome of a lookup. If the lookup found less than it asked for, it counts the reason and remembers the lookup.
// Otherwise it only records the timeline.
func (b *Book) Lookup(o *lookup.Outcome) {
	if o.Searched {
		b.lines.recordLookup(o)
	}
	if o.Why == miss.None {
		return
	}
	e := miss.Ended{
		At: time.Now(), Request: string(o.Request), Model: string(o.Model), Salt: string(o.Salt), Asked: o.AskedTokens(), Hit: o.HitTokens(),
		Why: o.Why, Detail: o.Detail, Missing: o.Missing, Shard: o.Shard, Tier: o.Tier, GoneAt: o.Gone.At, GoneBy: o.Gone.By,
	}
	if tags, ok := o.Note.(fmt.Stringer); ok {
		e.Tags = tags.String()
	}
	if o.Gone.By != "" {
		n, _ := b.names.Of(o.Gone.For)
		e.GoneModel, e.GoneSalt = n.Model, n.Salt
	}
	if o.Why == miss.NeverStored {
		b.elsewhere(&e, o.Others)
	}
	b.counts[e.Why].Add(1)
	b.lost[e.Why].Add(uint64(max(e.Asked-e.Hit, 0)))
	b.log.Add(&e)
}

// elsewhere sets, in e, the name that is nearest to the lookup's own among those under which the missing chunk is stored.
func (b *Book) elsewhere(e *miss.Ended, others []kv.Key) {
	best := len(nearness)
	for i := range others {
		o := &others[i]
		name, known := b.names.Of(o.Namespace)
		why := differs(e, o, name, known)
		if near := slices.Index(nearness, why); near < best {
			best = near
			e.Why, e.OtherModel, e.OtherSalt, e.OtherWorld = why, name.Model, name.Salt, int(o.Rank>>24)
		}
	}
}

// nearness orders the differences between two names, the smallest first.
var nearness = []miss.Reason{miss.OtherRank, miss.OtherLayout, miss.OtherSalt, miss.OtherModel, miss.OtherName}

func differs(e *miss.Ended, o *kv.Key, of tier.Name, known bool) miss.Reason {
	switch {
	case o.Namespace == e.Missing.Namespace:
		return miss.OtherRank
	case !known:
		return miss.OtherName
	case of.Model != e.Model:
		return miss.OtherModel
	case of.Salt != e.Salt:
		return miss.OtherSalt
	case o.Rank>>24 != e.Missing.Rank>>24:
		return miss.OtherRank
	}
	return miss.OtherLayout
}

// Do returns what to do about a reason, given its text; empty if that depends on more than the reason.
func Do(why string) string { return advice[why] }

var advice = map[string]string{
	miss.SkipLoad.String(): "nothing: the request says that all of its prompt is to be computed",
	miss.Window.String(): "the window or state at that place was not stored, or was dropped because no hit of its own prompt could load it: prompts hit where an earlier one " +
		"ended, or had a whole window. See docs/how/hybrid-hits.md",
	miss.OtherSalt.String():     "normal where tenants are to be kept apart; else send both prompts with one cache_salt, or none",
	miss.OtherModel.String():    "KV of one model is of no use to another. Where both are the same, give engines one --served-model-name, or one path",
	miss.OtherRank.String():     "KV is kept for each rank of one world size: engines share it where their parallel sizes are equal. Of equal ones, a worker has not stored its part: see the workers in kvasir status",
	miss.OtherLayout.String():   "engines share KV where number format, block size, heads and layers are equal: compare their flags (--dtype, --kv-cache-dtype, --block-size). A vLLM and a SGLang share KV of MLA alone",
	miss.OtherName.String():     "it was stored before this server started, and no request has named its model and salt since: it may be of another model, salt or layout",
	miss.Short.String():         "only whole chunks are stored and found: longer prompts, or a smaller --chunk-size",
	miss.Unregistered.String():  "normal while an engine starts. Else the engine's scheduler and its workers use different model names: compare them with the engine's --model",
	miss.Declined.String():      "the reason stands beside the lookup",
	miss.SkipLoad.String():      "normal where a request sets lmcache.skip_load in its request_configs",
	miss.Unsigned.String():      "with --require-signed-salts requests must come through a proxy with the same --salt-secret-file: engines that clients reach, and SGLang, whose client hashes salts, find and store nothing",
	miss.ForeignTenant.String(): "a line of --tenant-file limits the listener, the user, the key or the token of the engine to other tenants than the request's: send it to its own engine, or add its tenant to the line",
	miss.Cleared.String():       "the cache was cleared, by POST /cache/clear or by an engine; it fills again",
	miss.Expired.String():       "it was unused for its time to live: --ttl-seconds, or the tenant's own (kvasir quota list shows them)",
	miss.RequestTTL.String():    "the request that stored it gave it that time with lmcache.ttl in its request_configs: a longer one, if such prompts come again",
	miss.Failed.String():        "a worker began to store them and did not end: it was slow, or its engine ended; see the workers above",
	miss.BeingStored.String():   "harmless: the same prompt was asked for again before it was stored",
	miss.Busy.String():          "too many transfers were in progress; see --session-ttl-seconds and whether engines stall",
	miss.Unsummed.String():      "normal after a kill; an orderly stop computes the checksums. --trust-unsummed serves such chunks unchecked",
	miss.Corrupt.String():       "something else wrote into the pool, or memory is faulty: find out which before you trust the machine",
	miss.NotCompared.String():   "normal in the first seconds after a restart: chunks are compared with their checksums before they are served",
}
