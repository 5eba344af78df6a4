// SPDX-License-Identifier: Apache-2.0

// Package status has the commands with which operators ask a running server: kvasir status, top, advise, explain, clear and quota. It
// shows the state of the server in a terminal: once in words, or as a screen that is drawn again and again.
package status

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// Print writes the status of the server at url in words.
func Print(w io.Writer, url string, st *admin.Status) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, printable(fmt.Sprintf(format, args...)))
	}
	health := "healthy"
	if !st.Healthy {
		health = "NOT healthy: " + strings.Join(st.Unhealthy, "; ")
	}
	uptime := time.Duration(st.Uptime * float64(time.Second)).Round(time.Second)
	row("server", "%s, kvasir %s, process %d, since %s (%s), %s", url, st.Version, st.PID, st.Started, uptime, health)
	p := &st.Pool
	full := fmt.Sprintf("%.1f %% full", 100*p.UsageRatio)
	if p.UsageRatio > 0.95 {
		full += ", which is normal: room is made when it is needed"
	}
	row("pool", "/dev/shm/%s, %s, %s", p.Name, kv.FormatBytes(p.TotalBytes), full)
	row("chunks", "%d of %d tokens kept, %d evicted since the start", p.ResidentChunks, st.ChunkTokens, p.EvictedChunks)
	for i := range st.Below.Tiers {
		row("tier "+st.Below.Tiers[i].Name, "%s", st.Below.Tiers[i].Text())
	}
	l := &st.Lookup
	row("lookups", "%d (and %d too short), %s", l.Lookups, l.Short, hitRate(l.HitTokens, l.AskedTokens))
	if n := len(st.HitCurves); n > 0 && st.HitCurves[n-1].Asked > 0 {
		w := &st.HitCurves[n-1]
		row("last 24h", "hit %.1f %% of %.1f %% possible (kvasir advise says what comes nearer)", 100*w.Hit, 100*w.Ceiling)
	}
	r := &st.Recent
	row("last "+time.Duration(r.Seconds*float64(time.Second)).Round(time.Second).String(), "%d lookups, %s, stored %s, retrieved %s, evicted %d chunks",
		r.Lookups, hitRate(r.HitTokens, r.AskedTokens), kv.FormatBytes(int64(r.StoredBytes)), kv.FormatBytes(int64(r.RetrievedBytes)), r.EvictedChunks)
	var misses []string
	for _, why := range slices.Sorted(maps.Keys(l.MissReasons)) {
		misses = append(misses, fmt.Sprintf("%s: %d", why, l.MissReasons[why]))
	}
	row("misses", "%s", orNone(strings.Join(misses, "; ")))
	for _, v := range st.Workers {
		how := v.Mode
		switch {
		case v.Refused != "":
			how = "REFUSED: " + v.Refused
		case v.Asleep:
			how += ", ASLEEP until its next request"
		case v.CannotMapShm:
			how += ", through the socket (slow)"
		}
		row("worker", "%s, world size %d, %s, a chunk of %d tokens is %s, %s, last heard %.0f s ago", v.Model, v.World, how, v.ChunkTokens, kv.FormatBytes(v.ChunkBytes), v.Peer, v.SilentFor)
	}
	if len(st.Workers) == 0 {
		row("worker", "none")
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(st.Findings) == 0 {
		_, err := fmt.Fprintln(w, "\nNothing keeps hits away.")
		return err
	}
	fmt.Fprintln(w, "\nWhat keeps hits away:")
	for _, f := range st.Findings {
		fmt.Fprintf(w, "- %s\n  %s\n", printable(f.What), printable(f.Do))
	}
	return nil
}

// printable makes a text from outside safe for a terminal, such as the name of a model or a file: it moves no cursor and begins no
// line.
func printable(s string) string { return safelog.Text(s, 4096) }

func hitRate(hit, asked uint64) string {
	if asked == 0 {
		return "no tokens asked for"
	}
	return fmt.Sprintf("%.1f %% of %s tokens hit", 100*float64(hit)/float64(asked), Thousands(asked))
}

// Thousands writes a number with commas between groups of three digits: 3,308,093.
func Thousands(n uint64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
