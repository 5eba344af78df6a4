// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/statefile"
)

// The keeper refuses times of use and checksums of a later release with advice, and leaves them as they are.
func TestStateOfALaterReleaseIsRefused(t *testing.T) {
	root, state := t.TempDir(), t.TempDir()
	r, err := openRoot(root)
	if err != nil {
		t.Fatal(err)
	}
	defer r.dir.Close()
	f := func(what, magic string, open func() error) {
		t.Helper()
		path := filepath.Join(state, stateName(what, r))
		text := strings.TrimSuffix(magic, "1") + "2 00000000\nof which nothing is known\n"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := open()
		if e, ok := errors.AsType[*statefile.Error](err); !ok || !e.Newer || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", what, err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != text {
			t.Errorf("%s is %q, %v", what, b, err)
		}
	}
	f("uses", notesMagic, func() error {
		n, err := openNotes(state, []*rootDir{r})
		if err == nil {
			return n.close()
		}
		return err
	})
	f("sums", sumsMagic, func() error { return new(verifier).run(t.Context(), root, state) })
}
