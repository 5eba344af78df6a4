// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"log/slog"
	"testing"
)

// With --timing-shield the server keeps no memo of token lists for all tenants, and the store looks only under the request's own names.
func TestTimingShieldReachesServerAndStore(t *testing.T) {
	for _, shield := range []bool{false, true} {
		c := &serverCmd{Shield: shield, Memo: 64 << 20}
		o, _ := c.options(slog.New(slog.DiscardHandler)) // other flags are missing
		if o.server.NoMemo != shield || o.store.OwnNames != shield {
			t.Errorf("shield %v: no memo %v, own names %v", shield, o.server.NoMemo, o.store.OwnNames)
		}
	}
}
