// SPDX-License-Identifier: Apache-2.0

package transfer

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
func (o Options) Validate() error {
	var c options.Checks
	options.Within(&c, "Conns", o.Conns, 0, 1<<10)
	options.Within(&c, "Window", o.Window, 0, maxCount)
	options.Within(&c, "MaxPeers", o.MaxPeers, 0, maxCount)
	options.Within(&c, "MaxWaiting", o.MaxWaiting, 0, maxCount)
	options.Within(&c, "SplitBytes", o.SplitBytes, 0, math.MaxInt)
	options.Within(&c, "DialTimeout", o.DialTimeout, 0, forever)
	options.Within(&c, "HandshakeTimeout", o.HandshakeTimeout, 0, forever)
	options.Within(&c, "ProgressTimeout", o.ProgressTimeout, 0, forever)
	options.Within(&c, "SettleTimeout", o.SettleTimeout, 0, forever)
	return c.Err()
}

// Validate reports every field that cannot be used, as options.Errors.
func (o TargetOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "HandshakePort", o.HandshakePort, 0, 65535)
	options.Within(&c, "DataPort", o.DataPort, 0, 65535)
	options.Within(&c, "ProgressTimeout", o.ProgressTimeout, 0, forever)
	options.Within(&c, "HandshakeTimeout", o.HandshakeTimeout, 0, forever)
	options.Within(&c, "MaxConns", o.MaxConns, 0, maxCount)
	options.Within(&c, "MaxHandshakes", o.MaxHandshakes, 0, maxCount)
	return c.Err()
}
