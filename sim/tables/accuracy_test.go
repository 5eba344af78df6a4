// SPDX-License-Identifier: Apache-2.0

package tables_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim/tables"
)

// WriteAccuracy does not change a document without markers for the tables, nor any document when the run is interrupted.
func TestWriteAccuracyRefuses(t *testing.T) {
	if _, err := tables.WriteAccuracy(t.Context(), []byte("no markers")); !errors.Is(err, tables.ErrMarkers) {
		t.Errorf("%v", err)
	}
	text, err := os.ReadFile("../../docs/measured/accuracy-tables.md")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tables.WriteAccuracy(ctx, text); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// The document has the figures of this build. The test checks those of the table, which are fast enough for each test run.
func TestAccuracyDocumentMatchesThisBuild(t *testing.T) {
	text, err := os.ReadFile("../../docs/measured/accuracy-tables.md")
	if err != nil {
		t.Fatal(err)
	}
	got := play(t, tables.Options{})
	for _, line := range got.Lines() {
		if !strings.Contains(string(text), line) {
			t.Errorf("docs/measured/accuracy-tables.md lacks %q; make bench BENCH=accuracy writes it", line)
		}
	}
}
