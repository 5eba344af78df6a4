// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A demo that is interrupted says how far it came, in one line after those of its
// progress, shows no table, and leaves nothing in /dev/shm.
func TestDemoInterrupted(t *testing.T) {
	c := command("demo", "--requests", "100000", "--l1-size-gb", "16MiB", "--chunk-kib", "64")
	var out strings.Builder
	c.Stdout = &out
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill() }()
	lines := bufio.NewScanner(stderr)
	var rest []string
	for lines.Scan() {
		if strings.Contains(lines.Text(), "simulated engines") {
			if err := c.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			continue
		}
		rest = append(rest, lines.Text())
	}
	if err := c.Wait(); err == nil || c.ProcessState.ExitCode() != 1 {
		t.Errorf("it ended with %v", err)
	}
	if len(rest) != 1 || !regexp.MustCompile(`^kvasir: interrupted after \d+ of 100000 requests$`).MatchString(rest[0]) || out.Len() != 0 {
		t.Errorf("it said %q and printed %q", rest, out.String())
	}
	left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_kvasir_demo_*")
	for _, f := range left {
		if strings.HasSuffix(strings.TrimSuffix(f, ".kvasir"), fmt.Sprintf("_%d", c.Process.Pid)) {
			t.Errorf("left behind: %s", f)
		}
	}
}

// The same holds in the demo's second part: figures of only a part could not be compared. Variables for
// another server in the environment do not reach the demo's server.
func TestDemoInterruptedInItsSecondPart(t *testing.T) {
	c := command("demo", "--requests", "100", "--l1-size-gb", "16MiB", "--chunk-kib", "64")
	c.Env = append(c.Env, "KVASIR_SERVER_PORT=nonsense", "KVASIR_SERVER_CONFIG=/nonexistent")
	var out strings.Builder
	c.Stdout = &out
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill() }()
	last, second, asked := "", false, false
	for lines := bufio.NewScanner(stderr); lines.Scan(); last = lines.Text() {
		second = second || strings.Contains(lines.Text(), "the whole picture")
		if second && !asked && strings.HasSuffix(lines.Text(), "of 100 requests") {
			asked = true
			if err := c.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = c.Wait()
	if !regexp.MustCompile(`^kvasir: interrupted after \d+ of 100 requests of the second part$`).MatchString(last) || c.ProcessState.ExitCode() != 1 {
		t.Errorf("exit %d, last said %q", c.ProcessState.ExitCode(), last)
	}
	if strings.Contains(out.String(), "Prompt tokens to compute") {
		t.Errorf("a table of a part:\n%s", out.String())
	}
}
