// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/proxy"
)

// One row shows a transfer as proxy and relay saw it: the client's request and the model, P, D, and the
// relay's steps and bytes. A repeated prompt has a row of its own, from the relay's memory.
func TestTransfersOfProxyAndRelay(t *testing.T) {
	x := &deployment{t: t, registry: startRegistry(t)}
	x.stopAll()
	x.p = append(x.p, serve(t, "", producer(x.registry, "p0"), 0))
	x.d = append(x.d, serve(t, "", consumer, 0))
	r, err := relay.Open(relay.Options{Upstream: x.registry, MemoryPath: filepath.Join(t.TempDir(), "memory"), MemoryBytes: 16 << 20, RefreshEvery: time.Millisecond, Log: testLog()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	web := httptest.NewServer(r)
	t.Cleanup(web.Close)
	x.start(proxy.Options{Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: web.URL}}, Decode: []string{x.d[0].web.URL}, HealthInterval: 50 * time.Millisecond})
	for _, id := range []string{"first", "again"} {
		req, err := http.NewRequest(http.MethodPost, x.url+"/v1/completions", strings.NewReader(body(1, 3, "")))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Request-Id", id)
		res, err := http.DefaultClient.Do(req)
		if err != nil || res.StatusCode != 200 {
			t.Fatal(res, err)
		}
		res.Body.Close()
		x.idle()
	}
	list := transferlog.Join(r.Transfers(), x.proxy.Transfers())
	if len(list) != 2 {
		t.Fatalf("%d: %+v", len(list), list)
	}
	for i, want := range []struct{ request, source, steps, id string }{{"again", "memory", "relay sends to D", "…#1!"}, {"first", "P", "P sends relay sends to D", "…"}} {
		got := list[i]
		var steps []string
		for _, s := range got.Steps {
			if s.State == transferlog.Sending {
				steps = append(steps, s.What)
				if s.Bytes != got.Bytes || s.Bytes == 0 {
					t.Errorf("%s: %d of %d bytes", s.What, s.Bytes, got.Bytes)
				}
			}
		}
		if got.State != transferlog.Done || got.Request != want.request || got.Source != want.source || got.Model != "m" || got.From != "p0 at 127.0.0.1" || got.To != x.d[0].web.URL || got.Blocks == 0 ||
			strings.Join(steps, " ") != want.steps || !strings.HasSuffix(got.ID, want.id) || !strings.HasPrefix(got.ID, "kvasir-") || len(got.ID) > 24 {
			t.Errorf("%+v", got)
		}
	}
}

// Without a relay the proxy lists its own requests: a transfer ends with D's first byte, each attempt is
// one transfer, and a failed one has its reason.
func TestTransfersOfProxy(t *testing.T) {
	fails := make(chan bool, 2)
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		if <-fails {
			http.Error(w, "no room", 500)
			return
		}
		fmt.Fprint(w, `{}`)
	})
	mux := http.NewServeMux()
	mux.HandleFunc("GET /query", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"0":{"engine_id":"p","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
	})
	url, s := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: serveMux(t, mux)}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	answered := make(chan int)
	go func() {
		res, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"a"}`))
		if err != nil {
			answered <- 0
			return
		}
		res.Body.Close()
		answered <- res.StatusCode
	}()
	testkit.Eventually(t, "P is ready and D has not taken it", func() bool {
		list := s.Transfers()
		return len(list) == 1 && list[0].State == transferlog.Waiting && len(list[0].Steps) == 2
	})
	fails <- true
	testkit.Eventually(t, "the next attempt", func() bool { return len(s.Transfers()) == 2 })
	close(fails) // D's requests succeed from now on, also those that free P's KV
	if status := <-answered; status != 200 {
		t.Fatal(status)
	}
	list := s.Transfers()
	if len(list) != 2 || list[0].State != transferlog.Done || list[1].State != transferlog.Failed || !strings.Contains(list[1].Why, "no room") || list[0].ID == list[1].ID || list[0].Request != list[1].Request ||
		list[0].To != d || list[0].From != "p at 127.0.0.1" || list[0].Bytes != 0 {
		t.Errorf("%+v", list)
	}
}
