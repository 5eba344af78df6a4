// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"io"
	"log/slog"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// logFlags are the flags of every command that logs.
type logFlags struct {
	LogLevel  slog.Level `help:"Least severe lines to log: debug (a line for each request), info, warn, error." default:"info" enum:"debug,info,warn,error,DEBUG,INFO,WARN,ERROR"`
	LogFormat string     `help:"How lines are written: text (key=value) or json." default:"text" enum:"text,json"`
}

// newLog returns the logger of a command. Peers can neither forge its lines nor fill a disk with them.
func newLog(w io.Writer, f logFlags) *slog.Logger {
	o := &slog.HandlerOptions{Level: f.LogLevel}
	var h slog.Handler = slog.NewTextHandler(w, o)
	if f.LogFormat == "json" {
		h = slog.NewJSONHandler(w, o)
	}
	return safelog.New(slog.New(h))
}

// quiet returns a logger for a server inside another command: it logs warnings and errors until ctx ends. Errors after that come from
// the interruption itself.
func quiet(ctx context.Context, l *slog.Logger) *slog.Logger {
	return slog.New(warnings{l.Handler(), ctx.Done()})
}

type warnings struct {
	slog.Handler
	ended <-chan struct{}
}

func (h warnings) Enabled(ctx context.Context, l slog.Level) bool {
	select {
	case <-h.ended:
		return false
	default:
		return l >= slog.LevelWarn && h.Handler.Enabled(ctx, l)
	}
}

func (h warnings) WithAttrs(attrs []slog.Attr) slog.Handler {
	return warnings{h.Handler.WithAttrs(attrs), h.ended}
}

func (h warnings) WithGroup(name string) slog.Handler {
	return warnings{h.Handler.WithGroup(name), h.ended}
}
