// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"iter"
	"time"
)

// ErrScale means that lengths cannot be divided by a number.
var ErrScale = errors.New("workload: scale")

// Scaled returns the requests at 1/n of their size: it divides prompts, outputs, the tokens of a block, and arrivals by n. Prompts keep
// their number of blocks, and equal blocks stay equal, so a prefix cache with the same number of blocks has the same hits. The error is
// ErrScale if n does not divide the tokens of a block.
func Scaled(requests []Request, n int) ([]Request, error) {
	out := make([]Request, 0, len(requests))
	for q, err := range Scale(Each(requests), n) {
		if err != nil {
			return nil, err
		}
		out = append(out, q)
	}
	return out, nil
}

// Scale does what Scaled does, for requests that come one after another. The sequence ends with its first error.
func Scale(requests iter.Seq2[Request, error], n int) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		if n < 1 {
			yield(Request{}, fmt.Errorf("%w: %d is less than 1", ErrScale, n))
			return
		}
		for q, err := range requests {
			if err == nil && len(q.Blocks) > 0 && q.BlockTokens%n != 0 {
				err = fmt.Errorf("%w: %d does not divide the %d tokens of a block", ErrScale, n, q.BlockTokens)
			}
			if err != nil {
				yield(Request{}, err)
				return
			}
			q.Input, q.Output = (q.Input+n-1)/n, (q.Output+n-1)/n
			q.BlockTokens /= n
			q.Arrival /= time.Duration(n)
			q.Pause /= time.Duration(n)
			if !yield(q, nil) {
				return
			}
		}
	}
}
