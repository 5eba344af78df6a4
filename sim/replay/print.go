// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"

	"github.com/kvasir-kv/kvasir/internal/plot"
)

// Print writes the result as a table: block hit rate, token hit rate, and the part of the gap between lru and the optimum that a policy
// closes.
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

// WriteCSV writes the rows as CSV.
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

// WriteSVG draws the block hit rate of each policy by the size of the cache.
func (r *PolicyResult) WriteSVG(w io.Writer) error {
	p := plot.Panel{Title: "blocks hit, %", XLabel: "capacity in blocks"}
	at := make(map[string]int)
	for _, row := range r.Rows {
		i, ok := at[row.Policy]
		if !ok {
			i = len(p.Lines)
			at[row.Policy] = i
			p.Lines = append(p.Lines, plot.Line{Name: row.Policy})
		}
		l := &p.Lines[i]
		l.X, l.Y = append(l.X, float64(row.Capacity)), append(l.Y, 100*row.BlockHit)
	}
	return plot.Write(w, p)
}
