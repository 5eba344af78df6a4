// SPDX-License-Identifier: Apache-2.0

package coordinator

import (
	"fmt"
	"slices"
)

// Options configures a Coordinator.
type Options struct {
	// Release is the published version of vLLM whose decisions the Coordinator repeats, its defects included. Zero decides
	// without these defects. docs/how/hybrid-hits.md lists the differences.
	Release Release
}

// Coordinator decides the prefix hits of one model. It is immutable.
type Coordinator struct {
	layout  Layout
	rules   rule
	sets    []specGroup // in the order in which each pass looks them up
	bySet   []int       // group → index in sets, -1 for a group that is not cached
	flagged []bool      // group → its spec group drops its last block for EAGLE
	align   int         // what a hit is a multiple of
	simple  bool        // two spec groups, the first full: one pass suffices
	dense   bool        // under the rule repeatsMasks: StoreMask keeps every block
}

// New checks a layout with vLLM's own checks and returns its Coordinator. It copies the layout's slices. Errors are of type *Error.
func New(l Layout, o Options) (*Coordinator, error) {
	rules := rulesOf(o.Release)
	if err := checkLimits(&l); err != nil {
		return nil, err
	}
	if err := checkSizes(&l, rules); err != nil {
		return nil, err
	}
	l.Groups = slices.Clone(l.Groups)
	if rules.has(noPartialHits) {
		l.Partial, l.HasRetention, l.Retention = false, false, 0
	}
	c := &Coordinator{layout: l, rules: rules, sets: fold(&l, rules)}
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

// checkLimits refuses layouts that vLLM accepts only for lack of a check: vLLM does not bound its numbers, and a size of zero fails only at
// its first lookup.
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

// checkSizes makes vLLM's checks in vLLM's order.
func checkSizes(l *Layout, rules rule) *Error {
	cached := func(g *Group) bool { return rules.has(noScratchKinds) || !g.Kind.isScratch() }
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
		if g.Kind < Full || g.Kind > HiSparseSpilled || rules.has(noScratchKinds) && g.Kind.isScratch() {
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

// AlignLookupLength rounds a length in tokens down to a possible length of a hit.
func (c *Coordinator) AlignLookupLength(tokens int) int {
	return max(tokens, 0) / c.align * c.align
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
