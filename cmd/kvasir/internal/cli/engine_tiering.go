// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/kvasir-kv/kvasir/tier/vllm"
)

const likeTiering = "vllm-tiering"

// checkTiering returns an error for flags that cannot be used with --like vllm-tiering.
func (c *engineCmd) checkTiering() error {
	var bad faults
	bad.unless(c.VLLMTier != "", "--like vllm-tiering needs --vllm-tier, the socket of a server")
	bad.unless(c.Requests >= 0, "--requests %d is below 0", c.Requests)
	bad.unless(c.Transfer == "" && c.Events == "", "--like vllm-tiering has the connector of --vllm-tier alone")
	return bad.err()
}

// playTiering plays requests on the tier socket, and prints how many had which result.
func (c *engineCmd) playTiering(e *env) error {
	if err := c.checkTiering(); err != nil {
		return err
	}
	r, err := vllm.RunPlay(e.ctx, vllm.Simulation{
		Socket: c.VLLMTier, EngineID: fmt.Sprintf("kvasir-%d", os.Getpid()), Model: c.Model, Requests: c.Requests, Log: e.log,
	})
	if err == nil {
		err = json.NewEncoder(e.stdout).Encode(r)
	}
	if err == nil && r.Wrong > 0 {
		err = fmt.Errorf("%d rows had wrong bytes", r.Wrong)
	}
	return err
}
