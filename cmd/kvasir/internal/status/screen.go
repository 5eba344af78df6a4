// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
)

// Screen is what kvasir top shows. It holds the last two snapshots, and the hit rates of earlier ones for a line. It is not safe for
// concurrent use.
type Screen struct {
	URL   string
	Color bool // with SGR sequences, which set colours and bold
	View  View

	help   bool   // the keys are shown instead of the view
	chosen string // ID of the request that is shown step by step; empty: the newest
	cursor int    // the chosen row in the view Slow: of the slow requests, and then of the lookups

	before, now *Snapshot // nil: there is none yet
	err         error     // of the last attempt to ask the server
	lost        time.Time // since when the server does not answer; zero: it answers
	history     []float64 // hit rates, one for each interval; NaN: no lookups
	hour        hour      // the points of the last hour; empty: the server keeps none
}

// maxHistory is how many hit rates are kept: as many as the widest line shows. Older ones are dropped.
const maxHistory = 512

// Add adds the result of one attempt, at the time `at`, to ask the server: a snapshot or an error.
func (s *Screen) Add(snap *Snapshot, err error, at time.Time) {
	if s.err = err; err != nil {
		if s.lost.IsZero() {
			s.lost = at
		}
		return
	}
	s.lost = time.Time{}
	s.before, s.now = s.now, snap
	rate, ok := snap.hitRate(s.before)
	if !ok {
		rate = math.NaN()
	}
	if s.history = append(s.history, rate); len(s.history) > maxHistory {
		s.history = s.history[1:]
	}
	if !snap.isLater(s.before) {
		s.hour = hour{}
	}
	s.hour.add(snap.Live.History)
}

// block is a part of the screen: a title and rows. If there is too little room for all rows, share leaves out the last rows of blocks.
// It leaves out rows beyond least first.
type block struct {
	title string
	rows  []string
	least int
}

// minFooter is the least height of a screen that has a line of keys.
const minFooter = 5

// Lines returns the lines of the screen at the time `at`: none is longer than width columns, and there are at most height (0: no limit).
// note stands at the right of the first line. If there is a limit, the last line names the keys.
func (s *Screen) Lines(width, height int, note string, at time.Time) []string {
	lines := s.head(width, note, at)
	if s.now == nil {
		return s.fit(lines, width, height)
	}
	footer := height >= minFooter
	if footer {
		height--
	}
	blocks := slices.DeleteFunc(s.blocks(width), func(b block) bool { return len(b.rows) == 0 })
	room := share(blocks, height-len(lines))
	for i, b := range blocks {
		n := len(b.rows)
		if height > 0 {
			n = room[i]
		}
		switch {
		case n == 0 && len(b.rows) > 0:
			continue
		case n < len(b.rows):
			b.title += fmt.Sprintf(" (%d of %d)", n, len(b.rows))
		}
		lines = append(lines, s.bold(b.title))
		lines = append(lines, b.rows[:n]...)
	}
	lines = s.fit(lines, width, height)
	if footer {
		for len(lines) < height {
			lines = append(lines, "")
		}
		lines = append(lines, s.fit([]string{s.bold(s.footer())}, width, 0)...)
	}
	return lines
}

// share divides lines, the number of lines of a screen, among blocks and returns how many rows of each block are shown. First each block in
// turn gets its `least` rows. Then each gets one more row in turn, until there are no rows or no lines left. The first row of a block takes
// two lines, because the title needs one.
func share(blocks []block, lines int) []int {
	rows := make([]int, len(blocks))
	give := func(i int) bool {
		cost := 1
		if rows[i] == 0 {
			cost = 2
		}
		if rows[i] == len(blocks[i].rows) || cost > lines {
			return false
		}
		rows[i], lines = rows[i]+1, lines-cost
		return true
	}
	for i := range blocks {
		for rows[i] < blocks[i].least && give(i) {
		}
	}
	for given := true; given; {
		given = false
		for i := range blocks {
			given = give(i) || given
		}
	}
	return rows
}

// head returns the first lines, which every view has.
func (s *Screen) head(width int, note string, at time.Time) []string {
	if s.now == nil {
		lines := []string{s.bold(pad("kvasir top  "+s.URL, note, width))}
		if s.err != nil {
			lines = append(lines, s.red(fmt.Sprintf("no answer for %v: %s", at.Sub(s.lost).Round(time.Second), text(s.err.Error()))))
		}
		return lines
	}
	st := &s.now.Status
	up := time.Duration(st.Uptime * float64(time.Second)).Round(time.Second)
	lines := []string{s.bold(pad(title(&st.Status, s.URL, up, width-len([]rune(note))-1), note, width))}
	switch {
	case s.err != nil:
		lines = append(lines, s.red(fmt.Sprintf("NO ANSWER for %v, what follows is old: %s", at.Sub(s.lost).Round(time.Second), text(s.err.Error()))))
	case !st.Healthy:
		lines = append(lines, s.red("NOT healthy: "+text(strings.Join(st.Unhealthy, "; "))))
	default:
		lines = append(lines, "healthy")
	}
	if s.View != Overview || s.help {
		return append(lines, "")
	}
	p, l, r := &st.Pool, &st.Lookup, &st.Recent
	lines = append(lines,
		fmt.Sprintf("pool      [%s] %5.1f %% of %s, %s chunks, %s evicted", bar(p.UsageRatio, 12), 100*p.UsageRatio, kv.FormatBytes(p.TotalBytes), Thousands(uint64(p.ResidentChunks)), Thousands(p.EvictedChunks)),
		fmt.Sprintf("hits      now %s   last %v %s   since the start %s of tokens", percent(s.now.hitRate(s.before)),
			time.Duration(r.Seconds*float64(time.Second)).Round(time.Second), percentOf(r.HitTokens, r.AskedTokens), percentOf(l.HitTokens, l.AskedTokens)),
		fmt.Sprintf("requests  lookups %s   sessions %d   transfers %d   workers %d", s.perSecond(func(s *Snapshot) float64 { return float64(s.Status.Lookup.Lookups) }), st.Sessions, p.Transfers, len(st.Workers)),
		fmt.Sprintf("GB/s      stored %s   retrieved %s   from tiers %s   evicted %s", s.gigabytesPerSecond("kvasir_stored_bytes_total"), s.gigabytesPerSecond("kvasir_retrieved_bytes_total"),
			s.gigabytesPerSecond("kvasir_below_read_bytes_total"), s.gigabytesPerSecond("kvasir_evicted_bytes_total")))
	if line := s.savings(); line != "" {
		lines = append(lines, line)
	}
	switch room := min(width-10, maxHistory); {
	case len(s.hour.asked) > 1:
		lines = append(lines, "hit rate  "+spark(s.hour.rates(room-8), room-8)+fmt.Sprintf(" %2.0f min", math.Ceil(s.hour.seconds()/60)))
	case len(s.history) > 1:
		lines = append(lines, "hit rate  "+spark(s.history, room))
	}
	return append(lines, "")
}

// title returns the first line, which names process and URL. If room is too small, it leaves out the process first, then the URL, then
// how long the process runs.
func title(st *server.Status, url string, up time.Duration, room int) string {
	version := text(shortVersion(st.Version))
	for _, line := range []string{
		fmt.Sprintf("kvasir %s  %s  process %d  up %v", version, url, st.PID, up), fmt.Sprintf("kvasir %s  %s  up %v", version, url, up), fmt.Sprintf("kvasir %s  up %v", version, up),
	} {
		if len([]rune(line)) <= room {
			return line
		}
	}
	return "kvasir " + version
}

// pseudo matches the end of a version that Go makes for a commit without a tag.
var pseudo = regexp.MustCompile(`-([0-9a-f]{8})[0-9a-f]{4}(\+dirty)?$`)

// shortVersion returns a version, or only the commit if the version has no tag.
func shortVersion(v string) string {
	if m := pseudo.FindStringSubmatch(v); m != nil {
		return m[1]
	}
	return v
}

// savings says how long lookups take, which hit rate is possible, and what hits saved. It is empty if the server does not report these
// figures.
func (s *Screen) savings() string {
	var parts []string
	live := &s.now.Live
	if p50, p99, ok := s.hour.times(); ok {
		parts = append(parts, fmt.Sprintf("p50 %s  p99 %s", shortTime(p50), shortTime(p99)))
	}
	if w := s.now.Status.HitCurves; len(w) > 1 && w[1].Asked > 0 {
		parts = append(parts, fmt.Sprintf("possible %.1f %% (1h)", 100*w[1].Ceiling))
	}
	if rate := live.Cost.PrefillTokens; rate > 0 {
		saved := min(float64(s.now.Status.Lookup.HitTokens)/rate, maxSeconds)
		part := "saved " + time.Duration(saved*float64(time.Second)).Round(time.Second).String()
		if live.Cost.GPUHourPrice > 0 {
			part += fmt.Sprintf(" = %.2f", saved/3600*live.Cost.GPUHourPrice)
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return ""
	}
	return "lookups   " + strings.Join(parts, "   ")
}

// maxSeconds is about the largest time.Duration in seconds: 285 years. A longer time is shown as this one.
const maxSeconds = 9e9

// shortTime writes a time in seconds with three digits.
func shortTime(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	unit := time.Nanosecond
	for ; d/unit >= 1000; unit *= 10 {
	}
	return d.Round(unit).String()
}

// misses returns the reasons why lookups found no more, the most frequent of the last interval first.
func (s *Screen) misses() block {
	now := s.now.Status.Lookup.MissReasons
	grown := func(why string) uint64 {
		if !s.now.isLater(s.before) {
			return 0
		}
		return now[why] - min(now[why], s.before.Status.Lookup.MissReasons[why])
	}
	order := slices.SortedFunc(maps.Keys(now), func(a, b string) int {
		return cmp.Or(cmp.Compare(grown(b), grown(a)), cmp.Compare(now[b], now[a]), strings.Compare(a, b))
	})
	out := block{title: "why lookups found no more           now     in all"}
	for _, why := range order {
		out.rows = append(out.rows, fmt.Sprintf("  %s %6d %10s", column(why, 30), grown(why), Thousands(now[why])))
	}
	return out
}

func (s *Screen) tiers() (out block) {
	out.title = "tiers below the pool"
	for i := range s.now.Status.Below.Tiers {
		t := &s.now.Status.Below.Tiers[i]
		out.rows = append(out.rows, "  "+text(t.Name)+": "+text(t.Text()))
	}
	return out
}

// workers returns the workers of the server, those that it refused first.
func (s *Screen) workers() (out block) {
	out.title = "workers"
	for _, refused := range []bool{true, false} {
		for i := range s.now.Status.Workers {
			switch w := &s.now.Status.Workers[i]; {
			case refused != (w.Refused != ""):
			case refused:
				out.rows = append(out.rows, s.red(fmt.Sprintf("  %s refused: %s", column(w.Model, 24), text(w.Refused))))
			default:
				how := w.Mode
				if w.CannotMapShm {
					how += ", through the socket (slow)"
				}
				out.rows = append(out.rows, fmt.Sprintf("  %s world %d, %s, chunk %s, heard %.0f s ago", column(w.Model, 24), w.World, how, kv.FormatBytes(w.ChunkBytes), w.SilentFor))
			}
		}
	}
	return out
}

// parts returns the relay, registry and proxy that run in the process of the server.
func (s *Screen) parts() (out block) {
	out.title = "in the same process: P→D, registry, proxy"
	parts := s.now.Status.Parts
	if m := parts["relay"]; m != nil {
		out.rows = append(out.rows, fmt.Sprintf("  relay     %.0f pulled (%s), %.0f served from P, %.0f from memory, %.0f failed",
			m["kvasir_relay_pulled_total"], kv.FormatBytes(int64(m["kvasir_relay_pulled_bytes_total"])), m[`kvasir_relay_served_total{from="p"}`], m[`kvasir_relay_served_total{from="memory"}`],
			m["kvasir_relay_failed_total"]))
	}
	if m := parts["bootstrap"]; m != nil {
		out.rows = append(out.rows, fmt.Sprintf("  registry  %.0f engines (%.0f shown), %.0f workers, %.0f queries", m["kvasir_bootstrap_engines"], m["kvasir_bootstrap_engines_shown"], m["kvasir_bootstrap_workers"], m["kvasir_bootstrap_queries_total"]))
	}
	if m := parts["proxy"]; m != nil {
		well, engines := 0, 0
		for name, v := range m {
			if strings.HasPrefix(name, "kvasir_proxy_engine_well{") {
				engines++
				well += int(v)
			}
		}
		out.rows = append(out.rows, fmt.Sprintf("  proxy     %d of %d engines well, %.0f requests in flight, %.0f wait, %.0f answered, %.0f failed", well, engines,
			m["kvasir_proxy_requests_in_flight"], m["kvasir_proxy_requests_queued"], m[`kvasir_proxy_requests_total{outcome="ok"}`], m[`kvasir_proxy_requests_total{outcome="failed"}`]+m[`kvasir_proxy_requests_total{outcome="no_engine"}`]))
	}
	return out
}

// slow returns how long requests took, by kind: the kind with the highest 99th percentile first.
func (s *Screen) slow() block {
	out := block{title: "time of requests, slowest first    number        p50        p99"}
	list := s.now.operations(s.before)
	if len(list) == 0 {
		list = s.now.operations(nil)
	}
	for _, o := range list {
		out.rows = append(out.rows, fmt.Sprintf("  %s %8s %10s %10s", column(o.name, 30), Thousands(uint64(o.count)), atMost(o.p50), atMost(o.p99)))
	}
	return out
}

func (s *Screen) findings() (out block) {
	out.title = "what keeps hits away (kvasir status says what to do)"
	for _, normal := range []bool{false, true} {
		for _, f := range s.now.Status.Findings {
			if f.Normal != normal {
				continue
			}
			mark := "  - "
			if normal {
				mark = "  (normal) "
			}
			out.rows = append(out.rows, mark+text(f.What))
		}
	}
	return out
}

func (s *Screen) perSecond(of func(*Snapshot) float64) string {
	if v, ok := s.now.rate(s.before, of); ok {
		return fmt.Sprintf("%.1f/s", v)
	}
	return "-"
}

func (s *Screen) gigabytesPerSecond(name string) string {
	if v, ok := s.now.rate(s.before, func(s *Snapshot) float64 { return s.counts[name] }); ok {
		return fmt.Sprintf("%.2f", v/1e9)
	}
	return "-"
}

func percent(share float64, ok bool) string {
	if !ok {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*share)
}

// percentOf returns `part` as a percentage of the whole, which is `of`. If `part` is larger than the whole, it returns 100 %.
func percentOf(part, of uint64) string {
	return percent(float64(min(part, of))/math.Max(1, float64(of)), of > 0)
}

// atMost writes the upper bound of a bucket, in seconds; +Inf is "more".
func atMost(seconds float64) string {
	if math.IsInf(seconds, 1) {
		return "more"
	}
	return "≤ " + time.Duration(seconds*float64(time.Second)).String()
}

func bar(share float64, width int) string {
	n := int(math.Round(min(1, max(0, share)) * float64(width)))
	return strings.Repeat("#", n) + strings.Repeat(".", width-n)
}

// spark draws shares from 0 to 1 as bars of one column each: the last of them, at most width.
func spark(shares []float64, width int) string {
	levels := []rune("▁▂▃▄▅▆▇█")
	var b strings.Builder
	for _, v := range shares[max(0, len(shares)-max(0, width)):] {
		if math.IsNaN(v) {
			b.WriteByte(' ')
			continue
		}
		b.WriteRune(levels[min(len(levels)-1, int(v*float64(len(levels))))])
	}
	return b.String()
}

// text makes a text from outside safe for a terminal: it moves no cursor, and each rune takes one column.
func text(s string) string {
	return strings.Map(func(r rune) rune {
		if r >= 0x300 && r != '…' && r != '→' && r != '≤' {
			return '?' // a rune that is wide, or combines with its neighbour
		}
		return r
	}, printable(s))
}

// column cuts or pads s to width columns.
func column(s string, width int) string {
	r := []rune(text(s))
	if len(r) > width {
		r = append(r[:width-1], '…')
	}
	return string(r) + strings.Repeat(" ", width-len(r))
}

// pad puts note at the right end of a line of width columns.
func pad(line, note string, width int) string {
	n := width - len([]rune(line)) - len([]rune(note))
	if n < 1 {
		return line
	}
	return line + strings.Repeat(" ", n) + note
}

func (s *Screen) bold(text string) string { return s.sgr("1", text) }
func (s *Screen) red(text string) string  { return s.sgr("31", text) }

// mark stands before and after the code of a rendition (bold, red) at the beginning of a line. It takes no room: fit makes an escape
// sequence of it for the whole line, after it has cut the line.
const mark = '\x00'

func (s *Screen) sgr(code, text string) string {
	if !s.Color || text == "" {
		return text
	}
	return string(mark) + code + string(mark) + text
}

// fit cuts the lines to the width and height of the screen; a height of 0 sets no limit. A line that was cut ends with "…".
func (s *Screen) fit(lines []string, width, height int) []string {
	if height > 0 && len(lines) > height {
		lines = lines[:height]
	}
	for i, line := range lines {
		code := ""
		if rest, ok := strings.CutPrefix(line, string(mark)); ok {
			code, line, _ = strings.Cut(rest, string(mark))
		}
		if r := []rune(line); len(r) > width {
			line = string(r[:max(0, width-1)]) + "…"
		}
		if code != "" {
			line = "\x1b[" + code + "m" + line + "\x1b[0m"
		}
		lines[i] = line
	}
	return lines
}
