// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"slices"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/cluster"
)

// medians returns the median of each figure over the seeds 1 to n.
func medians(n int, play func(seed uint64) (map[string]float64, error)) (map[string]float64, error) {
	all := make(map[string][]float64)
	for seed := range n {
		v, err := play(uint64(seed) + 1)
		if err != nil {
			return nil, err
		}
		for figure, x := range v {
			all[figure] = append(all[figure], x)
		}
	}
	out := make(map[string]float64)
	for figure, v := range all {
		slices.Sort(v)
		out[figure] = cluster.Percentile(v, 50)
	}
	return out, nil
}

// fixed returns n requests with the same lengths.
func fixed(n, input, output int) []workload.Request {
	out := make([]workload.Request, n)
	for i := range out {
		out[i] = workload.Request{Input: input, Output: output, Conversation: i}
	}
	return out
}
