// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// The registry lists up to 64 engines: complete ones, and those that it hides from D with the reason; each with
// the time of its last registration.
func TestEngines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := Open(Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if got := r.Engines(); got == nil || len(got) != 0 {
			t.Errorf("none: %+v", got)
		}
		mustRegister(t, r, Registration{EngineID: "a", Addr: "tcp://10.0.0.7:1", TPSize: 1, PPSize: 1})
		time.Sleep(3 * time.Second)
		mustRegister(t, r, Registration{EngineID: "b", DPRank: 1, Addr: "tcp://10.0.0.8:1", TPSize: 2, PPSize: 1, Lease: time.Minute})
		time.Sleep(time.Second)
		got := r.Engines()
		if len(got) != 2 || got[0] != (EngineState{ID: "a", Host: "10.0.0.7", Workers: 1, Shown: true, Heard: 4}) ||
			got[1] != (EngineState{ID: "b", DPRank: 1, Host: "10.0.0.8", Workers: 1, Why: "1 of 2 TP ranks are registered", Heard: 1, Lease: true}) {
			t.Errorf("%+v", got)
		}
		for i := range 100 {
			mustRegister(t, r, Registration{EngineID: fmt.Sprint("e", i), DPRank: 2 + i, Addr: fmt.Sprint("tcp://10.0.1.1:", i+1)})
		}
		if n := len(r.Engines()); n != 64 {
			t.Errorf("%d engines", n)
		}
	})
}
