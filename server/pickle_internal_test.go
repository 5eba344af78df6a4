// SPDX-License-Identifier: Apache-2.0

package server

import (
	"testing"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// Frames are as large as the tensors of a commit may be.
func TestRouterLimits(t *testing.T) {
	f := func(o Options, want int64) {
		t.Helper()
		var r zmtp.RouterOptions
		o.routerLimits(&r)
		if r.MaxFrameBytes != want || want > 0 && r.MaxMessageBytes <= want {
			t.Errorf("%+v: %+v, want %d", o, r, want)
		}
	}
	f(Options{PickleBytes: MaxPickleBytes}, MaxPickleBytes+5) // envelopes of 0.5.7
	f(Options{Pickle: PickleOn, PickleBytes: MaxPickleBytes}, MaxPickleBytes+5)
	f(Options{Pickle: PickleOnly, PickleBytes: 1000}, 64<<20)
}
