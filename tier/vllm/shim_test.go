// SPDX-License-Identifier: Apache-2.0

package vllm_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"
)

// The module for vLLM treats a node's odd answers, odd options and repeated requests as misses. It raises no exception, does not wait
// forever, and commits nothing that was not written. testdata/shim.py has the scenarios.
func TestShimAgainstOddNodes(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	if testing.Short() {
		t.Skip("starts Python")
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	cmd := exec.CommandContext(ctx, python, "-B", "testdata/shim.py", ".")
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
