// SPDX-License-Identifier: Apache-2.0

package cli

import "testing"

func TestParseRevisions(t *testing.T) {
	f := func(model, revision string, flags ...string) {
		t.Helper()
		got, err := parseRevisions(flags)
		if (err == nil) != (revision != "") || got[model] != revision {
			t.Errorf("%q: %v, %v", flags, got, err)
		}
	}
	f("org/m", "v1.2_3-a", "org/m=v1.2_3-a")
	f("a=b", "c", "x=y", "a=b=c")
	for _, bad := range []string{"", "m", "m=", "=r", "m=a b", "m=a@b", "m=~"} {
		f("m", "", bad)
	}
	f("m", "", "m=1", "m=2")
}
