// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"errors"
	"fmt"
	"html"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Sizes of a picture, in pixels.
const (
	cellWidth = 520.0
	insetLeft = 58.0
	insetTop  = 44.0
	lineSkip  = 17.0
	perLegend = 70 // approximate letters in a line of a legend
)

const svgStyle = `<style>
svg{--bg:#fff;--fg:#1c2024;--soft:#5b6570;--line:#dde2e7;--c0:#2563c9;--c1:#c2570c;--c2:#0f8a5f;--c3:#8a3fc0;--c4:#8a6400;--c5:#c02646;--wait:#7d8894;--bad:#c02646;font:12px sans-serif}
@media (prefers-color-scheme:dark){svg{--bg:#12161a;--fg:#e6eaee;--soft:#98a4b0;--line:#2c343c;--c0:#6ea8ff;--c1:#ff9b57;--c2:#4fd1a1;--c3:#c792ff;--c4:#e6c04a;--c5:#ff7a95;--wait:#7d8894;--bad:#ff7a95}}
.ground{fill:var(--bg)}text{fill:var(--soft)}text.title{fill:var(--fg);font-weight:bold}
path{vector-effect:non-scaling-stroke}.frame{fill:none;stroke:var(--line)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.area{fill:var(--c);fill-opacity:.35}.mark{stroke:var(--c);stroke-dasharray:4 3;fill:none}.line{stroke:var(--c);fill:none;stroke-width:1.6}.dash{stroke:var(--c);fill:none;stroke-dasharray:2 3}
.dot{stroke:var(--c);stroke-width:11;stroke-linecap:round}.speck{stroke:var(--c);stroke-width:4;stroke-linecap:round;stroke-opacity:.45}.joined{stroke:var(--soft);fill:none;stroke-dasharray:4 3}
.waits{fill:var(--wait);--c:var(--wait)}.prefill{fill:var(--c0);--c:var(--c0)}.decode{fill:var(--c2);--c:var(--c2)}.failed{fill:var(--bad);--c:var(--bad)}
.swatch{fill:var(--c);stroke:none}
</style>
`

// WriteSVG writes the plots of a page as one picture that needs nothing else, two plots beside each other. It returns an error for runs
// that were saved without requests, because they have no plots.
func WriteSVG(w io.Writer, runs []Run) error {
	v, err := newView(runs)
	if err != nil {
		return err
	}
	all := v.Distributions
	for _, t := range v.Timelines {
		for _, p := range append([]*plot{t.Plot}, t.Engines...) {
			if len(v.Timelines) > 1 {
				p.Title = t.Name + ": " + p.Title
			}
			all = append(all, p)
		}
	}
	if v.Pareto != nil {
		all = append(all, v.Pareto)
	}
	if len(all) == 0 {
		return errors.New("report: the results have no requests, so there is nothing to draw: save them with --save-detailed")
	}
	var b strings.Builder
	y, row := 0.0, 0.0
	for i, p := range all {
		if i%2 == 0 {
			y, row = y+row, 0
		}
		row = max(row, p.draw(&b, cellWidth*float64(i%2), y))
	}
	_, err = fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f">`+"\n%s"+`<rect class="ground" width="100%%" height="100%%"/>`+"\n%s</svg>\n", 2*cellWidth, y+row, svgStyle, b.String())
	return err
}

// draw writes a plot at a place. It returns the height of the plot with its title and legend.
func (pl *plot) draw(b *strings.Builder, x, y float64) float64 {
	x0, y0, wide, high := x+insetLeft, y+insetTop, usualWidth-12.0, float64(pl.Height)
	fmt.Fprintf(b, `<g class="plot"><text class="title" x="%.1f" y="%.1f">%s</text>`, x0, y+20, svgText(pl.Title))
	if pl.Note != "" {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f">%s</text>`, x0, y+36, svgText(pl.Note))
	}
	fmt.Fprintf(b, `<svg x="%.1f" y="%.1f" width="%.1f" height="%.1f" viewBox="0 0 1000 1000" preserveAspectRatio="none" overflow="visible"><path class="frame" d="M0 0V1000H1000"/>`, x0, y0, wide, high)
	for _, p := range pl.Paths {
		style, title := "", ""
		if p.Style != "" {
			style = ` style="` + html.EscapeString(string(p.Style)) + `"`
		}
		if p.Title != "" {
			title = "<title>" + svgText(p.Title) + "</title>"
		}
		fmt.Fprintf(b, `<path class="%s" d="%s"%s>%s</path>`, p.Class, p.D, style, title)
	}
	b.WriteString("</svg>\n")
	share := func(t tick) float64 {
		v, _ := strconv.ParseFloat(strings.TrimSuffix(t.At, "%"), 64) // percent has written this text
		return v / 100
	}
	for _, t := range pl.X {
		fmt.Fprintf(b, `<text class="xtick" text-anchor="middle" x="%.1f" y="%.1f">%s</text>`, x0+wide*share(t), y0+high+15, svgText(t.Text))
	}
	for _, t := range pl.Y {
		fmt.Fprintf(b, `<text class="ytick" text-anchor="end" x="%.1f" y="%.1f">%s</text>`, x0-5, y0+high*(1-share(t))+4, svgText(t.Text))
	}
	below := y0 + high + 15 + lineSkip
	fmt.Fprintf(b, `<text text-anchor="end" x="%.1f" y="%.1f">%s</text>`, x0+wide, below, svgText(pl.XLabel))
	at := 0
	for _, l := range pl.Legend {
		n := utf8.RuneCountInString(l.Text) + 4
		if at == 0 || at+n > perLegend {
			below, at = below+lineSkip, 0
		}
		left := x0 + float64(at)*wide/perLegend
		fmt.Fprintf(b, `<rect class="swatch %s" x="%.1f" y="%.1f" width="9" height="9"/><text x="%.1f" y="%.1f">%s</text>`, svgText(l.Class), left, below-9, left+13, below, svgText(l.Text))
		at += n
	}
	b.WriteString("</g>\n")
	return cmp.Or(below-y, 1) + lineSkip
}

// svgText returns a text escaped for XML. Characters that XML does not allow, such as control characters, are replaced.
func svgText(s string) string {
	return html.EscapeString(strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' && r != '\n' && r != '\r' || r == 0xfffe || r == 0xffff {
			return utf8.RuneError
		}
		return r
	}, s))
}
