// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// Wrappers pass the ends of lives on.
func TestEndsOfLives(t *testing.T) {
	for name, x := range map[string]tier.Tier{
		"memory": memory(), "counted": tier.Counted(memory(), "memory"), "bounded": tier.Bounded(memory(), tier.Limits{}), "admitted": tier.Admitted(memory(), tier.Admission{}),
		"cascade": tier.Cascade(tier.CascadeOptions{}, memory(), memory()), "recorded": tier.Recorded(memory(), watched(), 1), "route": tier.Route(byRank, memory(), memory()),
		"remembered": tier.Remembered(memory(), tier.Absence{For: time.Hour}),
	} {
		t.Run(name, func(t *testing.T) { tiertest.Mortal(t, x) })
	}
}
