// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// The slot of a key is what the cluster specification computes: CRC16 of its tag.
func TestSlots(t *testing.T) {
	f := func(key string, want int) {
		t.Helper()
		if got := redis.SlotOf(key); got != want {
			t.Errorf("%q: slot %d, want %d", key, got, want)
		}
	}
	f("123456789", 12739) // the specification's example, 0x31C3
	f("", 0)
	f("a{123456789}b", 12739)
	f("{123456789}{x}", 12739)
	f("{}123456789", redis.SlotOf("{}123456789"))
	if redis.SlotOf("{}x") == redis.SlotOf("") {
		t.Error("an empty tag is taken for one")
	}
}

// newCluster returns servers that share the slots, in equal parts.
func newCluster(t *testing.T, n int) []*fake {
	all := make([]*fake, n)
	for i := range all {
		all[i] = newFake(t)
	}
	share(all)
	return all
}

// share gives the servers their slots.
func share(all []*fake) {
	table := fmt.Sprintf("*%d\r\n", len(all))
	const slots = 16384
	owner := func(slot int) int { return slot * len(all) / slots }
	for i, f := range all {
		host, port, _ := net.SplitHostPort(f.addr)
		first, last := -1, 0
		for s := range slots {
			if owner(s) == i {
				if first < 0 {
					first = s
				}
				last = s
			}
		}
		table += fmt.Sprintf("*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%s\r\n:%s\r\n", first, last, len(host), host, port)
	}
	for i, f := range all {
		f.mu.Lock()
		f.table = table
		for s := range slots {
			delete(f.slots, s)
			if owner(s) != i {
				f.slots[s] = fmt.Sprintf("MOVED %d %s", s, all[owner(s)].addr)
			}
		}
		f.mu.Unlock()
	}
}

// objects writes n objects with several stripes each.
func objects(t *testing.T, x tier.Tier, n int) (keys []kv.Key) {
	for i := range n {
		b, meta := tiertest.Object(i, 9<<10)
		keys = append(keys, tiertest.Key(i))
		write(t, x, keys[i], meta, b)
	}
	return keys
}

func check(t *testing.T, x tier.Tier, i int) {
	t.Helper()
	want, meta := tiertest.Object(i, 9<<10)
	dst := make([]byte, len(want))
	if m, err := x.Read(t.Context(), tiertest.Key(i), dst); err != nil || m != meta || !bytes.Equal(dst, want) {
		t.Errorf("object %d: %+v, %v", i, m, err)
	}
}

// Objects are spread over a cluster's servers, and found when slots move from one to
// another, also in the middle of it.
func TestCluster(t *testing.T) {
	all := newCluster(t, 3)
	x := open(t, redis.Options{Addrs: []string{all[1].addr}, Cluster: true, Stripe: 4 << 10, Pause: time.Millisecond})
	keys := objects(t, x, 30)
	for i, f := range all {
		if n := len(f.names()); n < 6 {
			t.Errorf("server %d has %d values", i, n)
		}
	}
	// One slot is being moved from one server to another. The source redirects requests for keys
	// that it does not have any more to the target, which answers clients that send ASKING.
	name := ""
	for _, n := range all[0].names() {
		if strings.HasSuffix(n, "}") {
			name = n
			break
		}
	}
	moving := redis.SlotOf(name)
	for _, n := range all[0].names() {
		if redis.SlotOf(n) == moving {
			all[2].set(n, all[0].value(n))
			all[0].drop(n)
		}
	}
	all[0].mu.Lock()
	all[0].slots[moving] = fmt.Sprintf("ASK %d %s", moving, all[2].addr)
	all[0].mu.Unlock()
	for i := range keys {
		check(t, x, i)
	}
	if all[2].called("ASKING") == 0 {
		t.Error("nobody asked for the slot that moves")
	}
	// A server leaves: the others have its objects.
	for _, n := range all[2].names() {
		to := all[min(1, redis.SlotOf(n)*2/16384)]
		to.set(n, all[2].value(n))
	}
	for _, n := range append(all[0].names(), all[1].names()...) {
		from, to := all[0], all[min(1, redis.SlotOf(n)*2/16384)]
		if to == all[0] {
			from = all[1]
		}
		if v := from.value(n); v != nil {
			to.set(n, v)
		}
	}
	share(all[:2])
	all[2].stop()
	testkit.Eventually(t, "all are found without the server that left", func() bool {
		metas := make([]tier.Meta, len(keys))
		if x.Stat(t.Context(), keys, metas) != nil {
			return false
		}
		for _, m := range metas {
			if m.Len == 0 {
				return false
			}
		}
		return true
	})
	for i := range keys {
		check(t, x, i)
	}
}

// While one server of a cluster is gone its objects are missing, and those of the others
// are there.
func TestClusterWithoutOne(t *testing.T) {
	all := newCluster(t, 2)
	x := open(t, redis.Options{Addrs: []string{all[0].addr}, Cluster: true, Stripe: 4 << 10, Pause: time.Millisecond})
	keys := objects(t, x, 20)
	gone := len(all[1].names())
	all[1].stop()
	for range 5 { // first it fails, then it is left alone
		there := 0
		for _, ok := range has(t, x, keys...) {
			if ok {
				there++
			}
		}
		if there == 0 || there == len(keys) || gone == 0 {
			t.Fatalf("%d of %d objects are there", there, len(keys))
		}
	}
}

// While one server of a cluster is gone, the others still tell their hottest objects.
func TestHottestWithoutOne(t *testing.T) {
	all := newCluster(t, 2)
	x := open(t, redis.Options{Addrs: []string{all[0].addr}, Cluster: true, Stripe: 4 << 10, Pause: time.Millisecond})
	objects(t, x, 20)
	gone := len(all[1].names()) / 3
	all[1].stop()
	for range 5 { // first it fails, then it is left alone
		n := 0
		err := x.Hottest(t.Context(), 100, func(kv.Key, tier.Meta) bool { n++; return true })
		if err != nil || gone == 0 || n != 20-gone {
			t.Fatalf("%d of %d objects: %v", n, 20-gone, err)
		}
	}
	all[0].stop()
	if err := x.Hottest(t.Context(), 100, nil); err == nil {
		t.Error("nobody is there")
	}
}

// If servers redirect every command to each other, at once or one by one, the call ends after a few answers.
func TestRedirectionsThatLoop(t *testing.T) {
	for _, word := range []string{"MOVED", "ASK"} {
		all := newCluster(t, 2)
		x := open(t, redis.Options{Addrs: []string{all[0].addr}, Cluster: true, Stripe: 4 << 10})
		objects(t, x, 2)
		for i, f := range all {
			other := all[1-i].addr
			f.misbehave(func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
				if len(cmd) < 2 || cmd[0] == "CLUSTER" || cmd[0] == "INFO" {
					return nil, false
				}
				return fmt.Appendf(nil, "-%s %d %s\r\n", word, redis.SlotOf(cmd[1]), other), true
			})
		}
		count := func() int { return all[0].called("") + all[1].called("") }
		before := count()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, err := x.Read(ctx, tiertest.Key(0), make([]byte, 9<<10)); err == nil || ctx.Err() != nil {
			t.Errorf("%s: Read: %v", word, err)
		}
		if err := x.Stat(ctx, []kv.Key{tiertest.Key(0)}, make([]tier.Meta, 1)); err == nil || ctx.Err() != nil {
			t.Errorf("%s: Stat: %v", word, err)
		}
		b, meta := tiertest.Object(0, 100)
		if err := x.Write(ctx, tiertest.Key(0), meta, b); err == nil || ctx.Err() != nil {
			t.Errorf("%s: Write: %v", word, err)
		}
		if asked := count() - before; asked > 100 {
			t.Errorf("%s: %d commands for three calls", word, asked)
		}
		cancel()
	}
}

// The Tier closes its connections to a server that left the cluster.
func TestServersThatLeftAreForgotten(t *testing.T) {
	all := newCluster(t, 3)
	x := open(t, redis.Options{Addrs: []string{all[0].addr}, Cluster: true, Stripe: 4 << 10})
	objects(t, x, 30)
	conns := func() int {
		all[2].mu.Lock()
		defer all[2].mu.Unlock()
		return len(all[2].conns)
	}
	if conns() == 0 {
		t.Fatal("nothing is on the third server")
	}
	share(all[:2])
	all[2].misbehave(func([]string, []byte, net.Conn) ([]byte, bool) { return []byte("-CLUSTERDOWN it left\r\n"), true })
	testkit.Eventually(t, "its connections end", func() bool {
		_ = x.Stat(t.Context(), []kv.Key{tiertest.Key(0), tiertest.Key(1), tiertest.Key(2), tiertest.Key(3), tiertest.Key(4), tiertest.Key(5)}, make([]tier.Meta, 6))
		return conns() == 0
	})
}

func newSentinel(t *testing.T, master string) *fake {
	s := newFake(t)
	point(s, master)
	return s
}

// point has a sentinel name a master.
func point(s *fake, master string) {
	host, port, _ := net.SplitHostPort(master)
	s.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		if strings.EqualFold(cmd[0], "SENTINEL") && cmd[2] == "main" {
			return fmt.Appendf(nil, "*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(host), host, len(port), port), true
		}
		return []byte("*-1\r\n"), true
	})
}

// After a failover the new master is used, whether the old one is gone or refuses to
// write.
func TestSentinelFailover(t *testing.T) {
	for _, gone := range []bool{true, false} {
		old, next := newFake(t), newFake(t)
		silent := newFake(t)
		silent.stop() // one of the sentinels is away
		s := newSentinel(t, old.addr)
		x := open(t, redis.Options{Addrs: []string{silent.addr, s.addr}, Sentinel: "main"})
		b, meta := tiertest.Object(1, 100)
		write(t, x, tiertest.Key(1), meta, b)
		if len(old.names()) != 1 {
			t.Fatal(old.names())
		}
		point(s, next.addr)
		if gone {
			old.stop()
		} else {
			old.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
				return []byte("-READONLY You can't write against a read only replica.\r\n"), cmd[0] == "SET"
			})
		}
		testkit.Eventually(t, "the new master is written to", func() bool {
			return x.Write(t.Context(), tiertest.Key(2), meta, b) == nil && len(next.names()) == 1
		})
	}
}

// The Tier uses a restarted server again. If only the idle connections ended, no call
// fails.
func TestConnectionsAreReplaced(t *testing.T) {
	f := newFakeOn(t, testkit.Listen(t))
	x := open(t, redis.Options{Addrs: []string{f.addr}, Password: "p", Stripe: 4 << 10})
	objects(t, x, 3)
	logins := f.logins
	f.cut()
	if got := has(t, x, tiertest.Key(0), tiertest.Key(1)); !got[0] || !got[1] {
		t.Error("after its connections ended it has nothing")
	}
	f.cut()
	check(t, x, 2)
	f.cut()
	b, meta := tiertest.Object(7, 9<<10)
	write(t, x, tiertest.Key(7), meta, b)
	check(t, x, 7)
	if f.logins == logins {
		t.Error("new connections did not log in")
	}
	f.stop()
	if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(0)}, make([]tier.Meta, 1)); err == nil {
		t.Error("a server that is gone answers")
	}
	l, err := net.Listen("tcp", f.addr)
	if err != nil {
		t.Fatal(err)
	}
	again := newFakeOn(t, l)
	testkit.Eventually(t, "the server that came back is used", func() bool { return x.Write(t.Context(), tiertest.Key(1), meta, b) == nil })
	if len(again.names()) == 0 {
		t.Error("it has nothing")
	}
}

// Values that take long to arrive delay no lookup.
func TestValuesDelayNoLookup(t *testing.T) {
	f := newFake(t)
	x := open(t, redis.Options{Addrs: []string{f.addr}, Workers: 1, Lookups: 1, Timeout: time.Minute})
	b, meta := tiertest.Object(1, 1<<20)
	write(t, x, tiertest.Key(1), meta, b)
	begun, release := make(chan bool), make(chan bool)
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		if cmd[0] == "GET" {
			_, _ = c.Write(normal[:len(normal)/2])
			begun <- true
			<-release
			return normal[len(normal)/2:], true
		}
		return nil, false
	})
	read := make(chan error)
	dst := make([]byte, len(b))
	go func() {
		_, err := x.Read(t.Context(), tiertest.Key(1), dst)
		read <- err
	}()
	<-begun
	if got := has(t, x, tiertest.Key(1), tiertest.Key(2)); !got[0] || got[1] {
		t.Errorf("Stat in the middle of a value: %v", got)
	}
	close(release)
	if err := <-read; err != nil || !bytes.Equal(dst, b) {
		t.Error(err)
	}
}
