// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier/redis"
)

// fake is a Redis server in this process that can be made to misbehave.
type fake struct {
	t    *testing.T
	l    net.Listener
	addr string
	done sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]bool
	values map[string][]byte
	lists  map[string]bool // names that are no values
	lives  []int           // lifetimes of values, as they were set
	ends   map[string]bool // names with an end of life
	until  map[string]time.Time
	calls  []string       // the first two words of each command
	slots  map[int]string // of a cluster: the server of a slot, where that is not this one
	moving map[int]string // of a cluster: where the keys of a slot go, one by one
	table  string         // the answer to CLUSTER SLOTS
	logins int

	// answer replaces the answer to a command where it returns true. It is called
	// without the lock.
	answer func(cmd []string, normal []byte, c net.Conn) ([]byte, bool)
}

func newFake(t *testing.T) *fake {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return newFakeOn(t, l)
}

func newFakeOn(t *testing.T, l net.Listener) *fake {
	f := &fake{t: t, l: l, addr: l.Addr().String(), conns: map[net.Conn]bool{}, values: map[string][]byte{}, lists: map[string]bool{}, ends: map[string]bool{}, until: map[string]time.Time{}, slots: map[int]string{}, moving: map[int]string{}}
	f.done.Go(f.accept)
	t.Cleanup(f.stop)
	return f
}

func (f *fake) accept() {
	for {
		c, err := f.l.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		f.conns[c] = true
		f.mu.Unlock()
		f.done.Go(func() { f.serve(c) })
	}
}

// stop ends the server.
func (f *fake) stop() {
	f.l.Close()
	f.cut()
	f.done.Wait()
}

// cut closes all connections.
func (f *fake) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		c.Close()
	}
	clear(f.conns)
}

func (f *fake) misbehave(answer func(cmd []string, normal []byte, c net.Conn) ([]byte, bool)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = answer
}

// called returns how often a command came.
func (f *fake) called(cmd string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if strings.HasPrefix(c, cmd) {
			n++
		}
	}
	return n
}

func (f *fake) names() (all []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.values {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}

func (f *fake) value(name string) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return bytes.Clone(f.values[name])
}

func (f *fake) set(name string, value []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.values[name] = bytes.Clone(value)
}

func (f *fake) drop(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.values, name)
}

func (f *fake) serve(c net.Conn) {
	defer func() {
		f.mu.Lock()
		delete(f.conns, c)
		f.mu.Unlock()
		c.Close()
	}()
	r := bufio.NewReader(c)
	asking := false
	for {
		cmd, err := readCommand(r)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.calls = append(f.calls, strings.ToUpper(strings.Join(cmd[:min(2, len(cmd))], " ")))
		reply := f.reply(cmd, asking)
		answer := f.answer
		f.mu.Unlock()
		asking = strings.EqualFold(cmd[0], "ASKING")
		if answer != nil {
			if other, ok := answer(cmd, reply, c); ok {
				reply = other
			}
		}
		if _, err := c.Write(reply); err != nil {
			return
		}
	}
}

func readCommand(r *bufio.Reader) ([]string, error) {
	number := func(kind byte) (int, error) {
		line, err := r.ReadString('\n')
		if err != nil || line[0] != kind {
			return 0, io.ErrUnexpectedEOF
		}
		return strconv.Atoi(strings.TrimSpace(line[1:]))
	}
	n, err := number('*')
	if err != nil {
		return nil, err
	}
	cmd := make([]string, n)
	for i := range cmd {
		size, err := number('$')
		if err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		cmd[i] = string(b[:size])
	}
	return cmd, nil
}

func bulk(b []byte) []byte { return fmt.Appendf(nil, "$%d\r\n%s\r\n", len(b), b) }

// reply does what Redis does.
func (f *fake) reply(cmd []string, asking bool) []byte {
	const ok, null, wrong = "+OK\r\n", "$-1\r\n", "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"
	name := ""
	if len(cmd) > 1 {
		name = cmd[1]
	}
	keyed := slices.Contains([]string{"SET", "GET", "GETRANGE", "STRLEN", "PERSIST", "UNLINK", "PTTL"}, strings.ToUpper(cmd[0]))
	if to := f.slots[redis.SlotOf(name)]; keyed && to != "" && !asking {
		return fmt.Appendf(nil, "-%s\r\n", to)
	}
	if keyed && f.lists[name] && cmd[0] != "UNLINK" && !(cmd[0] == "SET") {
		return []byte(wrong)
	}
	value, there := f.values[name]
	if to := f.moving[redis.SlotOf(name)]; keyed && to != "" {
		if len(cmd) > 2 && strings.EqualFold(cmd[0], "UNLINK") {
			return []byte("-TRYAGAIN Multiple keys request during rehashing of slot\r\n")
		}
		if !there {
			return fmt.Appendf(nil, "-ASK %d %s\r\n", redis.SlotOf(name), to)
		}
	}
	number := func(n int) []byte { return fmt.Appendf(nil, ":%d\r\n", n) }
	switch strings.ToUpper(cmd[0]) {
	case "AUTH":
		f.logins++
		return []byte(ok)
	case "SELECT", "ASKING":
		return []byte(ok)
	case "SET":
		options := strings.Join(cmd[3:], " ")
		if strings.Contains(options, "NX") && there {
			return []byte(null)
		}
		f.values[name] = []byte(cmd[2])
		delete(f.lists, name)
		f.ends[name] = strings.Contains(options, "EX ")
		if _, text, ok := strings.Cut(options, "EX "); ok {
			seconds, _ := strconv.Atoi(strings.Fields(text)[0])
			f.lives = append(f.lives, seconds)
			f.until[name] = time.Now().Add(time.Duration(seconds) * time.Second)
		}
		return []byte(ok)
	case "GET":
		if !there {
			return []byte(null)
		}
		return bulk(value)
	case "GETRANGE":
		last, _ := strconv.Atoi(cmd[3])
		return bulk(value[:min(len(value), last+1)])
	case "STRLEN":
		return number(len(value))
	case "PTTL":
		switch {
		case !there:
			return number(-2)
		case !f.ends[name]:
			return number(-1)
		}
		return number(int(time.Until(f.until[name]).Milliseconds()))
	case "PERSIST":
		had := f.ends[name]
		delete(f.ends, name)
		return number(map[bool]int{true: 1}[had])
	case "UNLINK":
		n := 0
		for _, name := range cmd[1:] {
			if _, ok := f.values[name]; ok {
				n++
			}
			delete(f.values, name)
		}
		return number(n)
	case "DBSIZE":
		return number(len(f.values))
	case "INFO":
		return bulk([]byte("# Memory\r\nused_memory:1000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"))
	case "SCAN":
		var found []byte
		n := 0
		for name := range f.values {
			before, after, _ := strings.Cut(cmd[3], "*")
			if strings.HasPrefix(name, before) && strings.HasSuffix(name, after) {
				n++
				found = append(found, bulk([]byte(name))...)
			}
		}
		return append(fmt.Appendf(nil, "*2\r\n$1\r\n0\r\n*%d\r\n", n), found...)
	case "CLUSTER":
		return []byte(f.table)
	}
	return fmt.Appendf(nil, "-ERR unknown command '%s'\r\n", cmd[0])
}
