// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// phase has the results of requests that were sent at a fixed rate.
type phase struct {
	ttft    []time.Duration // of requests that were let in
	refused []time.Duration // until 429 or 503
	other   map[string]int
	last    time.Duration // from the start of the phase to the arrival of the last request that was refused or slow
}

func median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Sorted(slices.Values(d))
	return d[len(d)/2]
}

// sendAtRate sends streamed requests at a fixed rate for a time, without waiting for their ends. A first byte later than slow counts
// for phase.last.
func sendAtRate(ctx context.Context, url string, rate float64, lasts, slow time.Duration) phase {
	p := phase{other: make(map[string]int)}
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := time.Now()
	for i := 0; time.Since(start) < lasts && ctx.Err() == nil; i++ {
		time.Sleep(time.Until(start.Add(time.Duration(float64(i) / rate * float64(time.Second)))))
		wg.Go(func() {
			came := time.Now()
			status, first, err := one(ctx, url, i)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				p.other[err.Error()]++
			case status == http.StatusOK:
				p.ttft = append(p.ttft, first)
			case status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable:
				p.refused = append(p.refused, first)
			default:
				p.other[fmt.Sprint("status ", status)]++
			}
			if err != nil || status != http.StatusOK || slow > 0 && first > slow {
				p.last = max(p.last, came.Sub(start))
			}
		})
	}
	wg.Wait()
	return p
}

// one sends one request and reads its stream to the end.
func one(ctx context.Context, url string, i int) (status int, first time.Duration, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body(i, 20, `,"stream":true`)))
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	done := resp.StatusCode != http.StatusOK
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if first == 0 {
			first = time.Since(start)
		}
		done = done || lines.Text() == "data: [DONE]"
	}
	if first == 0 {
		first = time.Since(start)
	}
	if !done {
		return 0, 0, fmt.Errorf("a stream without an end")
	}
	return resp.StatusCode, first, nil
}

// TestSoakOverload sends simulated P and D ten times the requests that they can take, for KVASIR_SOAK seconds. Accepted
// requests wait at most twice as long as at capacity, and the others are refused at once. Nothing leaks, and within
// 5 s all is as before. A short queue keeps the time to the first token short.
func TestSoakOverload(t *testing.T) {
	seconds, err := strconv.Atoi(os.Getenv("KVASIR_SOAK"))
	if err != nil {
		t.Skip("KVASIR_SOAK is not set: make soak takes 60 seconds of overload")
	}
	const step, perEngine, tokens = 20 * time.Millisecond, 8, 20
	x := &deployment{t: t, registry: startRegistry(t)}
	x.stopAll()
	x.p = append(x.p, serveWith(t, "", producer(x.registry, "p0"), engine.Options{StepTime: step}))
	o := proxy.Options{
		Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: x.registry}}, Policy: proxy.PrefixAware, MaxPerEngine: perEngine, MaxQueue: 2,
		HealthInterval: 200 * time.Millisecond,
	}
	for range 2 {
		d := serveWith(t, "", consumer, engine.Options{StepTime: step})
		x.d, o.Decode = append(x.d, d), append(o.Decode, d.web.URL)
	}
	x.start(o)
	for _, e := range append(x.p, x.d...) {
		testkit.Eventually(t, "all are well", func() bool { return x.proxy.Stats().Well[e.web.URL] == 1 })
	}
	http.DefaultTransport.(*http.Transport).MaxIdleConnsPerHost = 64
	// P serves perEngine prompts at a time too, one step each plus the hand-over: D is the bottleneck.
	capacity := 2 * perEngine / (float64(tokens+2) * step.Seconds())
	sendAtRate(t.Context(), x.url, capacity/2, 2*time.Second, 0) // connections
	x.idle()
	goroutines, heap := runtime.NumGoroutine(), heapInUse()
	var most atomic.Int64
	at := sendAtRate(t.Context(), x.url, capacity*0.9, 10*time.Second, 0)
	watched, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for watched.Err() == nil {
			most.Store(max(most.Load(), x.proxy.Stats().InFlight))
			time.Sleep(50 * time.Millisecond)
		}
	})
	over := sendAtRate(t.Context(), x.url, capacity*10, time.Duration(seconds)*time.Second, 0)
	stop()
	wg.Wait()
	base := median(at.ttft)
	after := sendAtRate(t.Context(), x.url, capacity*0.5, 8*time.Second, 2*base)
	x.idle()
	http.DefaultClient.CloseIdleConnections()
	testkit.Eventually(t, "goroutines have ended", func() bool { return runtime.NumGoroutine() <= goroutines+32 })
	t.Logf("at %.0f%% of capacity (%.0f requests/s): %d let in, %d refused, first byte after %v (median)", 90.0, capacity*0.9, len(at.ttft), len(at.refused), base)
	t.Logf("10 times capacity for %d s: %d let in, first byte after %v (median), %.2f times as long; %d refused after %v (median); at most %d in progress; other ends: %v",
		seconds, len(over.ttft), median(over.ttft), float64(median(over.ttft))/float64(base), len(over.refused), median(over.refused), most.Load(), over.other)
	t.Logf("afterwards: %d let in, first byte after %v (median); the last one that was refused or took twice as long came after %v", len(after.ttft), median(after.ttft), after.last)
	t.Logf("heap %d KiB before, %d KiB after; goroutines %d, %d", heap>>10, heapInUse()>>10, goroutines, runtime.NumGoroutine())
	if len(over.other) > 0 || len(over.refused) == 0 || len(over.ttft) < seconds {
		t.Errorf("let in %d, refused %d, %v", len(over.ttft), len(over.refused), over.other)
	}
	if median(over.ttft) > 2*base {
		t.Errorf("the first byte comes after %v instead of %v", median(over.ttft), base)
	}
	if after.last > 5*time.Second {
		t.Errorf("%v after the overload a request was refused or slow", after.last)
	}
}

func heapInUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}
