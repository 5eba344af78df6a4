// SPDX-License-Identifier: Apache-2.0

// Package workers knows the workers of engines that are registered with a server:
// what each one's chunks look like, who may speak for it, which shard it keeps, and
// how long it has been silent.
package workers

import (
	"fmt"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/tier"
)

// Worker is one registered worker. After Registry.Add what is not atomic changes no
// more, but for the fields of Search.
type Worker struct {
	ID          int64
	Model       string
	World       int
	Chunk       int       // tokens
	Base        int       // chunk size of the listener that it registered over; 0 is the server's
	Layout      kv.Layout // of the first object group
	Objects     []kv.Layout
	Bytes       int64  // per chunk
	Fingerprint string // of the layout
	Groups      *object.Groups
	Lent        *lent.KV // what the server copies itself; nil for a worker that copies
	Engine      string   // type of its engine, vllm or sglang; empty where the registration does not name it

	By          access.Principal    // who may speak for it
	Key         int64               // names it in the store
	Generations lmcache.Generations // that its client can be of
	Taken       bool                // an earlier server knew it, or an earlier registration of it
	Refused     string              // why its transfers are declined; empty when they are not
	Mapped      int64               // bytes of the pool that it was offered; 0 for a worker that was offered none
	Socket      uint64              // inode of the one it registered over; 0 unknown

	Pinged  atomic.Bool
	Process atomic.Pointer[peercred.Process] // which registered it, once that is proved
	Search  Search

	Pins         bool                  // a device of its process may have the pool's pages pinned
	Envelopes    bool                  // what it sends with its commits is an envelope, no pickle
	GroupLayouts []lmcache.GroupLayout // of a worker that copies itself and has several object groups

	kept     string // the model, with its revision
	unsalted kv.Namespace
	seq      uint64       // of the registration, counted up
	shard    atomic.Int32 // 1 + the shard it keeps, 0 while unknown
	lastSeen atomic.Int64 // ns since the Registry's epoch
	asleep   atomic.Bool  // changed under the Registry's mutex
	family   atomic.Pointer[family]
	claimed  atomic.Bool // a client is its relative
	sided    sided
}

// Search is what the search for a worker's process has found. It belongs to the
// goroutine that searches.
type Search struct {
	Tries    int  // for the process
	Looks    int  // at what it maps
	MapsPool bool // it was seen to map the pool
}

// New returns a worker whose chunks of chunk tokens have those object layouts, bytes and groups.
func New(id int64, model string, world, chunk int, objects []kv.Layout, bytes int64, fingerprint string, groups *object.Groups) *Worker {
	if len(objects) == 1 && objects[0].Slots != chunk { // else the layout has the size
		fingerprint = fmt.Sprintf("%s, chunks of %d tokens", fingerprint, chunk)
	}
	return &Worker{
		ID: id, Model: model, World: world, Chunk: chunk, Layout: objects[0], Objects: objects, Bytes: bytes, Fingerprint: fingerprint, Groups: groups,
		kept: model, unsalted: kv.NamespaceOf(model, "", fingerprint),
	}
}

// AtRevision makes the worker's chunks those of a revision of its model, before it is added.
func (w *Worker) AtRevision(revision string) *Worker {
	w.kept = tier.Revised(w.Model, revision)
	w.unsalted = kv.NamespaceOf(w.kept, "", w.Fingerprint)
	return w
}

// CameFrom notes who registers the worker.
func (w *Worker) CameFrom(c *access.Caller) {
	w.BelongsTo(c.By)
	w.Socket = c.Peer.Socket
	if p, ok := peercred.Running(c.Peer.PID); ok {
		w.IsOf(p)
	}
}

// IsOf notes the process that registered the worker.
func (w *Worker) IsOf(p peercred.Process) {
	w.Process.Store(&p)
	w.family.Store(familyOf(p))
}

// Sleep makes the worker one that is asleep, before it is added.
func (w *Worker) Sleep() { w.asleep.Store(true) }

// BelongsTo notes who may speak for the worker.
func (w *Worker) BelongsTo(by access.Principal) {
	w.By = by
	w.Key = w.who().key()
}

func (w *Worker) who() workerID { return workerID{w.ID, w.By} }

// Ended returns the process whose end proves that the worker has ended, if it has.
// gone reports whether a process has exited.
func (w *Worker) Ended(gone func(peercred.Process) bool) (peercred.Process, bool) {
	if w.Lent != nil && w.Lent.Owned() {
		return w.Lent.Segments[0].Owner, w.Lent.EndedBy(gone)
	}
	if p := w.Process.Load(); p != nil {
		return *p, gone(*p)
	}
	return peercred.Process{}, false
}

// Shard returns the shard that the worker keeps, -1 while that is not known.
func (w *Worker) Shard() int { return int(w.shard.Load()) - 1 }

// SetShard sets the shard before the worker is added; a shard outside the world is none.
func (w *Worker) SetShard(shard int) {
	if shard < 0 || shard >= w.World {
		shard = -1
	}
	w.shard.Store(int32(shard + 1))
}
