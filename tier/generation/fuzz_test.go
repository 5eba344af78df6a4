// SPDX-License-Identifier: Apache-2.0

package generation

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzParse: a file or a note of any bytes is refused, or can be written again with the same content.
func FuzzParse(f *testing.F) {
	s := state{Version: version, All: Generation{3, 4}}
	s.set("m", Generation{1, 9})
	f.Add(s.text())
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"models":{"a":{"number":1,"time":-1}}}`))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := parse(text)
		if err != nil {
			if !errors.Is(err, errDamaged) && !errors.Is(err, errNewer) {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		again, err := parse(s.text())
		if err != nil || !again.same(&s) || !bytes.Equal(again.text(), s.text()) {
			t.Fatalf("%q: %+v becomes %+v, %v", text, s, again, err)
		}
	})
}
