// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
)

// The figures have the names and the bucket edges of vLLM 0.33. Its Prometheus client adds
// _total to the names of counters.
func TestMetricsAsVLLM(t *testing.T) {
	m := mooncake.NewMetrics()
	m.Pushed(20*time.Millisecond, 3<<10, 11)
	m.Expire()
	var text strings.Builder
	if err := metrics.Write(&text, m.Stats()); err != nil {
		t.Fatal(err)
	}
	f := func(name string, edges ...string) {
		t.Helper()
		if got := testkit.Buckets(text.String(), name+"_bucket{"); !slices.Equal(got, append(edges, "+Inf")) {
			t.Errorf("%s: bucket edges %q, want %q", name, got, edges)
		}
	}
	f("vllm:mooncake_xfer_time_seconds", "0.005", "0.01", "0.025", "0.05", "0.075", "0.1", "0.2", "0.3", "0.5", "0.75", "1", "5")
	f("vllm:mooncake_bytes_transferred", "2048", "8192", "32768", "131072", "524288", "2.097152e+06", "8.388608e+06", "3.3554432e+07",
		"1.34217728e+08", "5.36870912e+08", "2.147483648e+09", "8.589934592e+09")
	f("vllm:mooncake_num_descriptors", "10", "20", "30", "50", "75", "100", "200", "400", "1000", "2000", "4000", "10000", "20000", "50000")
	for _, want := range []string{
		`vllm:mooncake_xfer_time_seconds_bucket{le="0.025"} 1`, `vllm:mooncake_xfer_time_seconds_bucket{le="0.01"} 0`,
		"vllm:mooncake_num_failed_transfers_total 0", "vllm:mooncake_num_failed_recvs_total 0", "vllm:mooncake_num_kv_expired_reqs_total 1",
	} {
		if !strings.Contains(text.String(), want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}
