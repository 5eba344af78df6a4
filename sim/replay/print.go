// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"encoding/csv"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Print writes the result as a table: block hit rate, token hit rate and the part of the gap between
// lru and the optimum.
func (r *PolicyResult) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "capacity\tpolicy\tblocks hit\ttokens hit\tof the gap\t\n")
	for i, row := range r.Rows {
		size, mark := "", ""
		if i == 0 || r.Rows[i-1].Capacity != row.Capacity {
			size = strconv.Itoa(row.Capacity)
		}
		if row.Policy == r.Default {
			mark = " *"
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f %%\t%.2f %%\t%.1f %%\t%s\n", size, row.Policy, 100*row.BlockHit, 100*row.TokenHit, 100*row.Gap, mark)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%d requests, %d full blocks, %d of them hits with room for all. * is the default.\nThe gap is that between lru and the optimum, which knows the future.\n",
		r.Requests, r.Blocks, r.Best)
	return err
}

// WriteCSV writes the rows.
func (r *PolicyResult) WriteCSV(w io.Writer) error {
	c := csv.NewWriter(w)
	_ = c.Write([]string{"policy", "capacity_blocks", "block_hit", "token_hit", "hit_blocks", "gap"}) // Flush keeps the error
	for _, row := range r.Rows {
		f := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
		_ = c.Write([]string{row.Policy, strconv.Itoa(row.Capacity), f(row.BlockHit), f(row.TokenHit), strconv.FormatInt(row.HitBlocks, 10), f(row.Gap)})
	}
	c.Flush()
	return c.Error()
}

var colours = []string{"#8c8c8c", "#b07aa1", "#59a14f", "#f28e2b", "#4e79a7", "#e15759", "#76b7b2", "#9c755f"}

// WriteSVG draws the block hit rate of each policy by size; sizes are at equal distances.
func (r *PolicyResult) WriteSVG(w io.Writer) error {
	const width, height, left, top, right, bottom = 720, 420, 60, 30, 140, 50
	var policies []string
	var sizes []int
	most := 0.01
	for _, row := range r.Rows {
		if !slices.Contains(policies, row.Policy) {
			policies = append(policies, row.Policy)
		}
		if !slices.Contains(sizes, row.Capacity) {
			sizes = append(sizes, row.Capacity)
		}
		most = max(most, row.BlockHit)
	}
	slices.Sort(sizes)
	x := func(capacity int) float64 {
		i, _ := slices.BinarySearch(sizes, capacity)
		return left + float64(i)*(width-left-right)/float64(max(1, len(sizes)-1))
	}
	y := func(hit float64) float64 { return height - bottom - hit/most*(height-top-bottom) }
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	for i := range 6 {
		hit := most * float64(i) / 5
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%.1f %%</text>`+"\n",
			left, width-right, y(hit), y(hit), left-6, y(hit)+4, 100*hit)
	}
	for _, c := range sizes {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", x(c), height-bottom+18, c)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">capacity in blocks</text><text x="%d" y="18">blocks hit</text>`+"\n", (left+width-right)/2, height-10, left-50)
	for i, policy := range policies {
		rows := slices.DeleteFunc(slices.Clone(r.Rows), func(row PolicyRow) bool { return row.Policy != policy })
		slices.SortFunc(rows, func(a, b PolicyRow) int { return a.Capacity - b.Capacity })
		var points []string
		for _, row := range rows {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(row.Capacity), y(row.BlockHit)))
		}
		colour := colours[i%len(colours)]
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), colour)
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", width-right+14, top+18*i+10, colour, policy)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}
