// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// top prints its screen once where its output is no terminal. A server that it cannot ask is reported in one line.
func TestTopOnce(t *testing.T) {
	s := serve(t)
	once := func(args ...string) (code int, stdout, stderr string) {
		t.Helper()
		testkit.Eventually(t, "the server answers in time", func() bool { // a busy machine can take longer than the command waits
			code, stdout, stderr = run(t, args...)
			return !strings.Contains(stderr, "does not answer in time")
		})
		return code, stdout, stderr
	}
	for _, args := range [][]string{{"--once"}, nil} { // the output of this test is no terminal
		code, stdout, stderr := once(append([]string{"top", "--interval", "0.1", "--url", fmt.Sprintf("http://127.0.0.1:%d/", s.http)}, args...)...)
		if code != 0 || stderr != "" || strings.Contains(stdout, "\x1b") {
			t.Fatalf("exit %d, %s\n%q", code, stderr, stdout)
		}
		for _, want := range []string{fmt.Sprintf("process %d", s.cmd.Process.Pid), "\nhealthy\n", "0.0 % of 10.2 MiB", "lookups 0.0/s", "GB/s      stored 0.00", "no worker that can be served is registered"} {
			if !strings.Contains(stdout, want) {
				t.Errorf("no %q in\n%s", want, stdout)
			}
		}
	}
	for view, want := range map[string]string{"tenants": "hit rate by tier", "requests": "its end\n  none came", "slow": "slowest requests", "pool": "240 cells of 43.7 KiB", "pd": "the server runs alone"} {
		code, stdout, stderr := once("top", "--once", "--view", view, "--interval", "0.1", "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http))
		if code != 0 || stderr != "" || !strings.Contains(stdout, want) {
			t.Errorf("%s: exit %d, %s, no %q in\n%s", view, code, stderr, want, stdout)
		}
	}
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append([]string{"top"}, args...)...)
		if got != code || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit %d, %s%s", args, got, stdout, stderr)
		}
	}
	f(2, "--url \"nonsense\" is not http://HOST:PORT", "--url", "nonsense")
	f(2, "--view must be one of", "--view", "all")
	f(2, "--interval 0 is not between 0.1 and 3600", "--interval", "0")
	f(2, "--interval NaN is not between", "--interval", "NaN")
	f(1, "nothing listens at http://127.0.0.1:1/status", "--url", "http://127.0.0.1:1")
}

// top --json prints the figures of two looks, and the status of the second one, as one object.
func TestTopJSON(t *testing.T) {
	s := serve(t)
	var code int
	var stdout, stderr string
	testkit.Eventually(t, "the server answers in time", func() bool { // a busy machine can take longer than the command waits
		code, stdout, stderr = run(t, "top", "--json", "--interval", "0.1", "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http))
		return !strings.Contains(stderr, "does not answer in time")
	})
	var got struct {
		Seconds float64
		HitRate *float64           `json:"hit_rate"`
		Rates   map[string]float64 `json:"bytes_per_second"`
		Status  struct {
			PID int
		}
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || stderr != "" {
		t.Fatalf("%v, exit %d, %s\n%s", err, code, stderr, stdout)
	}
	if got.Seconds < 0.1 || got.Seconds > 60 || got.HitRate != nil || len(got.Rates) != 4 || got.Status.PID != s.cmd.Process.Pid {
		t.Errorf("%+v of %s", got, stdout)
	}
}
