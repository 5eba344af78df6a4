// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"strings"
	"testing"
)

// A trace with more requests than can be played is an error, not a shorter trace, unless that part of it is asked for.
func TestTraceWithTooManyRequestsIsRefused(t *testing.T) {
	const trace = `{"input_length": 1, "hash_ids": [1]}` + "\n" + `{"input_length": 1, "hash_ids": [2]}` + "\n" + `{"input_length": 1, "hash_ids": [3]}` + "\n"
	if got, err := ReadTrace(strings.NewReader(trace), TraceOptions{maxRequests: 2}); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), "line 3: the trace has more than 2 requests") {
		t.Errorf("%d requests, %v", len(got), err)
	}
	for most, want := range map[int]int{0: 3, 2: 2} {
		if got, err := ReadTrace(strings.NewReader(trace), TraceOptions{Max: most, maxRequests: 3}); err != nil || len(got) != want {
			t.Errorf("%d of 3: %d requests, %v", most, len(got), err)
		}
	}
}
