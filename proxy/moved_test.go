// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A P with a fixed engine id that is started again has other side channels. The first request after it is right: D asks the registry again at
// once, without a failed load and without another attempt.
func TestFirstRequestAfterPRestarts(t *testing.T) {
	x := deploy(t, 1, 0)
	alone := serve(t, "", "", 0)
	defer alone.stop(t)
	for i, late := 0, 0; i < 3; i++ {
		x.wantAsked("before", 1, body(i+10*late, 4, ""), alone)
		addr := x.p[0].web.Listener.Addr().String()
		x.p[0].stop(t)
		x.p[0] = serve(t, addr, producer(x.registry, "p0"), 0)
		testkit.Eventually(t, "P is found again", func() bool { return x.proxy.Stats().Well[x.p[0].web.URL] == 1 })
		time.Sleep(100 * time.Millisecond) // looks
		retries, failed, began := x.proxy.Stats().Retries, x.d[0].Stats().FailedLoads, time.Now()
		asked := x.asked(body(100+i+10*late, 4, ""), alone)
		took := time.Since(began)
		retries, failed = x.proxy.Stats().Retries-retries, x.d[0].Stats().FailedLoads-failed
		if took > 4*time.Second && late < 3 { // a busy machine may pause for so long, but not each time
			late++
			i--
			continue
		}
		if asked != 1 || retries != 0 || failed != 0 || took > 4*time.Second {
			t.Errorf("P was asked %d times, %d retries, %d failed loads, %v, %d late requests", asked, retries, failed, took, late)
		}
	}
}
