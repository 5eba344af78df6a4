// SPDX-License-Identifier: Apache-2.0

package store

import (
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// forever is the longest time that an option may be.
const forever = time.Duration(math.MaxInt64)

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	options.Within(&c, "Quarantine", o.Quarantine, 0, forever)
	options.Within(&c, "SessionIdle", o.SessionIdle, 0, forever)
	options.Within(&c, "SumAfter", o.SumAfter, 0, forever)
	c.That(o.TTL == 0 || o.TTL >= time.Second && o.TTL <= tenant.MaxTTL, "TTL", "%v is neither 0 nor from 1 s to ten years", o.TTL)
	options.Within(&c, "LoadTimeout", o.LoadTimeout, 0, forever)
	options.Within(&c, "MaxSessions", o.MaxSessions, 0, 1<<24)
	options.Within(&c, "MaxHolds", o.MaxHolds, 0, 1<<24)
	options.Within(&c, "Ghosts", o.Ghosts, 0, 1<<24)
	options.Within(&c, "LoadBytes", o.LoadBytes, 0, math.MaxInt64)
	options.Within(&c, "WarmBytes", o.WarmBytes, 0, math.MaxInt64)
	options.Within(&c, "WarmTime", o.WarmTime, 0, forever)
	options.Within(&c, "WriteBytes", o.WriteBytes, 0, math.MaxInt64)
	c.That(o.Write <= WriteNever, "Write", "%d is no policy", o.Write)
	options.Within(&c, "PopulateRate", o.PopulateRate, 0, math.MaxInt64)
	options.Within(&c, "ChecksumRate", o.ChecksumRate, 0, math.MaxInt64)
	options.Within(&c, "WorkerShare", o.WorkerShare, 0, 1)
	options.Within(&c, "PeerShare", o.PeerShare, 0, 1)
	return c.Err()
}
