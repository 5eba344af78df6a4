// SPDX-License-Identifier: Apache-2.0

package events

import "testing"

// Memory that long texts needed is given up, whatever number of them came.
func TestLongTextsAreNotKept(t *testing.T) {
	var x news
	for range 3 * keptPages {
		for range 4 {
			x.copy(make([]byte, 8*pageBytes))
			x.copy(make([]byte, pageBytes/2))
		}
		x.reset()
	}
	kept := 0
	for _, p := range x.pages {
		kept += cap(p)
	}
	if most := keptPages * pageBytes; kept == 0 || kept > most {
		t.Errorf("%d bytes are kept, %d at most are wanted", kept, most)
	}
}
