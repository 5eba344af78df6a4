// SPDX-License-Identifier: Apache-2.0

package adapter

import (
	"testing"
	"time"
)

// A call may take as long as the operator's timeouts say, also if that is longer than the usual limit
// of a call.
func TestCallsMayTakeTheirTimeout(t *testing.T) {
	for text, least := range map[string]time.Duration{
		`{"type":"redis","host":"h","port":1}`:                                                  30 * time.Second,
		`{"type":"redis","host":"h","port":1,"request_timeout":120}`:                            120 * time.Second,
		`{"type":"resp","host":"h","port":1,"request_timeout":20,"connection_timeout":60}`:      80 * time.Second,
		`{"type":"s3_native","s3_endpoint":"http://h","s3_bucket":"b","request_timeout":300}`:   300 * time.Second,
		`{"type":"s3_native","s3_endpoint":"http://h","s3_bucket":"b","connection_timeout":60}`: 60 * time.Second,
	} {
		a, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := a.limits(); got.Timeout < least || got.Timeout > least+time.Minute {
			t.Errorf("%s: a call is cut after %v", text, got.Timeout)
		}
	}
}
