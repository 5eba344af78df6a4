// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A call that a client gave up while there was no server does not reach the next server: it could
// be a store of blocks that the engine has reused since. Later calls do.
func TestGivenUpCallsDoNotReachTheNextServer(t *testing.T) {
	l := testkit.Listen(t)
	addr := l.Addr().String()
	serve := func() (*zmtp.Router, func(lmcache.Op) int) {
		var mu sync.Mutex
		seen := map[lmcache.Op]int{}
		r := zmtp.NewRouter(func(p *zmtp.Peer, m zmtp.Message) {
			op, _ := lmcache.ParseOp(m[1])
			mu.Lock()
			seen[op]++
			mu.Unlock()
			_ = p.Send(m[0], m[1], lmcache.AppendBool(nil, true)) // the peer may be gone
		}, zmtp.RouterOptions{})
		for end := time.Now().Add(60 * time.Second); ; time.Sleep(10 * time.Millisecond) { // the port was ours a moment ago
			_, err := r.Listen(t.Context(), "tcp://"+addr)
			if err == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatal(err)
			}
		}
		return r, func(op lmcache.Op) int { mu.Lock(); defer mu.Unlock(); return seen[op] }
	}
	l.Close()
	var clients []*lmcache.Client
	for range 2 {
		c, err := lmcache.NewClient(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		clients = append(clients, c)
	}
	reach := func() {
		t.Helper()
		for _, c := range clients {
			for end := time.Now().Add(60 * time.Second); ; {
				ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
				ok, err := c.PingServer(ctx)
				cancel()
				if ok && err == nil {
					break
				}
				if time.Now().After(end) {
					t.Fatal("the server is not reached: ", err)
				}
			}
		}
	}
	giveUp := func() {
		var wg sync.WaitGroup
		for _, c := range clients {
			for range 4 {
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
					defer cancel()
					if _, err := c.StoreBlocks(ctx, &lmcache.Key{RequestID: "r"}, 1, [][]int{{1}}); err == nil {
						t.Error("stored without a server")
					}
				})
			}
		}
		wg.Wait()
	}
	giveUp() // before any server
	first, seen := serve()
	reach()
	if n := seen(lmcache.OpStore); n > 0 {
		t.Errorf("%d stores that were given up reach the first server", n)
	}
	first.Close()
	giveUp() // between two
	second, seen := serve()
	defer second.Close()
	reach()
	if n := seen(lmcache.OpStore); n > 0 {
		t.Errorf("%d stores that were given up reach the second server", n)
	}
}
