// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Command lines of vllm-router mean here what they mean there.
func TestProxyTakesRoutersFlags(t *testing.T) {
	f := func(line string, want ...string) {
		t.Helper()
		if got := Args(strings.Fields(line)); !slices.Equal(got, want) {
			t.Errorf("%s\n got %q\nwant %q", line, got, want)
		}
	}
	f("proxy --vllm-pd-disaggregation --prefill http://p:1 9000 --prefill http://q:1 --decode http://d:1 --policy cache_aware",
		"proxy", "--prefill", "http://p:1 9000", "--prefill", "http://q:1", "--decode", "http://d:1", "--policy", "cache_aware")
	f("--log-level debug proxy --prefill", "--log-level", "debug", "proxy", "--prefill")
	f("--log-level=warn proxy --worker-urls a", "--log-level=warn", "proxy", "--engine", "a")
	f("engine --model proxy --worker-urls a", "engine", "--model", "proxy", "--worker-urls", "a")
	f("proxy --worker-urls http://a:1 http://b:1 --port 1", "proxy", "--engine", "http://a:1", "--engine", "http://b:1", "--port", "1")
	f("proxy --worker-urls --port 1", "proxy", "--engine", "--port", "1")
	f("proxy --prefill http://p:1 none", "proxy", "--prefill", "http://p:1 none")
	f("proxy --pd-disaggregation --dp-aware --prefill http://p:1 8998 --decode http://d:1 --prefill-policy cache_aware --decode-policy random",
		"proxy", "--prefill", "http://p:1 8998", "--decode", "http://d:1", "--prefill-policy", "cache_aware", "--decode-policy", "random")
	f("engine --worker-urls a b", "engine", "--worker-urls", "a", "b")
	f("help proxy", "help", "proxy")
}

// The registry is at the address that the line names, or at vLLM's port on P's host.
func TestProxyPrefills(t *testing.T) {
	of := func(dialect proxy.Dialect, detect bool, want []proxy.Prefill, list ...string) {
		t.Helper()
		got, err := prefills(list, dialect, detect)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %+v, %v", list, got, err)
		}
	}
	f := func(registry bool, want []proxy.Prefill, list ...string) {
		t.Helper()
		of(map[bool]proxy.Dialect{true: proxy.Mooncake, false: proxy.NIXL}[registry], false, want, list...)
	}
	f(true, []proxy.Prefill{{URL: "http://p:1", Registry: "http://p:8998"}}, "http://p:1")
	f(true, []proxy.Prefill{{URL: "http://p:1", Registry: "http://p:9"}, {URL: "http://q:1", Registry: "http://q:8998"}}, "http://p:1 9", "http://q:1")
	f(true, []proxy.Prefill{{URL: "http://p:1", Registry: "http://p:9"}, {URL: "http://[::1]:1", Registry: "http://[::1]:7"}}, "http://p:1", "9", "http://[::1]:1 7")
	f(true, []proxy.Prefill{{URL: "http://p:1", Registry: "http://r:2"}}, "http://p:1,http://r:2")
	f(true, []proxy.Prefill{{URL: "http://p:1"}}, "http://p:1 none")
	f(false, []proxy.Prefill{{URL: "http://p:1"}}, "http://p:1 9")
	of(proxy.SGLang, false, []proxy.Prefill{{URL: "http://p:1", Registry: "http://p:9"}, {URL: "http://q:1"}, {URL: "http://r:1"}}, "http://p:1 9", "http://q:1", "http://r:1 none")
	of(proxy.Mooncake, true, []proxy.Prefill{{URL: "http://p:1", Registry: "http://p:9"}, {URL: "http://q:1", Registry: "http://q:8998", Guessed: true}}, "http://p:1 9", "http://q:1")
	of(proxy.Mooncake, true, []proxy.Prefill{{URL: "http://r:1", Registry: "http://r:8998", Guessed: true}}, "http://r:1 none")
	if _, err := prefills([]string{"p 9"}, proxy.Mooncake, false); err == nil {
		t.Error("p is no URL")
	}
}
