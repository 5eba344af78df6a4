// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	const forever = time.Duration(math.MaxInt64)
	options.Within(&c, "MemoryBytes", o.MemoryBytes, 0, 1<<50)
	options.Within(&c, "Timeout", o.Timeout, 0, forever)
	options.Within(&c, "RefreshTimeout", o.RefreshTimeout, 0, forever)
	options.Within(&c, "RefreshEvery", o.RefreshEvery, 0, forever)
	options.Within(&c, "MaxPulls", o.MaxPulls, 0, 1<<20)
	c.That(o.BlockBytes <= 1<<40, "BlockBytes", "%d is above %d", o.BlockBytes, uint64(1)<<40)
	return c.Err()
}
