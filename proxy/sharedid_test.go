// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// A request of several prompts under one transfer id fails at a simulated D, which is what shows that a proxy sent one.
func TestEngineFailsWhenPromptsShareATransfer(t *testing.T) {
	t.Parallel() // it waits for a transfer that never comes
	x := deploy(t, 1, 0)
	a, b := strings.Repeat("one two three ", 40), strings.Repeat("four five six ", 30)
	list := func(tokens int, params string) string {
		return fmt.Sprintf(`{"prompt":[%q,%q],"max_tokens":%d,"kv_transfer_params":%s}`, a, b, tokens, params)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if status, text, _ := post(t, x.p[0].web.URL, list(1, `{"do_remote_decode":true,"transfer_id":"t"}`)); status != 200 {
			t.Error(status, text)
		}
	})
	params := fmt.Sprintf(`{"do_remote_prefill":true,"transfer_id":"t","remote_engine_id":"p0","remote_bootstrap_addr":%q}`, x.registry)
	status, text, _ := post(t, x.d[0].web.URL, list(5, params))
	wg.Wait()
	if status != 500 {
		t.Errorf("%d %s", status, text)
	}
}
