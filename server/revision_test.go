// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/server"
)

// Chunks of one revision of a model are not found under another one, nor without one; they are
// found again under their own. Other models are not affected.
func TestChunksBelongToTheRevisionOfTheirModel(t *testing.T) {
	dir := t.TempDir()
	life := func(revision string, store bool, want map[string]int) {
		t.Helper()
		o := server.Options{Revisions: map[string]string{}}
		if revision != "" {
			o.Revisions["m"] = revision
		}
		n, stop := startNode(t, dir, 64, o)
		defer stop()
		c := newClient(t, n.url)
		for _, model := range []string{"m", "other"} {
			w, err := connector.OpenPoolClient(t.Context(), c, connector.PoolClientOptions{Model: model, Layout: smallLayout, ShmDir: dir})
			if err != nil {
				t.Fatal(err)
			}
			for _, salt := range []string{"", "s"} {
				k := lmcache.Key{Tokens: tokens(32, 1), End: 32, RequestID: "r" + salt, Salt: salt}
				if store {
					if stored, err := w.Store(t.Context(), k, 16, func(int, []byte) {}); err != nil || stored != 2-want[model] {
						t.Fatal(stored, err)
					}
				} else if hit, err := w.Lookup(t.Context(), k); err != nil || hit != want[model] {
					t.Errorf("revision %q: %d chunks of %s with salt %q hit, want %d, %v", revision, hit, model, salt, want[model], err)
				}
			}
			w.Close(t.Context())
		}
	}
	life("1", true, nil)
	life("1", false, map[string]int{"m": 2, "other": 2})
	life("2", false, map[string]int{"other": 2})
	life("", false, map[string]int{"other": 2})
	life("2", true, map[string]int{"other": 2})
	life("1", false, map[string]int{"m": 2, "other": 2})
	life("2", false, map[string]int{"m": 2, "other": 2})
}
