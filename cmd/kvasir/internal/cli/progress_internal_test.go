// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// On a terminal the text after an interrupted run begins on a new line. In a log each progress line is whole.
func TestProgressEndsItsLine(t *testing.T) {
	f := func(terminal bool, upTo int, want string) {
		t.Helper()
		var b strings.Builder
		show, end := progressOn(&b, terminal, "deployments")
		for done := range upTo + 1 {
			show(done, 2)
		}
		end()
		if got := b.String(); got != want {
			t.Errorf("terminal %v, up to %d of 2: %q, want %q", terminal, upTo, got, want)
		}
	}
	f(true, 0, "\r0 of 2 deployments\n")
	f(false, 0, "")
	f(false, 1, "1 of 2 deployments\n")
	f(false, 2, "1 of 2 deployments\n2 of 2 deployments\n")
	var b strings.Builder
	show, end := progressOn(&b, true, "requests")
	show(2, 2)
	end()
	if b.String() != "\r2 of 2 requests\n" {
		t.Errorf("%q", b.String())
	}
}
