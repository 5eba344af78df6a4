// SPDX-License-Identifier: Apache-2.0

package mooncake

import "fmt"

// BlockID is the type of a block id.
type BlockID interface {
	~int | ~int32 | ~int64 | ~uint32 | ~uint64
}

// Span is a stretch of two parallel lists of block ids: elements [From, To) of
// either one are consecutive ids, so they are one range of memory on both sides.
type Span struct{ From, To int }

// Len returns the number of blocks in the span.
func (s Span) Len() int { return s.To - s.From }

// LengthError means that two lists of block ids cannot be paired because their lengths, Src and Dst, differ.
type LengthError struct{ Src, Dst int }

func (e *LengthError) Error() string {
	return fmt.Sprintf("mooncake: %d source blocks for %d destination blocks", e.Src, e.Dst)
}

// GroupConcurrentContiguous appends the spans of src and dst to spans: it cuts both
// lists wherever the next id of either list is not its previous id plus 1. The spans
// follow each other and cover the lists; empty lists have none. It allocates only
// when spans lacks capacity, and keeps no slice.
//
// The only error is a *LengthError: what unequal lists mean is not defined (vLLM
// raises, or pairs the wrong blocks).
//
// vLLM: group_concurrent_contiguous, 0.33.0; vectors in
// internal/testkit/testdata/mooncake-connector/group-contiguous.json.
func GroupConcurrentContiguous[S, D BlockID](spans []Span, src []S, dst []D) ([]Span, error) {
	if len(src) != len(dst) {
		return spans, &LengthError{len(src), len(dst)}
	}
	from := 0
	for i := 1; i < len(src); i++ {
		if src[i] != src[i-1]+1 || dst[i] != dst[i-1]+1 {
			spans = append(spans, Span{from, i})
			from = i
		}
	}
	if len(src) > 0 {
		spans = append(spans, Span{from, len(src)})
	}
	return spans, nil
}
