// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"time"
)

// ErrScale means that lengths cannot be divided by a number.
var ErrScale = errors.New("workload: scale")

// Scaled returns the requests at 1/n of their size: prompts, outputs, the tokens of a block and
// arrivals are divided by n. Prompts have as many blocks as before, and what was equal stays
// equal, so a prefix cache of the same number of blocks has the same hits. Error: ErrScale where n
// does not divide the tokens of a block.
func Scaled(requests []Request, n int) ([]Request, error) {
	if n < 1 {
		return nil, fmt.Errorf("%w: %d is less than 1", ErrScale, n)
	}
	out := make([]Request, len(requests))
	for i := range requests {
		q := requests[i]
		if len(q.Blocks) > 0 && q.BlockTokens%n != 0 {
			return nil, fmt.Errorf("%w: %d does not divide the %d tokens of a block", ErrScale, n, q.BlockTokens)
		}
		q.Input, q.Output = (q.Input+n-1)/n, (q.Output+n-1)/n
		q.BlockTokens /= n
		q.Arrival /= time.Duration(n)
		q.Pause /= time.Duration(n)
		out[i] = q
	}
	return out, nil
}
