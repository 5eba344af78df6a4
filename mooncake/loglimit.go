// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"
)

// LogLimit limits log lines that peers can cause to 10 per second. The zero value is
// ready; its methods are safe for concurrent use.
type LogLimit struct {
	mu struct {
		sync.Mutex
		second int64
		shown  int
		hidden int
	}
}

const linesPerSecond = 10

// Warn logs a warning. Over the limit it only counts the warning; the next warning that is logged carries that count (not_shown).
func (l *LogLimit) Warn(log *slog.Logger, msg string, args ...any) {
	ok, hidden := l.allow()
	if !ok {
		return
	}
	if hidden > 0 {
		args = append(args, "not_shown", hidden)
	}
	log.Warn(msg, args...)
}

// SomeNames returns the first four names of a list, and how many more there are, for a log line.
func SomeNames(names []string) string {
	const most = 4
	text := strings.Join(names[:min(most, len(names))], " ")
	if len(names) > most {
		text += fmt.Sprintf(" and %d more", len(names)-most)
	}
	return text
}

// allow reports whether a line may be logged now. hidden is how many lines it has suppressed since the last line that was logged.
func (l *LogLimit) allow() (ok bool, hidden int) {
	now := time.Now().Unix()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.second != now {
		l.mu.second, l.mu.shown = now, 0
	}
	if l.mu.shown == linesPerSecond {
		l.mu.hidden++
		return false, 0
	}
	l.mu.shown++
	hidden, l.mu.hidden = l.mu.hidden, 0
	return true, hidden
}
