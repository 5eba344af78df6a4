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
	for i := range 3 {
		x.wantAsked("before", 1, body(i, 4, ""), alone)
		addr := x.p[0].web.Listener.Addr().String()
		x.p[0].stop(t)
		x.p[0] = serve(t, addr, producer(x.registry, "p0"), 0)
		testkit.Eventually(t, "P is found again", func() bool { return x.proxy.Stats().Well[x.p[0].web.URL] == 1 })
		time.Sleep(100 * time.Millisecond) // looks
		retries, began := x.proxy.Stats().Retries, time.Now()
		x.wantAsked("the first request", 1, body(100+i, 4, ""), alone)
		if s, d := x.proxy.Stats(), x.d[0].Stats(); s.Retries != retries || d.FailedLoads != 0 || time.Since(began) > 4*time.Second {
			t.Errorf("%d retries, %d failed loads, %v", s.Retries-retries, d.FailedLoads, time.Since(began))
		}
	}
}
