// SPDX-License-Identifier: Apache-2.0

package otlp

import "testing"

// Parse accepts a traceparent only if it is written as the same text again, except for its version and flags.
func FuzzParse(f *testing.F) {
	f.Add("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	f.Add("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-more")
	f.Add("00-00000000000000000000000000000000-b7ad6b7169203331-01")
	f.Add("ff-0-0-0")
	f.Add("---")
	f.Fuzz(func(t *testing.T, text string) {
		c, ok := Parse(text)
		if !ok {
			return
		}
		if again, ok := Parse(c.String()); !ok || again != c || len(text) < 55 || c.String()[2:53] != text[2:53] {
			t.Errorf("%q is %q", text, c.String())
		}
	})
}
