// SPDX-License-Identifier: Apache-2.0

package options_test

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// The error lists all faults, field by field, also of several structs together.
func TestChecks(t *testing.T) {
	var good, one, two options.Checks
	options.Within(&good, "Size", 0, 0, 5)
	options.Within(&good, "Size", 5, 0, 5)
	if err := good.Err(); err != nil {
		t.Error(err)
	}
	options.Within(&one, "Size", 6, 0, 5)
	options.Within(&one, "Share", math.NaN(), 0, 1)
	two.That(false, "Name", "%q is empty", "")
	options.Within(&two, "Wait", -time.Second, 0, time.Hour)
	var got []string
	options.Each(errors.Join(one.Err(), good.Err(), two.Err()), func(e *options.Error) { got = append(got, e.Field+"|"+e.Text) })
	want := []string{"Size|6 is outside 0 to 5", "Share|NaN is outside 0 to 1", `Name|"" is empty`, "Wait|-1s is outside 0s to 1h0m0s"}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%q, want %q", got, want)
	}
	if err := two.Err(); err.Error() != "Name \"\" is empty\nWait -1s is outside 0s to 1h0m0s" {
		t.Errorf("%v", err)
	}
}
