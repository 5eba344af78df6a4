package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
)

// lineHandler writes log records as lines for people: time, level unless it is
// info, message, key=value.
type lineHandler struct {
	w     io.Writer
	level slog.Level
	attrs string
	line  *lineBuffer // shared by every handler made from the first
}

type lineBuffer struct {
	sync.Mutex
	b []byte
}

func (h *lineHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

func (h *lineHandler) Handle(_ context.Context, r slog.Record) error {
	h.line.Lock()
	defer h.line.Unlock()
	b := r.Time.AppendFormat(h.line.b[:0], "15:04:05.000 ")
	if r.Level != slog.LevelInfo {
		b = append(append(b, r.Level.String()...), ' ')
	}
	b = append(append(b, r.Message...), h.attrs...)
	r.Attrs(func(a slog.Attr) bool {
		b = append(b, formatAttr(a)...)
		return true
	})
	b = append(b, '\n')
	h.line.b = b[:0]
	_, err := h.w.Write(b)
	return err
}

func formatAttr(a slog.Attr) string {
	v := a.Value.Resolve().String()
	if v == "" || strings.ContainsAny(v, " \"=\n") {
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
