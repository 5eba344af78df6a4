// SPDX-License-Identifier: Apache-2.0

// Package hold keeps the books of transfers in progress: which worker may touch the bytes of which slots of the pool, and until when. It
// pairs commits with their prepares, and limits the transfers and bytes of each worker, and of the user or address that it belongs to. It
// decides nothing about the slots themselves.
//
// A Table takes no lock: its owner's covers it.
package hold

import (
	"encoding/binary"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
)

// Transfer identifies, with a request id, one prepare and its commit. The hash Last covers all tokens up to the end of the range.
type Transfer struct {
	Instance int64
	By       string // the user or address that the instance belongs to
	Shard    object.Shard
	From, To int     // chunks
	Last     kv.Hash // of chunk To-1
	Load     bool

	// own is a number for transfers that no commit can mean: those that this process carries out, and those of an earlier server.
	own uint64
}

// Name returns a hash of a transfer and its request id for the pool's index. A server that takes over the pool recognizes by it whose
// commit arrives. It is never 0.
func (n *Transfer) Name(requestID []byte) uint64 {
	var b [128]byte
	le := binary.LittleEndian
	le.PutUint64(b[0:], uint64(n.Instance))
	le.PutUint64(b[8:], uint64(n.Shard.World))
	le.PutUint64(b[16:], uint64(n.Shard.Index))
	le.PutUint64(b[24:], uint64(n.From))
	le.PutUint64(b[32:], uint64(n.To))
	copy(b[40:], n.Last[:])
	copy(b[72:], n.Shard.Namespace[:])
	return max(xxh3.HashSeed(requestID, xxh3.Hash(b[:])), 1)
}

// Hold is a transfer in progress: a worker knows the places of its slots. A Hold without slots only absorbs a late commit: its prepare was
// refused, or its slots were taken back.
type Hold struct {
	Transfer  Transfer
	RequestID string
	Slots     []uint32
	Bytes     int64 // bytes of the objects
	Staged    int64 // bytes of the pool that they take, for a store
	Deadline  time.Time
	Reads     bool // the slots are resident, and kept from eviction for this hold
	Marked    bool // the places were marked before the worker knew them

	number uint64 // in order of the prepares
	former bool   // of a worker of an earlier server
	orphan bool   // the worker unregistered, ended or registered again
}

// Orphan reports whether the worker is detached: the hold is in quarantine.
func (h *Hold) Orphan() bool { return h.orphan }

// Late reports whether the commit of h comes too late to make anything visible.
func (h *Hold) Late() bool { return h.orphan || len(h.Slots) == 0 && !h.Transfer.Load }

// prepared has what a commit repeats of its prepare: LMCache sends the key of the prepare again, request id included, and nothing else. A
// worker that registered again meanwhile has other Groups, but its commit still means its prepare.
type prepared struct {
	transfer  Transfer
	requestID string
}

func preparedAs(name Transfer, requestID string) prepared {
	name.Shard.Groups, name.Shard.Each = nil, nil
	return prepared{name, requestID}
}

func (h *Hold) prepared() prepared { return preparedAs(h.Transfer, h.RequestID) }
