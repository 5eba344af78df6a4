// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"

	"github.com/kvasir-kv/kvasir/sim/replay"
)

type evictCmd struct {
	jsonFlag
	replay.PolicyFlags
}

// Run replays the trace with each policy, and prints how they compare.
func (c *evictCmd) Run(e *Env) error {
	if err := writable(c.JSON, c.CSV, c.SVG); err != nil {
		return err
	}
	r, err := c.Play(e.Ctx)
	if r == nil || len(r.Rows) == 0 {
		return asUsage(e, err)
	}
	return errors.Join(c.write(e, r, r.Print), c.Files(r), asUsage(e, err))
}
