// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
)

// Each command can be parsed alone, with the name and flags that it has in the whole grammar. Help and the commands that describe all commands
// need the whole grammar.
func TestAlone(t *testing.T) {
	all := new(root)
	whole, err := parse(all, &all.logFlags, []string{"version"}, io.Discard, io.Discard, nil, settings.New())
	if err != nil {
		t.Fatal(err)
	}
	if len(whole.parser.Model.Children) < 20 {
		t.Fatalf("%d commands", len(whole.parser.Model.Children))
	}
	for _, node := range whole.parser.Model.Children {
		alone := settings.Alone(new(root), []string{"--log-level", "warn", "--log-format=json", node.Name})
		if wants := slices.Contains([]string{"help", "completion", "man"}, node.Name); wants != (alone == nil) {
			t.Errorf("%s: alone is %v", node.Name, alone)
		}
		if alone == nil {
			continue
		}
		var one struct{ logFlags }
		l, _ := parse(&one, &one.logFlags, []string{"--log-level", "warn", node.Name}, io.Discard, io.Discard, alone, settings.New()) // arguments may be missing
		got := l.parser.Model.Children
		if len(got) != 1 || got[0].Name != node.Name || got[0].Help != node.Help || len(got[0].Flags) != len(node.Flags) || len(got[0].Children) != len(node.Children) {
			t.Errorf("%s alone: %+v", node.Name, got)
		}
	}
	for _, args := range [][]string{{}, {"nonsense"}, {"--log-level"}, {"--log-level", "server"}, {"server", "--help"}, {"server", "-h"}, {"--help", "server"}} {
		if settings.Alone(new(root), args) != nil {
			t.Errorf("%q: a command alone", args)
		}
	}
}

// A line that the command's own grammar cannot read is read again with the whole grammar, for the same error.
func TestAloneFails(t *testing.T) {
	l, err := readLine([]string{"server", "--bogus"}, io.Discard, io.Discard)
	if err == nil || len(l.parser.Model.Children) < 20 {
		t.Errorf("%v of %d commands", err, len(l.parser.Model.Children))
	}
}
