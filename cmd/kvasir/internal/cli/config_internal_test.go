// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"testing"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
)

// A command that listens runs for a long time, so it takes its flags also from the environment and from
// a file, and has --check-config.
func TestCommandsThatListenAreConfigurable(t *testing.T) {
	parser, err := kong.New(&root{})
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, node := range parser.Model.Leaves(false) {
		listens := node.Name != "bench" && (settings.FlagNamed(node, "port") != nil || settings.FlagNamed(node, "data-port") != nil) // bench dials its port
		if !listens {
			continue
		}
		found++
		if _, ok := node.Target.Addr().Interface().(configurable); !ok || settings.FlagNamed(node, "config") == nil {
			t.Errorf("%s listens and has no --config", node.Path())
		}
	}
	if found < 6 {
		t.Errorf("%d commands listen", found)
	}
}
