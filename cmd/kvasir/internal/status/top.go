// SPDX-License-Identifier: Apache-2.0

package status

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Options configures Top.
type Options struct {
	URL      string        // of the server's HTTP interface
	Asker    *Asker        // asks it
	Interval time.Duration // between two questions
	In, Out  *os.File      // a terminal; In need not be one
	Color    bool
	View     View // to begin with
}

// Once asks a server twice, an interval apart, so that there are rates, and writes what Top
// would show, without a limit on lines and without escape sequences.
func Once(ctx context.Context, o Options, w io.Writer) error {
	s := Screen{URL: o.URL, View: o.View}
	if err := twice(ctx, &o, func(snap *Snapshot) { s.Add(snap, nil, snap.At) }); err != nil {
		return err
	}
	for _, line := range s.Lines(onceWidth, 0, "", time.Now()) {
		if _, err := fmt.Fprintln(w, strings.TrimRight(line, " ")); err != nil {
			return err
		}
	}
	return nil
}

// twice asks a server twice, an interval apart.
func twice(ctx context.Context, o *Options, f func(*Snapshot)) error {
	for i := range 2 {
		if i > 0 {
			select {
			case <-time.After(o.Interval):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		snap, err := take(ctx, o, "", time.Now(), onceLimit)
		if err != nil {
			return err
		}
		f(snap)
	}
	return nil
}

// Limits of the time of a request, unless the interval is longer. Top asks again after a failed request, Once does not.
const (
	topLimit  = 2 * time.Second
	onceLimit = 10 * time.Second
)

// onceWidth is the width of Once, columns: scripts want whole lines.
const onceWidth = 200

func take(ctx context.Context, o *Options, request string, at time.Time, limit time.Duration) (*Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, max(o.Interval, limit))
	defer cancel()
	return o.Asker.Take(ctx, o.URL, request, at)
}

// IsTerminal reports whether a file is a terminal.
func IsTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), getTermios)
	return err == nil
}

// What is written to begin and end a screen: the other screen of the terminal, no cursor.
const enter, leave = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"

// Top shows a server on a terminal until ctx ends or q is pressed. A server that does not
// answer is asked again; one that comes back is shown again.
func Top(ctx context.Context, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	keys, restore, err := readKeys(o.In)
	if err != nil {
		return err
	}
	defer restore()
	if _, err := io.WriteString(o.Out, enter); err != nil {
		return err
	}
	defer func() { _, _ = io.WriteString(o.Out, leave) }() // a terminal that is gone needs none
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)

	s := Screen{URL: o.URL, Color: o.Color, View: o.View}
	answers := make(chan answer, 1)
	ask := func() {
		at, request := time.Now(), s.Chosen()
		go func() { // ends with ctx or its timeout; answers has room for it
			snap, err := take(ctx, &o, request, at, topLimit)
			answers <- answer{snap, err, at}
		}()
	}
	asking, paused := true, false
	ask()
	defer func() {
		if cancel(); asking {
			<-answers
		}
	}()
	tick := time.NewTicker(o.Interval)
	defer tick.Stop()
	for {
		if err := draw(o.Out, &s, paused); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-resized:
		case a := <-answers:
			asking = false
			s.Add(a.snap, a.err, a.at)
		case <-tick.C:
			if !asking && !paused {
				asking = true
				ask()
			}
		case key := <-keys:
			switch key {
			case 'q', 'Q', 3, 4: // Ctrl-C and Ctrl-D, where the terminal sends them as keys
				return nil
			case 'p', ' ':
				paused = !paused
			default:
				if s.Key(key) && !asking {
					asking = true
					ask()
				}
			}
		}
	}
}

type answer struct {
	snap *Snapshot
	err  error
	at   time.Time
}

// draw writes the whole screen at once.
func draw(out *os.File, s *Screen, paused bool) error {
	width, height := 80, 24
	if size, err := unix.IoctlGetWinsize(int(out.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 && size.Row > 0 {
		width, height = int(size.Col), int(size.Row)
	}
	note := time.Now().Format(time.TimeOnly)
	if paused {
		note = "PAUSED, p goes on"
	}
	lines := s.Lines(width, height, note, time.Now())
	_, err := io.WriteString(out, "\x1b[H"+strings.Join(lines, "\x1b[K\r\n")+"\x1b[K\x1b[J")
	return err
}

// readKeys reads a terminal key by key. restore ends that and gives the terminal its
// settings back. What is no terminal has no keys.
func readKeys(in *os.File) (keys <-chan byte, restore func(), err error) {
	fd := int(in.Fd())
	old, err := unix.IoctlGetTermios(fd, getTermios)
	if err != nil {
		return nil, func() {}, nil //nolint:nilerr // not a terminal
	}
	raw := *old
	raw.Lflag &^= unix.ICANON | unix.ECHO
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 0, 1 // a read ends after a tenth of a second
	if err := unix.IoctlSetTermios(fd, setTermios, &raw); err != nil {
		return nil, nil, fmt.Errorf("set the terminal: %w", err)
	}
	out, stop, done := make(chan byte), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		var b [16]byte
		for {
			select {
			case <-stop:
				return
			default:
			}
			n, err := unix.Read(fd, b[:])
			if err != nil && err != unix.EINTR {
				return
			}
			for _, key := range keysOf(b[:max(0, n)]) {
				select {
				case out <- key:
				case <-stop:
					return
				}
			}
		}
	}()
	return out, func() {
		close(stop)
		<-done
		_ = unix.IoctlSetTermios(fd, setTermios, old) // a terminal that is gone needs none
	}, nil
}

// arrows are what terminals send for the arrow keys and Shift with Tab, as the keys that do the same.
var arrows = map[byte]byte{'A': 'k', 'B': 'j', 'C': keyNext, 'D': keyPrevious, 'Z': keyPrevious}

// keysOf returns the keys in a terminal's input. Unknown escape sequences are dropped.
func keysOf(sent []byte) (keys []byte) {
	for i := 0; i < len(sent); i++ {
		switch {
		case sent[i] >= 0x80: // a letter beyond ASCII
		case sent[i] != 0x1b:
			keys = append(keys, sent[i])
		case i+1 < len(sent) && (sent[i+1] == '[' || sent[i+1] == 'O'):
			for i += 2; i < len(sent) && (sent[i] < 0x40 || sent[i] > 0x7e); i++ { // parameters, before the letter that ends it
			}
			if i < len(sent) && arrows[sent[i]] != 0 {
				keys = append(keys, arrows[sent[i]])
			}
		}
	}
	return keys
}

// widthOf returns the number of columns of the output, or the default where it is no terminal.
func widthOf(w io.Writer, otherwise int) int {
	if f, ok := w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return int(size.Col)
		}
	}
	return otherwise
}
