// SPDX-License-Identifier: Apache-2.0

package workers_test

import (
	"os"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/workers"
)

// The relatives of a client count for the model that it looks up: those of another model do not hide a worker whose process is
// not known yet.
func TestRelativesOfEachModel(t *testing.T) {
	r := workers.NewRegistry(10)
	here := access.Caller{By: alice, Peer: peercred.Peer{PID: os.Getpid()}}
	own := worker(1, alice, 1, 1)
	own.CameFrom(&here)
	other := worker(2, alice, 1, 1)
	other.Model = "n"
	add(t, r, own)
	add(t, r, other)
	c := r.NewClient(&here)
	for range 2 {
		for _, model := range []string{"m", "n"} {
			if got := r.Loaders([]byte(model), 1, 16, alice, c, 1); got != 1 {
				t.Errorf("%d workers of %s can load, want 1", got, model)
			}
		}
	}
}
