// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"testing"
	"time"
)

// Eventually waits until ok returns true. It fails the test if that does not happen within two minutes, most of which a busy machine
// may need. `what` names the condition in the failure. Eventually calls ok every two milliseconds, on the goroutine of the test.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	within(t, 2*time.Minute, what, ok)
}

func within(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so within %v: %s", limit, what)
		}
	}
}
