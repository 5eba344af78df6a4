// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/keys"
	"github.com/kvasir-kv/kvasir/proxy/limits"
	"github.com/kvasir-kv/kvasir/proxy/limits/limitstest"
)

// Two proxies that count together let in as many requests of a key as one alone; another key has its
// own. While Redis is silent each proxy holds the limit by itself.
func TestSharedLimits(t *testing.T) {
	var inside atomic.Int64
	release := make(chan bool)
	e := mock(t, func(w http.ResponseWriter, _ *http.Request) {
		inside.Add(1)
		defer inside.Add(-1)
		<-release
		fmt.Fprint(w, "{}")
	})
	path := filepath.Join(t.TempDir(), "keys")
	lines := fmt.Sprintf("ada %x concurrent=2\nbob %x concurrent=2\n", sha256.Sum256([]byte("a")), sha256.Sum256([]byte("b")))
	if err := os.WriteFile(path, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	redis := limitstest.Start(t)
	var urls []string
	var proxies []*proxy.Proxy
	for range 2 {
		known, err := keys.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		l, err := limits.New(limits.Options{Addr: redis.Addr, Timeout: 2 * time.Second, Pause: 50 * time.Millisecond, Life: time.Minute, Log: testLog()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		url, p := startProxy(t, proxy.Options{Engines: []string{e}, Keys: known, Limits: l, HealthInterval: 20 * time.Millisecond})
		urls, proxies = append(urls, url), append(proxies, p)
		testkit.Eventually(t, "the engine is well", func() bool { return p.Stats().Well[e] == 1 })
	}
	ended := make(chan int, 64)
	ask := func(proxy int, key string) {
		go func() {
			r, _ := http.NewRequest(http.MethodPost, urls[proxy]+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
			r.Header.Set("Authorization", "Bearer "+key)
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				ended <- 0
				return
			}
			resp.Body.Close()
			ended <- resp.StatusCode
		}()
	}
	// wave has both proxies asked several times each, and wants so many let in, and the rest refused at once.
	wave := func(what, key string, each int, in int64) {
		t.Helper()
		for range each {
			ask(0, key)
			ask(1, key)
		}
		for range 2*each - int(in) {
			if status := <-ended; status != http.StatusTooManyRequests {
				t.Errorf("%s: %d", what, status)
			}
		}
		testkit.Eventually(t, what, func() bool { return inside.Load() == in })
		for range in {
			release <- true
		}
		for range in {
			if status := <-ended; status != http.StatusOK {
				t.Errorf("%s: %d", what, status)
			}
		}
		testkit.Eventually(t, "the ends are counted", func() bool { return redis.Now("") == 0 })
	}
	wave("together", "a", 4, 2)
	wave("together, another key", "b", 4, 2)
	if a, b := proxies[0].Stats(), proxies[1].Stats(); a.Shared.Asked+b.Shared.Asked == 0 || a.Shared.Unknown+b.Shared.Unknown != 0 {
		t.Errorf("%+v %+v", a.Shared, b.Shared)
	}
	redis.Silence(true)
	wave("each by itself", "a", 4, 4)
	redis.Silence(false)
	testkit.Eventually(t, "they count together again", func() bool {
		before := [2]int64{proxies[0].Stats().Shared.Asked, proxies[1].Stats().Shared.Asked}
		for i := range proxies {
			ask(i, "b")
			testkit.Eventually(t, "it is inside", func() bool { return inside.Load() == 1 })
			release <- true
			<-ended
		}
		testkit.Eventually(t, "the ends are counted", func() bool { return redis.Now("") == 0 })
		return proxies[0].Stats().Shared.Asked > before[0] && proxies[1].Stats().Shared.Asked > before[1]
	})
	wave("together again", "a", 4, 2)
}
