// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

// A Sender remembers the last transfers that ended, for ten minutes. One that begins again is forgotten.
func TestEndedTransfersAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d doneTransfers
		for i := range maxDone + 10 {
			d.add(strconv.Itoa(i), nil)
		}
		if len(d.byID) != maxDone || len(d.order) != maxDone || d.has("9") || !d.has("10") {
			t.Errorf("%d and %d transfers; the tenth oldest: %v, the next: %v", len(d.byID), len(d.order), d.has("9"), d.has("10"))
		}
		d.forget("10")
		d.add("11", nil) // ended twice: the older end does not take the younger one with it
		d.add("a", nil)
		d.add("b", nil)
		if d.has("10") || !d.has("11") {
			t.Errorf("one that began again: %v; one that ended twice: %v", d.has("10"), d.has("11"))
		}
		time.Sleep(endedFor)
		if !d.has("b") {
			t.Error("forgotten too early")
		}
		time.Sleep(time.Second)
		if d.has("b") {
			t.Error("an end is remembered for more than ten minutes")
		}
		if d.add("c", nil); len(d.byID) != 1 || len(d.order) != 1 || !d.has("c") {
			t.Errorf("%d and %d transfers after ten minutes", len(d.byID), len(d.order))
		}
	})
}
