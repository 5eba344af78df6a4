// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// If a server refuses a command, the error has the server's words. The Tier does not take an object that stays for deleted, and a refused
// look not for one that found nothing.
func TestRefusedCommandsAreErrors(t *testing.T) {
	f := newFake(t)
	b, meta := tiertest.Object(1, 6000)
	x := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	write(t, x, tiertest.Key(1), meta, b)
	f.misbehave(func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
		return []byte("-NOPERM User x has no permissions to run the command\r\n"), !slices.Contains([]string{"INFO", "PING", "HELLO", "CLIENT", "AUTH", "SELECT"}, cmd[0])
	})
	keys := []kv.Key{tiertest.Key(1)}
	for what, err := range map[string]error{
		"Delete": x.Delete(t.Context(), keys),
		"Stat":   x.Stat(t.Context(), keys, make([]tier.Meta, 1)),
	} {
		if err == nil || !strings.Contains(err.Error(), "NOPERM") {
			t.Errorf("%s that the server refuses: %v", what, err)
		}
	}
	f.misbehave(nil)
	metas := make([]tier.Meta, 1)
	if err := x.Stat(t.Context(), keys, metas); err != nil || metas[0] != meta {
		t.Errorf("after that: %+v, %v", metas[0], err)
	}
}
