// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv("KVASIR_TEST_LEAVE") == "ever" {
		exit(m, 2*time.Second)
	}
	Main(m)
}

// The check waits for a goroutine that takes some time to end. It reports a goroutine that never ends, once its time is over.
func TestSlowEnd(t *testing.T) {
	switch os.Getenv("KVASIR_TEST_LEAVE") {
	case "slow":
		go time.Sleep(2 * time.Second)
		return
	case "ever":
		go func() { select {} }()
		return
	}
	for leave, want := range map[string]bool{"slow": true, "ever": false} {
		cmd := exec.Command("/proc/self/exe", "-test.run", "^TestSlowEnd$")
		cmd.Env = append(os.Environ(), "KVASIR_TEST_LEAVE="+leave)
		out, err := cmd.CombinedOutput()
		if (err == nil) != want || !want && !strings.Contains(string(out), "found unexpected goroutines") {
			t.Errorf("%s: %v\n%s", leave, err, out)
		}
	}
}
