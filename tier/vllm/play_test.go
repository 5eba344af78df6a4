// SPDX-License-Identifier: Apache-2.0

//go:build linux

package vllm

import (
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A region that its file system cannot hold is an error at the start, not a signal at its first use.
func TestRegionThatDoesNotFitIsAnError(t *testing.T) {
	testkit.SmallFS(t, 1<<20, func(t *testing.T, dir string) {
		p := Simulation{Socket: filepath.Join(dir, "none"), EngineID: "e", Model: "m", Dir: dir, RowBytes: 64 << 10, Longest: 24, Requests: 1}
		if out, err := RunPlay(t.Context(), p); err == nil {
			t.Fatalf("a region of 1.5 MiB in 1 MiB: %+v", out)
		}
	})
}
