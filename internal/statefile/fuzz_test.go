// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzParse: a file of any bytes is refused with a reason, or its document can be written with the same bytes.
func FuzzParse(f *testing.F) {
	s := File{path: "state", magic: "kvasir-fuzz-1", max: 1 << 10}
	f.Add(s.text(nil))
	f.Add(s.text([]byte("a document")))
	f.Add([]byte("kvasir-fuzz-1 ffffffff\nx\n"))
	f.Add([]byte("kvasir-fuzz-2 00000000\n\n"))
	f.Add([]byte("kvasir-fuzz- 00000000\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		doc, err := s.parse(b)
		if err != nil {
			if e, ok := errors.AsType[*Error](err); !ok || e.Newer && !e.Foreign {
				t.Fatalf("%q: %v", b, err)
			}
			return
		}
		if bytes.HasSuffix(doc, []byte("\n")) || int64(len(s.text(doc))) > s.max {
			return // Write accepts no such document
		}
		if again, err := s.parse(s.text(doc)); err != nil || !bytes.Equal(again, doc) {
			t.Fatalf("%q becomes %q, %v", doc, again, err)
		}
	})
}
