// SPDX-License-Identifier: Apache-2.0

package pages_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/tools/pages"
)

// Blocks, marks and expected outputs are read in their order.
func TestRead(t *testing.T) {
	p, faults := pages.Read(strings.ReplaceAll(`# A page
<!-- needs: redis-server -->
<!-- before: kvasir server -->

<!-- terminal: server -->
<!-- host: b -->
''sh
kvasir server \
  --port 1
''
Then:

''text
ready …
''
<!-- soon -->
''sh
kvasir status
''
<!-- each -->
''sh
a
b
''
''yaml
a: b
''
# Another part
''text
other
''
<!-- ctrl-c: server -->
<!-- not typed: needs root -->
''sh
sudo x
''
`, "''", "```"))
	want := []pages.Step{
		{Line: 7, Text: "kvasir server \\\n  --port 1\n", Terminal: "server", Host: "b", Shown: "ready …\n"},
		{Line: 17, Text: "kvasir status\n", Soon: true},
		{Line: 21, Text: "a\nb\n", Each: true},
		{Line: 32, Interrupt: "server"},
		{Line: 34, Text: "sudo x\n", NotTyped: "needs root"},
	}
	if len(faults) > 0 || !slices.Equal(p.Steps, want) || !slices.Equal(p.Needs, []string{"redis-server"}) || !slices.Equal(p.Before, []string{"kvasir server"}) || !p.Typed() {
		t.Errorf("%+v, %q", p, faults)
	}
}

func TestReadFindsWrongMarks(t *testing.T) {
	f := func(text, want string) {
		t.Helper()
		_, faults := pages.Read(strings.ReplaceAll(text, "''", "```"))
		if len(faults) != 1 || !strings.Contains(faults[0], want) {
			t.Errorf("%q: %q, want %q", text, faults, want)
		}
	}
	f("''\nkvasir x\n''\n", `line 1: a block of the language ""`)
	f("''sh\nkvasir x\n", "line 1: the block does not end")

	f("<!-- not typed -->\n''sh\nx\n''\n", "lacks a value")
	f("<!-- each: x -->\n''sh\nx\n''\n", "one too many")
	f("<!-- terminal: a -->\n''text\nx\n''\n", "no shell block follows")
	f("x\n\n    X=1 kvasir server\n    y\n", "line 3: commands in an indented block")
	f("x\n<!-- soon -->\n", "line 2: a mark that no shell block follows")
}

func TestMissing(t *testing.T) {
	f := func(shown, output, want string) {
		t.Helper()
		if got := pages.Missing(shown, output); got != want {
			t.Errorf("%q in %q: %q is missing, want %q", shown, output, got, want)
		}
	}
	f("a … c\n…\nlast\n", "first\n a b c \nother\nlast\n", "")
	f("a … c\nfirst\n", "first\na b c\n", "first") // the order counts
	f(`"n":512`, `"n":5120`, `"n":512`)
	f("a.c", "abc", "a.c")
	f("a   b", "a b", "") // the width of columns depends on other rows
	f("a b", "ab", "a b")
	f("", "x", "")
}
