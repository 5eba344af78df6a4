// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/tier/redis"
)

// The Tier logs once that Redis answers and, in LMCache's resp layout without MayDelete, that it deletes nothing.
func TestStartIsLogged(t *testing.T) {
	f := newFake(t)
	for _, c := range []struct {
		redis.Options
		want int
	}{
		{redis.Options{Layout: redis.RESP}, 1},
		{redis.Options{Layout: redis.RESP, MayDelete: true}, 0},
		{redis.Options{Layout: redis.Valkey}, 0},
		{redis.Options{}, 0},
	} {
		var log bytes.Buffer
		var mu sync.Mutex
		c.Addrs, c.Log = []string{f.addr}, slog.New(slog.NewTextHandler(locked{&mu, &log}, nil))
		x := open(t, c.Options)
		count := func(text string) int {
			mu.Lock()
			defer mu.Unlock()
			return strings.Count(log.String(), text)
		}
		testkit.Eventually(t, "Redis answers", func() bool { return count("Redis answers") > 0 })
		if count("Redis answers") != 1 || count("does not answer") != 0 || count("nothing is deleted from Redis") != c.want {
			t.Errorf("layout %d, deletion %v: %s", c.Layout, c.MayDelete, &log)
		}
		if call, dial := x.Timeouts(); call != 5*time.Second || dial != 10*time.Second {
			t.Errorf("a call may take %v, a dial %v", call, dial)
		}
	}
}
