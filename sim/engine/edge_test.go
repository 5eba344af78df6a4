// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// Prompts of one token, of a block exactly, of one token more or less, and of the model's greatest length pass
// from P to D in every kind of model.
func TestPromptsAtTheEdges(t *testing.T) {
	for name, groups := range hybrids {
		port := testkit.FreePort(t)
		p := open(t, engine.Options{KV: geometry(1), Groups: groups, MaxModel: 257},
			`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(port)})
		d := open(t, engine.Options{KV: geometry(1), Groups: groups, MaxModel: 257}, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`, nil)
		alone := open(t, engine.Options{KV: geometry(1), MaxModel: 257}, "", nil)
		for i, n := range []int{1, 2, 15, 16, 17, 32, 55, 56, 57, 255, 256} {
			tokens, id := prompt(n, uint32(i)), fmt.Sprint("x", n)
			want, _ := ask(t, alone, engine.Request{ID: id, Tokens: tokens, MaxTokens: 1})
			if _, end := ask(t, p, engine.Request{ID: "p" + id, Tokens: tokens, MaxTokens: 1, Params: wire.RemoteDecode(id)}); end.Err != nil {
				t.Fatalf("%s, %d tokens: P: %+v", name, n, end)
			}
			got, end := ask(t, d, engine.Request{ID: "d" + id, Tokens: tokens, MaxTokens: 1, Params: wire.RemotePrefill(fmt.Sprintf("http://127.0.0.1:%d", port), "p", id)})
			if end.Err != nil || !slices.Equal(got, want) {
				t.Fatalf("%s, %d tokens: D: %v, %+v, want %v", name, n, got, end, want)
			}
		}
		idle(t, p)
		idle(t, d)
		if s := d.Stats(); s.LoadedTokens == 0 {
			t.Fatalf("%s: %+v", name, s)
		}
	}
}
