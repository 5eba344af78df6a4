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
	counted := func() (asked, unknown int64) {
		a, b := proxies[0].Stats().Shared, proxies[1].Stats().Shared
		return a.Asked + b.Asked, a.Unknown + b.Unknown
	}
	together := true // Redis answers
	// wave has both proxies asked several times each, and wants so many let in, and the rest refused at once. A wave during which Redis
	// has not answered in time, since the machine stood still, counts nothing, and another one follows.
	wave := func(what, key string, each int, in int64) {
		t.Helper()
		for range 4 {
			asked, unknown := counted()
			for range each {
				ask(0, key)
				ask(1, key)
			}
			testkit.Eventually(t, what, func() bool { return int(inside.Load())+len(ended) == 2*each })
			let := inside.Load()
			for range let {
				release <- true
			}
			answers := make(map[int]int)
			for range 2 * each {
				answers[<-ended]++
			}
			testkit.Eventually(t, "the ends are counted", func() bool { return redis.Now("") == 0 })
			nowAsked, nowUnknown := counted()
			if together && nowUnknown != unknown {
				continue
			}
			if let != in || answers[http.StatusOK] != int(in) || answers[http.StatusTooManyRequests] != 2*each-int(in) || together && nowAsked == asked {
				t.Errorf("%s: %d let in, answers %v, Redis was asked %d times", what, let, answers, nowAsked-asked)
			}
			return
		}
		t.Errorf("%s: Redis did not answer in time during any wave", what)
	}
	wave("together", "a", 4, 2)
	wave("together, another key", "b", 4, 2)
	together = false
	redis.Silence(true)
	wave("each by itself", "a", 4, 4)
	redis.Silence(false)
	together = true
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
