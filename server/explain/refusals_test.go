// SPDX-License-Identifier: Apache-2.0

package explain_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/server/explain"
)

// A flood of unlike refusals keeps the latest, and equal ones count.
func TestRefusalsAreBounded(t *testing.T) {
	var a explain.Refusals
	for i := range 3 * explain.MaxRefusals {
		a.Add(errors.New(strings.Repeat("x", i)))
	}
	last := errors.New("no room")
	a.Add(last)
	a.Add(last)
	if got := a.List(); len(got) != explain.MaxRefusals || got[len(got)-1].Why != "no room" || got[len(got)-1].Count != 2 {
		t.Errorf("%d reasons, the last %+v", len(got), got[len(got)-1])
	}
}
