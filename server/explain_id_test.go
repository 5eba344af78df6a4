// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/server"
)

// A request is found under the id that its client has, to which engines append a number and more. An
// id that begins several requests stands for none, and one that is known stands for itself.
func TestExplainTakesTheClientsID(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	w, err := connector.OpenPoolClient(t.Context(), newClient(t, n.url), connector.PoolClientOptions{Model: "m", Layout: smallLayout, ShmDir: n.dir})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close(t.Context())
	for _, id := range []string{"cmpl-94-0-a5", "cmpl-941-0-a6", "two-0-x", "two-1-y", "own", "own-0-z"} {
		if _, err := w.Lookup(t.Context(), lmcache.Key{Tokens: tokens(32, 1), End: 32, RequestID: id}); err != nil {
			t.Fatal(err)
		}
	}
	f := func(id, want string) {
		t.Helper()
		got := n.Explain(id, 10)
		if want == "" {
			if len(got.Lookups)+len(got.Requests) != 0 {
				t.Errorf("%s: %+v", id, got)
			}
			return
		}
		if len(got.Lookups) != 1 || got.Lookups[0].Request != want || len(got.Requests) != 1 || got.Requests[0].Request != want {
			t.Errorf("%s: %+v, want %s", id, got, want)
		}
	}
	f("cmpl-94", "cmpl-94-0-a5")
	f("cmpl-941-0-a6", "cmpl-941-0-a6")
	f("own", "own")
	f("two", "")
	f("cmpl-9", "")
}
