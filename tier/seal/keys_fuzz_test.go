// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"strings"
	"testing"
)

// A file of keys gives at most maxKeys different keys, or an error that has no line of the file longer than 40 bytes.
func FuzzKeys(f *testing.F) {
	f.Add("# keys\n" + strings.Repeat("ab", 32) + "\n\nEBESExQVFhcYGRobHB0eHyAhIiMkJSYnKCkqKywtLi8=\n")
	f.Add(strings.Repeat("00", 32))
	f.Add(strings.Repeat("ab", 32) + "\n" + strings.Repeat("AB", 32))
	f.Add("secret-that-is-none")
	f.Fuzz(func(t *testing.T, text string) {
		r, err := parseKeys([]byte(text))
		if err != nil {
			for line := range strings.Lines(text) {
				if line = strings.TrimSpace(line); len(line) > 40 && strings.Contains(err.Error(), line) {
					t.Errorf("%v of %q", err, text)
				}
			}
			return
		}
		if len(r.list) > maxKeys || len(r.list) != len(r.byNumber) {
			t.Errorf("%d keys with %d short names", len(r.list), len(r.byNumber))
		}
		for _, k := range r.list {
			if r.byNumber[k.number] != k {
				t.Errorf("key %04x is not found", k.number)
			}
		}
	})
}
