// SPDX-License-Identifier: Apache-2.0

package relay

import "testing"

func TestParseID(t *testing.T) {
	f := func(id string, want transferID) {
		t.Helper()
		if got := parseID(id); got != want {
			t.Errorf("%q: %+v, want %+v", id, got, want)
		}
	}
	f("", transferID{})
	f("T", transferID{base: "T"})
	f("T#2", transferID{base: "T", repeat: true})
	f("T#", transferID{base: "T#"})
	f("#2", transferID{base: "#2"})
	f("T#a", transferID{base: "T#a"})
	f("a#b#3", transferID{base: "a#b", repeat: true})
	f("a#2#3", transferID{base: "a#2", repeat: true})
	f("T#2!", transferID{base: "T", repeat: true, only: true})
	f("T^P:12#3!", transferID{base: "T", repeat: true, only: true, prefix: "P", blocks: 12})
	f("T#!", transferID{base: "T#!"})
	f("T#2!!", transferID{base: "T#2!!"})
	f("#2!", transferID{base: "#2!"})
	f("T#2b", transferID{base: "T#2b"})
	f("T^P:12", transferID{base: "T", prefix: "P", blocks: 12})
	f("T^P:12#3", transferID{base: "T", repeat: true, prefix: "P", blocks: 12})
	f("T^P:x:7", transferID{base: "T", prefix: "P:x", blocks: 7})
	f("T^P", transferID{base: "T^P"})
	f("T^:7", transferID{base: "T^:7"})
	f("^P:7", transferID{base: "^P:7"})
	f("T^P:", transferID{base: "T^P:"})
	f("T^P:99999999999999999999", transferID{base: "T^P:99999999999999999999"})
}
