// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// lines is a trace whose lines are made when they are read.
type lines struct {
	n, of int
	line  func(i int) string
	rest  string
}

func (l *lines) Read(p []byte) (int, error) {
	for l.rest == "" {
		if l.n == l.of {
			return 0, io.EOF
		}
		l.rest = l.line(l.n) + "\n"
		l.n++
	}
	n := copy(p, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

// heapInUse returns the bytes of the heap that are in use.
func heapInUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A trace is read in bounded memory, whatever its length: here 40 MB of lines, in all formats, with what is kept for the order.
func TestReadingTakesBoundedMemory(t *testing.T) {
	pad := strings.Repeat(" ", 3000)
	f := func(format Format, line func(i int) string) {
		t.Helper()
		const count, most = 4000, 4 << 20
		r, err := NewReader(&lines{of: count, line: func(i int) string { return line(i) + pad }}, TraceOptions{BlockTokens: 16, Format: format, window: 100})
		if err != nil {
			t.Fatal(err)
		}
		before, n := heapInUse(), 0
		for _, err := range r.InOrder() {
			if n++; err != nil {
				t.Fatal(err)
			}
			if n%1000 == 0 {
				if now := heapInUse(); now > before+most {
					t.Fatalf("%d requests take %d bytes", n, now-before)
				}
			}
		}
		if n != count {
			t.Errorf("%d requests of %d", n, count)
		}
	}
	f(FormatMooncake, func(i int) string {
		return fmt.Sprintf(`{"timestamp": %d, "input_length": 32, "output_length": 1, "hash_ids": [%d, %d]}`, i^3, i, -i)
	})
	f(FormatTimed, func(i int) string {
		return fmt.Sprintf(`{"timestamp": %d, "input_length": 99, "output_length": 1, "hash_ids": [%d, %d]}`, i, i, -i)
	})
	f(FormatAIPerf, func(i int) string {
		return fmt.Sprintf(`{"session_id": "%d", "timestamp": %d, "messages": [{"role": "user", "content": "%0999d"}]}`, i%10, i, i)
	})
	f(FormatAIPerf, func(i int) string { return fmt.Sprintf(`{"timestamp": %d, "text_input": "%0999d"}`, i, i) })
}

// Lines that are out of order within what is read ahead are put into order; a line that comes too late for that is an error that
// names it.
func TestInOrder(t *testing.T) {
	at := func(times ...int) string {
		var b strings.Builder
		for i, ms := range times {
			fmt.Fprintf(&b, `{"timestamp": %d, "input_length": 1, "output_length": %d, "hash_ids": [1]}`+"\n", ms, i)
		}
		return b.String()
	}
	read := func(trace string, o TraceOptions) (out []Request, err error) {
		r, err := NewReader(strings.NewReader(trace), o)
		if err != nil {
			return nil, err
		}
		for q, err := range r.InOrder() {
			if err != nil {
				return out, err
			}
			out = append(out, q)
		}
		return out, nil
	}
	got, err := read(at(5, 3, 5, 90_000_000, 1), TraceOptions{})
	if err != nil || len(got) != 5 {
		t.Fatalf("%+v, %v", got, err)
	}
	for i, want := range []int{4, 1, 0, 2, 3} { // of equal times the first in the file comes first, and a gap of a day is none
		if got[i].Output != want {
			t.Errorf("place %d has line %d, want %d", i, got[i].Output+1, want+1)
		}
	}
	for _, o := range []TraceOptions{{window: 2}, {windowBlocks: 2}} {
		got, err = read(at(5, 6, 7, 8, 2), o)
		if !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), "line 5: its request comes at 2ms, and one at 6ms was already played") || len(got) != 2 {
			t.Errorf("%d requests, %v", len(got), err)
		}
	}
	if got, err = read(at(1, 2)+"not json\n", TraceOptions{}); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), "line 3: not json is no JSON object") {
		t.Errorf("%d requests, %v", len(got), err)
	}
	if got, err = read(at(3, 2, 1)+"not json\n", TraceOptions{Max: 2}); err != nil || len(got) != 2 || got[0].Output != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err = read(" \n", TraceOptions{}); !errors.Is(err, ErrTrace) {
		t.Error(err)
	}
}

// Stream returns what Load returns.
func TestStreamIsLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	text := `{"timestamp": 9000, "input_length": 700, "hash_ids": [7, 8]}
{"session_id": "a", "timestamp": 3, "input_length": 4, "output_length": 5, "hash_ids": [9]}
{"session_id": "a", "delay": 30, "input_length": 4}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, Agentic} {
		list, err := Load(name, TraceOptions{Max: 40})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for q, err := range Stream(name, TraceOptions{Max: 40}) {
			if err != nil || n >= len(list) || fmt.Sprint(q) != fmt.Sprint(list[n]) {
				t.Fatalf("request %d: %+v, %v", n, q, err)
			}
			n++
		}
		if n != len(list) {
			t.Errorf("%s: %d requests of %d", name, n, len(list))
		}
	}
	for _, err := range Stream(file+".absent", TraceOptions{}) {
		if !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
}

// Sessions that memory cannot keep are refused.
func TestSessionsAreBounded(t *testing.T) {
	f := func(want string, o TraceOptions, line func(i int) string) {
		t.Helper()
		r, err := NewReader(&lines{of: 100, line: line}, o)
		for err == nil {
			_, err = r.Next()
		}
		if !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), want) {
			t.Error(err)
		}
	}
	f("line 4: the trace has more than 3 sessions", TraceOptions{maxSessions: 3}, func(i int) string { return fmt.Sprintf(`{"session_id": "%d", "input_length": 1}`, i) })
	f("the prompts of the trace's sessions take more than 800 bytes", TraceOptions{maxBlocks: 100, BlockTokens: 4}, func(int) string { return `{"session_id": "a", "input_length": 40, "output_length": 9}` })
	f("turn 2 comes later than in 292 years", TraceOptions{TokenTime: time.Hour}, func(int) string {
		return `{"session_id": "a", "delay": 9e12, "input_length": 1, "output_length": 2000000}`
	})
}
