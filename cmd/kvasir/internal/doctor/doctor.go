// SPDX-License-Identifier: Apache-2.0

// Package doctor examines a machine for faults that keep Kvasir from working well: in shared memory, limits, ports, releases of its
// peers, tiers and clocks. Each finding names its cause, and the command that mends it.
//
// The package changes nothing on the machine. The check of a tier writes objects and removes them, and some checks open sockets for a
// moment.
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

// Level says how serious a finding is. A larger level is worse.
type Level int

// The levels of findings, the least serious first.
const (
	OK      Level = iota
	Info          // it works and could be better, or it could not be looked at
	Warning       // it works, and will cost hits, speed or a restart
	Error         // it does not work
)

var levelNames = [...]string{"ok", "info", "warning", "error"}

// String returns the name of the level.
func (l Level) String() string { return levelNames[l] }

// MarshalText returns the name of the level, for JSON. It implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// The nouns. A noun names the subject of a finding.
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

// Nouns are all subjects of findings, in the order in which a report has them.
var Nouns = []string{sharedMemory, limits, hugePages, ports, advertised, users, releases, tiers, clocks, congestion}

// Finding is one result of the examination: one sentence about one noun.
type Finding struct {
	Level Level  `json:"level"`
	Noun  string `json:"noun"`
	Text  string `json:"text"`
	Cause string `json:"cause,omitempty"`
	Mend  string `json:"mend,omitempty"` // a command or a setting that mends it
}

// System says where the doctor reads about the machine, and how it tries things. Tests replace it. A zero field means the machine's
// own.
type System struct {
	Proc, Sys, Shm string
	Now            func() time.Time
	Open           func(path string, flags int, mode uint32) (fd int, err error)       // makes the files with which directories are checked
	SetAttribute   func(fd int, name string, value []byte, flags int) error            // gives a file an extended attribute
	TryTier        func(ctx context.Context, text string) (tiertool.Verdict, []string) // checks a tier as kvasir tier check does
}

// Options say what the doctor looks at. A zero field means its default, or that the doctor looks at nothing of this kind.
type Options struct {
	System
	PoolBytes  int64    // the size of the pool that is to fit into shared memory
	Listen     []string // HOST:PORT of each listener; default: those of kvasir server, and then a port that is taken is no fault
	Advertised []string // HOST or HOST:PORT that peers are told to connect to
	Pythons    []string // interpreters of Python, or directories of environments
	Tiers      []string // in the form that kvasir tier takes
	Peers      []string // URLs of machines whose clocks are compared with this clock
	Log        *slog.Logger
}

// Report holds what Run found.
type Report struct {
	Findings []Finding `json:"findings"`
}

// doctor is one examination of a machine.
type doctor struct {
	Options
	report Report
}

// Run looks at everything that the options name, and returns the findings.
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

// add adds a finding to the report. It makes texts from outside printable, such as names of files and texts of errors, and cuts texts after
// 500 bytes.
func (d *doctor) add(level Level, noun, text, cause, mend string) {
	const most = 500
	d.report.Findings = append(d.report.Findings, Finding{level, noun, safelog.Text(text, most), safelog.Text(cause, most), safelog.Text(mend, most)})
}

// okIfNone adds an OK finding about a noun if no finding was added since d.mark returned mark.
func (d *doctor) okIfNone(mark int, noun, format string, args ...any) {
	if len(d.report.Findings) == mark {
		d.add(OK, noun, fmt.Sprintf(format, args...), "", "")
	}
}

// mark returns the number of findings so far. okIfNone takes it.
func (d *doctor) mark() int { return len(d.report.Findings) }

// Worst returns the worst level of all findings.
func (r *Report) Worst() (worst Level) {
	for _, f := range r.Findings {
		worst = max(worst, f.Level)
	}
	return worst
}

// ExitCode returns the exit code of the command: 0 if no finding is above Info, 1 if the worst is a Warning, and 2 if it is an Error.
func (r *Report) ExitCode() int { return int(max(r.Worst(), Info) - Info) }

// Write writes the report as text for people.
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

// read returns the text of a small file of the kernel, or of as much of it as can be read; empty if nothing can.
func read(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, maxFile)) // after an error, b has what could be read
	return string(b)
}

// maxFile is how many bytes of a file of the kernel are read; what follows is ignored.
const maxFile = 4 << 20
