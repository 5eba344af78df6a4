// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// A client's header fields about its request reach the engines: ids, trace context, unknown fields. Fields of the
// connection do not.
func TestFieldsPass(t *testing.T) {
	var ps, ds legs
	registry := mockRegistry(t, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		ds.note(r)
		testkit.Eventually(t, "P has its part", func() bool { return ps.count() == 1 })
		w.Header().Set("X-Engine", "1")
		fmt.Fprint(w, `{}`)
	})
	url, _ := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: registry}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	r, _ := http.NewRequest(http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"a"}`))
	for k, v := range map[string]string{
		"X-Request-Id": "mine", "Traceparent": "00-1", "Tracestate": "a=b", "X-Own": "1", "Connection": "X-Hop, close", "X-Hop": "2", "Te": "trailers", "Proxy-Authorization": "x", "Authorization": "Bearer k",
	} {
		r.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	_, toP := ps.all()
	_, toD := ds.all()
	for _, h := range []http.Header{toP[0], toD[0]} {
		if h.Get("X-Request-Id") != "mine" || h.Get("Traceparent") != "00-1" || h.Get("Tracestate") != "a=b" || h.Get("X-Own") != "1" || h.Get("Authorization") != "Bearer k" {
			t.Errorf("%v", h)
		}
		for _, k := range []string{"X-Hop", "Te", "Proxy-Authorization", "Connection"} {
			if h.Get(k) != "" {
				t.Errorf("%s passes", k)
			}
		}
	}
	if resp.Header.Get("X-Engine") != "1" || resp.Header.Get("X-Request-Id") != "mine" {
		t.Errorf("%v", resp.Header)
	}
}

// Clients that are slow to send, or send floods of fields, are answered and cost no engine.
func TestSlowAndFloodingClients(t *testing.T) {
	var asked atomic.Int64
	e := mock(t, func(http.ResponseWriter, *http.Request) { asked.Add(1) })
	p, err := proxy.New(proxy.Options{Engines: []string{e}, BodyTimeout: 50 * time.Millisecond, HealthInterval: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(p)
	s.Config.MaxHeaderBytes = 16 << 10
	s.Start()
	defer func() { s.Close(); p.Close() }()
	ask := func(text string) string {
		nc, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		_, _ = io.WriteString(nc, text)
		_ = nc.SetReadDeadline(time.Now().Add(30 * time.Second))
		got, err := io.ReadAll(nc)
		if err != nil && len(got) == 0 && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
			t.Fatal(err)
		}
		return string(got)
	}
	if got := ask("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"prompt\":"); !strings.HasPrefix(got, "HTTP/1.1 408") {
		t.Errorf("%q", got)
	}
	if got := ask("POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("A: b\r\n", 10000) + "\r\n"); got != "" && !strings.HasPrefix(got, "HTTP/1.1 431") {
		t.Errorf("%.100q", got)
	}
	if st := p.Stats(); asked.Load() != 0 || st.Requests["bad_request"] != 1 || st.InFlight != 0 {
		t.Errorf("%+v", st)
	}
}
