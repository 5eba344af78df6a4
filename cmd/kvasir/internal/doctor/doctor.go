// SPDX-License-Identifier: Apache-2.0

// Package doctor looks at a machine for what keeps Kvasir from working well: shared memory, limits, ports, releases of its peers, tiers,
// clocks. Each finding names its cause and the command that mends it.
//
// It changes nothing, but for the objects that the check of a tier writes and removes, and sockets that it opens for a moment.
package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// Level says how bad a finding is.
type Level int

// The levels.
const (
	OK      Level = iota
	Info          // works, and could be better; or could not be looked at
	Warning       // works, and will cost hits, speed or a restart
	Error         // does not work
)

var levelNames = [...]string{"ok", "info", "warning", "error"}

// String returns the level's name.
func (l Level) String() string { return levelNames[l] }

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// The nouns, which name what a finding is about.
const (
	sharedMemory = "shared memory"
	limits       = "limits"
	hugePages    = "huge pages"
	ports        = "ports"
	advertised   = "advertised addresses"
	users        = "users"
	releases     = "releases"
	tiers        = "tiers"
	clocks       = "clocks"
	congestion   = "congestion control"
)

// Nouns are what a report has findings about, in its order.
var Nouns = []string{sharedMemory, limits, hugePages, ports, advertised, users, releases, tiers, clocks, congestion}

// Finding is one sentence about one noun.
type Finding struct {
	Level Level  `json:"level"`
	Noun  string `json:"noun"`
	Text  string `json:"text"`
	Cause string `json:"cause,omitempty"`
	Mend  string `json:"mend,omitempty"` // a command, or a setting
}

// System is where a machine describes itself. A zero field means the machine's own.
type System struct {
	Proc, Sys, Shm string
	Now            func() time.Time
	Open           func(path string, flags int, mode uint32) (fd int, err error)       // makes the files of checks
	SetAttribute   func(fd int, name string, value []byte, flags int) error            // an extended attribute
	TryTier        func(ctx context.Context, text string) (tiertool.Verdict, []string) // kvasir tier check
}

// Options say what is looked at. A zero field means nothing, or its default.
type Options struct {
	System
	PoolBytes  int64    // of the pool that is to fit
	Listen     []string // HOST:PORT of listeners; default: those of kvasir server, where a conflict is no fault
	Advertised []string // HOST or HOST:PORT that peers are given
	Pythons    []string // interpreters, or directories of environments
	Tiers      []string // as kvasir tier takes them
	Peers      []string // URLs whose clocks are compared with this one
	Log        *slog.Logger
}

// Report is what was found.
type Report struct {
	Findings []Finding `json:"findings"`
}

// doctor is one examination.
type doctor struct {
	Options
	report Report
}

// Run looks at everything.
func Run(ctx context.Context, o Options) *Report {
	if o.Proc == "" {
		o.Proc = "/proc"
	}
	if o.Sys == "" {
		o.Sys = "/sys"
	}
	if o.Shm == "" {
		o.Shm = shm.Dir
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Open == nil {
		o.Open = unix.Open
	}
	if o.SetAttribute == nil {
		o.SetAttribute = unix.Fsetxattr
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.TryTier == nil {
		o.TryTier = func(ctx context.Context, text string) (tiertool.Verdict, []string) {
			return tiertool.TierFaults(ctx, io.Discard, o.Log, seal.Source{}, text, checkBytes, checkObjects)
		}
	}
	d := &doctor{Options: o}
	d.sharedMemory()
	d.limits()
	d.hugePages()
	d.ports()
	all := d.processes()
	d.advertised(ctx, all)
	d.users(all)
	d.releases(ctx, all)
	d.tiers(ctx)
	d.clocks(ctx)
	d.congestion()
	return &d.report
}

// add adds a finding. It makes texts from outside, such as names of files and texts of errors, printable.
func (d *doctor) add(level Level, noun, text, cause, mend string) {
	const most = 500
	d.report.Findings = append(d.report.Findings, Finding{level, noun, safelog.Text(text, most), safelog.Text(cause, most), safelog.Text(mend, most)})
}

// okIfNone adds an OK finding about a noun if no finding was added since mark.
func (d *doctor) okIfNone(mark int, noun, format string, args ...any) {
	if len(d.report.Findings) == mark {
		d.add(OK, noun, fmt.Sprintf(format, args...), "", "")
	}
}

// mark returns the number of findings so far, for okIfNone.
func (d *doctor) mark() int { return len(d.report.Findings) }

// Worst returns the worst level.
func (r *Report) Worst() (worst Level) {
	for _, f := range r.Findings {
		worst = max(worst, f.Level)
	}
	return worst
}

// ExitCode is 0 where nothing is above Info, 1 with warnings, and 2 with errors.
func (r *Report) ExitCode() int { return int(max(r.Worst(), Info) - Info) }

// Write writes the report for people.
func (r *Report) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	count := map[Level]int{}
	for _, f := range r.Findings {
		count[f.Level]++
		fmt.Fprintf(t, "%s\t%s\t%s\n", f.Level, f.Noun, f.Text)
		if f.Cause != "" {
			fmt.Fprintf(t, "\t\t  cause: %s\n", f.Cause)
		}
		if f.Mend != "" {
			fmt.Fprintf(t, "\t\t  mend:  %s\n", f.Mend)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "errors: %d, warnings: %d\n", count[Error], count[Warning])
	return err
}

// WriteJSON writes the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	return json.NewEncoder(w).Encode(struct {
		Worst    Level     `json:"worst"`
		Findings []Finding `json:"findings"`
	}{r.Worst(), r.Findings})
}

// read returns a small file of the kernel without the blanks around it; empty where it cannot be read.
func read(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, maxFile)) // what could be read
	return string(b)
}

// maxFile bounds a file of the kernel, bytes.
const maxFile = 4 << 20
