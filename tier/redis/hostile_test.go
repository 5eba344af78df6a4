// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// cutAt answers the first n bytes and ends the connection.
func cutAt(n int) func([]byte, net.Conn) []byte {
	return func(normal []byte, c net.Conn) []byte {
		_, _ = c.Write(normal[:min(n, len(normal))])
		_ = c.Close()
		return nil
	}
}

func say(text string) func([]byte, net.Conn) []byte {
	return func([]byte, net.Conn) []byte { return []byte(text) }
}

// answers are wrong answers that a server may give.
var answers = map[string]func(normal []byte, c net.Conn) []byte{
	"nil":               say("$-1\r\n"),
	"nil list":          say("*-1\r\n"),
	"empty":             say("$0\r\n\r\n"),
	"LOADING":           say("-LOADING Redis is loading the dataset in memory\r\n"),
	"OOM":               say("-OOM command not allowed when used memory > 'maxmemory'.\r\n"),
	"NOAUTH":            say("-NOAUTH Authentication required.\r\n"),
	"NOPERM":            say("-NOPERM this user has no permissions\r\n"),
	"MOVED":             say("-MOVED 1234 127.0.0.1:1\r\n"),
	"ASK":               say("-ASK 1234 127.0.0.1:1\r\n"),
	"status":            say("+QUEUED\r\n"),
	"number":            say(":7\r\n"),
	"negative number":   say(":-7\r\n"),
	"no number":         say(":x\r\n"),
	"huge value":        say("$9223372036854775807\r\n"),
	"huger value":       say("$99999999999999999999\r\n"),
	"negative value":    say("$-5\r\n"),
	"huge list":         say("*1000000000\r\n"),
	"lists in lists":    say(strings.Repeat("*1\r\n", 1000)),
	"not RESP":          say("HTTP/1.1 400 Bad Request\r\n\r\n"),
	"RESP 3":            say("%1\r\n+a\r\n+b\r\n"),
	"no line end":       say(strings.Repeat("x", 100<<10)),
	"half a line end":   say("$100\n"),
	"silence":           say(""),
	"cut before":        cutAt(0),
	"cut in the length": cutAt(2),
	"cut after it":      cutAt(6),
	"cut in the header": cutAt(20),
	"cut in the value":  cutAt(70),
	"cut before its end": func(normal []byte, c net.Conn) []byte {
		return cutAt(len(normal)-2)(normal, c)
	},
	"cut in its end": func(normal []byte, c net.Conn) []byte {
		return cutAt(len(normal)-1)(normal, c)
	},
	"another end": func(normal []byte, c net.Conn) []byte {
		return append(slices.Clone(normal[:len(normal)-2]), "xx"...)
	},
	"half the length":  length(func(n int) int { return n / 2 }),
	"twice the length": length(func(n int) int { return 2 * n }),
	"a byte less":      length(func(n int) int { return n - 1 }),
	"a byte more":      length(func(n int) int { return n + 1 }),
}

// length answers a value that is longer or shorter.
func length(of func(int) int) func([]byte, net.Conn) []byte {
	return func(normal []byte, c net.Conn) []byte {
		_, rest, found := bytes.Cut(normal, []byte("\r\n"))
		if normal[0] != '$' || !found || len(rest) < 2 {
			return normal
		}
		value := rest[:len(rest)-2]
		return bulk(append(bytes.Repeat(value, 2), 0)[:max(0, of(len(value)))])
	}
}

// endless reports whether after an answer a client may wait for more of it.
func endless(what string) bool {
	return what == "silence" || what == "half a line end" || what == "lists in lists" || what == "no line end" || what == "another end" || strings.HasPrefix(what, "huge")
}

// Whatever a server answers, each call ends, with the right bytes or with none, and a
// Tier works again once the server does.
func TestHostileAnswers(t *testing.T) {
	const size = 9 << 10
	good, meta := tiertest.Object(1, size)
	k, other := tiertest.Key(1), tiertest.Key(2)
	for what, answer := range answers {
		for layout, commands := range map[redis.Layout][]string{redis.Native: {"GETRANGE", "GET", "STRLEN", "SET", "PERSIST", "UNLINK", "PTTL"}, redis.RESP: {"STRLEN", "GET", "SET"}} {
			for _, cmd := range commands {
				t.Run(fmt.Sprintf("%s to %s in layout %d", what, cmd, layout), func(t *testing.T) {
					t.Parallel()
					f := newFake(t)
					x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: layout, Stripe: 4 << 10, Timeout: time.Minute, Pause: time.Millisecond})
					write(t, x, k, meta, good)
					f.misbehave(func(c []string, normal []byte, conn net.Conn) ([]byte, bool) {
						if c[0] != cmd {
							return nil, false
						}
						return answer(normal, conn), true
					})
					ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
					if endless(what) {
						ctx, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
					}
					defer cancel()
					metas := make([]tier.Meta, 1)
					_ = x.Stat(ctx, []kv.Key{k}, metas)
					dst := make([]byte, size)
					if m, err := x.Read(ctx, k, dst); err == nil && (m.Len != size || !bytes.Equal(dst, good)) {
						t.Errorf("Read: %+v with wrong bytes", m)
					}
					poison := bytes.Repeat([]byte{0xee}, size)
					copy(dst, poison)
					_ = x.Write(ctx, other, meta, good)
					_ = x.Delete(ctx, []kv.Key{other})
					if !bytes.Equal(dst, poison) {
						t.Error("something wrote to the memory of a Read that had returned")
					}
					f.misbehave(nil)
					testkit.Eventually(t, "it works again", func() bool {
						if x.Write(t.Context(), k, meta, good) != nil {
							return false
						}
						m, err := x.Read(t.Context(), k, dst)
						return err == nil && m.Len == size && bytes.Equal(dst, good)
					})
				})
			}
		}
	}
}

// Whatever a server answers to questions about itself, calls end, and a Tier works again once it answers.
func TestHostileAnswersAboutServers(t *testing.T) {
	for what, answer := range answers {
		for _, cmd := range []string{"CLUSTER", "INFO", "DBSIZE", "SCAN", "OBJECT", "AUTH", "SENTINEL"} {
			t.Run(fmt.Sprintf("%s to %s", what, cmd), func(t *testing.T) {
				t.Parallel()
				for try := 1; ; try++ {
					took := askHostile(t, what, answer, cmd)
					if took <= 10*time.Second {
						return
					}
					if try == 3 { // a late machine may take that long, too
						t.Fatalf("calls went on for %v after their context", took)
					}
				}
			})
		}
	}
}

// askHostile makes calls to a server that gives the wrong answer to one command, and checks that they work again without it. It returns the
// longest time that the calls of one context took.
func askHostile(t *testing.T, what string, answer func([]byte, net.Conn) []byte, cmd string) (longest time.Duration) {
	t.Helper()
	f := newFake(t)
	share([]*fake{f})
	o := redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10, Password: "p", Timeout: time.Second, DialTimeout: time.Second, Pause: time.Millisecond, Limit: 1 << 30}
	if what == "NOPERM" { // the Tier asks again in ten seconds
		o.Limit = 0
	}
	o.Cluster = cmd != "SENTINEL"
	f.misbehave(func(c []string, normal []byte, conn net.Conn) ([]byte, bool) {
		if c[0] != cmd {
			return nil, false
		}
		return answer(normal, conn), true
	})
	asked := f.addr
	if !o.Cluster {
		s := newSentinel(t, f.addr)
		point := s.answer
		s.misbehave(func(c []string, normal []byte, conn net.Conn) ([]byte, bool) {
			normal, _ = point(c, normal, conn)
			if c[0] == "SENTINEL" {
				normal = answer(normal, conn)
			}
			return normal, true
		})
		defer s.misbehave(point)
		o.Sentinel, asked = "main", s.addr
	}
	o.Addrs = []string{asked}
	x := open(t, o)
	b, meta := tiertest.Object(1, 9<<10)
	for range 2 {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		began := time.Now()
		_ = x.Stat(ctx, []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1))
		_ = x.Write(ctx, tiertest.Key(1), meta, b)
		_ = x.List(ctx, func(kv.Key, tier.Meta) bool { return true })
		_ = x.Hottest(ctx, 10, func(kv.Key, tier.Meta) bool { return true })
		longest = max(longest, time.Since(began))
		cancel()
	}
	if !o.Cluster {
		return longest
	}
	f.misbehave(nil)
	testkit.Eventually(t, "it works again", func() bool {
		dst := make([]byte, len(b))
		if x.Write(t.Context(), tiertest.Key(1), meta, b) != nil {
			return false
		}
		m, err := x.Read(t.Context(), tiertest.Key(1), dst)
		return err == nil && m == meta && bytes.Equal(dst, b)
	})
	return longest
}

// A write that a server does not confirm counts as not written.
func TestUnconfirmedWriteFails(t *testing.T) {
	good, meta := tiertest.Object(1, 9<<10)
	for what, answer := range answers {
		if endless(what) || strings.Contains(what, "length") || strings.Contains(what, "byte") ||
			strings.HasPrefix(what, "cut") && what != "cut before" && what != "cut in the length" {
			continue // it ends with the context, as above, or is no answer to a SET
		}
		f := newFake(t)
		x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: redis.RESP})
		f.misbehave(func(c []string, normal []byte, conn net.Conn) ([]byte, bool) {
			if c[0] != "SET" {
				return nil, false
			}
			return answer(normal, conn), true
		})
		if err := x.Write(t.Context(), tiertest.Key(1), meta, good); err == nil {
			t.Errorf("%s: Write succeeds", what)
		} else if full := errors.Is(err, tier.ErrNotKept); full != (what == "OOM" || what == "NOPERM") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// After a few calls to a server that does not answer, the Tier pauses: calls end at once, and
// after a while it tries the server again.
func TestSilentServerIsLeftAlone(t *testing.T) {
	f := newFake(t)
	release := make(chan bool)
	f.misbehave(func([]string, []byte, net.Conn) ([]byte, bool) {
		<-release
		return nil, false
	})
	x := open(t, redis.Options{Addrs: []string{f.addr}, Timeout: 50 * time.Millisecond, Pause: 500 * time.Millisecond})
	stat := func() error { return x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) }
	testkit.Eventually(t, "it is left alone", func() bool { return strings.Contains(fmt.Sprint(stat()), "paused") })
	close(release)
	f.misbehave(nil)
	testkit.Eventually(t, "it is used again", func() bool { return stat() == nil })
}

// Calls that wait for a connection to a silent server end when the Tier pauses its calls to it.
func TestCallsToASilentServerEnd(t *testing.T) {
	f := newFake(t)
	release := make(chan bool)
	f.misbehave(func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
		if cmd[0] == "GETRANGE" {
			<-release
		}
		return nil, false
	})
	defer close(release)
	x := open(t, redis.Options{Addrs: []string{f.addr}, Lookups: 1, Timeout: time.Second, Pause: time.Minute})
	began := time.Now()
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() { _ = x.Stat(t.Context(), []kv.Key{tiertest.Key(i)}, make([]tier.Meta, 1)) })
	}
	wg.Wait()
	if took := time.Since(began); took > 30*time.Second { // 40 in a row take 40 s
		t.Errorf("the last of 40 calls ended after %v", took)
	}
}

// Calls end with their context, whatever they wait for: an answer, a connection, a login.
func TestCallsEndWithTheirContext(t *testing.T) {
	for _, silent := range []string{"GET", "AUTH", "SET"} {
		f := newFake(t)
		release := make(chan bool)
		begun := make(chan bool, 100)
		f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
			if cmd[0] == silent {
				begun <- true
				<-release
			}
			return nil, false
		})
		x := open(t, redis.Options{Addrs: []string{f.addr}, Password: "p", Workers: 1, Lookups: 1, Timeout: time.Hour, DialTimeout: time.Hour})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		for i := range 2 { // the second one waits for the connection of the first
			go func() {
				b, meta := tiertest.Object(i, 100)
				if silent == "SET" {
					ended <- x.Write(ctx, tiertest.Key(i), meta, b)
					return
				}
				_, err := x.Read(ctx, tiertest.Key(i), b)
				ended <- err
			}()
		}
		<-begun
		cancel()
		for range 2 {
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", silent, err)
			}
		}
		close(release)
	}
}
