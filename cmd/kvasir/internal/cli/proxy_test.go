// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// A wrong line is told flag by flag.
func TestProxyFlags(t *testing.T) {
	f := func(line, want string) {
		t.Helper()
		var out, errs strings.Builder
		if code := Main(strings.Fields(line), &out, &errs); code != 2 || !strings.Contains(errs.String(), want) {
			t.Errorf("%s: %d %s", line, code, &errs)
		}
	}
	f("proxy", "--prefill and --decode, or --engine, are missing")
	f("proxy --prefill http://p:1 none --decode http://d:1", `--prefill "" is not http://host:port`)
	f("proxy --prefill http://p:1", "--decode is missing beside prefill engines")
	f("proxy --engine x", `--engine "x" is not http://host:port`)
	f("proxy --engine http://x --attempts 0", "--attempts must be above 0")
	f("proxy --engine http://x --policy best", "--policy must be one of")
}

// Secrets are not shown.
func TestProxyHidesSecrets(t *testing.T) {
	var out, errs strings.Builder
	line := "proxy --engine http://x --admin-port 1 --admin-token hidden1 --engine-api-key hidden2 --check-config"
	if code := Main(strings.Fields(line), &out, &errs); code != 0 || strings.Contains(out.String(), "hidden") || !strings.Contains(out.String(), "# admin-token: (set)") {
		t.Errorf("%d %s %s", code, &out, &errs)
	}
}
