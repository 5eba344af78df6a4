// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
)

// journal records the starts and ends of parts, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

// part returns a part that records its start, is ready at once, and records its end when its context ends. It returns err.
func (j *journal) part(name string, err error) runPart {
	return runPart{Name: name, Run: func(ctx context.Context, ready func()) error {
		j.add("+" + name)
		ready()
		<-ctx.Done()
		j.add("-" + name)
		return err
	}}
}

var silent = slog.New(slog.DiscardHandler)

func (j *journal) want(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(j.lines, " "); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// A part starts when the part before it is ready, and ends when the later parts have ended.
func TestOrder(t *testing.T) {
	var j journal
	ctx, cancel := context.WithCancel(t.Context())
	last := j.part("c", nil)
	run := last.Run
	last.Run = func(ctx context.Context, ready func()) error {
		return run(ctx, func() { ready(); cancel() })
	}
	if err := runTogether(ctx, silent, j.part("a", nil), j.part("b", nil), last); err != nil {
		t.Error(err)
	}
	j.want(t, "+a +b +c -c -b -a")
}

// When a part fails to start, or ends by itself later, the running parts are ended and the parts
// after it are not started. The error has all parts' errors, with their names.
func TestFailure(t *testing.T) {
	broken := errors.New("broken")
	var j journal
	err := runTogether(t.Context(), silent, j.part("a", errors.New("slow")), runPart{Name: "b", Run: func(context.Context, func()) error { return broken }}, j.part("c", nil))
	if !errors.Is(err, broken) || err.Error() != "b: broken\na: slow" {
		t.Errorf("got %v", err)
	}
	j.want(t, "+a -a")

	j = journal{}
	up := make(chan struct{})
	watched := j.part("c", nil)
	run := watched.Run
	watched.Run = func(ctx context.Context, ready func()) error { return run(ctx, func() { ready(); close(up) }) }
	err = runTogether(t.Context(), silent, j.part("a", nil), runPart{Name: "b", Run: func(_ context.Context, ready func()) error {
		ready()
		<-up
		return nil
	}}, watched)
	if !errors.Is(err, errEnded) || err.Error() != "b: it ended, although nothing stopped it" {
		t.Errorf("got %v", err)
	}
	j.want(t, "+a +c -c -a")
}

// When runTogether is stopped while a part is starting, it does not wait for that part to be ready, starts no other
// part, and ends the running ones.
func TestStopWhileStarting(t *testing.T) {
	var j journal
	ctx, cancel := context.WithCancel(t.Context())
	never := runPart{Name: "b", Run: func(ctx context.Context, _ func()) error {
		j.add("+b")
		cancel()
		<-ctx.Done()
		j.add("-b")
		return nil
	}}
	if err := runTogether(ctx, silent, j.part("a", nil), never, j.part("c", nil)); err != nil {
		t.Error(err)
	}
	j.want(t, "+a +b -b -a")
	if len(j.lines) != 4 || slices.Contains(j.lines, "+c") {
		t.Error(j.lines)
	}
}

// No part is started after one that failed to start, also when the failure comes at the same moment.
func TestNothingStartsAfterAFailure(t *testing.T) {
	for i := range 20_000 {
		var j journal
		broken := runPart{Name: "a", Run: func(context.Context, func()) error { return errors.New("broken") }}
		if err := runTogether(t.Context(), silent, broken, j.part("b", nil)); err == nil || err.Error() != "a: broken" {
			t.Fatal(err)
		}
		if len(j.lines) > 0 {
			t.Fatalf("attempt %d: %v", i, j.lines)
		}
	}
}
