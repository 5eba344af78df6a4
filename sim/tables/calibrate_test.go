// SPDX-License-Identifier: Apache-2.0

package tables_test

import (
	"math"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

// Recalibration from the published figures gives the constants of the profiles: none was changed by hand.
func TestStoredConstantsFollowFromTheirFigures(t *testing.T) {
	all := tables.Calibrations()
	for _, c := range all[:testkit.Volume(len(all))] {
		got, err := c.Recalibrate(t.Context())
		if err != nil {
			t.Error(err)
			continue
		}
		for _, k := range got {
			t.Logf("%s: %s %.6g gives %s %.6g, wanted %.6g; stored %.6g", k.Calibration, k.Constant, k.Value, k.Figure, k.Got, k.Want, k.Stored)
			if math.Abs(k.Got/k.Want-1) > 0.005 {
				t.Errorf("%s: %s %.6g gives %s %.6g, wanted %.6g", k.Calibration, k.Constant, k.Value, k.Figure, k.Got, k.Want)
			}
			if math.Abs(k.Stored/k.Value-1) > 0.005 {
				t.Errorf("%s: %s %.6g is stored, its figure gives %.6g", k.Calibration, k.Constant, k.Stored, k.Value)
			}
		}
	}
}
