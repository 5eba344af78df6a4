// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// later is a file or a note of a later release.
const later = `{"version":2,"all":{"number":7,"time":8},"ranges":[1]}`

// The Book refuses a file of a later release with an error that names it, and leaves it as it is, also if it appears while the server runs.
func TestFileOfALaterReleaseIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), generation.FileName)
	put := func() {
		t.Helper()
		if err := os.WriteFile(file, []byte(later), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put()
	b, err := generation.Open([]string{file}, tier.NewNames(), slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "a later release") {
		t.Fatalf("%v, %v", b, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if b, err = generation.Open([]string{file}, tier.NewNames(), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	put()
	if _, err := b.Prepare(nil); err == nil || !strings.Contains(err.Error(), "a later release") {
		t.Errorf("a clear succeeds: %v", err)
	}
	if text, _ := os.ReadFile(file); string(text) != later {
		t.Errorf("the file is %s", text)
	}
}

// A note of a later release stays as it is: a server that cannot read it does not know which generation counts,
// so it serves nothing of the tier and its clears fail.
func TestNoteOfALaterReleaseStays(t *testing.T) {
	p := newPlace()
	p.text = []byte(later)
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.book.Sync(t.Context())
	if err := a.clear("m"); err == nil || !strings.Contains(err.Error(), "a later release") {
		t.Errorf("a clear succeeds: %v", err)
	}
	a.book.Sync(t.Context())
	if string(p.text) != later {
		t.Errorf("the note is %s", p.text)
	}
}
