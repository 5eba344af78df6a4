package openai_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// A stream has ended as it should if its last event says so, in whatever pieces it came.
func TestTail(t *testing.T) {
	f := func(stream string, want bool) {
		t.Helper()
		for n := 1; n <= len(stream)+1; n++ {
			var end openai.Tail
			for rest := stream; rest != ""; {
				piece := rest[:min(n, len(rest))]
				rest = rest[len(piece):]
				end.Add([]byte(piece))
			}
			if end.Done() != want {
				t.Errorf("%q in pieces of %d: %v", stream, n, end.Done())
			}
		}
	}
	f("", false)
	f("data: [DONE]", true)
	f("data: [DONE]\r\n\r\n", true)
	f("data:[DONE]\n\n", true)
	f(strings.Repeat("data: {}\n\n", 20)+"data: [DONE]\n\n", true)
	f("data: [DONE]\n\ndata: {}\n\n", false)
	f("[DONE]", false)
}
