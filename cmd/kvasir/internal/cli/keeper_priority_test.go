// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// All threads of a keeper that root starts have a raised priority, so that engines that use all processors do not keep it from unlinking.
func TestKeeperHasPriority(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root may raise a priority")
	}
	pid, _ := startAndLog(t, "the keeper knows all files", "keeper", newFSTier(t).root, "--max-gb", "1")
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		_, fields, _ := strings.Cut(string(text), ") ")
		if nice := strings.Fields(fields)[16]; nice != "-10" {
			t.Errorf("%s: nice %s, want -10", path, nice)
		}
	}
	if len(threads) < 2 {
		t.Errorf("%d threads", len(threads))
	}
}
