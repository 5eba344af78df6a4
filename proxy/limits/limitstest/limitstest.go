// SPDX-License-Identifier: Apache-2.0

// Package limitstest has a fake Redis server for tests of shared limits: it does in Go what the scripts of package limits do. It can be
// silent or cut connections.
package limitstest

import (
	"bufio"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"io"
	"math"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Redis is a fake Redis server.
type Redis struct {
	Addr string

	l    net.Listener
	done sync.WaitGroup

	mu      sync.Mutex
	conns   map[net.Conn]bool
	silent  bool
	scripts map[string]bool
	buckets map[string]bucket
	now     map[string]map[string]entry
	calls   int
}

type bucket struct {
	tokens float64
	at     time.Time
}

type entry struct {
	n    int
	ends time.Time
}

// Start starts a server, which stops when the test ends.
func Start(t testing.TB) *Redis {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &Redis{Addr: l.Addr().String(), l: l, conns: map[net.Conn]bool{}, scripts: map[string]bool{}, buckets: map[string]bucket{}, now: map[string]map[string]entry{}}
	r.done.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns[c] = true
			r.mu.Unlock()
			r.done.Go(func() { r.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.cut()
		r.done.Wait()
	})
	return r
}

func (r *Redis) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.Close()
	}
}

// Silence(true) makes the server stop reading and answering; Silence(false) makes it answer again. Both cut all connections.
func (r *Redis) Silence(on bool) {
	r.mu.Lock()
	r.silent = on
	r.mu.Unlock()
	r.cut()
}

// Forget makes the server forget the scripts, as a restarted server does.
func (r *Redis) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.scripts)
}

// Now returns how many requests all proxies together have in progress for the keys whose name contains the text key.
func (r *Redis) Now(key string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, all := range r.now {
		for _, e := range all {
			if strings.Contains(name, key) && time.Now().Before(e.ends) {
				n += e.n
			}
		}
	}
	return n
}

// Calls returns how many commands were answered.
func (r *Redis) Calls() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls
}

func (r *Redis) serve(c net.Conn) {
	defer func() {
		c.Close()
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.conns, c)
	}()
	in := bufio.NewReader(c)
	for {
		args, err := command(in)
		if err != nil {
			return
		}
		r.mu.Lock()
		silent := r.silent
		out := ""
		if !silent {
			r.calls++
			out = r.answerLocked(args)
		}
		r.mu.Unlock()
		if _, err := io.WriteString(c, out); err != nil {
			return
		}
	}
}

func command(in *bufio.Reader) (args []string, err error) {
	number := func(kind byte) (int, error) {
		line, err := in.ReadString('\n')
		if err != nil || len(line) < 4 || line[0] != kind {
			return 0, fmt.Errorf("line %q: %v", line, err)
		}
		return strconv.Atoi(strings.TrimSpace(line[1:]))
	}
	n, err := number('*')
	for ; err == nil && n > 0; n-- {
		var size int
		if size, err = number('$'); err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err = io.ReadFull(in, b); err != nil {
			return nil, err
		}
		args = append(args, string(b[:size]))
	}
	return args, err
}

func (r *Redis) answerLocked(args []string) string {
	number := func(s string) float64 {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil {
			panic(fmt.Sprintf("limitstest: %q: %v", args, err))
		}
		return f
	}
	life := func(s string) time.Time { return time.Now().Add(time.Duration(number(s)) * time.Millisecond) }
	switch {
	case args[0] == "SCRIPT":
		sum := sha1.Sum([]byte(args[2]))
		sha := hex.EncodeToString(sum[:])
		r.scripts[sha] = true
		return fmt.Sprintf("$%d\r\n%s\r\n", len(sha), sha)
	case args[0] == "EVALSHA" && !r.scripts[args[1]]:
		return "-NOSCRIPT No matching script\r\n"
	case args[0] == "EVALSHA":
		rate, burst, most, proxy, n := number(args[5]), number(args[6]), int(number(args[7])), args[8], int(number(args[9]))
		sum := n
		for p, e := range r.now[args[4]] {
			if p != proxy && time.Now().Before(e.ends) {
				sum += e.n
			}
		}
		if most > 0 && sum > most {
			return "*2\r\n:0\r\n:1000\r\n"
		}
		if rate > 0 {
			b, ok := r.buckets[args[3]]
			if !ok {
				b = bucket{burst, time.Now()}
			}
			b.tokens, b.at = math.Min(burst, b.tokens+rate*time.Since(b.at).Seconds()), time.Now()
			ok = b.tokens >= 1
			if ok {
				b.tokens--
			}
			if r.buckets[args[3]] = b; !ok {
				return fmt.Sprintf("*2\r\n:0\r\n:%d\r\n", int(math.Ceil((1-b.tokens)/rate*1000)))
			}
		}
		if most > 0 {
			r.setLocked(args[4], proxy, entry{n, life(args[10])})
		}
		return "*2\r\n:1\r\n:0\r\n"
	case args[0] == "EVAL":
		r.setLocked(args[3], args[4], entry{int(number(args[5])), life(args[6])})
		return ":1\r\n"
	case args[0] == "AUTH" || args[0] == "SELECT":
		return "+OK\r\n"
	}
	return "-ERR unknown command\r\n"
}

func (r *Redis) setLocked(name, proxy string, e entry) {
	if r.now[name] == nil {
		r.now[name] = make(map[string]entry)
	}
	r.now[name][proxy] = e
}
