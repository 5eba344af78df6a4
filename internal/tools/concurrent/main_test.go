// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The tool names packages that start goroutines, themselves or in their tests. It does not name packages that use only one goroutine.
func TestPackagesThatStartGoroutinesAreNamed(t *testing.T) {
	t.Chdir("../../..")
	var out bytes.Buffer
	if err := run(&out, []string{"./store/hold", "./store", "./kv/coordinator", "./internal/statefile"}); err != nil {
		t.Fatal(err)
	}
	want := []string{module + "/internal/statefile", module + "/store"}
	if got := strings.Fields(out.String()); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestStarts(t *testing.T) {
	for text, want := range map[string]bool{
		"func f() { go g() }":                             true,
		"func f(w *sync.WaitGroup) { w.Go(g) }":           true,
		"func f(t *testing.T) { t.Parallel() }":           true,
		"func f() { time.AfterFunc(1, g) }":               true,
		"func f() { s := \"go g()\"; _ = s } // go g()\n": false,
		"func Go() {}":                                    false,
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "a.go"), []byte("package a\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := starts(dir, []string{"a.go"}); err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
}
