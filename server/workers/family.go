// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/server/access"
)

// maxClients bounds the clients whose process is being looked for. The processes of further clients are not looked for.
const maxClients = 1024

// Client is who looks up over one connection: the scheduler of an engine.
type Client struct {
	by      access.Principal
	socket  uint64
	tries   int // used only by FindProcesses' goroutine
	engine  atomic.Pointer[engine]
	process atomic.Pointer[family]
}

// engine is what a client's lookups of a model have shown about its workers. Lookups of another model or layout begin another engine.
type engine struct {
	model layoutKey
	most  int // the largest number of workers that were the client's relatives at one time
}

// relatives returns the largest number of workers of a model's layout that were k's relatives at one time; `now` is the present number.
// first is the fingerprint of the layout's first worker, which tells the layout apart from others.
func (k *Client) relatives(q *Query, first string, now int) int {
	of := k.engine.Load()
	if of == nil || of.model.model != string(q.Model) || of.model.world != q.World || of.model.chunk != q.Chunk || of.model.print != first {
		of = &engine{model: layoutKey{modelKey{model: string(q.Model), world: q.World, chunk: q.Chunk}, first}}
		k.engine.Store(of)
	}
	if of.most < now {
		of = &engine{of.model, now}
		k.engine.Store(of)
	}
	return of.most
}

// family is a process and its ancestors, the nearest first, at the time when the process was found.
type family struct {
	process   peercred.Process
	ancestors []peercred.Process
}

// related reports whether both families have the same process, or one process is an ancestor of the other.
func (f *family) related(other *family) bool {
	return f.process == other.process || slices.Contains(f.ancestors, other.process) || slices.Contains(other.ancestors, f.process)
}

// knowFamily records the family of a worker that lent memory, if the process that made the memory is known.
func (w *Worker) knowFamily() {
	if w.family.Load() == nil && w.Lent != nil && w.Lent.Owned() {
		w.family.Store(familyOf(w.Lent.Segments[0].Owner))
	}
}

func familyOf(p peercred.Process) *family { return &family{p, p.Ancestors()} }

// NewClient returns the client behind a connection. Its process is known at once, or FindProcesses looks for it.
func (r *Registry) NewClient(c *access.Caller) *Client {
	k := &Client{by: c.By, socket: c.Peer.Socket}
	if p, ok := peercred.Running(c.Peer.PID); ok {
		k.process.Store(familyOf(p))
		return k
	}
	if !c.By.User || c.Peer.Socket == 0 {
		return k
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.mu.clients) < maxClients {
		r.mu.clients[k] = struct{}{}
	}
	return k
}

// searching returns the clients whose process must be looked for now. It is looked for maxTries times at most.
func (r *Registry) searching() (out []*Client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := range r.mu.clients {
		if k.tries++; k.tries >= maxTries {
			delete(r.mu.clients, k)
		}
		out = append(out, k)
	}
	return out
}

func (r *Registry) foundClient(k *Client, p peercred.Process) {
	k.process.Store(familyOf(p))
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.mu.clients, k)
}

// isAlive reports whether the process of a worker is proved to run.
func (r *Registry) isAlive(in *Worker) bool {
	p, ended := in.Ended(r.gone)
	return p != (peercred.Process{}) && !ended
}

// loaders returns how many workers of the layout can load what a client looks up. `need` is how many workers the lookup needs.
//
//   - Workers that are asleep do not count.
//   - If the client's process is not known, all others count.
//   - If at least `need` workers were seen to be the client's relatives, only those count.
//   - If fewer were, workers whose process is not known count as well.
//   - If none was, all count except the relatives of other clients.
func (l *engineLayout) loaders(q *Query, need int) int {
	from := q.From
	var own *family
	if from != nil {
		own = from.process.Load()
	}
	if own == nil {
		return len(l.workers)
	}
	relatives, unknown, free := 0, 0, 0
	for _, in := range l.workers {
		switch f := in.family.Load(); {
		case in.Socket != 0 && in.Socket == from.socket: // it registered over the client's own connection
			relatives++
			in.claimed.Store(true)
		case f == nil:
			unknown++
		case own.related(f):
			relatives++
			in.claimed.Store(true)
		case !in.claimed.Load():
			free++
		}
	}
	most := from.relatives(q, l.first, relatives)
	switch {
	case most >= need: // all workers of the client's engine are its relatives
		return relatives
	case most > 0:
		return relatives + unknown
	}
	return unknown + free
}

// Awake returns how many workers can load now: they are registered, neither refused nor asleep.
func (r *Registry) Awake() (n int) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, in := range r.mu.instances {
		if in.Refused == "" && !in.asleep.Load() {
			n++
		}
	}
	return n
}

// Asleep reports whether the worker was silent for so long that lookups do not count on it.
func (in *Worker) Asleep() bool { return in.asleep.Load() }

// sleepLocked removes a silent worker from those that lookups count on. Its next request wakes it.
func (r *Registry) sleepLocked(in *Worker) {
	in.asleep.Store(true)
	r.unlistLocked(in)
}

// wake wakes a worker that is asleep, after a sign of life: lookups count on it again.
func (r *Registry) wake(in *Worker) {
	if !in.asleep.Load() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !in.asleep.Swap(false) || r.mu.instances[in.who()] != in {
		return
	}
	r.woke.Store(true)
	if in.Refused == "" {
		r.knowLocked(in)
	}
}

// Woke reports whether a worker woke since the last call.
func (r *Registry) Woke() bool { return r.woke.Swap(false) }

// Silent returns the workers that were silent for too long and of which no process is known to run: longer than reap if they have pinged,
// longer than grace if they never did; 0: never. A worker that lends memory is removed, because the memory may be a dead process's. Any
// other worker falls asleep: it is returned once, and its next request wakes it. After a pause of this process no worker counts as silent,
// because its pings may be unread.
func (r *Registry) Silent(now time.Time, reap, grace time.Duration) (silent []*Worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at := r.clock.at(now); r.clock.gap(at) {
		for _, in := range r.mu.instances {
			in.lastSeen.Store(int64(at))
		}
		return nil
	}
	for _, in := range r.mu.instances {
		limit := grace
		if in.Pinged.Load() {
			limit = reap
		}
		if limit > 0 && r.Silence(in, now) >= limit && !in.asleep.Load() && !r.isAlive(in) {
			silent = append(silent, in)
		}
	}
	for _, in := range silent {
		if in.Lent != nil || in.Refused != "" {
			r.forgetLocked(in)
		} else {
			r.sleepLocked(in)
		}
	}
	return silent
}
