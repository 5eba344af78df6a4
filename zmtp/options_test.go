// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestOptionsValidate(t *testing.T) {
	testkit.CheckNumbers[RouterOptions](t)
	testkit.CheckNumbers[DealerOptions](t)
	testkit.CheckNumbers[PubOptions](t)
}

// A Router or a Pub uses one mechanism: Validate refuses Curve together with Plain, and accepts each alone.
func TestOptionsRefuseTwoMechanisms(t *testing.T) {
	curve, plain := &CurveServer{}, func(string, string) bool { return true }
	f := func(curve *CurveServer, plain func(string, string) bool, want bool) {
		t.Helper()
		a := Authentication{Curve: curve, Plain: plain}
		for _, err := range []error{RouterOptions{Authentication: a}.Validate(), PubOptions{Authentication: a}.Validate()} {
			if (err == nil) != want {
				t.Errorf("curve %t, plain %t: %v", curve != nil, plain != nil, err)
			}
		}
	}
	f(curve, plain, false)
	f(curve, nil, true)
	f(nil, plain, true)
	f(nil, nil, true)
	if (DealerOptions{Curve: &CurveClient{}, Plain: &PlainClient{}}).Validate() == nil {
		t.Error("a client has two mechanisms")
	}
}
