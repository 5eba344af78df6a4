// SPDX-License-Identifier: Apache-2.0

// Package safelog keeps a log readable whatever peers send. It clips texts, escapes control characters, and limits the lines that each
// place in the code logs. Log lines contain names that peers choose; such names must neither forge lines nor fill a disk.
package safelog

import (
	"context"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"
)

const (
	// MaxText is how many bytes of a message, or of a text attribute, are logged.
	MaxText = 600
	// maxStack is how many bytes of the attribute "stack" are logged; the rest is cut off.
	maxStack = 16 << 10
	// Burst is how many lines one place in the code may log at a time, and LinesPerSecond is how many lines per second it may log in
	// the long run.
	Burst          = 100
	LinesPerSecond = 5
	// maxPlaces bounds the number of places that are counted. Lines of any further place are logged without a limit.
	maxPlaces = 4096
)

// New returns a logger that writes safe lines to l; a nil l discards them. It counts the lines that it leaves out: the next line of the
// same place carries their number as "not_shown".
func New(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	if h, ok := l.Handler().(*handler); ok {
		return slog.New(h)
	}
	return slog.New(&handler{next: l.Handler(), places: &places{of: make(map[placeKey]*place)}})
}

// Per returns an attribute whose value belongs to the place: lines with different values have separate limits. There must be few
// values, and none may come from a peer.
func Per(key, value string) slog.Attr { return slog.Any(key, per(value)) }

type per string

func (p per) LogValue() slog.Value { return slog.StringValue(string(p)) }

type handler struct {
	next   slog.Handler
	places *places // shared by all handlers made by With
}

type places struct {
	mu sync.Mutex
	of map[placeKey]*place
}

// placeKey identifies a place: a call of the logger in the code, and the value of its Per attribute.
type placeKey struct {
	pc  uintptr
	per per
}

// place counts the lines of one place.
type place struct {
	last   time.Time
	left   float64 // lines that the place may log now
	hidden int
}

// allow reports whether a line of the place key may be logged now; a line that may not is counted and dropped. hidden is how many lines of
// the place were dropped since its last logged line.
func (p *places) allow(key placeKey, now time.Time) (ok bool, hidden int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.of[key]
	if at == nil {
		if len(p.of) >= maxPlaces {
			return true, 0
		}
		at = &place{last: now, left: Burst}
		p.of[key] = at
	}
	at.left = min(Burst, at.left+LinesPerSecond*max(0, now.Sub(at.last).Seconds()))
	at.last = now
	if at.left < 1 {
		at.hidden++
		return false, 0
	}
	at.left--
	hidden, at.hidden = at.hidden, 0
	return true, hidden
}

func (h *handler) Enabled(ctx context.Context, l slog.Level) bool { return h.next.Enabled(ctx, l) }

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	ok, hidden := true, 0
	if r.PC != 0 {
		key := placeKey{pc: r.PC}
		r.Attrs(func(a slog.Attr) bool {
			v, is := a.Value.Any().(per)
			if is {
				key.per = v
			}
			return !is
		})
		ok, hidden = h.places.allow(key, r.Time)
	}
	if !ok {
		return nil
	}
	clean := slog.NewRecord(r.Time, r.Level, Text(r.Message, MaxText), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		clean.AddAttrs(attr(a))
		return true
	})
	if hidden > 0 {
		clean.AddAttrs(slog.Int("not_shown", hidden))
	}
	return h.next.Handle(ctx, clean)
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	clean := make([]slog.Attr, len(attrs))
	for i, a := range attrs {
		clean[i] = attr(a)
	}
	return &handler{next: h.next.WithAttrs(clean), places: h.places}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{next: h.next.WithGroup(name), places: h.places}
}

// attr makes texts safe. Numbers, times and groups stay unchanged.
func attr(a slog.Attr) slog.Attr {
	v := a.Value.Resolve()
	if k := v.Kind(); k != slog.KindString && k != slog.KindAny {
		return slog.Attr{Key: a.Key, Value: v}
	}
	limit := MaxText
	if a.Key == "stack" {
		return slog.String(a.Key, v.String()[:min(len(v.String()), maxStack)])
	}
	return slog.String(a.Key, Text(v.String(), limit))
}

// Text returns s in a form that people can read: it escapes control characters and invalid UTF-8, and keeps at most limit bytes, with a
// note of how many it left out.
func Text(s string, limit int) string {
	cut := len(s)
	if cut > limit {
		for cut = limit; cut > limit-utf8.UTFMax && !utf8.RuneStart(s[cut]); cut-- {
		}
	}
	shown := s[:cut]
	if strings.ContainsFunc(shown, unfit) || !utf8.ValidString(shown) {
		var b strings.Builder
		for i, r := range shown {
			if _, n := utf8.DecodeRuneInString(shown[i:]); unfit(r) || r == utf8.RuneError && n == 1 {
				q := strconv.Quote(shown[i : i+n])
				b.WriteString(q[1 : len(q)-1])
				continue
			}
			b.WriteRune(r)
		}
		shown = b.String()
	}
	if cut < len(s) {
		shown += "... (" + strconv.Itoa(len(s)-cut) + " bytes more)"
	}
	return shown
}

// unfit reports whether r moves the cursor, ends the line, or changes the order in which a terminal shows other characters.
func unfit(r rune) bool {
	return unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp)
}

// login matches a user and a password before the host in a URL, or in a text that looks like a URL.
var login = regexp.MustCompile(`//[^/@\s"]*@`)

// HideLogin returns a text without the user and the password of the URLs in it.
func HideLogin(s string) string { return login.ReplaceAllString(s, "//(set)@") }
