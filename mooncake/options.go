// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"math"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
)

const (
	maxCount = 1 << 24                      // largest number in options
	forever  = time.Duration(math.MaxInt64) // largest time in options: it is not limited
)

// Validate reports every field that cannot be used, as options.Errors.
func (o SenderOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "DPRank", o.DPRank, 0, maxCount)
	options.Within(&c, "PPRank", o.PPRank, 0, maxCount)
	options.Within(&c, "Lease", o.Lease, 0, forever)
	options.Within(&c, "AbortTimeout", o.AbortTimeout, 0, forever)
	options.Within(&c, "RetryTimeout", o.RetryTimeout, 0, forever)
	options.Within(&c, "Workers", o.Workers, 0, maxCount)
	options.Within(&c, "MaxPulls", o.MaxPulls, 0, maxCount)
	options.Within(&c, "MaxTransfers", o.MaxTransfers, 0, maxCount)
	return c.Err()
}

// Validate reports every field that cannot be used, as options.Errors.
func (o ReceiverOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "PPRank", o.PPRank, 0, maxCount)
	c.That(o.Release >= 0, "Release", "%d is no minor version of vLLM", o.Release)
	options.Within(&c, "Timeout", o.Timeout, 0, forever)
	options.Within(&c, "UnknownTimeout", o.UnknownTimeout, 0, forever)
	options.Within(&c, "ConnectTimeout", o.ConnectTimeout, 0, forever)
	options.Within(&c, "ArrivalTimeout", o.ArrivalTimeout, 0, forever)
	options.Within(&c, "FenceTimeout", o.FenceTimeout, 0, forever)
	options.Within(&c, "Attempts", o.Attempts, 0, maxCount)
	options.Within(&c, "MaxIdle", o.MaxIdle, 0, maxCount)
	return c.Err()
}
