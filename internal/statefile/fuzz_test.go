// SPDX-License-Identifier: Apache-2.0

package statefile

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// FuzzOpen: a file of any bytes is refused and stays as it is, or its document is written as it was read.
func FuzzOpen(f *testing.F) {
	const magic = "kvasir-fuzz-1"
	f.Add([]byte(magic + " 00000000\n\n"))
	f.Add([]byte(magic + " ffffffff\nx\n"))
	f.Add([]byte("kvasir-fuzz-2 00000000\n\n"))
	f.Add([]byte("kvasir-fuzz- 00000000\n\n"))
	path := filepath.Join(f.TempDir(), "state")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		s, doc, err := Open(path, magic, 1<<10)
		if err != nil {
			e, ok := errors.AsType[*Error](err)
			if now, rerr := os.ReadFile(path); !ok || rerr != nil || !bytes.Equal(now, b) || e.Newer && !e.Foreign {
				t.Fatalf("%q: %v; it is %q, %v", b, err, now, rerr)
			}
			return
		}
		defer s.Close()
		if bytes.HasSuffix(doc, []byte("\n")) {
			return // Write takes none that ends so
		}
		if err := s.Write(doc); err != nil {
			t.Fatal(err)
		}
		if again, err := s.read(); err != nil || !bytes.Equal(again, doc) {
			t.Fatalf("%q becomes %q, %v", doc, again, err)
		}
	})
}
