// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/server/lookup"
)

// Limits of the remembered requests: MaxTimelines of them, each with MaxSpans spans, take less than 1.5 MiB, allocated as they come. A new
// request takes the place of the oldest, further spans of a request are only counted, and longer ids and names are cut.
const (
	MaxTimelines = 1024
	MaxSpans     = 24
	maxRequestID = 128 // bytes
	maxModelName = 64
)

// Timeline is the operations of one engine request at this server, and how long each took.
type Timeline struct {
	Request     string `json:"request_id"`
	Model       string `json:"model_name"` // of its last lookup, as the next four fields
	Salt        string `json:"cache_salt"`
	AskedTokens int    `json:"asked_tokens"`
	HitTokens   int    `json:"hit_tokens"`
	BelowTokens int    `json:"below_tokens"` // of the hit tokens, those that were read from a tier below the pool for it
	Began       string `json:"at"`           // RFC 3339
	Spans       []Span `json:"spans"`        // in the order in which they ended
	More        int    `json:"more"`         // number of operations beyond MaxSpans, which are not listed
}

// Span is an operation, or several of the same kind one after the other.
type Span struct {
	Operation string  `json:"operation"` // LMCache's name, or WaitSpan
	FromMS    float64 `json:"from_ms"`   // since the request began
	MS        float64 `json:"ms"`        // until the end of the last one
	Count     int     `json:"count"`
}

// WaitSpan is the operation for the time between a lookup and its result, if it was pending: tiers were read, or chunks were compared with
// their checksums. It ends when the engine got the result.
const WaitSpan = "wait"

type span struct {
	operation string
	from, to  time.Duration // since the line's began
	count     int32
}

// line is the timeline of one request.
type line struct {
	id, model, salt   string
	asked, hit, below int
	began             time.Time
	ended             bool
	spans             []span
	more              int
}

// timelines remembers requests. The zero value is empty; methods are safe for concurrent use, the mutex is a leaf.
type timelines struct {
	mu   sync.Mutex
	of   map[string]*line
	ring []*line // once it is full, the oldest is at next
	next int

	latest      *line  // the line of the last call: the next call is mostly of the same request
	model, salt string // of the last lookup
}

// lookupName and endName are names of operations. A lookup after the end of a session begins another request with the same id. Workers may
// still store for the first one then.
const lookupName, endName = "lookup", "end_session"

// lineLocked returns the line of a request. It makes a new one if there is none, or if the request has ended and this is a lookup.
func (t *timelines) lineLocked(request []byte, began time.Time, lookup bool) *line {
	request = request[:min(len(request), maxRequestID)]
	l := t.latest
	if l == nil || l.id != string(request) {
		l = t.of[string(request)]
	}
	t.latest = l
	if l != nil && !(lookup && l.ended) {
		return l
	}
	if l != nil {
		*l = line{id: l.id, began: began, spans: l.spans[:0]}
		return l
	}
	if t.of == nil {
		t.of = make(map[string]*line)
	}
	if len(t.ring) < MaxTimelines {
		l = new(line)
		t.ring = append(t.ring, l)
	} else {
		l = t.ring[t.next]
		t.next = (t.next + 1) % MaxTimelines
		delete(t.of, l.id)
	}
	*l = line{id: string(request), began: began, spans: l.spans[:0]}
	t.of[l.id], t.latest = l, l
	return l
}

// took records an operation of a request.
func (t *timelines) took(operation string, request []byte, began, ended time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lineLocked(request, began, operation == lookupName)
	l.ended = l.ended || operation == endName
	l.add(operation, began, ended)
}

func (l *line) add(operation string, from, to time.Time) {
	s := span{operation, from.Sub(l.began), to.Sub(l.began), 1}
	if n := len(l.spans); n > 0 && l.more == 0 && l.spans[n-1].operation == operation {
		l.spans[n-1].to = s.to
		l.spans[n-1].count++
		return
	}
	if len(l.spans) == MaxSpans {
		l.more++
		return
	}
	if n := len(l.spans); n == cap(l.spans) {
		l.spans = append(make([]span, 0, min(n+8, MaxSpans)), l.spans...) // append would double it
	}
	l.spans = append(l.spans, s)
}

// recordLookup records the result of a lookup.
func (t *timelines) recordLookup(o *lookup.Outcome) {
	now := time.Now()
	model, salt := o.Model[:min(len(o.Model), maxModelName)], o.Salt[:min(len(o.Salt), maxRequestID)]
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lineLocked(o.Request, now, true)
	if t.model != string(model) {
		t.model = string(model)
	}
	if t.salt != string(salt) {
		t.salt = string(salt)
	}
	l.model, l.salt = t.model, t.salt // most lookups have the same names as the one before
	l.asked, l.hit, l.below = o.AskedTokens(), o.HitTokens(), o.BelowTokens()
	if o.Waited {
		from := l.began
		for i := range l.spans { // since the last lookup was acknowledged
			if l.spans[i].operation == lookupName {
				from = l.began.Add(l.spans[i].to)
			}
		}
		l.add(WaitSpan, from, now)
	}
}

// last returns the newest timelines, `most` at most; only those of a request if request is not empty.
func (t *timelines) last(request string, most int) []Timeline {
	out := []Timeline{}
	t.mu.Lock()
	defer t.mu.Unlock()
	if request != "" {
		if l := t.of[request[:min(len(request), maxRequestID)]]; l != nil {
			out = append(out, l.timeline())
		}
		return out
	}
	for i := range min(most, len(t.ring)) {
		out = append(out, t.ring[(t.next+len(t.ring)-1-i)%len(t.ring)].timeline())
	}
	return out
}

func (l *line) timeline() Timeline {
	first := time.Duration(0) // a lookup has its result before it is answered
	for _, s := range l.spans {
		first = min(first, s.from)
	}
	out := Timeline{
		Request: l.id, Model: l.model, Salt: l.salt, AskedTokens: l.asked, HitTokens: l.hit, BelowTokens: l.below,
		Began: l.began.Add(first).UTC().Format(timeFormat), Spans: make([]Span, 0, len(l.spans)), More: l.more,
	}
	for _, s := range l.spans {
		out.Spans = append(out.Spans, Span{s.operation, millis(s.from - first), millis(s.to - s.from), int(s.count)})
	}
	return out
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
