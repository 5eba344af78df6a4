// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/server/explain"
)

// View says what a Screen shows below its first lines.
type View int

// The views, in the order of the keys 1 to 6.
const (
	Overview View = iota
	Tenants
	Requests
	Slow
	Pool
	Transfers

	views = iota
)

var viewNames = [views]string{"overview", "tenants", "requests", "slow", "pool", "P→D"}

// ParseView returns the view with a name. pd is another name for the view Transfers. ok is false if no view has the name.
func ParseView(name string) (View, bool) {
	if name == "pd" {
		return Transfers, true
	}
	i := slices.Index(viewNames[:], name)
	return View(max(i, 0)), i >= 0
}

// Key handles a key. It reports whether the screen needs a new answer of the server, because the user chose another request.
func (s *Screen) Key(key byte) (ask bool) {
	was := s.chosen
	switch {
	case key == '?' || key == 'h':
		s.help = !s.help
		return false
	case key >= '1' && key < '1'+views:
		s.View, s.cursor = View(key-'1'), 0
	case key == keyNext || key == keyPrevious:
		step := View(1)
		if key == keyPrevious {
			step = views - 1
		}
		s.View, s.cursor = (s.View+step)%views, 0
	case key == 'n':
		s.chosen = ""
	case s.View == Requests && (key == 'j' || key == 'k'):
		s.choose(key == 'j')
	case s.View == Slow && (key == 'j' || key == 'k'):
		s.cursor = max(0, min(s.cursor+1-2*int(key-'j'), len(s.slowIDs())-1))
	case s.View == Slow && (key == '\r' || key == '\n'):
		if ids := s.slowIDs(); s.cursor < len(ids) && ids[s.cursor] != "" {
			s.chosen, s.View = ids[s.cursor], Requests
		}
	}
	s.help = false
	return s.chosen != was && s.chosen != ""
}

// The keys that a terminal sends as several bytes, or that have no letter.
const (
	keyNext     = '\t'
	keyPrevious = 0x80
)

// Chosen returns the ID of the request that is shown step by step; empty: the newest.
func (s *Screen) Chosen() string { return s.chosen }

// choose chooses the next of the last requests: below the chosen one if down is true, else above it.
func (s *Screen) choose(down bool) {
	if s.now == nil || len(s.now.Live.Requests) == 0 {
		return
	}
	list := s.now.Live.Requests
	at := slices.IndexFunc(list, func(r explain.Timeline) bool { return r.Request == s.chosen })
	switch {
	case at < 0:
		at = 0 // no request was chosen, or the chosen one is no longer in the list
	case down:
		at = min(at+1, len(list)-1)
	default:
		at = max(at-1, 0)
	}
	s.chosen = list[at].Request
}

// blocks returns the blocks of the view.
func (s *Screen) blocks(width int) []block {
	if s.help {
		return []block{{title: "keys", rows: helpRows}}
	}
	if s.View != Overview && s.View != Transfers && s.now.Live.AtMillis == 0 {
		return []block{{title: viewNames[s.View], rows: []string{"  the server does not tell it: it is of an older version, or did not answer GET /now"}}}
	}
	switch s.View {
	case Tenants:
		return []block{s.origins(), s.shares(), s.accounts()}
	case Requests:
		return []block{s.oneRequest(width), s.lastRequests()}
	case Slow:
		return []block{s.slowest(), s.ended(), s.slow()}
	case Pool:
		return []block{s.cells(width), s.owners(), s.memory(width), s.poolFigures(), s.workers(), s.tierTable()}
	case Transfers:
		return append(s.singleTransfers(width), s.partsInFull()...)
	}
	return []block{s.misses(), s.tiers(), s.workers(), s.parts(), s.slow(), s.findings()}
}

var helpRows = []string{
	"  1 to 6        the views below; also Tab, left and right",
	"  j k, down up  choose a request, in requests and slow",
	"  Enter         in slow: show that request step by step",
	"  n             in requests: follow the newest again",
	"  p, blank      pause, go on",
	"  ?             these keys, and back",
	"  q             quit",
}

// footer returns the line that names views and keys.
func (s *Screen) footer() string {
	var b strings.Builder
	for v, name := range viewNames {
		form := " %d %s "
		if View(v) == s.View {
			form = "[%d %s]"
		}
		fmt.Fprintf(&b, form, v+1, name)
	}
	return b.String() + " ? keys  q quit"
}

// origins says which share of the tokens came from the pool, and which from each tier.
func (s *Screen) origins() block {
	l, below := &s.now.Status.Lookup, s.now.Live.BelowTokens
	out := block{title: "hit rate by tier, since the start", least: 3}
	out.rows = append(out.rows,
		fmt.Sprintf("  %s %7s of %s tokens asked for", column("the pool", 24), percentOf(l.HitTokens-min(below, l.HitTokens), l.AskedTokens), Thousands(l.AskedTokens)),
		fmt.Sprintf("  %s %7s", column("tiers below it", 24), percentOf(below, l.AskedTokens)))
	for i := range s.now.Status.Below.Tiers {
		t := &s.now.Status.Below.Tiers[i]
		out.rows = append(out.rows, fmt.Sprintf("  %s %7s of %s chunks that it was asked for", column("tier "+t.Name, 24), percentOf(t.Hits, t.Hits+t.Misses), Thousands(t.Hits+t.Misses)))
	}
	return out
}

// shares returns the hit rates by model and tenant.
func (s *Screen) shares() block {
	out := block{title: "model                    tenant               now     all   tiers      tokens", least: 4}
	was := make(map[[2]string]admin.Share)
	if s.now.isLater(s.before) {
		for _, b := range s.before.Live.By {
			was[[2]string{b.Model, b.Salt}] = b
		}
	}
	for _, b := range s.now.Live.By {
		now := "-"
		if o, ok := was[[2]string{b.Model, b.Salt}]; ok && b.AskedTokens >= o.AskedTokens && b.HitTokens >= o.HitTokens {
			now = percentOf(b.HitTokens-o.HitTokens, b.AskedTokens-o.AskedTokens)
		}
		out.rows = append(out.rows, fmt.Sprintf("  %s %s %7s %7s %7s %11s", column(cmp.Or(b.Model, "no name"), 22), column(cmp.Or(b.Salt, "none"), 16),
			now, percentOf(b.HitTokens, b.AskedTokens), percentOf(b.BelowTokens, b.AskedTokens), Thousands(b.AskedTokens)))
	}
	return out
}

// accounts returns the tenants that have a quota, a time to live or a pin limit of their own.
func (s *Screen) accounts() block {
	out := block{title: "tenant               quota       has   evicted       TTL    pinned   may pin", least: 2}
	for _, u := range s.now.Live.Tenants {
		quota, has, evicted, ttl, pinned, limit := "-", "-", "-", "-", "-", "-"
		if u.Quota != nil {
			quota, has, evicted = kv.FormatBytes(*u.Quota), kv.FormatBytes(u.Bytes), kv.FormatBytes(int64(u.EvictedBytes))
		}
		if u.TTL != nil {
			ttl = ttlWords(*u.TTL)
		}
		if u.PinLimit > 0 || u.PinnedObjects > 0 {
			pinned, limit = kv.FormatBytes(u.PinnedBytes), kv.FormatBytes(u.PinLimit)
		}
		out.rows = append(out.rows, fmt.Sprintf("  %s %9s %9s %9s %9s %9s %9s", column(u.Salt, 16), quota, has, evicted, ttl, pinned, limit))
	}
	return out
}

// oneRequest draws the steps of the chosen request.
func (s *Screen) oneRequest(width int) block {
	r, why := s.request()
	if r == nil {
		if s.chosen == "" {
			return block{title: "one request, from its lookup to its end", rows: []string{"  none came"}}
		}
		return block{title: "one request: " + text(s.chosen), rows: []string{fmt.Sprintf("  it is not remembered: it is older than the last %d, or the server was not asked yet", explain.MaxTimelines)}}
	}
	of := strings.TrimPrefix(requestLine(r), r.Request+"  ")
	out := block{title: "one request: " + text(r.Request), rows: []string{"  " + text(of)}, least: 13}
	out.rows = append(append(out.rows, wrap(text(why), width)...), waterfall(r, width)...)
	return out
}

// wrap breaks a text into at most three rows of the width, at blanks if it has some.
func wrap(line string, width int) (rows []string) {
	rest, room := []rune(line), max(8, width-2)
	for len(rows) < 2 && len(rest) > room {
		at := room
		for i := room; i > room/2; i-- {
			if rest[i] == ' ' {
				at = i
				break
			}
		}
		rows = append(rows, "  "+string(rest[:at]))
		rest = []rune(strings.TrimLeft(string(rest[at:]), " "))
	}
	return append(rows, "  "+string(rest))
}

// request returns the request that is shown, and says why its hit ended there. r is nil if there is none.
func (s *Screen) request() (r *explain.Timeline, why string) {
	ended := s.now.Live.Ended
	if s.chosen == "" {
		if len(s.now.Live.Requests) == 0 {
			return nil, ""
		}
		r = &s.now.Live.Requests[0]
	} else {
		of := &s.now.Chosen
		ended = of.Lookups
		if len(of.Requests) > 0 && of.Requests[0].Request == s.chosen {
			r = &of.Requests[0]
		} else if i := slices.IndexFunc(s.now.Live.Requests, func(r explain.Timeline) bool { return r.Request == s.chosen }); i >= 0 {
			r = &s.now.Live.Requests[i]
		} else {
			return nil, ""
		}
	}
	for _, l := range ended {
		if l.Request == r.Request {
			return r, l.Text
		}
	}
	if r.HitTokens < r.AskedTokens {
		return r, "why it found no more: kvasir explain " + r.Request
	}
	return r, foundAll(r, 0)
}

func (s *Screen) lastRequests() block {
	out := block{title: "last requests              tenant       model                      hit       ms", least: 4}
	for _, r := range s.now.Live.Requests {
		mark := " "
		if r.Request == s.chosen {
			mark = ">"
		}
		out.rows = append(out.rows, fmt.Sprintf("%s %s %s %s %7s %8.1f", mark, column(r.Request, 24), column(cmp.Or(r.Salt, "none"), 12), column(cmp.Or(r.Model, "no lookup"), 22), percentOf(uint64(max(0, r.HitTokens)), uint64(max(0, r.AskedTokens))), lengthOf(&r)))
	}
	return out
}

// maxSlow is how many of the slowest requests are shown.
const maxSlow = 9

// slowIDs returns the IDs of the requests that can be chosen in the view Slow: the slowest ones, then those that found less than they
// asked for.
func (s *Screen) slowIDs() (ids []string) {
	if s.now == nil {
		return nil
	}
	for i := range s.now.Live.Slow[:min(maxSlow, len(s.now.Live.Slow))] {
		ids = append(ids, s.now.Live.Slow[i].Request)
	}
	for i := range s.now.Live.Ended {
		ids = append(ids, s.now.Live.Ended[i].Request)
	}
	return ids
}

func (s *Screen) slowest() block {
	out := block{title: "slowest requests of ten minutes  request                                  ms", least: maxSlow}
	for i := range s.now.Live.Slow[:min(maxSlow, len(s.now.Live.Slow))] {
		r := &s.now.Live.Slow[i]
		out.rows = append(out.rows, fmt.Sprintf("%s %s %s %11.1f", s.mark(i), column(r.Operation, 30), column(r.Request, 32), 1000*r.Seconds))
	}
	if len(out.rows) == 0 {
		out.rows = []string{"  none took a millisecond"}
	}
	return out
}

func (s *Screen) mark(i int) string {
	if i == s.cursor {
		return ">"
	}
	return " "
}

// ended returns the last lookups that found less than they asked for.
func (s *Screen) ended() block {
	out := block{title: "last lookups that found less than they asked for", least: 8}
	from := min(maxSlow, len(s.now.Live.Slow))
	for i, l := range s.now.Live.Ended {
		out.rows = append(out.rows, fmt.Sprintf("%s %s %s", s.mark(from+i), column(l.Request, 20), text(l.Text)))
	}
	return out
}

// The signs for the content of a cell in the map of the pool.
const (
	cellFull, cellPartly, cellStaged, cellGone, cellFree = "#", "+", "w", "x", "."

	mapRow = 60 // the most cells in a row
)

// cells draws a map of the pool that shows what lies where.
func (s *Screen) cells(width int) block {
	m := &s.now.Live.Map
	n := min(len(m.Resident), len(m.Staged), len(m.Quarantined))
	if n == 0 || m.CellBytes <= 0 {
		return block{}
	}
	out := block{title: fmt.Sprintf("the pool, %d cells of %s", n, kv.FormatBytes(m.CellBytes)), least: 5}
	for from, row := 0, max(1, min(mapRow, width-2)); from < n; from += row {
		line := "  "
		for i := from; i < min(from+row, n); i++ {
			switch used := m.Resident[i]; {
			case m.Quarantined[i] > 0:
				line += cellGone
			case m.Staged[i] > 0:
				line += cellStaged
			case 2*used > m.CellBytes:
				line += cellFull
			case used > 0:
				line += cellPartly
			default:
				line += cellFree
			}
		}
		out.rows = append(out.rows, line)
	}
	out.rows = append(out.rows, "  # chunks  + some  w being written  x waits for a worker that is gone  . free")
	return out
}

// owners returns how many bytes of the pool the objects of each model and tenant take.
func (s *Screen) owners() block {
	out := block{title: "who has it                                                    bytes     share", least: 2}
	for _, o := range s.now.Live.Owners {
		name := "others, or not named since the start"
		if o.Known {
			name = cmp.Or(o.Model, "no name")
			if o.Salt != "" {
				name += ", " + o.Salt
			}
		}
		out.rows = append(out.rows, fmt.Sprintf("  %s %12s %9s", column(name, 52), kv.FormatBytes(o.Bytes), percentOf(uint64(max(0, o.Bytes)), uint64(max(0, s.now.Status.Pool.TotalBytes)))))
	}
	return out
}

// memory says which hit rates other amounts of memory would have had in the last hour.
func (s *Screen) memory(width int) (out block) {
	w := s.now.Status.HitCurves
	if len(w) < 2 || w[1].Asked == 0 {
		return out
	}
	of := &w[1]
	out = block{title: "what other amounts of memory would find, of the last hour (kvasir advise)", least: 1}
	line := fmt.Sprintf("now %.1f %%", 100*of.Hit)
	for _, p := range of.Curve {
		line += fmt.Sprintf(", %s %.1f %%", kv.FormatBytes(p.Bytes), 100*p.Rate)
	}
	for _, p := range of.Tiers {
		line += fmt.Sprintf(", with tier %s %.1f %%", text(p.Name), 100*p.Rate)
	}
	out.rows = wrap(line+fmt.Sprintf(", without end %.1f %%", 100*of.Ceiling), width)
	return out
}

func (s *Screen) poolFigures() block {
	st := &s.now.Status
	p := &st.Pool
	return block{title: "in it", least: 3, rows: []string{
		fmt.Sprintf("  chunks %s, being written %s, in quarantine %s, free %s of %s", kv.FormatBytes(p.ResidentBytes), kv.FormatBytes(p.StagedBytes), kv.FormatBytes(p.QuarantinedBytes), kv.FormatBytes(p.FreeBytes), kv.FormatBytes(p.TotalBytes)),
		fmt.Sprintf("  %s chunks, %s of them may go; %s evicted; %s stores did not fit", Thousands(uint64(max(0, p.ResidentChunks))), Thousands(uint64(max(0, p.EvictableChunks))), Thousands(p.EvictedChunks), Thousands(p.Failures)),
		fmt.Sprintf("  %d sessions; %d chunks in transfer, %d in quarantine", st.Sessions, p.Transfers, p.Quarantined),
	}}
}

// tierTable returns the tiers and their figures in columns.
func (s *Screen) tierTable() block {
	out := block{title: "tier                       found        read  GB/s     written  GB/s  troubles", least: 2}
	for i := range s.now.Status.Below.Tiers {
		t := &s.now.Status.Below.Tiers[i]
		out.rows = append(out.rows, fmt.Sprintf("  %s %8s %11s %5.2f %11s %5.2f %9s", column(t.Name, 21), percentOf(t.Hits, t.Hits+t.Misses), kv.FormatBytes(int64(t.ReadBytes)), t.ReadRate,
			kv.FormatBytes(int64(t.WriteBytes)), t.WriteRate, Thousands(t.Corrupt+t.Late+t.Failures+t.Dropped)))
	}
	return out
}

// partsInFull returns a block for each part that runs in the process of the server.
func (s *Screen) partsInFull() (out []block) {
	parts := s.now.Status.Parts
	if len(parts) == 0 {
		return []block{{title: "P→D, registry, proxy", rows: []string{"  the server runs alone: kvasir all runs relay, registry and proxy in its process"}}}
	}
	number := func(part, name string) string { return Thousands(uint64(max(0, parts[part][name]))) }
	size := func(part, name string) string { return kv.FormatBytes(int64(parts[part][name])) }
	now := func(part, name string) string {
		return s.perSecond(func(s *Snapshot) float64 { return s.Status.Parts[part][name] })
	}
	speed := func(part, name string) string {
		v, ok := s.now.rate(s.before, func(s *Snapshot) float64 { return s.Status.Parts[part][name] })
		if !ok {
			return "-"
		}
		return fmt.Sprintf("%.2f GB/s", v/1e9)
	}
	row := func(what, all, now string) string {
		return strings.TrimRight(fmt.Sprintf("  %s %26s  %20s", column(what, 24), all, now), " ")
	}
	if parts["relay"] != nil {
		const r = "relay"
		out = append(out, block{title: "relay: P→D                               since the start                   now", least: 4, rows: []string{
			row("transfers pulled from P", number(r, "kvasir_relay_pulled_total"), now(r, "kvasir_relay_pulled_total")),
			row("KV pulled from P", size(r, "kvasir_relay_pulled_bytes_total"), speed(r, "kvasir_relay_pulled_bytes_total")),
			row("KV pushed to D", size(r, "kvasir_relay_pushed_bytes_total"), speed(r, "kvasir_relay_pushed_bytes_total")),
			row("D served from P", number(r, `kvasir_relay_served_total{from="p"}`), now(r, `kvasir_relay_served_total{from="p"}`)),
			row("D served from memory", number(r, `kvasir_relay_served_total{from="memory"}`), now(r, `kvasir_relay_served_total{from="memory"}`)),
			row("failed, D computes", number(r, "kvasir_relay_failed_total"), now(r, "kvasir_relay_failed_total")),
			row("kept transfers", number(r, "kvasir_relay_kept_transfers")+", "+size(r, "kvasir_relay_kept_bytes"), ""),
			row("engines of P", number(r, "kvasir_relay_engines"), ""),
		}})
	}
	if parts["bootstrap"] != nil {
		const b = "bootstrap"
		out = append(out, block{title: "registry", least: 2, rows: []string{
			row("engines of P, complete", number(b, "kvasir_bootstrap_engines")+", "+number(b, "kvasir_bootstrap_engines_shown"), ""),
			row("workers", number(b, "kvasir_bootstrap_workers"), ""),
			row("queries", number(b, "kvasir_bootstrap_queries_total"), now(b, "kvasir_bootstrap_queries_total")),
			row("refused", number(b, "kvasir_bootstrap_refused_total"), now(b, "kvasir_bootstrap_refused_total")),
		}})
	}
	if m := parts["proxy"]; m != nil {
		const p = "proxy"
		failed := m[`kvasir_proxy_requests_total{outcome="failed"}`] + m[`kvasir_proxy_requests_total{outcome="no_engine"}`]
		b := block{title: "proxy", least: 3, rows: []string{
			row("in progress, waiting", number(p, "kvasir_proxy_requests_in_flight")+", "+number(p, "kvasir_proxy_requests_queued"), ""),
			row("answered", number(p, `kvasir_proxy_requests_total{outcome="ok"}`), now(p, `kvasir_proxy_requests_total{outcome="ok"}`)),
			row("failed, retried", Thousands(uint64(max(0, failed)))+", "+number(p, "kvasir_proxy_retries_total"), now(p, "kvasir_proxy_retries_total")),
		}}
		for _, name := range slices.Sorted(maps.Keys(m)) {
			if engine, ok := strings.CutPrefix(name, "kvasir_proxy_engine_well{"); ok {
				how := "does not answer"
				if m[name] > 0 {
					how = fmt.Sprintf("well, %.0f requests", m["kvasir_proxy_engine_requests{"+engine])
				}
				b.rows = append(b.rows, "  engine "+column(label(engine, "engine"), 40)+" "+how)
			}
		}
		out = append(out, b)
	}
	return out
}
