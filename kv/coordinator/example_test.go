// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// A stored prefix is a hit as far as every group can continue from it: full attention
// needs all blocks before, a window of 32 tokens only the last two.
func Example() {
	layout, err := coordinator.ParseLayout("full,bs=16 swa,bs=16,win=32")
	if err != nil {
		panic(err)
	}
	c, err := coordinator.New(layout, coordinator.Options{})
	if err != nil {
		panic(err)
	}
	have := coordinator.NewRuns(c)
	have.Add(0, 0, 10) // full attention: blocks 0 to 9
	have.Add(1, 6, 8)  // the window: blocks 6 and 7 only

	var hit coordinator.Result
	if err := c.Hit(&hit, have, coordinator.Query{Units: 12, MaxTokens: 12*16 - 1}); err != nil {
		panic(err)
	}
	fmt.Println(hit.Tokens, "tokens:", hit.Masks[0].Count(), "blocks of full attention,", hit.Masks[1].Count(), "of the window")
	// Output: 128 tokens: 8 blocks of full attention, 2 of the window
}
