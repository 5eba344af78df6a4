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

// Options say what Top and Once show, and where.
type Options struct {
	URL      string        // URL of the server's HTTP interface
	Asker    *Asker        // sends the requests
	Interval time.Duration // time between two requests
	In, Out  *os.File      // Out is a terminal; In need not be one
	Color    bool
	View     View // the view that is shown first
}

// Once asks a server twice, one interval apart, so that it knows rates. It writes to w what Top would show, all lines of it, without
// escape sequences.
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

// twice asks a server twice, one interval apart, and calls f with each snapshot.
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

// How long the requests for one snapshot may take, unless the interval is longer. Once ends after a failure, but Top tries again.
const (
	topLimit  = 2 * time.Second
	onceLimit = 10 * time.Second
)

// onceWidth is the width of the lines of Once in columns. It is large, because scripts want whole lines.
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

// The sequences that begin and end the screen: they switch to the terminal's other screen and hide the cursor, and back.
const enter, leave = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"

// Top shows a server on a terminal until ctx ends or the user presses q. If the server does not answer, Top asks it again and again,
// and shows it when it is back.
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
	defer func() { _, _ = io.WriteString(o.Out, leave) }() // if the terminal is gone, the error does not matter
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)

	s := Screen{URL: o.URL, Color: o.Color, View: o.View}
	answers := make(chan answer, 1)
	ask := func() {
		at, request := time.Now(), s.Chosen()
		go func() { // it ends with ctx or at its timeout; the channel answers has room for its result
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
			case 'q', 'Q', 3, 4: // Ctrl-C and Ctrl-D, if the terminal sends them as keys
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

// draw writes the whole screen in one write.
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

// readKeys reads single keys from the terminal `in`. restore stops the reading and gives the terminal its settings back. If `in` is no
// terminal, keys is nil.
func readKeys(in *os.File) (keys <-chan byte, restore func(), err error) {
	fd := int(in.Fd())
	old, err := unix.IoctlGetTermios(fd, getTermios)
	if err != nil {
		return nil, func() {}, nil //nolint:nilerr // in is no terminal
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
		_ = unix.IoctlSetTermios(fd, setTermios, old) // if the terminal is gone, the error does not matter
	}, nil
}

// arrows maps the last byte of what a terminal sends for an arrow key, or for Shift with Tab, to the key that does the same.
var arrows = map[byte]byte{'A': 'k', 'B': 'j', 'C': keyNext, 'D': keyPrevious, 'Z': keyPrevious}

// keysOf returns the keys in the bytes that a terminal sent. It drops unknown escape sequences.
func keysOf(sent []byte) (keys []byte) {
	for i := 0; i < len(sent); i++ {
		switch {
		case sent[i] >= 0x80: // a byte of a letter beyond ASCII
		case sent[i] != 0x1b:
			keys = append(keys, sent[i])
		case i+1 < len(sent) && (sent[i+1] == '[' || sent[i+1] == 'O'):
			for i += 2; i < len(sent) && (sent[i] < 0x40 || sent[i] > 0x7e); i++ { // skips parameters up to the letter that ends the sequence
			}
			if i < len(sent) && arrows[sent[i]] != 0 {
				keys = append(keys, arrows[sent[i]])
			}
		}
	}
	return keys
}

// widthOf returns how many columns the output has, or otherwise if it is no terminal.
func widthOf(w io.Writer, otherwise int) int {
	if f, ok := w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return int(size.Col)
		}
	}
	return otherwise
}
