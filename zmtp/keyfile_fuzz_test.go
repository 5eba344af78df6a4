// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"strings"
	"testing"
)

// A file of clients names each key once, with a name that stands before it in the file.
func FuzzClients(f *testing.F) {
	public := NewKey().Public().Z85()
	f.Add("# clients\nann " + public + "\n\n")
	f.Add("ann " + public + "\nbob " + public)
	f.Add("ann\t#" + public)
	f.Add(strings.Repeat("a", 300) + " " + public)
	f.Fuzz(func(t *testing.T, text string) {
		c := &CurveClients{}
		c.names.Store(&map[Key]string{})
		change, err := c.parse([]byte(text))
		if err != nil {
			return
		}
		change.Take()
		names := *c.names.Load()
		if len(names) != change.Entries || len(names) > maxClients {
			t.Errorf("%d clients, %d entries", len(names), change.Entries)
		}
		for k, name := range names {
			if got, ok := c.Find(k); !ok || got != name || len(name) > maxClientName || !strings.Contains(text, name) || !strings.Contains(text, k.Z85()) {
				t.Errorf("%q of %q", name, text)
			}
		}
	})
}
