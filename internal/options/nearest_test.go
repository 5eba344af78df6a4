// SPDX-License-Identifier: Apache-2.0

package options_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/options"
)

func TestHint(t *testing.T) {
	known := []string{"kv_role", "kv_port", "kv_connector", "engine_id"}
	f := func(word, want string) {
		t.Helper()
		if got := options.NearestHint(word, known); got != want {
			t.Errorf("%q: %q, want %q", word, got, want)
		}
	}
	f("kv_roll", `, did you mean "kv_role"?`)
	f("kvport", `, did you mean "kv_port"?`)
	f("engine-id", `, did you mean "engine_id"?`)
	f("kv_connectors", `, did you mean "kv_connector"?`)
	f("port", "")
	f("kv_rloe", `, did you mean "kv_role"?`)
	f("kv_prto", `, did you mean "kv_port"?`)
	f("", "")
}
