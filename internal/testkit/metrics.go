// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"slices"
	"strings"
)

// Buckets returns the upper bounds of a histogram in a page of metrics, in order. begin is the beginning of the histogram's lines, up
// to the bound: name_bucket{label="value",
func Buckets(page, begin string) (bounds []string) {
	for line := range strings.Lines(page) {
		rest, found := strings.CutPrefix(line, begin)
		if bound, _, whole := strings.Cut(strings.TrimPrefix(rest, `le="`), `"`); found && whole && !slices.Contains(bounds, bound) {
			bounds = append(bounds, bound)
		}
	}
	return bounds
}
