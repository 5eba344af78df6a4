// SPDX-License-Identifier: Apache-2.0

// Package beginning finds prompts whose beginnings change before text that repeats, such as a date before a system prompt.
//
// A prompt hits as far as it equals an earlier one from its first token on. A Finder compares a sample of the prompts whose hit ended at a
// chunk that was never stored. It hashes each window of 16 tokens after the miss, and keeps one window in 32, chosen by its hash: equal
// text gives equal anchors at any position (U. Manber, USENIX 1994). If several anchors follow each other as in an earlier prompt, but
// after other text, their text was computed again only because the text before it has changed.
//
// Only hashes are stored, computed with a secret of the process. Prompts of different models or salts are never compared.
package beginning

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// Limits on the part of a prompt that is compared. What is beyond maxTokens or maxAnchors is not compared.
const (
	window     = 16   // tokens per anchor
	anchorBits = 5    // one window in 32 is an anchor
	maxTokens  = 8192 // tokens after the miss
	maxAnchors = 512  // only text that repeats itself has more

	// Text counts as repeated if it has minAnchors in a row, over minTokens and a chunk.
	minAnchors = 4
	minTokens  = 256
)

// Limits on the cost of comparing: prompts for which the budget does not suffice are not compared. A token takes 9 to 15 ns: 0.1 ms per
// second, whatever the load.
const (
	perSecond = maxTokens     // tokens per second
	mostSaved = 8 * maxTokens // budget in tokens at the start, and its limit
)

// Memory: 1,015,808 bytes in all, allocated with the first prompt that is compared.
const (
	ways    = 4     // entries of a set
	sets    = 14336 // sets of entries: 57,344 anchors, those of about 220 long prompts
	prompts = 4096  // prompts that were compared; a new one takes the place of the oldest
)

// Finder finds such prompts. Its methods are safe for concurrent use; its mutex is a leaf.
type Finder struct {
	key    [3]uint64 // secret and odd; immutable
	began  time.Time
	ready  atomic.Int64  // when a prompt may be compared again, ns since began
	missed atomic.Uint64 // tokens that lookups missed since the last comparison
	buffer sync.Pool     // *buffer

	mu struct {
		sync.Mutex
		budget  float64       // tokens that may be compared
		at      time.Duration // when budget was last computed, since began
		number  uint32
		entries []entry  // sets of ways
		prompts []prompt // by number
		found   Found
		now     block   // the latest compared prompts, blockPrompts at most
		lost    float64 // lost tokens of the blocks before now
		counted float64 // the largest sum of lost and the lost tokens of now
		differ  uint64  // sums over Found.Changed
		same    uint64
	}
}

// block has the sums over a row of compared prompts: their lost and their missed tokens, and in stand the missed tokens of all prompts that
// they represent. The lost share is lost/missed of the whole block, because a mean of the prompts' shares would count long prompts too
// little.
type block struct{ prompts, lost, missed, stand uint64 }

const blockPrompts = 32

// of returns how many of `tokens` missed tokens are lost, if the lost share of the block holds for them.
func (b *block) of(tokens uint64) float64 {
	if b.missed == 0 {
		return 0
	}
	return float64(tokens) * float64(b.lost) / float64(b.missed)
}

// entry is a stored anchor. The zero entry has none.
type entry struct {
	tag    uint32
	before uint32 // hash of the text before and including it
	prompt uint32 // number of the newest prompt that has it
	at     uint16 // position of its last token in the compared part of that prompt
}

// prompt is a prompt that was compared.
type prompt struct {
	prefix  uint64 // hash of the text before the compared part
	missing uint64 // hash of that text and the first chunk that was compared
	from    uint32 // index of that chunk
	number  uint32
}

// anchor is an anchor of the prompt that is compared now.
type anchor struct {
	id     uint64 // hash of its window's tokens and of the namespace
	before uint32 // as in entry
	at     int    // index of its last token among the compared tokens
}

type buffer struct {
	tokens  []uint32
	anchors []anchor
}

// Found has the results since the start.
type Found struct {
	Compared      uint64 `json:"compared_prompts"` // a sample of the prompts whose next chunk was never stored
	Changed       uint64 `json:"changed_prompts"`  // of them, prompts with text that earlier prompts have after another beginning
	LostTokens    uint64 `json:"lost_tokens"`      // tokens that all prompts asked for and did not find for that reason; estimated from the sample
	DifferTokens  uint64 `json:"differ_tokens"`    // upper bound of the changed tokens before that text; mean of the changed prompts
	SameTokens    uint64 `json:"same_tokens"`      // tokens of that text; mean of the changed prompts
	UnknownTokens uint64 `json:"unknown_tokens"`   // tokens of lookups that bring only hashes: they are not compared
}

// New returns an empty Finder.
func New() *Finder {
	f := &Finder{key: [3]uint64{rand.Uint64() | 1, rand.Uint64() | 1, rand.Uint64() | 1}, began: time.Now()}
	f.mu.budget = mostSaved
	f.buffer.New = func() any { return &buffer{make([]uint32, 0, maxTokens), make([]anchor, 0, maxAnchors)} }
	return f
}

// Found returns the results since the start.
func (f *Finder) Found() Found {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := f.mu.found
	out.LostTokens = uint64(f.mu.lost + f.mu.now.of(f.mu.now.stand+f.missed.Load()))
	if out.Changed > 0 {
		out.DifferTokens, out.SameTokens = f.mu.differ/out.Changed, f.mu.same/out.Changed
	}
	return out
}

// Lost returns the largest Found.LostTokens so far, taken at each comparison. It never falls.
func (f *Finder) Lost() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return uint64(f.mu.counted)
}

// Lookup takes the outcome of a lookup. If its prompt was not compared before and its tokens are known, it may compare the prompt now.
func (f *Finder) Lookup(o *lookup.Outcome) {
	if !o.Searched || o.Why != miss.NeverStored || len(o.Others) > 0 || o.Asked <= o.Hit {
		return
	}
	missed := (o.Asked - o.Hit) * o.ChunkTokens
	if o.HashesOnly {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.mu.found.UnknownTokens += uint64(missed)
		return
	}
	f.missed.Add(uint64(missed))
	got := o.Repeated
	if got == nil {
		got = f.Compare(o.Namespace, o.Text, o.Hit, o.Asked)
	}
	if got != nil {
		f.count(got, o.Hit*o.ChunkTokens, missed)
	}
}

// count records the result of a prompt's comparison. The prompt represents all tokens that were missed since the last comparison.
func (f *Finder) count(got *lookup.Repeated, hit, missed int) {
	lost := min(max(got.Tokens-max(hit-got.At, 0), 0), missed) // tokens that hit are not lost
	since := f.missed.Swap(0)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.found.Compared++
	if f.mu.now.prompts == blockPrompts {
		f.mu.lost += f.mu.now.of(f.mu.now.stand)
		f.mu.now = block{}
	}
	f.mu.now = block{f.mu.now.prompts + 1, f.mu.now.lost + uint64(lost), f.mu.now.missed + uint64(missed), f.mu.now.stand + since}
	f.mu.counted = max(f.mu.counted, f.mu.lost+f.mu.now.of(f.mu.now.stand))
	if lost == 0 {
		return
	}
	f.mu.found.Changed++
	f.mu.differ += uint64(max(got.At-max(hit, got.From), 0))
	f.mu.same += uint64(lost)
}

// take reports whether `tokens` tokens may be compared now. It requires the budget of the longest prompt, whatever the length of this one,
// so that short prompts are not preferred.
func (f *Finder) take(tokens int) bool {
	now := time.Since(f.began)
	if now < time.Duration(f.ready.Load()) {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.budget = min(f.mu.budget+max(now-f.mu.at, 0).Seconds()*perSecond, mostSaved)
	f.mu.at = max(now, f.mu.at)
	enough := f.mu.budget >= maxTokens
	if enough {
		f.mu.budget -= float64(tokens)
	}
	if lacks := maxTokens - f.mu.budget; lacks > 0 {
		f.ready.Store(int64(now) + int64(lacks/perSecond*float64(time.Second)))
	}
	return enough
}

// Compare compares the chunks [from, to) of a prompt with earlier prompts of the same namespace `of`, and stores their anchors. It returns
// nil if the prompt is not in the sample, or its tokens are not known.
func (f *Finder) Compare(of kv.Namespace, text lookup.Text, from, to int) *lookup.Repeated {
	all := (to - from) * text.ChunkTokens()
	if all <= 0 || !f.take(min(all, maxTokens)) {
		return nil
	}
	b := f.buffer.Get().(*buffer)
	defer func() {
		clear(b.tokens[:cap(b.tokens)]) // only hashes are stored
		f.buffer.Put(b)
	}()
	b.tokens = text.Tokens(b.tokens[:0], from, min(all, maxTokens))
	hashes := text.Hashes(from + 1)
	if len(hashes) <= from || len(b.tokens) == 0 {
		return nil
	}
	p := prompt{missing: bitsOf(&hashes[from]), from: uint32(from)}
	if from > 0 {
		p.prefix = bitsOf(&hashes[from-1])
	}
	f.readAnchors(b, p.prefix, of)
	got := &lookup.Repeated{From: from * text.ChunkTokens()}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mu.entries == nil {
		f.mu.entries, f.mu.prompts = make([]entry, sets*ways), make([]prompt, prompts)
	}
	f.compareLocked(got, b, hashes, &p, all, max(minTokens, text.ChunkTokens()))
	f.keepLocked(b.anchors, &p)
	return got
}

func bitsOf(h *kv.Hash) uint64 { return binary.LittleEndian.Uint64(h[:]) }

// readAnchors fills b.anchors from b.tokens, at most maxAnchors; it cuts the tokens after the last of them. prefix is the hash of the text
// before b.tokens, and `of` the prompt's namespace. Each token shifts the sum of the tokens before it by 4 bits, so the sum covers the last
// 16 tokens.
func (f *Finder) readAnchors(b *buffer, prefix uint64, of kv.Namespace) {
	b.anchors = b.anchors[:0]
	spread, pick, chain := f.key[0], f.key[1], f.key[2]
	space := (binary.LittleEndian.Uint64(of[:]) ^ pick) * chain // anchors of different namespaces differ
	sum, before, last := uint64(0), prefix^spread, uint64(0)
	for i, t := range b.tokens {
		x := (uint64(t) + 1) * spread
		x ^= x >> 32
		sum = sum<<(64/window) + x
		before = (before ^ x) * chain
		h := sum * pick
		if h>>(64-anchorBits) != 0 || i < window-1 || h == last {
			continue
		}
		if len(b.anchors) == maxAnchors {
			b.tokens = b.tokens[:i]
			return
		}
		last = h
		b.anchors = append(b.anchors, anchor{mix(h ^ space), uint32(before >> 32), i})
	}
}

// mix spreads the bits of a number over all bits (D. Stafford's variant 13 of MurmurHash3's end).
func mix(v uint64) uint64 {
	v = (v ^ v>>30) * 0xbf58476d1ce4e5b9
	v = (v ^ v>>27) * 0x94d049bb133111eb
	return v ^ v>>31
}

// setOf returns the set of entries in which an anchor is stored.
func (f *Finder) setOf(id uint64) []entry {
	set, _ := bits.Mul64(id, sets)
	return f.mu.entries[set*ways : (set+1)*ways]
}

// run is a row of anchors that another prompt has in the same order.
type run struct {
	of       *prompt // the other prompt; nil: there is no run
	anchors  int
	from, to int    // the text that the anchors cover, as indices of the compared tokens
	at       uint16 // entry.at of the last anchor
}

// compareLocked finds text of a prompt that earlier prompts have after another beginning, and adds it to got. hashes are those of the
// prompt's chunks. `all` is how many tokens after the miss the prompt asked for. Text of fewer than `least` tokens does not count.
func (f *Finder) compareLocked(got *lookup.Repeated, b *buffer, hashes []kv.Hash, p *prompt, all, least int) {
	var r run
	end := func(last bool) {
		if r.of == nil || r.anchors < minAnchors || r.to-r.from < least {
			return
		}
		other := r.from - got.Tokens // tokens before the run that do not repeat
		if r.of.prefix != p.prefix { // the other prompt differs already in the part that hit here
			other += got.From
		}
		if r.to-r.from < other { // a closing text, or a part that many prompts have somewhere
			return
		}
		if got.Tokens == 0 {
			got.At = got.From + r.from
		}
		// At each end the text is longer, on average by the distance of two anchors.
		got.Tokens += r.to - r.from + min(1<<anchorBits, r.from)
		if last && len(b.tokens) < all { // the text continues after the compared tokens
			got.Tokens += all - r.to
		} else {
			got.Tokens += min(1<<anchorBits, len(b.tokens)-r.to)
		}
	}
	for i := range b.anchors {
		a := &b.anchors[i]
		e, of := f.elsewhereLocked(a, hashes)
		if of != nil && of == r.of && e.at > r.at {
			r.anchors, r.to, r.at = r.anchors+1, a.at+1, e.at
			continue
		}
		end(false)
		r = run{}
		if of != nil {
			r = run{of, 1, a.at + 1 - window, a.at + 1, e.at}
		}
	}
	end(true)
}

// elsewhereLocked returns the entry of an anchor, and the entry's prompt if that has the anchor after another beginning; else nil.
func (f *Finder) elsewhereLocked(a *anchor, hashes []kv.Hash) (*entry, *prompt) {
	set := f.setOf(a.id)
	for i := range set {
		e := &set[i]
		if e.prompt == 0 || e.tag != uint32(a.id) {
			continue
		}
		of := &f.mu.prompts[e.prompt%prompts]
		begins := int(of.from) >= len(hashes) || bitsOf(&hashes[of.from]) == of.missing // both begin the same up to there, or that is not known
		if of.number != e.prompt || e.before == a.before || begins {
			return e, nil
		}
		return e, of
	}
	return nil, nil
}

// keepLocked stores the anchors of a prompt, in place of the oldest ones.
func (f *Finder) keepLocked(anchors []anchor, p *prompt) {
	if f.mu.number++; f.mu.number == 0 { // 0 means no prompt
		f.mu.number = 1
	}
	p.number = f.mu.number
	f.mu.prompts[p.number%prompts] = *p
	for i := range anchors {
		a := &anchors[i]
		set := f.setOf(a.id)
		at := 0
		for k := range set {
			if set[k].prompt != 0 && set[k].tag == uint32(a.id) {
				at = k
				break
			}
			if set[k].prompt < set[at].prompt {
				at = k
			}
		}
		if set[at].prompt != p.number || set[at].tag != uint32(a.id) { // of several equal anchors in one prompt the first stays
			set[at] = entry{uint32(a.id), a.before, p.number, uint16(a.at)}
		}
	}
}
