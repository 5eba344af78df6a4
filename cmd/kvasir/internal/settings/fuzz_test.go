// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"strings"
	"testing"
)

// Any file gives either settings of known keys or an error of one line.
func FuzzSettings(f *testing.F) {
	for _, seed := range []string{"port: 1\n", "a: &x [1, 2]\nport: *x\n", "port: {}\n---\nport: 2\n", "- 1\n", "port: !!null\n", "<<: {port: 1}\n", "server:\n  port: 1\nrelay:\n", "server: &s {port: 1}\nrelay: *s\n", "relay: 1\nrelay: []\n", "\x00", "\"a\\nb\": 1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		known := []string{"port", "host", "allow-host"}
		s := &Settings{path: "file"}
		got, err := s.readSettings(strings.NewReader(text), known, []string{"server", "relay"})
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Errorf("%q", err)
			}
			return
		}
		for key, s := range got {
			if key != "port" && key != "host" && key != "allow-host" || s.line < 1 {
				t.Errorf("%s: %+v", key, s)
			}
		}
		for name := range s.sections {
			part, ok := s.Section(name)
			if name != "server" && name != "relay" || !ok {
				t.Fatalf("section %q", name)
			}
			if _, err := part.readMapping(part.section, known, nil); err != nil && strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Errorf("%q", err)
			}
		}
	})
}
