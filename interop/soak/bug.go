// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// buildWith builds cmd/kvasir with the change of a patch, which stays outside of the working tree: the compiler
// takes the changed file from an overlay. The result is DIR/kvasir.
func buildWith(ctx context.Context, patch, dir string) (binary string, err error) {
	text, err := os.ReadFile(patch)
	if err != nil {
		return "", err
	}
	var path string
	for line := range strings.Lines(string(text)) {
		if p, ok := strings.CutPrefix(strings.TrimSpace(line), "+++ b/"); ok {
			if path != "" {
				return "", fmt.Errorf("%s changes more than one file", patch)
			}
			path = p
		}
	}
	if path == "" {
		return "", fmt.Errorf("%s changes no file", patch)
	}
	changed := filepath.Join(dir, filepath.Base(path))
	cmd := exec.CommandContext(ctx, "patch", "--quiet", "--output", changed, path, patch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("patch %s: %w: %s", path, err, out)
	}
	original, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	if err := writeJSON(overlay, map[string]any{"Replace": map[string]string{original: changed}}); err != nil {
		return "", err
	}
	binary = filepath.Join(dir, "kvasir")
	cmd = exec.CommandContext(ctx, "go", "build", "-overlay", overlay, "-o", binary, "./cmd/kvasir")
	cmd.Stderr = os.Stderr
	if err := cmd.Run(); err != nil {
		return "", errors.Join(fmt.Errorf("build with %s", patch), err)
	}
	return binary, nil
}
