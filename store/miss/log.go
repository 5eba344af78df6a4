// SPDX-License-Identifier: Apache-2.0

package miss

import (
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

// Ended is a lookup whose hit ended before its prompt, and why. A Log cuts texts: ids and salts to 128 bytes, other texts to 64.
type Ended struct {
	At      time.Time
	Request string
	Model   string
	Salt    string
	Asked   int // tokens
	Hit     int // tokens
	Why     Reason
	Missing kv.Key // the object at which the hit ended; zero if none was searched for
	Shard   int    // shard of that object
	Tier    string // the tier that caused it, if that is known
	Detail  string // why the lookup was declined
	Tags    string // tags of its request

	GoneAt              time.Time // when an object that was there before was dropped; zero: not known
	GoneBy              string    // the user or address that got its room
	GoneModel, GoneSalt string    // model and salt for which the room was needed

	OtherModel, OtherSalt string // another model and salt that have the chunk
	OtherWorld            int
}

// MaxEnded is how many lookups a Log remembers. A new one then takes the place of the oldest.
const MaxEnded = 4096

// Log remembers the last lookups that ended before their prompts. Its memory is MaxEnded records of a fixed size, allocated page by page as
// lookups come; Add allocates nothing else. Its methods are safe for concurrent use; its mutex is a leaf. The zero Log is empty.
type Log struct {
	mu struct {
		sync.Mutex
		ids   [MaxEnded]uint64 // hashes of the request ids
		pages [MaxEnded / logPage]*[logPage]record
		added uint64
	}
}

const logPage = 64

var seed = maphash.MakeSeed()

// text is a text of n bytes at most.
type (
	short struct {
		n uint8
		b [64]byte
	}
	long struct {
		n uint8
		b [128]byte
	}
)

func (t *short) set(s string)   { t.n = uint8(copy(t.b[:], s)) }
func (t *short) String() string { return string(t.b[:t.n]) }
func (t *long) set(s string)    { t.n = uint8(copy(t.b[:], s)) }
func (t *long) String() string  { return string(t.b[:t.n]) }

// record is an Ended without pointers.
type record struct {
	at, goneAt                  int64 // Unix, ns; 0: not known
	asked, hit, shard           int32
	otherWorld                  int32
	why                         Reason
	missing                     kv.Key
	request, detail             long
	salt, goneSalt, otherSalt   long
	model, goneModel, otherName short
	tier, goneBy, tags          short
}

// Add adds a lookup; in a full Log it replaces the oldest.
func (l *Log) Add(e *Ended) {
	id := maphash.String(seed, e.Request)
	l.mu.Lock()
	defer l.mu.Unlock()
	i := l.mu.added % MaxEnded
	l.mu.added++
	l.mu.ids[i] = id
	page := &l.mu.pages[i/logPage]
	if *page == nil {
		*page = new([logPage]record)
	}
	r := &(*page)[i%logPage]
	r.at, r.goneAt = e.At.UnixNano(), 0
	if !e.GoneAt.IsZero() {
		r.goneAt = e.GoneAt.UnixNano()
	}
	r.asked, r.hit, r.shard, r.otherWorld = int32(e.Asked), int32(e.Hit), int32(e.Shard), int32(e.OtherWorld)
	r.why, r.missing = e.Why, e.Missing
	r.request.set(e.Request)
	r.detail.set(e.Detail)
	r.tags.set(e.Tags)
	r.model.set(e.Model)
	r.salt.set(e.Salt)
	r.tier.set(e.Tier)
	r.goneBy.set(e.GoneBy)
	r.goneModel.set(e.GoneModel)
	r.goneSalt.set(e.GoneSalt)
	r.otherName.set(e.OtherModel)
	r.otherSalt.set(e.OtherSalt)
}

// Of returns the lookups of a request id, the newest first, `most` at most. Engines count their requests from 0, so several requests may
// have the same id.
func (l *Log) Of(request string, most int) []Ended {
	id := maphash.String(seed, request)
	return l.latest(most, func(of uint64) bool { return of == id })
}

// Last returns the last lookups, the newest first, `most` at most.
func (l *Log) Last(most int) []Ended {
	return l.latest(most, func(uint64) bool { return true })
}

func (l *Log) latest(most int, want func(id uint64) bool) []Ended {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := []Ended{}
	for n := range min(l.mu.added, MaxEnded) {
		i := (l.mu.added - 1 - n) % MaxEnded
		if len(out) >= most {
			break
		}
		if want(l.mu.ids[i]) {
			out = append(out, l.mu.pages[i/logPage][i%logPage].ended())
		}
	}
	return out
}

// Len returns how many lookups are remembered.
func (l *Log) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return int(min(l.mu.added, MaxEnded))
}

func (r *record) ended() Ended {
	e := Ended{
		At: time.Unix(0, r.at), Request: r.request.String(), Model: r.model.String(), Salt: r.salt.String(),
		Asked: int(r.asked), Hit: int(r.hit), Why: r.why, Missing: r.missing, Shard: int(r.shard), Tier: r.tier.String(), Detail: r.detail.String(), Tags: r.tags.String(),
		GoneBy: r.goneBy.String(), GoneModel: r.goneModel.String(), GoneSalt: r.goneSalt.String(),
		OtherModel: r.otherName.String(), OtherSalt: r.otherSalt.String(), OtherWorld: int(r.otherWorld),
	}
	if r.goneAt != 0 {
		e.GoneAt = time.Unix(0, r.goneAt)
	}
	return e
}
