// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/server/explain"
)

// stream is an answer of /live.
type stream struct {
	body  io.Closer
	lines *bufio.Reader
}

// openStream asks for /live.
func openStream(ctx context.Context, url string) (*stream, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/live", nil)
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != "text/event-stream" {
		return nil, errors.Join(fmt.Errorf("%s, %v", res.Status, res.Header), res.Body.Close())
	}
	return &stream{body: res.Body, lines: bufio.NewReader(res.Body)}, nil
}

// next waits for an event.
func (s *stream) next() (admin.Live, error) {
	var e admin.Live
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return e, err
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			err = json.Unmarshal([]byte(data), &e)
			return e, err
		}
	}
}

// events opens /live and returns what it sends, until close.
func events(t *testing.T, url string) (next func() admin.Live, closeStream func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	s, err := openStream(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.body.Close() })
	return func() admin.Live {
		t.Helper()
		e, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		return e
	}, cancel
}

// liveServer serves a handler. Reading a request and writing an answer may take limit each.
func liveServer(t *testing.T, o admin.Options, limit time.Duration) *httptest.Server {
	t.Helper()
	web := httptest.NewUnstartedServer(admin.Handler(newServer(t), o))
	web.Config.ReadTimeout, web.Config.WriteTimeout = limit, limit
	web.Start()
	t.Cleanup(func() { web.CloseClientConnections(); web.Close(); http.DefaultClient.CloseIdleConnections() })
	return web
}

// Events say what the server says, and go on beyond the limits of ordinary requests.
func TestLive(t *testing.T) {
	const limit = 300 * time.Millisecond // far below the length of a stream
	web := liveServer(t, admin.Options{}, limit)
	for tries := 1; ; tries++ {
		began := time.Now()
		s, err := openStream(t.Context(), web.URL)
		var first admin.Live
		if err == nil {
			t.Cleanup(func() { s.body.Close() })
			first, err = s.next()
		}
		if late := time.Since(began) > limit; err != nil && late && tries < 20 {
			t.Logf("the request came too late: %v", err)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		checkEvents(t, first, s.next)
		return
	}
}

// checkEvents compares the first event and the two that follow with the server's state.
func checkEvents(t *testing.T, e admin.Live, next func() (admin.Live, error)) {
	t.Helper()
	last := int64(0)
	for n := range 3 {
		if n > 0 {
			var err error
			if e, err = next(); err != nil {
				t.Fatal(err)
			}
		}
		if e.AtMillis <= last || e.Status.PID != os.Getpid() || e.Workers != 1 || len(e.Status.Workers) != 1 || e.Bytes.Stored == 0 || e.Slow == nil || e.Ended == nil {
			t.Errorf("%+v after %d", e, last)
		}
		last = e.AtMillis
		sum := int64(0)
		for i, n := range e.Map.Resident {
			sum += n + e.Map.Staged[i] + e.Map.Quarantined[i]
		}
		if sum != e.Status.Pool.ResidentBytes || sum == 0 || e.Map.CellBytes != 4096 || len(e.Map.Resident) != 64 {
			t.Errorf("the map has %d bytes, the pool %d: %+v", sum, e.Status.Pool.ResidentBytes, e.Map)
		}
	}
}

// A program gets one event as JSON, also while no more pages may be open.
func TestNow(t *testing.T) {
	web := liveServer(t, admin.Options{}, time.Minute)
	for range 16 {
		next, _ := events(t, web.URL)
		next()
	}
	res, err := http.Get(web.URL + "/now")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var e admin.Live
	if err := json.NewDecoder(res.Body).Decode(&e); err != nil || res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != "application/json" {
		t.Fatalf("%v, %s, %v", err, res.Status, res.Header)
	}
	if e.Status.PID != os.Getpid() || e.Workers != 1 || len(e.Map.Resident) != 64 || e.By == nil || e.Tenants == nil || e.Requests == nil {
		t.Errorf("%+v", e)
	}
}

// The number of listeners is bounded, and one that leaves makes room.
func TestLiveListenersAreBounded(t *testing.T) {
	web := liveServer(t, admin.Options{}, time.Minute)
	var leave func()
	for range 16 {
		next, closeStream := events(t, web.URL)
		next()
		leave = closeStream
	}
	ask := func() int {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, web.URL+"/live", nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode == http.StatusServiceUnavailable {
			if body, _ := io.ReadAll(res.Body); !strings.Contains(string(body), "16 pages are open already") {
				t.Errorf("%s", body)
			}
		}
		return res.StatusCode
	}
	if code := ask(); code != http.StatusServiceUnavailable {
		t.Errorf("one more: %d", code)
	}
	leave()
	for end := time.Now().Add(90 * time.Second); ask() != http.StatusOK; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a listener that left makes no room")
		}
	}
}

// People get a page at /, programs what they always got; a foreign site gets neither the
// page nor the events.
func TestPage(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{AllowHosts: []string{"kv.example"}})
	get := func(url string, header ...string) *http.Response {
		r := httptest.NewRequest("GET", url, nil)
		for i := 0; i+1 < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Result()
	}
	const browser = "text/html,application/xhtml+xml,*/*;q=0.8"
	for _, host := range []string{"localhost:8080", "127.0.0.1", "kv.example"} {
		res := get("http://"+host+"/", "Accept", browser)
		body, _ := io.ReadAll(res.Body)
		policy := res.Header.Get("Content-Security-Policy")
		if res.StatusCode != 200 || !strings.HasPrefix(string(body), "<!doctype html>") || !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") || strings.Count(policy, "sha256-") != 2 {
			t.Errorf("%s: %s, %s", host, res.Status, policy)
		}
		// The one address in it is the name of a language, which nobody asks for.
		for _, address := range regexp.MustCompile(`(?i)(https?:)?//[a-z0-9.]+\.[a-z]+[^"]*`).FindAllString(string(body), -1) {
			if address != "http://www.w3.org/2000/svg" {
				t.Errorf("the page names %s", address)
			}
		}
	}
	for _, url := range []string{"http://evil.example/", "http://evil.example/live", "http://evil.example/now"} {
		if res := get(url, "Accept", browser); res.StatusCode != 403 {
			t.Errorf("%s: %s", url, res.Status)
		}
	}
	if res := get("http://localhost/live", "Sec-Fetch-Site", "cross-site"); res.StatusCode != 403 {
		t.Errorf("a page of another site: %s", res.Status)
	}
	res := get("http://localhost/", "Accept", "*/*")
	if body, _ := io.ReadAll(res.Body); string(body) != "{\"service\":\"Kvasir HTTP API\",\"status\":\"ok\"}\n" || res.Header.Get("Vary") != "Accept" {
		t.Errorf("a program: %s", body)
	}
}

// What the page shows of models, tenants and requests is what they asked for.
func TestLiveRequests(t *testing.T) {
	s := newServer(t)
	h := admin.Handler(s, admin.Options{})
	for i := range 20 {
		loadPrompt(s, fmt.Sprintf("chat-%d", i))
	}
	var st admin.Status
	if _, body := ask(h, "GET", "http://localhost/status", ""); json.Unmarshal([]byte(body), &st) != nil || len(st.ByModel) != 1 ||
		st.ByModel[0] != (admin.Share{Model: "m", Lookups: 20, AskedTokens: 20 * 64, HitTokens: 20 * 32}) {
		t.Errorf("%+v", st.ByModel)
	}
	var got explain.Explanation
	if code, body := ask(h, "GET", "http://localhost/explain?request_id=chat-7", ""); code != 200 || json.Unmarshal([]byte(body), &got) != nil || len(got.Requests) != 1 || len(got.Lookups) != 1 {
		t.Fatalf("%d %s", code, body)
	}
	r := got.Requests[0]
	var names []string
	for i, span := range r.Spans {
		names = append(names, span.Operation)
		if span.MS < 0 || span.FromMS < 0 || i > 0 && span.FromMS < r.Spans[i-1].FromMS {
			t.Errorf("%+v", r.Spans)
		}
	}
	if r.Request != "chat-7" || r.Model != "m" || r.AskedTokens != 64 || r.HitTokens != 32 || strings.Join(names, " ") != "lookup prepare_retrieve commit_retrieve end_session" {
		t.Errorf("%+v", r)
	}
	web := httptest.NewServer(h)
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	next, _ := events(t, web.URL)
	if e := next(); len(e.Requests) != 8 || e.Requests[0].Request != "chat-19" || len(e.By) != 1 {
		t.Errorf("%+v, %+v", e.By, e.Requests)
	}
}

// smallBuffers gives connections buffers that one event fills.
type smallBuffers struct{ net.Listener }

func (l smallBuffers) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		err = c.(*net.TCPConn).SetWriteBuffer(4096)
	}
	return c, err
}

// A listener that never reads is dropped, and its place is free again; those who read go on.
func TestLiveDropsWhoNeverReads(t *testing.T) {
	s := newServer(t)
	h := admin.NewHistory(s)
	h.FillHistory(3600, func(int) uint64 { return 5000 }, func(int) uint64 { return 4000 }) // a first event of 50 KiB
	o := admin.Options{History: h}
	o.WithLiveTimeout(200 * time.Millisecond)
	web := httptest.NewUnstartedServer(admin.Handler(s, o))
	web.Listener = smallBuffers{web.Listener}
	web.Start()
	t.Cleanup(func() { web.CloseClientConnections(); web.Close(); http.DefaultClient.CloseIdleConnections() })
	for range 16 {
		c, err := net.Dial("tcp", web.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	// The silent listeners may come late, and a reader that is late itself is dropped as well.
	for ctx.Err() == nil {
		began := time.Now()
		s, err := openStream(ctx, web.URL)
		if err != nil {
			if !strings.Contains(err.Error(), "503") {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Millisecond)
			continue
		}
		n := 0
		for ; n < 3 && err == nil; n++ {
			_, err = s.next()
		}
		s.body.Close()
		if err == nil {
			return
		}
		t.Logf("the stream ended after %d events and %v: %v", n-1, time.Since(began), err)
	}
	t.Error("no listener that reads gets three events")
}

// Of many tenants the first 64 are in an event, and their number.
func TestLiveOfManyTenants(t *testing.T) {
	s := newServer(t)
	for i := range 200 {
		if err := s.Store().SetTTL(fmt.Sprintf("tenant-%03d", i), time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	var e admin.Live
	if _, body := ask(admin.Handler(s, admin.Options{}), "GET", "http://localhost/now", ""); json.Unmarshal([]byte(body), &e) != nil || len(e.Tenants) != 64 || e.TenantsAll != 200 || e.Tenants[0].Salt != "tenant-000" {
		t.Errorf("%d of %d tenants", len(e.Tenants), e.TenantsAll)
	}
}
