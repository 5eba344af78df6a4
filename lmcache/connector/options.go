// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// The largest values of options. Validate refuses larger ones.
const (
	forever  = time.Duration(math.MaxInt64)
	maxLimit = 1 << 24 // of the numbers of lookups, calls, operations and events
)

// Validate reports every field that cannot be used, as options.Errors.
func (o ServerCacheOptions) Validate() error {
	var c options.Checks
	_, err := o.Parallel.Check()
	c.That(err == nil, "Parallel", "%v", err)
	options.Within(&c, "ChunkTokens", o.ChunkTokens, 1, lmcache.MaxTokens)
	options.Within(&c, "CallTimeout", o.CallTimeout, 0, forever)
	options.Within(&c, "Heartbeat", o.Heartbeat, 0, forever)
	options.Within(&c, "MaxLookups", o.MaxLookups, 0, maxLimit)
	options.Within(&c, "MaxNotices", o.MaxNotices, 0, maxLimit)
	return c.Err()
}

// Validate reports every field that cannot be used, as options.Errors.
func (o WorkerOptions) Validate() error {
	var c options.Checks
	_, err := o.Parallel.Check()
	c.That(err == nil, "Parallel", "%v", err)
	c.That(o.Cache != nil, "Cache", "is missing")
	options.Within(&c, "ChunkTokens", o.ChunkTokens, 0, lmcache.MaxTokens)
	c.That(len(o.Groups) <= maxGroups, "Groups", "are %d, and at most %d are possible", len(o.Groups), maxGroups)
	for i := range o.Groups {
		err := o.Groups[i].check()
		c.That(err == nil, "Groups", "%d: %v", i, err)
	}
	c.That(len(o.Groups) != 1 || !o.Groups[0].sparse() || len(o.Segments) > 0, "Groups", "a single group with a window or states needs Segments: LMCache's workers that copy themselves (engine_driven) register it as full attention")
	options.Within(&c, "CallTimeout", o.CallTimeout, 0, forever)
	options.Within(&c, "Heartbeat", o.Heartbeat, 0, forever)
	options.Within(&c, "MaxQueue", o.MaxQueue, 0, maxLimit)
	options.Within(&c, "Concurrency", o.Concurrency, 0, maxLimit)
	options.Within(&c, "MaxEvents", o.MaxEvents, 0, maxLimit)
	return c.Err()
}
