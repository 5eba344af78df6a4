// SPDX-License-Identifier: Apache-2.0

package limits_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/proxy/limits"
	"github.com/kvasir-kv/kvasir/proxy/limits/limitstest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestOptions(t *testing.T) { testkit.CheckNumbers[limits.Options](t) }

func TestParseURL(t *testing.T) {
	f := func(s, addr, user, password string, db int, tls, ok bool) {
		t.Helper()
		o, err := limits.ParseURL(s)
		if (err == nil) != ok || ok && (o.Addr != addr || o.Username != user || o.Password != password || o.Database != db || (o.TLS != nil) != tls) {
			t.Errorf("%s: %+v, %v", s, o, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%v", err)
		}
	}
	f("redis://h", "h:6379", "", "", 0, false, true)
	f("redis://u:secret@h:1/3", "h:1", "u", "secret", 3, false, true)
	f("rediss://:secret@[::1]:1", "[::1]:1", "", "secret", 0, true, true)
	f("unix:/run/redis.sock", "unix:/run/redis.sock", "", "", 0, false, true)
	f("http://h", "", "", "", 0, false, false)
	f("redis://u:secret@h/x", "", "", "", 0, false, false)
	f("redis://u:secret@h?x=1", "", "", "", 0, false, false)
	f("h:1", "", "", "", 0, false, false)
}

// two returns the limits of two proxies that count in one server.
func two(t *testing.T, o limits.Options) (a, b *limits.Limits) {
	t.Helper()
	o.Timeout, o.Life, o.Prefix = 20*time.Second, 2*time.Minute, fmt.Sprintf("test-%d:", time.Now().UnixNano())
	var err error
	if a, err = limits.New(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	if b, err = limits.New(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return a, b
}

// server is the address of a real server that KVASIR_REDIS names (make interop starts one), or of one for tests.
func server(t *testing.T) string {
	if addr := os.Getenv("KVASIR_REDIS"); addr != "" {
		return addr
	}
	return limitstest.Start(t).Addr
}

// Two proxies together let in as many requests at a time as a key may have, and each key has its own.
func TestRealAtOnce(t *testing.T) {
	a, b := two(t, limits.Options{Addr: server(t)})
	both, bob := []*limits.Limits{a, b}, limits.Limit{Key: "bob", AtOnce: 5, Burst: 1}
	for round := range 3 {
		ada := limits.Limit{Key: fmt.Sprint("ada", round), AtOnce: 5, Burst: 1}
		var in [2]atomic.Int64
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				if _, ok := both[i%2].Begin(ada); ok {
					in[i%2].Add(1)
				}
			})
		}
		wg.Wait()
		if n := in[0].Load() + in[1].Load(); n != 5 {
			t.Fatalf("%d requests at a time, of 5", n)
		}
		if _, ok := b.Begin(bob); !ok {
			t.Fatal("another key is refused")
		}
		b.End(bob)
		for i, l := range both {
			for range in[i].Load() {
				l.End(ada)
			}
		}
		testkit.Eventually(t, "all places are free again, for one proxy alone", func() bool {
			n := 0
			for range 5 {
				if _, ok := a.Begin(ada); ok {
					n++
				}
			}
			for range n {
				a.End(ada)
			}
			return n == 5
		})
	}
	if s := a.Stats(); s.Unknown != 0 || s.Asked == 0 {
		t.Errorf("%+v", s)
	}
}

// Two proxies together keep a key's rate: its burst at once, and then no more than comes with time.
func TestRealRate(t *testing.T) {
	a, b := two(t, limits.Options{Addr: server(t)})
	l := limits.Limit{Key: "ada", Rate: 0.01, Burst: 4}
	n := 0
	for i := range 20 {
		wait, ok := []*limits.Limits{a, b}[i%2].Begin(l)
		if ok {
			n++
		} else if wait <= 0 || wait > 100*time.Second {
			t.Errorf("wait %v", wait)
		}
	}
	if n != 4 {
		t.Errorf("%d requests of a burst of 4", n)
	}
	fast := limits.Limit{Key: "eve", Rate: 1000, Burst: 1}
	if _, ok := a.Begin(fast); !ok {
		t.Fatal("the first one is refused")
	}
	testkit.Eventually(t, "time gives another", func() bool { _, ok := b.Begin(fast); return ok })
}

// The requests of a proxy that was closed do not count any more, and the closed one refuses none.
func TestProxyIsGone(t *testing.T) {
	r := limitstest.Start(t)
	l := limits.Limit{Key: "ada", AtOnce: 2}
	o := limits.Options{Addr: r.Addr, Timeout: 20 * time.Second, Life: time.Minute}
	gone, err := limits.New(o)
	if err != nil {
		t.Fatal(err)
	}
	other, err := limits.New(o)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	for range 2 {
		if _, ok := gone.Begin(l); !ok {
			t.Fatal("refused")
		}
	}
	if _, ok := other.Begin(l); ok {
		t.Fatal("a third one is let in")
	}
	gone.Close()
	if _, ok := other.Begin(l); !ok {
		t.Error("a proxy that ended counts")
	}
	if _, ok := gone.Begin(l); !ok {
		t.Error("a closed one refuses")
	}
}

// While the server is silent every request is let in, and the log says so once. When the server answers
// again, requests in progress count at once. A server that has lost the script gets it again.
func TestServerIsAway(t *testing.T) {
	r := limitstest.Start(t)
	var log safeBuffer
	a, err := limits.New(limits.Options{Addr: r.Addr, Timeout: time.Second, Pause: 100 * time.Millisecond, Life: time.Minute, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	l := limits.Limit{Key: "ada", AtOnce: 1}
	testkit.Eventually(t, "the server answers", func() bool { // this may be slow
		_, ok := a.Begin(l)
		defer a.End(l)
		return ok && r.Now("ada") == 1
	})
	for life := range 2 {
		r.Silence(true)
		before := a.Stats().Unknown
		for range 5 {
			if _, ok := a.Begin(l); !ok {
				t.Fatal("refused by nobody")
			}
		}
		if a.Stats().Unknown == before {
			t.Fatal("it is not counted")
		}
		r.Silence(false)
		r.Forget()
		testkit.Eventually(t, "the server knows of them", func() bool {
			if _, ok := a.Begin(l); ok {
				a.End(l)
			}
			return r.Now("ada") >= 5
		})
		for range 5 {
			a.End(l)
		}
		testkit.Eventually(t, "the server knows that they ended", func() bool { return r.Now("ada") == 0 })
		if away, back := log.count("by each proxy alone"), log.count("together with other proxies again"); away == 0 || back < away-1 || back > away {
			t.Errorf("life %d: said %d times, and %d times that it is over:\n%s", life, away, back, log.String())
		}
	}
	r.Forget()
	before := a.Stats().Asked
	testkit.Eventually(t, "the script is there again", func() bool {
		if _, ok := a.Begin(l); ok {
			a.End(l)
		}
		return a.Stats().Asked > before
	})
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *safeBuffer) count(words string) int { return strings.Count(s.String(), words) }

// A malformed answer of the server lets the request in and has no other effect.
func TestGarbage(t *testing.T) {
	for _, answer := range []string{"+OK\r\n", "*2\r\n:1\r\n", "*-1\r\n", "$5\r\nab", "HTTP/1.1 400\r\n\r\n", "*2\r\n+a\r\n+b\r\n", "-ERR no\r\n"} {
		addr := garbage(t, answer)
		a, err := limits.New(limits.Options{Addr: addr, Timeout: 100 * time.Millisecond, Pause: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if _, ok := a.Begin(limits.Limit{Key: "k", AtOnce: 1, Rate: 1, Burst: 1}); !ok {
				t.Errorf("%q refuses", answer)
			}
		}
		if s := a.Stats(); s.Unknown != 3 {
			t.Errorf("%q: %+v", answer, s)
		}
		a.Close()
	}
}

// garbage answers whatever comes with one text.
func garbage(t *testing.T, answer string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				b := make([]byte, 4096)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					if _, err := c.Write([]byte(answer)); err != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String()
}

// A request that lasts longer than the server keeps its entry is reported again in time, also where no other request comes and where
// the server has lost the entry.
func TestRequestsInProgressAreReportedAgain(t *testing.T) {
	r := limitstest.Start(t)
	a, err := limits.New(limits.Options{Addr: r.Addr, Timeout: 20 * time.Second, Life: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	l := limits.Limit{Key: "ada", AtOnce: 4}
	testkit.Eventually(t, "the server counts one", func() bool {
		if _, ok := a.Begin(l); ok && r.Now("ada") == 1 {
			return true
		}
		a.End(l)
		return false
	})
	r.Forget() // like a restarted server: the proxy sends it the scripts once more
	begun := time.Now()
	testkit.Eventually(t, "the server counts it after three lives of a report", func() bool { return time.Since(begun) > 900*time.Millisecond && r.Now("ada") == 1 })
	a.End(l)
	testkit.Eventually(t, "it has ended", func() bool { return r.Now("ada") == 0 })
}
