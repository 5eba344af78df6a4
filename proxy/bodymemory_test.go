// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy"
)

// The memory of unfinished bodies is bounded over all clients. When one address has its share, its further requests are refused at
// once, and a client of another address is served meanwhile. The memory is free again when the clients leave.
func TestUnfinishedBodiesAreBounded(t *testing.T) {
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `{}`)
	})
	const limit = 8 << 20
	url, p := startProxy(t, proxy.Options{Engines: []string{e}, BodyMemory: limit, HealthInterval: time.Hour})
	reach(t, url)
	var flood []net.Conn
	var refused atomic.Int64 // connections that got 503
	dial := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	for range 24 {
		nc, err := dial.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Skip("no second loopback address: ", err)
		}
		defer nc.Close()
		flood = append(flood, nc)
		_ = nc.SetDeadline(time.Now().Add(2 * time.Minute))
		go func() {
			answer := make([]byte, 12)
			if n, _ := io.ReadFull(nc, answer); string(answer[:n]) == "HTTP/1.1 503" {
				refused.Add(1)
			}
		}()
		go func() { // until it is refused or closed
			fmt.Fprintf(nc, "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2500000\r\n\r\n{\"prompt\":\"")
			_, _ = nc.Write([]byte(strings.Repeat("x", 2_400_000)))
		}()
	}
	testkit.Eventually(t, "most are refused", func() bool { return p.Stats().Requests["refused"] >= 22 })
	if n := p.Stats().Bodies; n <= 0 || n > limit {
		t.Errorf("%d bytes for bodies, %d are allowed", n, limit)
	}
	big := `{"prompt":"` + strings.Repeat("y", 1<<19) + `"}`
	if status, text, _ := post(t, url, big); status != 200 {
		t.Errorf("an honest client: %d %s", status, text)
	}
	testkit.Eventually(t, "20 of 24 unfinished requests hear 503", func() bool { return refused.Load() >= 20 })
	for _, nc := range flood {
		nc.Close()
	}
	testkit.Eventually(t, "their memory is back", func() bool { return p.Stats().Bodies == 0 && p.Stats().InFlight == 0 })
}

// A body as large as bodies may be fits into the share of one address, with its length or in chunks; a larger one is 413.
func TestTheLargestBodyIsRead(t *testing.T) {
	e := mock(t, func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, `{"n":%d}`, n)
	})
	url, p := startProxy(t, proxy.Options{Engines: []string{e}, BodyMemory: 24 << 20, HealthInterval: time.Hour})
	reach(t, url)
	for _, size := range []int{8 << 20, 8<<20 + 1} {
		for _, chunked := range []bool{false, true} {
			body := `{"prompt":"` + strings.Repeat("y", size-13) + `"}`
			var from io.Reader = strings.NewReader(body)
			if chunked {
				from = io.MultiReader(from)
			}
			r, err := http.Post(url+"/v1/completions", "application/json", from)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(r.Body)
			r.Body.Close()
			if fits := size == 8<<20; fits && string(text) != fmt.Sprintf(`{"n":%d}`, size) || !fits && r.StatusCode != 413 {
				t.Errorf("%d bytes, in chunks: %v: %d %.100s", size, chunked, r.StatusCode, text)
			}
		}
	}
	if n := p.Stats().Bodies; n != 0 {
		t.Errorf("%d bytes stay taken", n)
	}
}
