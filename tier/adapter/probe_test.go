// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
)

// A tier that cannot be reached at the start is one warning before any prompt, and its state
// has the error.
func TestUnreachableTierShowsAtTheStart(t *testing.T) {
	for _, text := range []string{
		`{"type":"s3_native","s3_endpoint":"http://127.0.0.1:1","s3_bucket":"b","aws_access_key_id":"i","aws_secret_access_key":"s","request_timeout":60}`,
		`{"type":"redis","host":"127.0.0.1","port":1}`,
		`{"type":"resp","host":"127.0.0.1","port":1}`,
	} {
		var log bytes.Buffer
		a, err := adapter.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		s, err := adapter.Open(adapter.Options{Adapters: []adapter.Adapter{a}, Names: tier.NewNames(), Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		s.Probe(t.Context())
		got := s.Each[0].Condition()
		if err := s.Tier.Close(); err != nil {
			t.Error(err)
		}
		if got.State != tier.Unreachable || !strings.Contains(got.Err, "refused") {
			t.Errorf("%s: %+v", text, got)
		}
		if n := strings.Count(log.String(), "the state of a tier changed"); n != 1 {
			t.Errorf("%s: %d warnings:\n%s", text, n, log.String())
		}
	}
}
