package coordinator

import (
	"fmt"
	"slices"
)

// Dialect selects whose decisions a Coordinator repeats.
type Dialect uint8

// The dialects.
const (
	Current  Dialect = iota // vLLM 0.33.0, "C"
	Original                // vLLM 0.23.0, "S"
)

// String returns the release whose decisions the dialect repeats.
func (d Dialect) String() string {
	if d == Original {
		return "0.23.0"
	}
	return "0.33.0"
}

// Options configures a Coordinator. The zero value is the current dialect, to
// the letter.
type Options struct {
	Dialect Dialect

	// Lenient answers a hit of no tokens with a reason where the original
	// raises at lookup: cross attention, chunked attention under EAGLE or under
	// unequal blocks.
	Lenient bool

	// Corrected departs from the dialect where it loses stored blocks or would
	// load wrong ones; docs/hybrid-hits.md lists each departure:
	//
	//   - Original: hits are found as Current finds them (the EAGLE look-ahead
	//     is bounded by the hashes, Mamba looks nothing ahead, each full group is
	//     cut to the hit, a single group obeys the scheduler block);
	//   - Original: StoreMask keeps every group's own tail of each segment; the
	//     EAGLE drop no longer shortens and shifts the repeated masks;
	//   - both: the masks of a hit are those of LoadMask at its length;
	//   - both: a chunked group continues only where its chunk is present, also
	//     when chunks and blocks do not align;
	//   - both: a window of one token looks up, keeps and loads one block;
	//   - both: a prompt shorter than a window loses one segment to EAGLE, not two;
	//   - both: under EAGLE the block after the hit is always present in flagged
	//     groups, not only where they were first verified, and so one more stored
	//     block never shortens a hit;
	//   - both: a layout in which no group can be cached never hits.
	Corrected bool
}

// Coordinator decides for one model. It is immutable.
type Coordinator struct {
	layout  Layout
	opt     Options
	sets    []specGroup // the fixed point's order
	bySet   []int       // group → index in sets, -1 when it is not cached
	flagged []bool      // group → its spec group drops for EAGLE
	modern  bool        // find as Current does
	align   int         // what a hit is a multiple of
	simple  bool        // two spec groups, the first full: one pass suffices
	dense   bool        // Original: StoreMask keeps everything
}

// New checks a layout the way the original does at construction. The layout's
// slices are copied. Errors are of type *Error.
func New(l Layout, o Options) (*Coordinator, error) {
	if err := checkLimits(&l); err != nil {
		return nil, err
	}
	if err := checkSizes(&l, o.Dialect); err != nil {
		return nil, err
	}
	l.Groups = slices.Clone(l.Groups)
	if o.Dialect == Original {
		l.Partial, l.HasRetention, l.Retention = false, false, 0
	}
	c := &Coordinator{layout: l, opt: o, sets: fold(&l, o.Dialect)}
	c.modern = o.Dialect == Current || o.Corrected
	c.align = l.Scheduler
	if l.Partial {
		c.align = l.HashUnit
	}
	c.simple = len(c.sets) == 2 && c.sets[0].kind.isFull()
	c.dense = !slices.ContainsFunc(c.sets, func(s specGroup) bool {
		return !s.kind.isFull() && s.block != l.Scheduler
	})
	c.bySet = make([]int, len(l.Groups))
	c.flagged = make([]bool, len(l.Groups))
	for i := range c.bySet {
		c.bySet[i] = -1
	}
	for i, s := range c.sets {
		for _, g := range s.groups {
			c.bySet[g], c.flagged[g] = i, s.eagle
		}
	}
	return c, nil
}

// checkLimits refuses what the original never meant to accept: its arithmetic
// has no bounds, and it divides by zero only once a lookup comes.
func checkLimits(l *Layout) *Error {
	if len(l.Groups) > maxGroups {
		return limitf("%d groups are more than %d", len(l.Groups), maxGroups)
	}
	if l.HashUnit == 0 || l.Scheduler == 0 {
		return errZero
	}
	if l.HashUnit < 0 || l.HashUnit > maxSize {
		return limitf("hash_block_size (%d) must be between 1 and %d", l.HashUnit, maxSize)
	}
	if l.Scheduler < 0 || l.Scheduler > maxSize {
		return limitf("scheduler_block_size (%d) must be between 1 and %d", l.Scheduler, maxSize)
	}
	if l.HasRetention && (l.Retention < 0 || l.Retention > maxTokens) {
		return limitf("retention_interval (%d) must be between 0 and %d", l.Retention, maxTokens)
	}
	for i := range l.Groups {
		if err := l.Groups[i].check(); err != nil {
			return err
		}
	}
	return nil
}

func (g *Group) check() *Error {
	switch {
	case g.Block == 0:
		return errZero
	case g.Block < 0 || g.Block > maxSize:
		return limitf("block_size (%d) must be between 1 and %d", g.Block, maxSize)
	case g.Heads < 0 || g.Heads > maxSize:
		return limitf("num_kv_heads (%d) must be between 1 and %d", g.Heads, maxSize)
	case len(g.Variant) > maxVariantSize:
		return limitf("a variant of %d bytes is longer than %d", len(g.Variant), maxVariantSize)
	case g.Kind.isWindow() && (g.Window < 1 || g.Window > maxSize):
		return limitf("sliding_window (%d) must be between 1 and %d", g.Window, maxSize)
	case g.Kind.isWindow() && (g.Extra < 0 || g.Extra > maxSize):
		return limitf("extra_retained_tokens (%d) must be between 0 and %d", g.Extra, maxSize)
	case g.Kind == ChunkedLocal && (g.Chunk < 1 || g.Chunk > maxSize):
		return limitf("attention_chunk_size (%d) must be between 1 and %d", g.Chunk, maxSize)
	case g.Kind == Mamba && g.Mode > MambaAll:
		return limitf("unknown mamba_cache_mode %d", g.Mode)
	}
	return nil
}

// checkSizes makes the original's checks in the original's order.
func checkSizes(l *Layout, d Dialect) *Error {
	cached := func(g *Group) bool { return d == Original || !g.Kind.isScratch() }
	for i := range l.Groups {
		if g := &l.Groups[i]; cached(g) && g.Block%l.HashUnit != 0 {
			return errHashUnit
		}
	}
	if l.Scheduler%l.HashUnit != 0 {
		return &Error{CodeScheduler, assertion, fmt.Sprintf(
			"scheduler_block_size (%d) must be a multiple of hash_block_size (%d)", l.Scheduler, l.HashUnit)}
	}
	for i := range l.Groups {
		if g := &l.Groups[i]; cached(g) && l.Scheduler%g.Block != 0 {
			return errSchedulerGroup
		}
	}
	for i := range l.Groups {
		g := &l.Groups[i]
		if g.Kind < Full || g.Kind > HiSparseSpilled || d == Original && g.Kind.isScratch() {
			return &Error{CodeNoManager, assertion, fmt.Sprintf(
				"No manager registered for KVCacheSpec %v(block_size=%d)", g.Kind, g.Block)}
		}
	}
	return nil
}

// Groups returns the number of groups.
func (c *Coordinator) Groups() int { return len(c.layout.Groups) }

// Group returns a group as it was given to New.
func (c *Coordinator) Group(g int) Group { return c.layout.Groups[g] }

// Layout returns the layout; its slice must not be written to.
func (c *Coordinator) Layout() Layout { return c.layout }

// AlignLookupLength rounds a length down to what a hit can be a multiple of.
func (c *Coordinator) AlignLookupLength(tokens int) int {
	return max(tokens, 0) / c.align * c.align
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
