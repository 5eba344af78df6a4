// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
)

// traceLine is a line of a request at a time, with one block.
func traceLine(ms, block int) string {
	return fmt.Sprintf(`{"timestamp": %d, "input_length": 10, "output_length": 2, "hash_ids": [%d]}`+"\n", ms, block)
}

func writeTrace(t *testing.T, name string, flag int, text string) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|flag, 0o600)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func opened(t *testing.T, name string, o TraceOptions) *Trace {
	t.Helper()
	trace, err := OpenTrace(name, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := trace.Close(); err != nil {
			t.Error(err)
		}
	})
	return trace
}

// blocksOf reads requests up to most, and returns the first block of each.
func blocksOf(requests iter.Seq2[Request, error], most int) (out []int64, err error) {
	for q, err := range requests {
		if err != nil {
			return out, err
		}
		if out = append(out, q.Blocks[0]); len(out) == most {
			break
		}
	}
	return out, nil
}

// All passes over a trace have the same requests, in the order of the file or of the arrivals, also when the file grows between them or another
// file takes its name. A file that was rewritten or cut is an error.
func TestPassesHaveTheSameRequests(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	text := traceLine(5, 1) + traceLine(3, 2) + traceLine(9, 3)
	writeTrace(t, name, 0, text)
	trace := opened(t, name, TraceOptions{})
	f := func(want string) {
		t.Helper()
		for which, requests := range map[string]iter.Seq2[Request, error]{"[1 2 3]": trace.Lines(), "[2 1 3]": trace.Requests()} {
			got, err := blocksOf(requests, -1)
			switch {
			case want == "" && (err != nil || fmt.Sprint(got) != which):
				t.Errorf("%v, %v, want %s", got, err, which)
			case want != "" && (!errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), want)):
				t.Errorf("%v, %v, want %q", got, err, want)
			}
		}
	}
	f("")
	f("")
	writeTrace(t, name, os.O_APPEND, traceLine(1, 4)+`{"timestamp": 1, "inp`) // a writer is in the middle of a line
	f("")
	writeTrace(t, name+".new", 0, traceLine(1, 7))
	if err := os.Rename(name+".new", name); err != nil {
		t.Fatal(err)
	}
	f("")

	writeTrace(t, name, 0, text)
	trace = opened(t, name, TraceOptions{})
	f("")
	writeTrace(t, name, os.O_TRUNC, traceLine(5, 1)+traceLine(3, 2)+traceLine(8, 3))
	f("trace.jsonl: workload: bad trace: the file changed while it was played: its first pass had 3 requests, a later one 3")
	writeTrace(t, name, os.O_TRUNC, traceLine(5, 1))
	f("a later one 1, or other ones")
	writeTrace(t, name, os.O_TRUNC, "")
	f("no requests")

	if n, err := Count(t.Context(), opened(t, Agentic, TraceOptions{Max: 30}).Requests()); n != 30 || err != nil {
		t.Error(n, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Count(ended, Each(make([]Request, 3))); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A pipe is read once, and played several times, also when the first pass does not come to its end. No file is left.
func TestPassesOverAPipe(t *testing.T) {
	dir, temporary := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temporary)
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip("no named pipe can be made here:", err)
	}
	const lines = 20_000 // 1.6 MB, more than a pipe and a reader's buffer hold
	written := make(chan error, 1)
	write := func() {
		f, err := os.OpenFile(pipe, os.O_WRONLY, 0)
		w := bufio.NewWriter(f)
		for i := 0; i < lines && err == nil; i++ {
			_, err = w.WriteString(traceLine(i, i))
		}
		written <- errors.Join(err, w.Flush(), f.Close())
	}
	go write()
	trace, err := OpenTrace(pipe, TraceOptions{window: 10})
	if err != nil {
		t.Fatal(err)
	}
	for _, most := range []int{3, -1, -1, 20} {
		got, err := blocksOf(trace.Requests(), most)
		if want := map[bool]int{true: most, false: lines}[most > 0]; err != nil || len(got) != want || got[want-1] != int64(want-1) {
			t.Fatalf("%d requests, %v, want %d", len(got), err, want)
		}
	}
	if err := errors.Join(<-written, trace.Close()); err != nil {
		t.Error(err)
	}
	go write()
	if got, err := blocksOf(Stream(pipe, TraceOptions{window: 10}), -1); err != nil || len(got) != lines {
		t.Errorf("one pass: %d requests, %v", len(got), err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(temporary); err != nil || len(left) != 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
	go write()
	t.Setenv("TMPDIR", filepath.Join(temporary, "absent"))
	if _, err := OpenTrace(pipe, TraceOptions{}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "needs a temporary file") {
		t.Error(err)
	}
	if err := <-written; !errors.Is(err, syscall.EPIPE) {
		t.Error(err)
	}
}

// When the copy of a pipe finds no room on the disk, the error says so.
func TestPipeWithoutRoomForItsCopy(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := errors.Join(err, syscall.Mkfifo(pipe, 0o600)); err != nil {
		t.Skip("no named pipe can be made here:", err)
	}
	go func() { _ = os.WriteFile(pipe, []byte(traceLine(1, 1)), 0o600) }()
	trace := opened(t, pipe, TraceOptions{})
	if err := trace.spool.Close(); err != nil {
		t.Fatal(err)
	}
	trace.spool = full
	if _, err := Count(t.Context(), trace.Lines()); !errors.Is(err, syscall.ENOSPC) || !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), "write the temporary file of a trace that can be read only once") {
		t.Error(err)
	}
}

// Passes take bounded memory, whatever the trace's length: here 40 MB of lines three times.
func TestPassesTakeBoundedMemory(t *testing.T) {
	const count, most = 13_000, 4 << 20
	name, pad := filepath.Join(t.TempDir(), "trace.jsonl"), strings.Repeat(" ", 3000)
	var b strings.Builder
	for i := range count {
		b.WriteString(pad)
		b.WriteString(traceLine(i^3, i))
	}
	writeTrace(t, name, 0, b.String())
	b.Reset()
	trace := opened(t, name, TraceOptions{window: 100})
	before := heapInUse()
	for pass, requests := range []iter.Seq2[Request, error]{trace.Lines(), trace.Requests(), Scale(Arriving(trace.SelfTimed(), 5, 1, 1), 4)} {
		n := 0
		for _, err := range requests {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n%3000 == 0 {
				if now := heapInUse(); now > before+most {
					t.Fatalf("pass %d: %d requests take %d bytes", pass, n, now-before)
				}
			}
		}
		if n != count {
			t.Errorf("pass %d: %d requests", pass, n)
		}
	}
	before = heapInUse()
	n := 0
	for range opened(t, Agentic, TraceOptions{Max: 100_000, BlockTokens: 256}).Requests() { // 50 MB of names
		if n++; n%30_000 == 0 {
			if now := heapInUse(); now > before+most {
				t.Fatalf("%d requests of agents take %d bytes", n, now-before)
			}
		}
	}
}

// A bad line of a trace is an error that names file and line, in each pass.
func TestPassesOverBadTraces(t *testing.T) {
	f := func(want, text string) {
		t.Helper()
		name := filepath.Join(t.TempDir(), "bad.jsonl")
		writeTrace(t, name, 0, text)
		trace := opened(t, name, TraceOptions{window: 2})
		for range 2 {
			if _, err := Count(t.Context(), trace.Requests()); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), name+": workload: bad trace: "+want) {
				t.Errorf("%v, want %q", err, want)
			}
		}
	}
	f("no requests", "")
	f("line 2: ", traceLine(1, 1)+`{"timestamp": 2, "input_length": 10, "ha`)
	f("line 5: its request comes at 2ms, and one at 6ms was already played: sort the trace by time", traceLine(5, 1)+traceLine(6, 1)+traceLine(7, 1)+traceLine(8, 1)+traceLine(2, 1))
	for _, bad := range []string{filepath.Join(t.TempDir(), "absent"), Agentic} {
		if _, err := OpenTrace(bad, TraceOptions{BlockTokens: 3}); err == nil {
			t.Errorf("%s was opened", bad)
		}
	}
}

// Requests that are made one after another have the arrivals and sizes of those that are made in memory.
func TestSequencesAreLists(t *testing.T) {
	collect := func(requests iter.Seq2[Request, error]) (out []Request) {
		for q, err := range requests {
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, q)
		}
		return out
	}
	f := func(want []Request, err error, got iter.Seq2[Request, error]) {
		t.Helper()
		if got := collect(got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%v: %d requests, want %d", err, len(got), len(want))
		}
	}
	list := Chats(100, ChatOptions{})
	for _, burstiness := range []float64{0.3, 1, 4} {
		err := Arrive(list, 3, burstiness, 7)
		f(list, err, Arriving(Each(Chats(100, ChatOptions{})), 3, burstiness, 7))
		a := Arrivals{Rate: 3, Burstiness: burstiness, Seed: 9}
		err = Schedule(list, a)
		f(list, err, Scheduled(Each(Chats(100, ChatOptions{})), 100, a))
	}
	scaled, err := Scaled(list, 8)
	f(scaled, err, Scale(Each(list), 8))
	f(Agents(200, AgentOptions{Block: 512}), nil, opened(t, Agentic, TraceOptions{Max: 200}).Requests())
	for _, bad := range []iter.Seq2[Request, error]{
		Arriving(Each(list), 0, 1, 1), Arriving(Each(list), 1e-300, 1, 1), Scheduled(Each(list), 100, Arrivals{}), Scheduled(Each(list), 99, Arrivals{Rate: 1, Burstiness: 1}),
		Scale(Each(list), 0), Scale(Each(list), 7),
	} {
		if n, err := Count(t.Context(), bad); err == nil {
			t.Errorf("%d requests without an error", n)
		}
	}
}
