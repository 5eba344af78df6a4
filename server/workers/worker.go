// SPDX-License-Identifier: Apache-2.0

// Package workers has the workers of engines that are registered with a server: the shape of their chunks, who may speak for them, which
// shard each keeps, and how long each has been silent.
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

// Worker is one registered worker. After Registry.Add only its atomic fields and those of Search change.
type Worker struct {
	ID          int64
	Model       string
	World       int
	Chunk       int       // tokens
	Base        int       // chunk size of the listener that it registered over; 0: the server's own
	Layout      kv.Layout // of the first object group
	Objects     []kv.Layout
	Bytes       int64  // per chunk
	Fingerprint string // of the layout
	Groups      *object.Groups
	Lent        *lent.KV // the KV that it lends and the server copies; nil for a worker that copies itself
	Engine      string   // type of its engine, vllm or sglang; empty: the registration does not name it

	By          access.Principal    // the user or address that may speak for it
	Key         int64               // its number in the store
	Generations lmcache.Generations // those that its client may be of
	Taken       bool                // an earlier server knew it, or an earlier registration of it exists
	Refused     string              // why its transfers are declined; empty: they are not
	Mapped      int64               // bytes of the pool that it was offered; 0: none
	Socket      uint64              // inode of the socket over which it registered; 0: not known

	Pinged  atomic.Bool
	Process atomic.Pointer[peercred.Process] // the process that registered it, once that is proved
	Search  Search

	Pins         bool                  // a device of its process may have the pool's pages pinned
	Envelopes    bool                  // it sends envelopes with its commits, no pickles
	GroupLayouts []lmcache.GroupLayout // groups of a worker that copies itself and has several object groups

	kept     string // the model, with its revision
	unsalted kv.Namespace
	seq      uint64       // number of the registration
	shard    atomic.Int32 // 1 + the shard that it keeps; 0: not known
	lastSeen atomic.Int64 // ns since the Registry's epoch
	asleep   atomic.Bool  // changed under the Registry's mutex
	family   atomic.Pointer[family]
	claimed  atomic.Bool // it is a relative of a client
	sided    sided
}

// Search has what the search for a worker's process has found. Only the goroutine that searches uses it.
type Search struct {
	Tries    int  // number of searches for the process
	Looks    int  // number of looks at the files that it maps
	MapsPool bool // it was seen to map the pool
}

// New returns a worker whose chunks of `chunk` tokens have those object layouts, bytes and groups.
func New(id int64, model string, world, chunk int, objects []kv.Layout, bytes int64, fingerprint string, groups *object.Groups) *Worker {
	if len(objects) == 1 && objects[0].Slots != chunk { // else the layout shows the chunk size
		fingerprint = fmt.Sprintf("%s, chunks of %d tokens", fingerprint, chunk)
	}
	return &Worker{
		ID: id, Model: model, World: world, Chunk: chunk, Layout: objects[0], Objects: objects, Bytes: bytes, Fingerprint: fingerprint, Groups: groups,
		kept: model, unsalted: kv.NamespaceOf(model, "", fingerprint),
	}
}

// AtRevision sets the revision of the worker's model, before the worker is added. Its chunks then belong to that revision.
func (w *Worker) AtRevision(revision string) *Worker {
	w.kept = tier.Revised(w.Model, revision)
	w.unsalted = kv.NamespaceOf(w.kept, "", w.Fingerprint)
	return w
}

// CameFrom records the caller that registers the worker.
func (w *Worker) CameFrom(c *access.Caller) {
	w.BelongsTo(c.By)
	w.Socket = c.Peer.Socket
	if p, ok := peercred.Running(c.Peer.PID); ok {
		w.IsOf(p)
	}
}

// IsOf records the process that registered the worker.
func (w *Worker) IsOf(p peercred.Process) {
	w.Process.Store(&p)
	w.family.Store(familyOf(p))
}

// Sleep marks the worker as asleep, before it is added.
func (w *Worker) Sleep() { w.asleep.Store(true) }

// BelongsTo records `by`, the user or address that may speak for the worker.
func (w *Worker) BelongsTo(by access.Principal) {
	w.By = by
	w.Key = w.who().key()
}

func (w *Worker) who() workerID { return workerID{w.ID, w.By} }

// Ended returns the process whose end proves that the worker has ended, and reports whether it has ended. gone reports whether a process
// has exited.
func (w *Worker) Ended(gone func(peercred.Process) bool) (peercred.Process, bool) {
	if w.Lent != nil && w.Lent.Owned() {
		return w.Lent.Segments[0].Owner, w.Lent.EndedBy(gone)
	}
	if p := w.Process.Load(); p != nil {
		return *p, gone(*p)
	}
	return peercred.Process{}, false
}

// Shard returns the shard that the worker keeps; -1: not known yet.
func (w *Worker) Shard() int { return int(w.shard.Load()) - 1 }

// SetShard sets the shard before the worker is added. A shard outside the world counts as not known.
func (w *Worker) SetShard(shard int) {
	if shard < 0 || shard >= w.World {
		shard = -1
	}
	w.shard.Store(int32(shard + 1))
}
