// SPDX-License-Identifier: Apache-2.0

package coordinator

// ChunkGroup is an object group of a server that stores chunks.
type ChunkGroup struct {
	// Window is the sliding window in tokens, -1 for full attention. It has no meaning if Recurrent or Excluded is set.
	Window int

	// Recurrent is a group of states (Mamba): only the last chunk of a prefix
	// matters, as one block divides a chunk.
	Recurrent bool

	// Excluded is a group that takes no part in hits (a tag other than 0).
	Excluded bool
}

// Chunks decides, for the object groups of a server whose hash unit, block and chunk have one size, how long a hit is, which chunks a load
// of the hit moves, and which stored chunks a hit can still need. It is immutable.
//
// A hit needs the last ceil(W/c) chunks of each group with a window of W tokens, at c tokens per chunk. LMCache 0.5.6 reads as many. vLLM
// reads ceil((W-1)/c), which is never more, so both can use the stored chunks.
type Chunks struct {
	c     *Coordinator
	chunk int   // tokens
	tail  []int // chunks that a hit needs, by group; full attention: wholePrefix; excluded: 0
}

const wholePrefix = int(^uint(0) >> 1)

// NewChunks returns the rule for chunks of chunkTokens tokens. Windows need at least 2 tokens per chunk. Every method takes a group's index
// in groups. Draft layers need no rule here, because the client itself drops their last block.
func NewChunks(chunkTokens int, groups []ChunkGroup) (*Chunks, error) {
	if chunkTokens < 1 || chunkTokens > maxSize {
		return nil, limitf("chunk size (%d) must be between 1 and %d", chunkTokens, maxSize)
	}
	if len(groups) > maxGroups {
		return nil, limitf("%d groups are more than %d", len(groups), maxGroups)
	}
	k := &Chunks{chunk: chunkTokens, tail: make([]int, len(groups))}
	l := Layout{Groups: make([]Group, len(groups)), Scheduler: chunkTokens, HashUnit: chunkTokens}
	for i, g := range groups {
		l.Groups[i] = Group{Kind: Circular, Block: chunkTokens}
		switch {
		case g.Excluded:
			continue
		case g.Recurrent:
			k.tail[i] = 1
		case g.Window == -1:
			k.tail[i] = wholePrefix
			l.Groups[i].Kind = Full
			continue
		case g.Window < 1 || g.Window > maxSize:
			return nil, limitf("sliding_window (%d) must be -1 or between 1 and %d", g.Window, maxSize)
		default:
			k.tail[i] = ceilDiv(g.Window, chunkTokens)
		}
		if chunkTokens < 2 {
			return nil, limitf("windows need chunks of at least 2 tokens")
		}
		l.Groups[i].Kind = SlidingWindow
		l.Groups[i].Window = k.tail[i] * chunkTokens
	}
	c, err := New(l, Options{})
	k.c = c
	return k, err
}

// Coordinator returns the coordinator that finds the hits. A chunk is one of its blocks. NewRuns needs it.
func (k *Chunks) Coordinator() *Coordinator { return k.c }

// Hit returns the longest hit, in chunks, of a prompt of `chunks` whole chunks: the largest n such that each group has the chunks of
// Need(group, n) stored. r.Masks are the chunks to lock and copy.
func (k *Chunks) Hit(r *Result, p Presence, chunks int) (int, error) {
	if chunks < 0 || chunks > maxTokens/k.chunk {
		return 0, limitf("a prompt of %d chunks is impossible: the number is below 0 or too large", chunks)
	}
	err := k.c.Hit(r, p, Query{Units: chunks, MaxTokens: chunks * k.chunk})
	return r.Tokens / k.chunk, err
}

// Need returns the chunks of group g that a load of the first `hit` chunks moves. Lookup, pin accounting and retrieve must all use it.
func (k *Chunks) Need(g, hit int) Run {
	hit = max(hit, 0)
	return Run{hit - min(k.tail[g], hit), hit}
}

// Reusable appends to dst the chunks of group g that a hit of `shortest` to `longest` chunks can load, given what is stored now. No hit can
// use any other stored chunk of the group until missing chunks are stored again, so eviction can take those other chunks first.
func (k *Chunks) Reusable(dst []Run, g int, stored *Runs, shortest, longest int) []Run {
	base := len(dst)
	for n := max(shortest, 1); k.tail[g] > 0; {
		var end int
		if n, end = k.nextHits(stored, n); n > longest {
			break
		}
		end = min(end, longest)
		r := Run{k.Need(g, n).Start, end}
		if last := len(dst) - 1; last >= base && dst[last].End >= r.Start {
			dst[last].End = end
		} else {
			dst = append(dst, r)
		}
		n = end + 1
	}
	return dst
}

// nextHits returns the shortest possible hit of at least n chunks as first, and an end such that every length from first to end is a
// possible hit. If there is none, both are beyond any prompt.
func (k *Chunks) nextHits(stored *Runs, n int) (first, end int) {
	const never = wholePrefix
	for {
		start := n
		end = never
		for g, tail := range k.tail {
			if tail == 0 {
				continue
			}
			var e int
			if n, e = nextEnd(stored.blocks[g], tail, n); n == never {
				return never, never
			}
			end = min(end, e)
		}
		if n == start {
			return n, end
		}
	}
}

// nextEnd returns the smallest m >= n such that the last `tail` chunks of the first m are present (all m if tail is larger). end is the end
// of the run that has them.
func nextEnd(runs []Run, tail, n int) (m, end int) {
	for i := max(before(runs, n), 0); i < len(runs); i++ {
		r := runs[i]
		m := max(n, r.Start+1)
		if r.Start > 0 {
			if tail > r.End-r.Start {
				continue
			}
			m = max(m, r.Start+tail)
		}
		if m <= r.End {
			return m, r.End
		}
	}
	return wholePrefix, wholePrefix
}
