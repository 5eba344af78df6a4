// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/bench/load"
)

// The interval of the progress bar on a terminal, and that of lines elsewhere.
const (
	barEvery  = 200 * time.Millisecond
	lineEvery = 10 * time.Second
)

// progress prints the progress of a run until the caller calls stop.
func (c *Flags) progress(g *load.Generator, w io.Writer) (stop func()) {
	if c.NoProgress {
		return func() {}
	}
	bar, every := isTerminal(w), lineEvery
	if bar {
		every = barEvery
	}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				if bar {
					fmt.Fprintf(w, "\r%s\x1b[K", barOf(g.Progress()))
				} else {
					fmt.Fprintln(w, lineOf(g.Progress()))
				}
			case <-end:
				if bar {
					fmt.Fprint(w, "\r\x1b[K")
				}
				return
			}
		}
	}()
	return func() {
		close(end)
		<-ended
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

const barWidth = 20

func barOf(p load.Progress) string {
	full := 0
	if p.Total > 0 {
		full = barWidth * p.Done / p.Total
	}
	return "[" + strings.Repeat("#", full) + strings.Repeat(" ", barWidth-full) + "] " + lineOf(p)
}

func lineOf(p load.Progress) string {
	text := fmt.Sprintf("%d/%d done, %d in progress, %.0f s", p.Done, p.Total, p.Running, p.Elapsed.Seconds())
	if s := p.Elapsed.Seconds(); s > 0 {
		text += fmt.Sprintf(", %.1f req/s, %.0f tok/s", float64(p.Done)/s, float64(p.Tokens)/s)
	}
	if p.Failed > 0 {
		text += fmt.Sprintf(", %d failed", p.Failed)
	}
	return text
}
