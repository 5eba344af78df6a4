// SPDX-License-Identifier: Apache-2.0

package http1

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func client(t testing.TB, base string) *Client {
	t.Helper()
	c, err := New(base, Options{IdleTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// ask sends a request over any connection and reads all of the answer.
func ask(t testing.TB, c *Client, r *Request) (*Response, string, error) {
	t.Helper()
	n, err := c.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	a, err := n.Do(t.Context(), r, time.Time{})
	if err != nil {
		return nil, "", err
	}
	defer a.Close()
	text, err := a.ReadAll(10 << 20)
	return a, string(text), err
}

// Bodies of every kind arrive, of requests and of answers, over one connection that is used again.
func TestRoundTrips(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Target", r.URL.RequestURI()+" "+r.Header.Get("X-One")+" "+r.RemoteAddr)
		if r.URL.Query().Has("empty") {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		if r.URL.Query().Has("flush") {
			for part := range bytes.SplitSeq(body, []byte(" ")) {
				_, _ = w.Write(append(bytes.Clone(part), ' '))
				_ = http.NewResponseController(w).Flush()
			}
			return
		}
		_, _ = w.Write(body)
	}))
	defer s.Close()
	c := client(t, s.URL)
	peer := ""
	for i, size := range []int{0, 1, 5000, 300000} {
		body := strings.Repeat("word ", size/5)
		for _, query := range []string{"", "?flush", "?empty"} {
			r := &Request{Method: "POST", Target: "/v1/x" + query, Fields: []byte("X-One: 1\r\n"), Body: [][]byte{[]byte(body[:len(body)/2]), []byte(body[len(body)/2:])}}
			a, text, err := ask(t, c, r)
			if err != nil {
				t.Fatal(size, query, err)
			}
			want := body
			if query == "?empty" {
				want = ""
			}
			if strings.TrimSpace(text) != strings.TrimSpace(want) {
				t.Fatalf("%d %s: %d bytes, want %d", size, query, len(text), len(want))
			}
			f := strings.Fields(a.Field("X-Target"))
			if len(f) != 3 || f[0] != "/v1/x"+query || f[1] != "1" || i > 0 && f[2] != peer {
				t.Fatalf("%q, before %q", f, peer)
			}
			peer = f[2]
		}
	}
}

// Bodies are read into memory of the caller, and not past it, also after Next has lent a part.
func TestReadInto(t *testing.T) {
	body := bytes.Repeat([]byte("0123456789"), 50000)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !r.URL.Query().Has("chunked") {
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		}
		_, _ = w.Write(body[:len(body)/2])
		_ = http.NewResponseController(w).Flush()
		_, _ = w.Write(body[len(body)/2:])
	}))
	defer s.Close()
	c := client(t, s.URL)
	for _, query := range []string{"", "?chunked"} {
		for _, lend := range []bool{false, true} {
			n, err := c.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			a, err := n.Do(t.Context(), &Request{Method: "GET", Target: "/" + query}, time.Time{})
			if err != nil {
				t.Fatal(err)
			}
			var got []byte
			if lend {
				part, err := a.Next()
				if err != nil {
					t.Fatal(err)
				}
				got = bytes.Clone(part)
			}
			memory := make([]byte, len(body)+100)
			k, err := io.ReadFull(a, memory[:len(body)-len(got)])
			if got = append(got, memory[:k]...); err != nil || !bytes.Equal(got, body) || !bytes.Equal(memory[k:], make([]byte, len(memory)-k)) {
				t.Errorf("%s: %d bytes, %v", query, len(got), err)
			}
			if k, err := a.Read(memory); k != 0 || !errors.Is(err, io.EOF) {
				t.Errorf("%s: %d bytes after the end, %v", query, k, err)
			}
			a.Close()
			if c.Idle() != 1 {
				t.Error("the connection is not used again")
			}
		}
	}
}

// raw serves one text after another to each connection, whatever the requests are.
func raw(t testing.TB, answers ...string) *Client {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, text := range answers {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			r, err := http.ReadRequest(bufio.NewReader(nc))
			if err == nil {
				_, _ = io.Copy(io.Discard, r.Body)
				_, _ = io.WriteString(nc, text)
			}
			_ = nc.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return client(t, "http://"+l.Addr().String())
}

var post = &Request{Method: "POST", Target: "/", Body: [][]byte{[]byte("{}")}}

const (
	sized   = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
	chunked = "HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nA: b\r\n\r\n"
)

// An answer that is cut at any byte is never taken for a whole one.
func TestCutAnswers(t *testing.T) {
	for _, whole := range []string{sized, chunked} {
		var texts []string
		for n := range len(whole) {
			texts = append(texts, whole[:n])
		}
		c := raw(t, append(texts, whole)...)
		for n := range len(whole) {
			if a, text, err := ask(t, c, post); err == nil {
				t.Fatalf("%q is taken for a whole answer: %d %q", whole[:n], a.Status, text)
			}
		}
		if _, text, err := ask(t, c, post); err != nil || text != "hello" {
			t.Fatal(text, err)
		}
	}
}

// An answer that is not HTTP/1.1, or could be read in two ways, is refused.
func TestBadAnswers(t *testing.T) {
	bad := []string{
		"garbage\r\n\r\n", "HTTP/2 200\r\n\r\n", "HTTP/1.1 99 x\r\n\r\n", "HTTP/1.1 +20 x\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffffffffffff\r\n",
		"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "HTTP/1.1 200 OK\r\nA : b\r\n\r\n", "HTTP/1.1 200 OK\r\nA: b\x00\r\n\r\n",
		"HTTP/1.1 200 OK\r\n" + strings.Repeat("A: b\r\n", 1000) + "\r\n", "HTTP/1.1 200 OK\r\nA: " + strings.Repeat("b", 100<<10) + "\r\n\r\n",
		strings.Repeat("HTTP/1.1 100 x\r\n\r\n", 100),
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n0\r\n\r\n",
	}
	for _, body := range []string{"1\na\r\n0\r\n\r\n", "1\r\na\n0\r\n\r\n", "1;\rx\r\na\r\n0\r\n\r\n", " 1\r\na\r\n0\r\n\r\n", "00000000000000001\r\na\r\n0\r\n\r\n", strings.Repeat("1;"+strings.Repeat("x", 1<<10)+"\r\na\r\n", 20) + "0\r\n\r\n"} {
		bad = append(bad, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+body)
	}
	for _, trailer := range []string{"no colon\r\n\r\n", "A : b\r\n\r\n", " folded: x\r\n\r\n", "A: b\n\r\n", "A: b\r\n\n", "A: b\x00\r\n\r\n", "A: " + strings.Repeat("b", 8<<10) + "\r\n\r\n"} {
		bad = append(bad, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"+trailer)
	}
	c := raw(t, bad...)
	for _, text := range bad {
		if a, _, err := ask(t, c, post); err == nil {
			t.Errorf("%.80q is taken for an answer: %d", text, a.Status)
		}
	}
}

// If a server closes after each answer, the client connects anew each time, and its caller does not notice.
func TestServerClosesIdleConnections(t *testing.T) {
	c := raw(t, sized, sized, sized)
	for range 3 {
		if _, text, err := ask(t, c, post); err != nil || text != "hello" {
			t.Fatal(text, err)
		}
		for end := time.Now().Add(60 * time.Second); c.Idle() > 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
			c.mu.Lock()
			quiet := open(c.mu.idle[0].nc)
			c.mu.Unlock()
			if !quiet {
				break
			}
		}
	}
}

// A connection that breaks under its second request says so; one that breaks under its first is
// an error of its own.
func TestStale(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			br := bufio.NewReader(nc)
			if r, err := http.ReadRequest(br); err == nil {
				_, _ = io.Copy(io.Discard, r.Body)
				if r.URL.Path == "/first" {
					_ = nc.Close()
					continue
				}
				_, _ = io.WriteString(nc, sized)
			}
			_, _ = http.ReadRequest(br)
			_ = nc.Close()
		}
	}()
	c := client(t, "http://"+l.Addr().String())
	if _, _, err := ask(t, c, post); err != nil {
		t.Fatal(err)
	}
	if _, _, err := ask(t, c, post); !errors.Is(err, ErrStale) {
		t.Fatal(err)
	}
	if _, _, err := ask(t, c, &Request{Method: "POST", Target: "/first"}); err == nil || errors.Is(err, ErrStale) {
		t.Fatal(err)
	}
}

// The end of a context ends each step, and the connection is not used again.
func TestContextEnds(t *testing.T) {
	arrived, release := make(chan string, 10), make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/body" {
			_, _ = io.WriteString(w, "some")
			_ = http.NewResponseController(w).Flush()
		}
		arrived <- r.URL.Path
		select {
		case <-r.Context().Done():
			arrived <- "left"
		case <-release:
		}
	}))
	defer s.Close()
	defer close(release)
	c := client(t, s.URL)
	cause := errors.New("enough")
	for _, path := range []string{"/head", "/body"} {
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		n, err := c.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if path == "/head" {
			go func() { <-arrived; cancel(cause) }()
		}
		a, err := n.Do(ctx, &Request{Method: "POST", Target: path}, time.Time{})
		if path == "/head" {
			if !errors.Is(err, cause) {
				t.Fatal(err)
			}
		} else {
			if err != nil {
				t.Fatal(err)
			}
			<-arrived
			cancel(cause)
			for err == nil {
				a.Until(time.Now().Add(time.Hour)) // does not hide that the context has ended
				_, err = a.Next()
			}
			a.Close()
		}
		if got := <-arrived; got != "left" {
			t.Fatal(got)
		}
		if c.Idle() != 0 {
			t.Fatal("the connection is kept")
		}
	}
	n, err := c.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Do(t.Context(), &Request{Method: "GET", Target: "/head"}, time.Now().Add(20*time.Millisecond)); err == nil || !isTimeout(err) {
		t.Fatal(err)
	}
}

// A request with Whole is sent to its end although the context ends while the server reads it. Other requests are cut.
func TestWholeRequest(t *testing.T) {
	for _, whole := range []bool{true, false} {
		begun, got, left := make(chan struct{}), make(chan int64, 1), make(chan struct{})
		s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(begun)
			<-left
			n, _ := io.Copy(io.Discard, r.Body)
			got <- n
		}))
		ctx, cancel := context.WithCancel(t.Context())
		n, err := client(t, s.URL).Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			<-begun
			cancel()
			if !whole {
				select {
				case <-ended: // the client saw it before the server read
				case <-time.After(time.Minute):
				}
			}
			close(left)
		}()
		body := make([]byte, 32<<20) // more than sockets hold
		if _, err := n.Do(ctx, &Request{Method: "POST", Target: "/", Body: [][]byte{body}, Whole: whole}, time.Time{}); !errors.Is(err, context.Canceled) || errors.Is(err, ErrCut) == whole {
			t.Fatal(err)
		}
		close(ended)
		if n := <-got; (n == int64(len(body))) != whole {
			t.Errorf("whole %v: %d bytes arrived", whole, n)
		}
		s.Close()
	}
}

func TestTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	}))
	defer s.Close()
	c, err := New(s.URL, Options{TLS: s.Client().Transport.(*http.Transport).TLSClientConfig})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, size := range []int{10, 100000, 10} {
		body := strings.Repeat("x", size)
		if _, text, err := ask(t, c, &Request{Method: "POST", Target: "/", Body: [][]byte{[]byte(body)}}); err != nil || text != body {
			t.Fatal(size, len(text), err)
		}
	}
	if u, _ := url.Parse(s.URL); c.Host() != u.Host {
		t.Error(c.Host())
	}
	plain := client(t, s.URL) // does not trust the authority
	if _, err := plain.Conn(t.Context()); err == nil {
		t.Error("an unknown authority is trusted")
	}
}

// Answers are read as net/http reads them, or refused.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(sized))
	f.Add([]byte(chunked))
	f.Add([]byte("HTTP/1.1 200 OK\r\n\r\nto the end"))
	f.Add([]byte("HTTP/1.0 200\nConnection: close\n\nx"))
	f.Add([]byte(strings.TrimSuffix(chunked, "\r\n") + "no field\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Sum\r\n\r\n1\r\nx\r\n0\r\nSum: 1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, got, err := read(text)
		if err != nil {
			return
		}
		br := bufio.NewReader(bytes.NewReader(text))
		var r *http.Response
		for range 9 {
			if r, err = http.ReadResponse(br, &http.Request{Method: "POST"}); err != nil || r.StatusCode >= 200 {
				break
			}
		}
		if err != nil {
			t.Fatalf("%q: %d, where net/http says %v", text, a.Status, err)
		}
		want, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != a.Status || !bytes.Equal(want, got) {
			t.Fatalf("%q: %d %q, where net/http reads %d %q, %v", text, a.Status, got, r.StatusCode, want, err)
		}
	})
}

func read(text []byte) (*Response, []byte, error) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		_, _ = theirs.Write(text)
		_ = theirs.Close()
	}()
	n := &Conn{c: &Client{}, nc: ours, br: bufio.NewReaderSize(ours, bufBytes), ended: func() error { return nil }}
	a, err := n.head("POST")
	if err != nil {
		return nil, nil, err
	}
	all, err := a.ReadAll(1 << 20)
	return a, all, err
}

func BenchmarkRoundTrip(b *testing.B) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "{}")
	}))
	defer s.Close()
	c := client(b, s.URL)
	for _, size := range []int{2 << 10, 1 << 20} {
		r := &Request{Method: "POST", Target: "/", Body: [][]byte{make([]byte, size)}}
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := ask(b, c, r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
