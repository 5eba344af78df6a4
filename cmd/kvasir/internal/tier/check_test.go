// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// A check says what works and what does not, with a verdict, and leaves nothing behind.
func TestCheckSaysWhatWorks(t *testing.T) {
	f := func(text string, want tiertool.Verdict, sentences ...string) {
		t.Helper()
		var out bytes.Buffer
		got := tiertool.CheckTier(t.Context(), &out, slog.New(slog.DiscardHandler), seal.Source{}, text, 5000, 3)
		for _, s := range sentences {
			if !strings.Contains(out.String(), s) {
				t.Errorf("%s: no %q in\n%s", text, s, out.String())
			}
		}
		if got != want {
			t.Errorf("%s: verdict %d, want %d\n%s", text, got, want, out.String())
		}
		for line := range strings.Lines(out.String()) {
			if !strings.HasSuffix(line, ".\n") {
				t.Errorf("%s: not a sentence: %q", text, line)
			}
		}
	}
	dir := t.TempDir()
	f("fs:"+dir, tiertool.Good, "Objects go to "+dir, "The tier answers", "This user may write: 3 objects", "reads what was written", "Objects have checksums", "This user may delete")
	if left, err := filepath.Glob(filepath.Join(dir, "*.data")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	f("fs:"+filepath.Join(dir, "none"), tiertool.Useless, "The tier cannot be used")
	f(fmt.Sprintf("redis:127.0.0.1:%d", testkit.FreePort(t)), tiertool.Useless, "The tier does not answer")
	f("nothing:x", tiertool.Useless, "The tier cannot be used")
	f(fmt.Sprintf(`{"type":"fs","base_path":%q,"min_free_gb":1000000}`, dir), tiertool.Partial, "The tier takes nothing now")
	if os.Geteuid() != 0 {
		if err := os.Chmod(dir, 0o500); err != nil {
			t.Fatal(err)
		}
		f("fs:"+dir, tiertool.Partial, "This user may not write")
	}
}
