// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Many clients leave right after they sent their requests. P keeps no blocks for any of them afterwards, because D gets each
// request that P gets.
func TestClientsLeaveAtOnce(t *testing.T) {
	x := deploy(t, 1, 10*time.Millisecond)
	for round := range 12 {
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(30000))*time.Microsecond)
				defer cancel()
				r, _ := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions", strings.NewReader(body(i+100*round, 500, `,"stream":true`)))
				if resp, err := http.DefaultClient.Do(r); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			})
		}
		wg.Wait()
		x.idle()
	}
}
