// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"fmt"
	"math"
	"slices"
)

// Point is a place in the picture, in pixels.
type Point struct{ X, Y float64 }

// Run is a part of a line, from one of its points to another, that is drawn in one way. If lines coincide there, each is drawn in the
// gaps of the others: with dashes of Own pixels, separated by gaps of Gap pixels, from Offset on. Own is 0 if no other line coincides.
type Run struct {
	From, To         int // indices of points
	Own, Gap, Offset float64
}

// Dashes returns the SVG dash array of a Run and its offset; both are empty for a line without dashes.
func (r Run) Dashes() (array, offset string) {
	if r.Own == 0 {
		return "", ""
	}
	return fmt.Sprintf("%.2f %.2f", r.Own, r.Gap), fmt.Sprintf("%.2f", r.Offset)
}

// Share divides lines into runs so that no line hides another. Lines coincide where both ends of their segments are less than 1.5
// pixels apart. A short run has shorter dashes, so that each of its lines can be seen.
func Share(lines [][]Point) [][]Run {
	type span struct{ from, to int }
	spanOf := func(l []Point, k int) span { return span{int(math.Round(l[k-1].X)), int(math.Round(l[k].X))} }
	segments := make(map[span][][2]int) // line and point
	for i, l := range lines {
		for k := 1; k < len(l); k++ {
			s := spanOf(l, k)
			segments[s] = append(segments[s], [2]int{i, k})
		}
	}
	// with returns the lines that coincide with the segment before point k of line i.
	with := func(i, k int) (set []int) {
		a, b := lines[i][k-1], lines[i][k]
		at := spanOf(lines[i], k)
		for from := at.from - 2; from <= at.from+2; from++ {
			for to := at.to - 2; to <= at.to+2; to++ {
				for _, s := range segments[span{from, to}] {
					if o := lines[s[0]]; !slices.Contains(set, s[0]) && same(o[s[1]-1], a) && same(o[s[1]], b) {
						set = append(set, s[0])
					}
				}
			}
		}
		slices.Sort(set)
		return set
	}
	out := make([][]Run, len(lines))
	for i, l := range lines {
		for k := 1; k < len(l); {
			set, r, length := with(i, k), Run{From: k - 1}, 0.0
			for k < len(l) && slices.Equal(with(i, k), set) {
				length += math.Hypot(l[k].X-l[k-1].X, l[k].Y-l[k-1].Y)
				k++
			}
			r.To = k - 1
			if n := float64(len(set)); n > 1 {
				whole := min(period, max(0.8*length, 2*n))
				r.Own = whole / n
				r.Gap, r.Offset = whole-r.Own, -r.Own*float64(slices.Index(set, i))
			}
			out[i] = append(out[i], r)
		}
	}
	return out
}

func same(a, b Point) bool { return math.Abs(a.X-b.X) < near && math.Abs(a.Y-b.Y) < near }
