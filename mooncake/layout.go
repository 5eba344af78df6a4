// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	lru "container/list"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

var errLayoutMiss = errors.New("layout not cached")

type layoutMissError struct {
	id      uint64
	segment string
}

func (e *layoutMissError) Error() string {
	return fmt.Sprintf("Mooncake KV layout %#x from %s is not cached.", e.id, e.segment)
}

func (e *layoutMissError) Is(target error) bool { return target == errLayoutMiss }

const (
	maxLayouts = 1024 // plans that a P keeps, for all D workers; as many as vLLM. With more, the least recently used one is dropped
	maxOfOneD  = 64   // plans that a P keeps for the host and port of one D worker; with more, that worker's least recently used one is dropped
)

// layoutKey names one layout of one D worker.
type layoutKey struct {
	host           string
	port           int
	rank, tpp, ppp int
	id             uint64
}

// layoutCache keeps P's plans for the layouts that D workers have sent. A later pull of D may then name its layout by id instead of
// sending it again. The cache evicts the least recently used plan. The zero value is ready.
type layoutCache struct {
	mu struct { // a leaf: no other lock is taken under it
		sync.Mutex
		plans map[layoutKey]*lru.Element // of *layoutEntry
		byD   map[string]int
		order lru.List // the last used one is at the front
	}
}

type layoutEntry struct {
	key  layoutKey
	plan *PushPlan
}

func (c *layoutCache) get(k layoutKey) *PushPlan {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.mu.plans[k]
	if e == nil {
		return nil
	}
	c.mu.order.MoveToFront(e)
	return e.Value.(*layoutEntry).plan
}

func (c *layoutCache) put(k layoutKey, plan *PushPlan) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.mu.plans[k]; e != nil {
		e.Value.(*layoutEntry).plan = plan
		c.mu.order.MoveToFront(e)
		return
	}
	if c.mu.plans == nil {
		c.mu.plans = make(map[layoutKey]*lru.Element)
		c.mu.byD = make(map[string]int)
	}
	c.mu.plans[k] = c.mu.order.PushFront(&layoutEntry{k, plan})
	c.mu.byD[k.d()]++
	switch {
	case c.mu.byD[k.d()] > maxOfOneD:
		for e := c.mu.order.Back(); ; e = e.Prev() {
			if e.Value.(*layoutEntry).key.d() == k.d() {
				c.dropLocked(e)
				return
			}
		}
	case len(c.mu.plans) > maxLayouts:
		c.dropLocked(c.mu.order.Back())
	}
}

func (c *layoutCache) dropLocked(e *lru.Element) {
	k := c.mu.order.Remove(e).(*layoutEntry).key
	delete(c.mu.plans, k)
	if c.mu.byD[k.d()]--; c.mu.byD[k.d()] == 0 {
		delete(c.mu.byD, k.d())
	}
}

// d returns the D worker's host and port as one string.
func (k *layoutKey) d() string { return net.JoinHostPort(k.host, strconv.Itoa(k.port)) }

// prepare checks that the memory of D's worker fits this worker's and plans the push. Its checks run in the same order as vLLM's.
func (s *Sender) prepare(p *pullAnswer) error {
	pull, self := p.pull, s.o.Self
	remote := Peer{TPRank: pull.TPRank, TPSize: pull.TPSize, PPSize: max(pull.PPSize, 1)}
	paired, err := pairedRanks(self.TPRank, self.TPSize, remote.TPSize)
	if err != nil {
		return err
	}
	p.paired = paired
	if !slices.Contains(paired, remote.TPRank) {
		return layoutError("This D tp_rank %d is not paired with P tp_rank %d; expected one of %s.",
			remote.TPRank, self.TPRank, pyList(paired))
	}
	key := layoutKey{pull.Host, pull.Port, remote.TPRank, remote.TPSize, remote.PPSize, pull.LayoutID}
	if pull.LayoutID != 0 && len(pull.Regions) == 0 {
		if p.plan = s.layouts.get(key); p.plan == nil {
			return &layoutMissError{pull.LayoutID, fmt.Sprintf("%s:%d", pull.Host, pull.Port)}
		}
		return nil
	}
	if p.plan, err = PlanPush(s.cache, self, remote, pull.Regions); err == nil && pull.LayoutID != 0 {
		s.layouts.put(key, p.plan)
	}
	return err
}

// PlanPush plans how the P worker self, whose memory is c, pushes into the regions of the D worker remote. It returns a *LayoutError if
// the two do not fit each other.
func PlanPush(c *Cache, self, remote Peer, regions []wire.Region) (*PushPlan, error) {
	if self.PPSize != remote.PPSize && (c.Opaque || slices.ContainsFunc(regions, wholeRow)) {
		return nil, layoutError("Mooncake non-page-contiguous packed regions keep only the first layer name, "+
			"so they cannot be aligned across PP sizes %d and %d.", self.PPSize, remote.PPSize)
	}
	pairs, err := align(c.Regions, regions, remote.PPSize != self.PPSize)
	if err != nil {
		return nil, err
	}
	heads, replicated := c.heads(), c.replicated(self.TPSize)
	ratio, err := tpRatio(self.TPSize, remote.TPSize)
	if err != nil {
		return nil, err
	}
	if ratio == 1 || replicated { // a head's offset would land on another layer of a merged run
		pairs = merge(pairs, len(pairs) == len(c.Regions) && len(pairs) == len(regions))
	}
	if err := validate(pairs, self.TPSize, remote.TPSize, replicated, heads); err != nil {
		return nil, err
	}
	plan, err := newPushPlan(pairs, self, remote, replicated, heads, c.Kinds, c.KernelBlocks)
	if err == nil && c.Unsliced != "" && plan.cuts() {
		return nil, layoutError("P of TP size %d cannot cut its blocks for D of TP size %d: %s.", self.TPSize, remote.TPSize, c.Unsliced)
	}
	return plan, err
}

// wholeRow reports whether r is a row of several layers under one name.
func wholeRow(r wire.Region) bool { return r.RowOffset == 0 && r.Payload == r.Stride }

// pyList writes numbers as Python writes a list of them.
func pyList(l []int) string {
	t := tuple(append(slices.Clone(l), 0, 0)) // never the one-element form
	return "[" + t[1:len(t)-len(", 0, 0)")] + "]"
}
