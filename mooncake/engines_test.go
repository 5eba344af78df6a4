// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/scheduler"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// engine is a scheduler with its block pool, around one worker.
type engine struct {
	t     *testing.T
	rnd   *rand.Rand
	sched *scheduler.Scheduler
	cache *Cache
	free  []int
	owner map[int]string
}

func newEngine(t *testing.T, rnd *rand.Rand, role wire.Role, c *Cache, n int) *engine {
	t.Helper()
	s, err := scheduler.New(scheduler.Options{Role: role})
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, rnd: rnd, sched: s, cache: c, owner: map[int]string{}}
	for i := range n {
		e.free = append(e.free, i)
	}
	return e
}

// alloc takes n blocks for id, in any order; nil if there are not as many.
func (e *engine) alloc(id string, n int) []int {
	if len(e.free) < n {
		return nil
	}
	e.rnd.Shuffle(len(e.free), func(i, j int) { e.free[i], e.free[j] = e.free[j], e.free[i] })
	blocks := slices.Clone(e.free[:n])
	e.free = e.free[n:]
	for _, b := range blocks {
		e.owner[b] = id
	}
	return blocks
}

// release gives id's blocks back and overwrites them, so that a late reader finds other bytes.
func (e *engine) release(id string, blocks []int) {
	for _, b := range blocks {
		if e.owner[b] != id {
			e.t.Fatalf("%s frees block %d of %q", id, b, e.owner[b])
		}
		delete(e.owner, b)
		e.write(b, "nobody", e.rnd.IntN(1<<30))
	}
	e.free = append(e.free, blocks...)
}

func kvOf(prompt string, index int, n uint64) []byte {
	return bytes.Repeat(fmt.Appendf(nil, "%s/%d ", prompt, index), int(n))[:n]
}

func (e *engine) write(b int, prompt string, index int) {
	for _, r := range e.cache.Regions {
		copy(e.cache.Bytes(r.Base+uint64(b)*r.Stride, r.Payload), kvOf(prompt, index, r.Payload))
	}
}

func (e *engine) holds(b int, prompt string, index int) bool {
	return !slices.ContainsFunc(e.cache.Regions, func(r wire.Region) bool {
		return !bytes.Equal(e.cache.Bytes(r.Base+uint64(b)*r.Stride, r.Payload), kvOf(prompt, index, r.Payload))
	})
}

// job is a prompt: a request at P and one at D, as a proxy makes them.
type job struct {
	id      string
	p, d    *scheduler.Request
	pBlocks []int
	dBlocks []int
	own     int  // leading blocks that D has itself
	pDone   bool // has ended at P
	dDone   bool
	pKept   bool
	dKept   bool
	waits   bool // D's request, for its pull
}

// couple is both engines, and what they work on.
type couple struct {
	*pair
	t              *testing.T
	rnd            *rand.Rand
	pe, de         *engine
	jobs           map[string]*job
	made           int
	loaded, failed int
	aborted        int
}

const jobBlock = 16 // tokens

func (c *couple) newJob() {
	c.made++
	n := 1 + c.rnd.IntN(8)
	j := &job{id: fmt.Sprint("j", c.made), own: c.rnd.IntN(n + 1)}
	j.p = &scheduler.Request{ID: j.id + "-p", PromptTokens: n * jobBlock, Params: wire.RemoteDecode("x" + j.id)}
	j.d = &scheduler.Request{ID: j.id + "-d", PromptTokens: n * jobBlock, Params: wire.RemotePrefill(c.from.Bootstrap, c.from.EngineID, "x"+j.id)}
	c.jobs[j.id] = j
}

// schedule gives j's requests blocks, in any order.
func (c *couple) schedule(j *job) {
	n := j.p.PromptTokens / jobBlock
	if j.pBlocks == nil && !j.pDone && c.rnd.IntN(3) > 0 {
		if j.pBlocks = c.pe.alloc(j.p.ID, n); j.pBlocks != nil {
			c.must(c.pe.sched.Allocated(j.p, [][]int{j.pBlocks}, 0))
		}
	}
	if j.dBlocks != nil || j.dDone || c.rnd.IntN(3) == 0 {
		return
	}
	m, err := c.de.sched.Match(j.d, j.own*jobBlock)
	c.must(err)
	if m.Tokens != (n-j.own)*jobBlock {
		c.t.Fatalf("%s: %+v of %d blocks, %d own", j.id, m, n, j.own)
	}
	if j.dBlocks = c.de.alloc(j.d.ID, n); j.dBlocks == nil {
		return
	}
	for i, b := range j.dBlocks[:j.own] {
		c.de.write(b, j.id, i)
	}
	c.must(c.de.sched.Allocated(j.d, [][]int{j.dBlocks[j.own:]}, m.Tokens))
	j.waits = m.Async
}

// compute lets P finish a prefill that it was told to do in an earlier step.
func (c *couple) compute(j *job) {
	if j.pDone || j.pBlocks == nil || c.rnd.IntN(3) == 0 {
		return
	}
	for i, b := range j.pBlocks {
		c.pe.write(b, j.id, i)
	}
	c.endP(j, scheduler.LengthCapped)
}

func (c *couple) endP(j *job, status scheduler.RequestStatus) {
	f, err := c.pe.sched.Finish(j.p, status, [][]int{j.pBlocks})
	c.must(err)
	if j.pDone, j.pKept = true, f.KeepBlocks; !j.pKept {
		c.pe.release(j.p.ID, j.pBlocks)
	}
}

func (c *couple) endD(j *job, status scheduler.RequestStatus) {
	f, err := c.de.sched.Finish(j.d, status, [][]int{j.dBlocks})
	c.must(err)
	if j.dDone, j.dKept = true, f.KeepBlocks; !j.dKept {
		c.de.release(j.d.ID, j.dBlocks)
	}
}

func (c *couple) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// step gives the schedulers' decisions to the workers and the workers' results to the schedulers.
func (c *couple) step() {
	m, err := c.pe.sched.Build()
	c.must(err)
	c.sender.Apply(m)
	m, err = c.de.sched.Build()
	c.must(err)
	c.must(c.receiver.Apply(m))

	u, err := c.pe.sched.Update(scheduler.WorkerOutput{Sent: c.sender.Finished()})
	c.must(err)
	for _, id := range u.Freed {
		j := c.jobs[id[:len(id)-2]]
		c.pe.release(id, j.pBlocks)
		j.pKept = false
	}
	r := c.receiver.Results()
	o := scheduler.WorkerOutput{Received: r.Received, FailedBlocks: r.FailedBlocks}
	for id := range r.Failed {
		o.Failed = append(o.Failed, id)
	}
	u, err = c.de.sched.Update(o)
	c.must(err)
	for _, id := range u.Freed {
		j := c.jobs[id[:len(id)-2]]
		c.de.release(id, j.dBlocks)
		j.dKept = false
	}
	for _, id := range u.Failed {
		j := c.jobs[id[:len(id)-2]]
		c.failed++
		j.waits = false // it is computed here
		for i, b := range j.dBlocks {
			c.de.write(b, j.id, i)
		}
	}
	for _, id := range u.Loaded {
		c.loaded++
		c.jobs[id[:len(id)-2]].waits = false
	}
}

// check compares what D computes with, until the request ends, and tidies up.
func (c *couple) check() {
	for id, j := range c.jobs {
		if j.dBlocks != nil && !j.waits && !j.dDone {
			for i, b := range j.dBlocks {
				if !c.de.holds(b, j.id, i) {
					c.t.Fatalf("%s: block %d of %d at D holds something else", id, i, len(j.dBlocks))
				}
			}
			if c.rnd.IntN(3) == 0 {
				c.endD(j, scheduler.Stopped)
			}
		}
		if j.pDone && j.dDone && !j.pKept && !j.dKept {
			delete(c.jobs, id)
		}
	}
}

// Two schedulers over two workers and real transfers: requests that D asks for
// before and after P has them, prefix hits of its own up to the whole prompt,
// aborts on either side at any point. What D loads is what P computed, no block is
// used by two, and all come back.
func TestEngines(t *testing.T) {
	const blocks = 48
	for seed := range uint64(4) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		x := newPair(t, testCache(2, blocks, 256), testCache(2, blocks, 256),
			SenderOptions{AbortTimeout: 5 * time.Second, RetryTimeout: 50 * time.Millisecond},
			ReceiverOptions{UnknownTimeout: 100 * time.Millisecond, FenceTimeout: 50 * time.Millisecond})
		c := &couple{
			pair: x, t: t, rnd: rnd, jobs: map[string]*job{},
			pe: newEngine(t, rnd, wire.Producer, x.p, blocks), de: newEngine(t, rnd, wire.Consumer, x.d, blocks),
		}
		play := func(abort int) {
			for _, j := range c.jobs {
				c.compute(j)
				c.schedule(j)
				if rnd.IntN(abort) == 0 && !j.pDone {
					c.aborted++
					c.endP(j, scheduler.Aborted)
				}
				if rnd.IntN(abort) == 0 && !j.dDone {
					c.aborted++
					c.endD(j, scheduler.Aborted)
				}
			}
			c.step()
			c.check()
			time.Sleep(time.Millisecond) // an engine computes
		}
		for range 150 {
			if len(c.jobs) < 12 {
				c.newJob()
			}
			play(40)
		}
		for end := time.Now().Add(30 * time.Second); len(c.jobs) > 0; {
			if play(1 << 30); time.Now().After(end) {
				for id, j := range c.jobs {
					t.Errorf("seed %d: %s is left: %+v", seed, id, *j)
				}
				t.Fatalf("%+v\n%+v", x.sender.Stats(), x.receiver.Stats())
			}
		}
		testkit.Eventually(t, "empty pulls are told", func() bool { c.step(); return c.pe.sched.Len() == 0 && c.de.sched.Len() == 0 })
		x.idle(t)
		if len(c.pe.free) != blocks || len(c.de.free) != blocks || len(c.pe.owner)+len(c.de.owner) > 0 {
			t.Fatalf("seed %d: P has %d blocks, D %d", seed, len(c.pe.free), len(c.de.free))
		}
		if c.loaded == 0 || c.aborted == 0 {
			t.Fatalf("seed %d: %d loaded, %d aborted", seed, c.loaded, c.aborted)
		}
		t.Logf("seed %d: %d prompts, %d loaded, %d failed, %d aborted", seed, c.made, c.loaded, c.failed, c.aborted)
	}
}
