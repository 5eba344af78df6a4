// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"sync/atomic"
	"testing"
)

// A command that ends at once when its context is over still says that it stops, before it ends; one that ends by itself does not.
func TestStopIsAnnouncedByACommandThatEndsAtOnce(t *testing.T) {
	for range 20000 {
		ctx, cancel := context.WithCancel(t.Context())
		var said atomic.Bool
		end := whenOver(ctx, func() { said.Store(true) })
		go cancel()
		<-ctx.Done()
		if end(); !said.Load() {
			t.Fatal("the command ended, and nothing was announced")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	whenOver(ctx, func() { t.Error("announced a stop that nothing asked for") })()
}
