// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// Events are returned whole however the stream is cut, also in the middle of a rune, and their bytes
// are unchanged.
func TestReader(t *testing.T) {
	const text = "data: {\"a\":\"ü 漢\"}\n\n: comment\nid: 3\ndata:one\r\ndata: two\r\n\r\n\ndata: [DONE]\n\n"
	want := []string{"{\"a\":\"ü 漢\"}", "one\ntwo", "", openai.Done}
	for _, wrap := range []func(io.Reader) io.Reader{func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader} {
		r := openai.NewReader(wrap(strings.NewReader(text)), 1000)
		raw := ""
		for i := 0; ; i++ {
			e, err := r.Next()
			if errors.Is(err, io.EOF) {
				if i != len(want) || raw != text {
					t.Fatalf("%d events, %q", i, raw)
				}
				break
			}
			if err != nil || string(e.Data) != want[i] {
				t.Fatalf("event %d: %q, %v", i, e.Data, err)
			}
			raw += string(e.Raw)
		}
	}
}

func TestReaderRefuses(t *testing.T) {
	if _, err := openai.NewReader(strings.NewReader("data: half"), 100).Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	if _, err := openai.NewReader(strings.NewReader("data: "+strings.Repeat("x", 1<<20)+"\n\n"), 1<<16).Next(); !errors.Is(err, openai.ErrEvent) {
		t.Error(err)
	}
	if e, err := openai.NewReader(strings.NewReader("data: "+strings.Repeat("x", 1<<17)+"\n\n"), 1<<20).Next(); err != nil || len(e.Data) != 1<<17 {
		t.Error(len(e.Data), err)
	}
}

// The events that are read have the bytes of the stream, and an event that is written is read again.
func FuzzReader(f *testing.F) {
	f.Add([]byte("data: a\n\ndata: b\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := openai.NewReader(bytes.NewReader(b), 1<<16)
		n := 0
		for {
			e, err := r.Next()
			if err != nil {
				return
			}
			if !bytes.HasPrefix(b[n:], e.Raw) {
				t.Fatalf("%q is not what came: %q", e.Raw, b[n:])
			}
			n += len(e.Raw)
			if !bytes.ContainsAny(e.Data, "\r\n") {
				again, err := openai.NewReader(bytes.NewReader(openai.AppendEvent(nil, e.Data)), 1<<20).Next()
				if err != nil || !bytes.Equal(again.Data, e.Data) {
					t.Fatalf("%q becomes %q, %v", e.Data, again.Data, err)
				}
			}
		}
	})
}
