// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// The error of a wrong command line names each wrong flag.
func TestProxyFlags(t *testing.T) {
	f := func(line, want string) {
		t.Helper()
		var out, errs strings.Builder
		if code := Main(strings.Fields(line), &out, &errs); code != 2 || !strings.Contains(errs.String(), want) {
			t.Errorf("%s: %d %s", line, code, &errs)
		}
	}
	f("proxy", "--prefill and --decode, or --engine, are missing")
	f("proxy --kv-connector mooncake --prefill http://p:1 none --decode http://d:1", `--prefill "" is not http://host:port`)
	f("proxy --prefill http://p:1", "--decode is missing beside prefill engines")
	f("proxy --engine x", `--engine "x" is not http://host:port`)
	f("proxy --engine http://x --attempts 0", "--attempts must be above 0")
	f("proxy --engine http://x --policy best", "--policy must be one of")
	f("proxy --engine http://x --prefill-policy best", `--prefill-policy "best" is no policy`)
	f("proxy --kv-connector sglang --prefill http://p:1 --decode http://d:1 --decode-alone --skip-prefill-below 1KiB", "--decode-alone is of no use with SGLang: its D computes no prompt")
	f("engine --disaggregation-mode prefill", "--disaggregation-mode is for --like sglang")
	f(`engine --like sglang --kv-transfer-config {"kv_connector":"MooncakeConnector","kv_role":"kv_both"}`, "--kv-transfer-config is vLLM's")
}

// Secrets are not shown.
func TestProxyHidesSecrets(t *testing.T) {
	var out, errs strings.Builder
	line := "proxy --engine http://x --admin-port 1 --admin-token hidden1 --engine-api-key hidden2 --check-config"
	if code := Main(strings.Fields(line), &out, &errs); code != 0 || strings.Contains(out.String(), "hidden") || !strings.Contains(out.String(), "# admin-token: (set)") {
		t.Errorf("%d %s %s", code, &out, &errs)
	}
}
