// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// P restarts at the same address with a new engine id, while D waits for a transfer of P's first
// life. The restarted P offers another prompt under the same transfer id. D sends its pull again, and
// the pull must fail instead of taking that prompt's KV. Where only the connection breaks, the pull
// succeeds.
func TestPullSentAgainToAnotherLife(t *testing.T) {
	for _, restarts := range []bool{true, false} {
		x := small(t, SenderOptions{}, ReceiverOptions{UnknownTimeout: 20 * time.Second, ConnectTimeout: 10 * time.Second})
		x.sender.Expect("p", "xfer-1")
		done := x.begin(t, "d", "xfer-1", []int{1, 2})
		testkit.Eventually(t, "the pull arrives", func() bool { return x.sender.Stats().Pulls == 1 })
		if !restarts {
			x.breakConnections()
			testkit.Eventually(t, "the pull comes again", func() bool { return x.receiver.Stats().Resent == 1 && x.sender.Stats().Pulls == 1 })
			x.sender.Offer("p", "xfer-1", [][]int{{7, 8}})
			if err := wait(t, done); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(block(x.d, 0, 2), block(x.p, 0, 8)) {
				t.Fatal("wrong bytes")
			}
			continue
		}
		addr := x.sender.Addr()
		x.sender.Close()
		client := transfer.New(transfer.Options{})
		defer client.Close()
		second, err := NewSender(x.p, SenderOptions{Transfer: client, Listen: addr, Log: testLog(t)})
		if err != nil {
			t.Fatal(err)
		}
		if err := second.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		defer second.Close()
		x.dir.show(second.EngineID(), second.Addr())
		second.Offer("other", "xfer-1", [][]int{{9, 10}})
		if err := wait(t, done); !errors.Is(err, ErrNoEngine) {
			t.Fatalf("another prompt's KV: %v", err)
		}
	}
}

// breakConnections closes D's connections to P's side channel.
func (x *pair) breakConnections() {
	x.sender.conns.mu.Lock()
	defer x.sender.conns.mu.Unlock()
	for p := range x.sender.conns.mu.all {
		go p.Close()
	}
}
