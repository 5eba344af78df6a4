// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	neturl "net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// directory is what a registry answers: an engine for each host.
func directory(hosts ...string) string {
	var of []string
	for i, h := range hosts {
		of = append(of, fmt.Sprintf(`"%d":{"engine_id":"e%d","worker_addr":{"0":{"0":"tcp://%s:1"}}}`, i, i, h))
	}
	return "{" + strings.Join(of, ",") + "}"
}

// No request of the proxy gives the engines' API key to an engine that a registry names, unless the operator allows it. Engines
// that the operator named get it.
func TestEnginesOfARegistryGetNoKey(t *testing.T) {
	f := func(engineKey string, toFound bool, want, wantD string) {
		t.Helper()
		var ps, ds legs
		mux := http.NewServeMux()
		mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, `{}`) })
		u, _ := neturl.Parse(serveMux(t, mux))
		d := mock(t, func(w http.ResponseWriter, r *http.Request) { ds.note(r); fmt.Fprint(w, `{}`) })
		url, _ := startProxy(t, proxy.Options{
			EngineKey: engineKey, EngineKeyToFound: toFound, Decode: []string{d}, HealthInterval: 20 * time.Millisecond,
			Sources: []proxy.Source{{Role: "prefill", URL: "registry+" + mockRegistry(t, directory("127.0.0.1")) + "?port=" + u.Port()}},
		})
		reach(t, url)
		if status := ask(t, url+"/v1/completions", `{"prompt":"a"}`, "Authorization", "Bearer client", "X-Api-Key", "client", "Cookie", "client", "X-Other", "passes"); status != 200 {
			t.Fatal(status)
		}
		testkit.Eventually(t, "P has its part", func() bool {
			_, heads := ps.all()
			return slices.ContainsFunc(heads, func(h http.Header) bool { return h.Get("X-Other") != "" })
		})
		_, heads := ps.all()
		for _, h := range heads {
			leg := h.Get("X-Other") != "" // not a look at P
			if got := h.Get("Authorization"); got != want && (leg || engineKey != "") {
				t.Errorf("to found: %v: P got %q", toFound, got)
				break
			}
			if want == "" && h.Get("X-Api-Key")+h.Get("Cookie") != "" {
				t.Errorf("P got %v", h)
			}
		}
		if _, heads := ds.all(); heads[0].Get("Authorization") != wantD {
			t.Errorf("D got %q", heads[0].Get("Authorization"))
		}
	}
	f("secret", false, "", "Bearer secret")
	f("secret", true, "Bearer secret", "Bearer secret")
	f("", false, "", "Bearer client") // which may be the engines' key
	f("", true, "Bearer client", "Bearer client")
}

// A registry makes at most 64 engines known, and only those in the networks of the operator.
func TestEnginesOfARegistryAreBounded(t *testing.T) {
	f := func(networks string, want int, hosts ...string) {
		t.Helper()
		o := proxy.Options{
			Decode: []string{mock(t, func(http.ResponseWriter, *http.Request) {})}, HealthInterval: time.Hour,
			Sources: []proxy.Source{{Role: "prefill", URL: "registry+" + mockRegistry(t, directory(hosts...)) + "?port=1"}},
		}
		for n := range strings.FieldsSeq(networks) {
			o.FoundNetworks = append(o.FoundNetworks, netip.MustParsePrefix(n))
		}
		o = proxy.WithResolver(o, func(_ context.Context, host string) ([]string, error) {
			return map[string][]string{"inside": {"10.0.0.7"}, "outside": {"8.8.8.8"}, "both": {"10.0.0.8", "8.8.8.8"}}[host], nil
		})
		_, p := startProxy(t, o)
		testkit.Eventually(t, "they are known", func() bool { return len(p.Stats().Well) == want+1 })
	}
	var many []string
	for i := range 300 {
		many = append(many, fmt.Sprintf("127.1.%d.%d", i/200, 1+i%200))
	}
	f("", 64, many...)
	f("", 4, "10.1.2.3", "172.16.0.1", "192.168.1.1", "inside", "8.8.8.8", "169.254.169.254", "outside", "both", "unknown")
	f("8.8.0.0/16", 2, "10.1.2.3", "8.8.8.8", "outside", "both")
}
