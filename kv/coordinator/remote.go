// SPDX-License-Identifier: Apache-2.0

package coordinator

// Probe is one key of a remote store.
type Probe struct {
	Group int
	Unit  int // the last hash unit the key covers

	// Block is the block that the key stands for (AppendKey), or -1 for a block
	// that is filled only up to Unit (AppendUnitKey).
	Block int
}

// Querier asks a remote store. An implementation serves one request and knows the request's
// deadline. It must not keep the slices.
type Querier interface {
	// Exists sets present[i] to whether probes[i] is in the store. The caller passes
	// present all false.
	Exists(probes []Probe, present []bool) error
}

// RemoteOptions configures a Remote. A zero field means its default.
type RemoteOptions struct {
	// Batch is the most keys per question; default 256.
	Batch int

	// PrefixShaped promises that the store has of a full-attention group only the first blocks of a prompt, as a store does that evicts
	// from the end. A lookup then needs only a few probes. If the promise is broken, the hit may be too long, and a load finds a block
	// missing.
	PrefixShaped bool
}

// remoteBlocks bounds the blocks of one prompt that a Remote remembers, per spec. Blocks beyond it count as absent. 4 Mi blocks of 16
// tokens are 64 Mi tokens.
const remoteBlocks = 1 << 22

// Remote is a Presence over a store that answers in batches. It asks for each
// key at most once, and for a window's tail only where a window could end. When it searches
// for a window, it skips along the prompt by whole windows. A lookup over it takes:
//
//   - full attention: batches that grow from 16 keys to Batch, up to the first
//     absent block; if PrefixShaped, 1 + log(blocks) / log(64) batches;
//   - a window at the full groups' hit: one batch of its length;
//   - Mamba: batches that grow from 4 keys, from the right.
//
// After an error every block that is not yet known counts as absent, so a broken store
// gives a shorter hit. A Remote serves one lookup at a time.
type Remote struct {
	c   *Coordinator
	q   Querier
	opt RemoteOptions

	seen    []sighting // [set*2]; [set*2+1] for fine series
	probes  []Probe
	present []bool
	at      []int // positions of the batch that is being made

	err            error
	batches, asked int
}

// sighting is the known state of one series.
type sighting struct{ known, held words }

// NewRemote returns a Remote without a store; Reset gives it one.
func NewRemote(c *Coordinator, o RemoteOptions) *Remote {
	if o.Batch <= 0 {
		o.Batch = 256
	}
	return &Remote{c: c, opt: o, seen: make([]sighting, 2*len(c.sets))}
}

// Reset forgets the last prompt, and makes q the store to ask. It keeps the allocated memory.
func (r *Remote) Reset(q Querier) {
	r.q, r.err, r.batches, r.asked = q, nil, 0, 0
	for i := range r.seen {
		s := &r.seen[i]
		clear(s.known)
		clear(s.held)
		s.known, s.held = s.known[:0], s.held[:0]
	}
}

// Err returns the error after which the Remote stopped to ask its store, or nil.
func (r *Remote) Err() error { return r.err }

// Asked returns the number of batches and of keys since Reset.
func (r *Remote) Asked() (batches, keys int) { return r.batches, r.asked }

func (r *Remote) sighting(s *Series) *sighting {
	i := s.Set * 2
	if s.Fine {
		i++
	}
	return &r.seen[i]
}

func (s *sighting) unknown(i int) bool { return !s.known.has(i) }

// lastAbsent returns the last position of [lo, hi) known to be absent, or lo-1.
func (s *sighting) lastAbsent(lo, hi int) int {
	for hi > lo {
		i := s.known.last(lo, hi, 0)
		if i < lo || !s.held.has(i) {
			return i
		}
		hi = i
	}
	return lo - 1
}

// addProbe adds a position to the batch being made, if it is not known.
func (r *Remote) addProbe(s *Series, i int) {
	if r.sighting(s).unknown(i) {
		r.at = append(r.at, i)
	}
}

// batchPositions returns how many positions fit one batch, at least one.
func (r *Remote) batchPositions(s *Series) int { return max(r.opt.Batch/len(s.Groups), 1) }

// ask asks the store for the positions in r.at, and leaves them there for the
// caller. It reports false after an error.
func (r *Remote) ask(s *Series) bool {
	seen := r.sighting(s)
	for _, i := range r.at {
		seen.known, seen.held = seen.known.set(i), seen.held.set(i) // present until one group lacks it
		for _, g := range s.Groups {
			p := Probe{Group: g, Unit: (i+1)*s.Units - 1, Block: i}
			if s.Fine {
				p.Block = -1
				if k := r.c.sets[s.Set].units; (i+1)%k == 0 {
					p.Block = i / k
				}
			}
			if r.probes = append(r.probes, p); len(r.probes) == r.opt.Batch && !r.flush(s) {
				break
			}
		}
	}
	return r.flush(s)
}

// flush sends the collected probes as one batch. It returns false after an error, now or earlier: the probed positions then count as absent.
func (r *Remote) flush(s *Series) bool {
	defer func() { r.probes = r.probes[:0] }()
	if len(r.probes) == 0 {
		return r.err == nil
	}
	r.present = grow(r.present[:0], len(r.probes))
	if r.err == nil {
		r.batches++
		r.asked += len(r.probes)
		r.err = r.q.Exists(r.probes, r.present)
	}
	seen := r.sighting(s)
	for j, p := range r.probes {
		if r.err != nil || !r.present[j] {
			seen.held.clear((p.Unit+1)/s.Units - 1)
		}
	}
	return r.err == nil
}

// Prefix implements Presence.
func (r *Remote) Prefix(s Series, lo, hi int) int {
	hi = min(hi, remoteBlocks)
	if r.opt.PrefixShaped && lo == 0 {
		return r.gallop(&s, hi)
	}
	seen := r.sighting(&s)
	for batch := 16; lo < hi; {
		batch = min(batch, r.batchPositions(&s))
		end := min(hi, lo+batch)
		batch *= 4
		r.at = r.at[:0]
		for i := lo; i < end; i++ {
			r.addProbe(&s, i)
		}
		ok := r.ask(&s)
		if lo = seen.held.firstZero(lo, end); lo < end || !ok {
			return lo
		}
	}
	return hi
}

// gallop finds the end of a prefix in [0, hi]. It first asks for positions at doubling distances and for the last position, then for evenly
// spaced positions between two of them.
func (r *Remote) gallop(s *Series, hi int) int {
	const fan = 64
	seen := r.sighting(s)
	lo := 0 // blocks below lo are present
	for round := 0; lo < hi; round++ {
		r.at = r.at[:0]
		if round == 0 {
			for d := 1; lo+d < hi; d *= 2 {
				r.addProbe(s, lo+d-1)
			}
			r.addProbe(s, hi-1)
		} else {
			step := ceilDiv(hi-lo, min(fan, r.batchPositions(s)))
			for i := lo + step - 1; i < hi; i += step {
				r.addProbe(s, i)
			}
		}
		if len(r.at) == 0 { // all positions are known
			return seen.held.firstZero(lo, hi)
		}
		if !r.ask(s) {
			return lo
		}
		for _, i := range r.at { // rising
			if !seen.held.has(i) {
				hi = i
				break
			}
			lo = i + 1
		}
	}
	return lo
}

// Last implements Presence.
func (r *Remote) Last(s Series, lo, hi, align int) int {
	seen := r.sighting(&s)
	i := min(hi, remoteBlocks)/align*align - 1
	for batch := 4; i >= lo; {
		batch = min(batch, r.batchPositions(&s))
		next := i
		r.at = r.at[:0]
		for n := batch; next >= lo && n > 0; n-- {
			r.addProbe(&s, next)
			next -= align
		}
		batch *= 4
		if !r.ask(&s) {
			return lo - 1
		}
		for ; i > next; i -= align {
			if seen.held.has(i) {
				return i
			}
		}
	}
	return lo - 1
}

// Window implements Presence. If a window has an absent block, the search continues left of the last such block. While no window is found,
// it asks for posts: one block in each stretch as long as a window. No window fits between two absent posts.
func (r *Remote) Window(s Series, hi int, w Window) int {
	seen := r.sighting(&s)
	e := w.down(min(hi, remoteBlocks))
	stride, base, batch := max(w.Need, w.Align), e-w.Need, 4
	for whole := true; e > 0; {
		lo := max(0, e-w.Need)
		if i := seen.lastAbsent(lo, e); i >= lo {
			e = w.down(i)
			continue
		}
		if seen.known.firstZero(lo, e) == e {
			return e
		}
		post := base - ceilDiv(max(base-e+1, 0), stride)*stride
		if whole || post < lo || !seen.unknown(post) {
			if whole = false; !r.askDown(&s, lo, e) {
				return 0
			}
			continue
		}
		batch = min(batch, r.batchPositions(&s))
		r.at = r.at[:0]
		for n := batch; post >= 0 && n > 0; n-- {
			r.addProbe(&s, post)
			post -= stride
		}
		batch *= 4
		if !r.ask(&s) {
			return 0
		}
	}
	return 0
}

// askDown asks for [lo, hi) from the right, until a batch has an absent block.
func (r *Remote) askDown(s *Series, lo, hi int) bool {
	seen := r.sighting(s)
	for top := hi; top > lo; {
		next := max(lo, top-r.batchPositions(s))
		r.at = r.at[:0]
		for i := next; i < top; i++ {
			r.addProbe(s, i)
		}
		if !r.ask(s) {
			return false
		}
		if seen.lastAbsent(next, top) >= next {
			return true
		}
		top = next
	}
	return true
}
