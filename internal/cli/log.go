package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// lineHandler writes log records as lines for people: time, level unless it is
// info, message, key=value.
type lineHandler struct {
	level slog.Level
	attrs string
	out   *lineWriter // shared by every handler made from the first
}

// lineWriter collects lines for a moment: one write per line would cost a busy
// server more than the request that the line is about. Warnings go out at once,
// with what came before them.
type lineWriter struct {
	mu      sync.Mutex
	w       io.Writer
	pending []byte
	timer   bool // a flush is due
}

const (
	lineDelay   = 50 * time.Millisecond
	linePending = 64 << 10 // bytes that are written without waiting
)

// flush writes what is pending; Main calls it last.
func (l *lineWriter) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = false
	l.flushLocked()
}

func (l *lineWriter) flushLocked() {
	if len(l.pending) > 0 {
		_, _ = l.w.Write(l.pending) // there is nobody else to tell
		l.pending = l.pending[:0]
	}
}

// addedLocked is called after a line was appended to pending.
func (l *lineWriter) addedLocked(urgent bool) {
	switch {
	case urgent || len(l.pending) > linePending:
		l.flushLocked()
	case !l.timer:
		l.timer = true
		time.AfterFunc(lineDelay, l.flush)
	}
}

func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	b := r.Time.AppendFormat(h.out.pending, "15:04:05.000 ")
	if r.Level != slog.LevelInfo {
		b = append(append(b, r.Level.String()...), ' ')
	}
	b = append(append(b, safelog.Text(r.Message, len(r.Message))...), h.attrs...)
	r.Attrs(func(a slog.Attr) bool {
		b = append(b, formatAttr(a)...)
		return true
	})
	h.out.pending = append(b, '\n')
	h.out.addedLocked(r.Level > slog.LevelInfo)
	return nil
}

func formatAttr(a slog.Attr) string {
	v := a.Value.Resolve().String()
	if v == "" || strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r == '"' || r == '=' || !strconv.IsPrint(r) }) {
		v = strconv.Quote(v)
	}
	return fmt.Sprintf(" %s=%s", a.Key, v)
}

func (h *lineHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	for _, a := range attrs {
		c.attrs += formatAttr(a)
	}
	return &c
}

func (h *lineHandler) WithGroup(string) slog.Handler { return h }

// quiet returns a logger for a server inside another command: warnings and worse.
func quiet(l *slog.Logger) *slog.Logger {
	h, ok := l.Handler().(*lineHandler)
	if !ok {
		return l
	}
	c := *h
	c.level = max(c.level, slog.LevelWarn)
	return slog.New(&c)
}
