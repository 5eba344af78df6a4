// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// load reads the objects that are there, and writes and reads others, until it is ended.
type load struct {
	x    tier.Tier
	keys []kv.Key // objects(…)
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu                        sync.Mutex
	reads, writes             int
	readsFailed, writesFailed int
	wrong                     []string
	slowest                   time.Duration
	written                   []int // objects that were written
}

func newLoad(x tier.Tier, keys []kv.Key) *load { return &load{x: x, keys: keys} }

func (l *load) start(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	l.stop = stop
	for range 4 {
		l.wg.Go(func() {
			for ctx.Err() == nil {
				l.read(t, rand.IntN(len(l.keys)))
			}
		})
	}
	for w := range 2 {
		l.wg.Go(func() {
			for i := 10_000 * (w + 1); ctx.Err() == nil; i++ {
				if l.write(t, i) {
					l.read(t, i)
				}
			}
		})
	}
}

// end stops the load, and waits until its calls have ended.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop()
	l.wg.Wait()
	for _, w := range l.wrong {
		t.Error(w)
	}
	if l.reads == 0 || l.writes == 0 {
		t.Errorf("%d reads and %d writes: this tests nothing", l.reads, l.writes)
	}
}

// note counts a call.
func (l *load) note(calls, failed *int, began time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*calls++
	if err != nil {
		*failed++
	}
	l.slowest = max(l.slowest, time.Since(began))
}

func (l *load) read(t *testing.T, i int) (ok bool) {
	want, meta := tiertest.Object(i, 9<<10)
	dst, began := make([]byte, len(want)), time.Now()
	m, err := l.x.Read(t.Context(), tiertest.Key(i), dst)
	l.note(&l.reads, &l.readsFailed, began, err)
	if err == nil && (m != meta || !bytes.Equal(dst, want)) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.wrong = append(l.wrong, fmt.Sprintf("object %d: wrong bytes", i))
	}
	return err == nil
}

func (l *load) write(t *testing.T, i int) (ok bool) {
	b, meta := tiertest.Object(i, 9<<10)
	began := time.Now()
	err := l.x.Write(t.Context(), tiertest.Key(i), meta, b)
	l.note(&l.writes, &l.writesFailed, began, err)
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.written = append(l.written, i)
	}
	return err == nil
}

// missing returns how many of the objects that were there, or were written, cannot be read.
func (l *load) missing(t *testing.T) (n int) {
	for i := range l.keys {
		if !l.read(t, i) {
			n++
		}
	}
	for _, i := range l.written {
		if !l.read(t, i) {
			n++
		}
	}
	return n
}

// moveSlot moves a slot from one server to another as redis-cli does: key by key.
func moveSlot(slot int, from, to *fake) {
	on := func(f *fake, do func()) {
		f.mu.Lock()
		defer f.mu.Unlock()
		do()
	}
	on(to, func() { to.slots[slot] = fmt.Sprintf("MOVED %d %s", slot, from.addr) })
	on(from, func() { from.moving[slot] = to.addr })
	for more := true; more; {
		more = false
		on(from, func() {
			for name, value := range from.values {
				if redis.SlotOf(name) != slot {
					continue
				}
				on(to, func() { to.values[name], to.ends[name] = value, from.ends[name] })
				delete(from.values, name)
				delete(from.ends, name)
				more = true
				break
			}
		})
		time.Sleep(100 * time.Microsecond) // others may come between two keys
	}
	on(to, func() { delete(to.slots, slot) })
	on(from, func() {
		delete(from.moving, slot)
		from.slots[slot] = fmt.Sprintf("MOVED %d %s", slot, to.addr)
	})
}

// While slots move from one server to another and back, every object can be read and written: no
// call fails. In the end no part of an object has an end of life.
func TestReshard(t *testing.T) {
	all := newCluster(t, 2)
	x := open(t, redis.Options{Addrs: []string{all[0].addr}, Cluster: true, Stripe: 4 << 10})
	l := newLoad(x, objects(t, x, 40))
	l.start(t)
	asked := func() int { return all[0].called("ASKING") + all[1].called("ASKING") }
	for end := time.Now().Add(time.Minute); asked() < 20 && time.Now().Before(end); {
		slots := map[int]bool{}
		for _, name := range all[0].names() {
			slots[redis.SlotOf(name)] = true
		}
		for slot := range slots {
			moveSlot(slot, all[0], all[1])
		}
		for slot := range slots {
			moveSlot(slot, all[1], all[0])
		}
	}
	l.end(t)
	if n := l.missing(t); n+l.readsFailed+l.writesFailed > 0 {
		t.Errorf("%d are missing; %d of %d reads and %d of %d writes failed", n, l.readsFailed, l.reads, l.writesFailed, l.writes)
	}
	if n := asked(); n < 20 {
		t.Errorf("slots that move were asked for %d times: this tests nothing", n)
	}
	for _, f := range all {
		for _, name := range f.names() {
			f.mu.Lock()
			if f.ends[name] {
				t.Errorf("%s will end", name)
			}
			f.mu.Unlock()
		}
	}
}

// A large object whose slot is being moved, with some values on each of two servers, is written, read and
// deleted like any other.
func TestSlotOnItsWay(t *testing.T) {
	all := newCluster(t, 2)
	x := open(t, redis.Options{Addrs: []string{all[0].addr}, Cluster: true, Stripe: 4 << 10})
	b, meta := tiertest.Object(1, 15<<10)
	for i := range 20 {
		k := tiertest.Key(i)
		write(t, x, k, meta, b)
		from, to := all[0], all[1]
		if len(from.names()) == 0 {
			from, to = to, from
		}
		names := from.names()
		slot := redis.SlotOf(names[0])
		to.mu.Lock()
		to.slots[slot] = fmt.Sprintf("MOVED %d %s", slot, from.addr)
		to.mu.Unlock()
		from.mu.Lock()
		from.moving[slot] = to.addr
		from.mu.Unlock()
		for j, name := range names {
			if j%2 == i%2 {
				to.set(name, from.value(name))
				from.drop(name)
			}
		}
		dst := make([]byte, len(b))
		if m, err := x.Read(t.Context(), k, dst); err != nil || m != meta || !bytes.Equal(dst, b) {
			t.Errorf("object %d: %+v, %v", i, m, err)
		}
		if err := x.Delete(t.Context(), []kv.Key{k}); err != nil || len(all[0].names())+len(all[1].names()) > 0 {
			t.Errorf("object %d: %v; left are %s", i, err, strings.Join(append(all[0].names(), all[1].names()...), " "))
		}
		write(t, x, k, meta, b) // all its values go to the target of the slot
		if got := len(to.names()); got != 4 {
			t.Errorf("object %d: %d of 4 values are where the slot goes", i, got)
		}
		to.mu.Lock()
		for name, ends := range to.ends {
			if ends && to.values[name] != nil {
				t.Errorf("%s will end", name)
			}
		}
		to.mu.Unlock()
		moveSlot(slot, from, to)
		if err := x.Delete(t.Context(), []kv.Key{k}); err != nil {
			t.Error(err)
		}
	}
}
