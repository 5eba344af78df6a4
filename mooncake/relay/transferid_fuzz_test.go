// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"fmt"
	"testing"
)

// A transfer id that D sends is read so that its parts give it again.
func FuzzTransferID(f *testing.F) {
	for _, id := range []string{"T", "T#2", "T#2!", "T^PREFIX:12", "T^PREFIX:12#3!", "^:", "#", "T^P:99999999999999999999", "T^P:007", "T#"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		x := parseID(id)
		if x.blocks < 0 || x.blocks > 1<<31 || x.blocks > 0 && x.prefix == "" || x.only && !x.repeat {
			t.Fatalf("%q is %+v", id, x)
		}
		again := x.base
		if x.prefix != "" {
			again += "^" + x.prefix + ":" + fmt.Sprint(x.blocks)
		}
		if y := parseID(again); y.base != x.base || y.prefix != x.prefix || y.blocks != x.blocks {
			if !x.repeat { // else a second # may be left in the base, which is read as another repeat
				t.Fatalf("%q is %+v, and %q is %+v", id, x, again, y)
			}
		}
		if id != "" && x.base == "" {
			t.Fatalf("%q has no base", id)
		}
	})
}
