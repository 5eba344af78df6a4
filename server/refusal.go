// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
)

// refusal is an error for which a request is declined, with its label in metrics.
type refusal struct{ text, label string }

func (r *refusal) Error() string { return r.text }

var (
	errShort       = &refusal{"message with fewer than two frames", "short_message"}
	errUnknownOp   = &refusal{"unknown operation", "unknown_operation"}
	errUnsupported = &refusal{"this server does not serve the request", "unsupported"}
	errMode        = &refusal{"the worker registered for the other transfer mode (engine_driven or lmcache_driven)", "other_mode"}
	errModel       = &refusal{"no worker is registered for this model and world size", "unknown_model"}
	errFewWorkers  = &refusal{"too few workers can load a hit", "few_workers"}
	errDraining    = &refusal{"server is shutting down", "draining"}
	errMiss        = &refusal{"chunks are not readable", "miss"}
	errNoCommit    = &refusal{"no transfer of that key is in progress", "no_transfer"}
	errReaders     = &refusal{"num_kv_readers is 0", "no_readers"}
	errPickle      = &refusal{"worker does not map the pool, and this server reads no pickled tensors", "pickle"}
	errSide        = &refusal{"worker stored in the pool itself before, and now sends pickled tensors, or the other way round", "other_side"}
	errElsewhere   = &refusal{"what the worker stored did not reach the pool", "elsewhere"}
	errTensors     = &refusal{"pickled tensors do not fit what the worker registered, or the limits", "tensors"}
	errLate        = &refusal{"commit of a worker that was dropped or registered anew in between", "late_commit"}
	errRoom        = &refusal{"no room in the pool", "no_room"}
	errAmbiguous   = &refusal{"operations of several client generations look like this one", "ambiguous"}
	errGeneration  = &refusal{"clients of this generation are not served", "generation"}
	errPanic       = &refusal{"internal error", "internal_error"} // a bug of this server made the request panic. Only that request fails
	errChunkSize   = &refusal{"the engine may use another chunk size", "chunk_size"}
	errUnread      = &refusal{"replies that their clients have not read hold too much memory", "unread_replies"}
	errUID         = &refusal{"request uid is too long", "request_uid"}
	errWaits       = &refusal{"too many requests wait for lookups", "waits"}
	errStreams     = &refusal{"too many event streams", "streams"}
	errForget      = &refusal{"lookups may find what was stored before the clear", "clear"}
	errUnsigned    = &refusal{"the cache salt has no valid signature", "unsigned_salt"}
	errTenant      = &refusal{"the client may not use this tenant (--tenant-file)", "foreign_tenant"}
	errTokens      = &refusal{"event streams tell the tokens of all prompts, and this peer may not read the pool", "no_events"}
)

// refusals lists all reasons of this package.
var refusals = []*refusal{
	errShort, errUnknownOp, errUnsupported, errMode, errModel, errFewWorkers, errDraining, errMiss, errNoCommit, errReaders, errPickle, errSide, errElsewhere,
	errTensors, errLate, errRoom, errAmbiguous, errGeneration, errPanic, errChunkSize, errUnread, errUID, errWaits, errStreams, errForget, errUnsigned, errTenant, errTokens,
}

// reasonsElsewhere lists the reasons that other packages define.
var reasonsElsewhere = []struct {
	err   error
	label string
}{
	{workers.ErrUnknown, "unknown_instance"},
	{workers.ErrRefused, "refused_instance"},
	{workers.ErrLayouts, "several_layouts"},
	{paged.ErrBlocks, "block_ids"},
	{shm.ErrFault, "memory_gone"},
	{access.ErrLender, "not_lender"},
	{store.ErrBusy, "busy"},
	{lmcache.ErrRange, "range"},
	{lmcache.ErrSkipped, "skipped_chunks"},
	{lmcache.ErrGroups, "group_layouts"},
	{lmcache.ErrEnvelope, "envelope"},
	{lmcache.ErrPayloads, "payload_count"},
}

// malformed is the label of all other errors: a frame that does not decode.
const malformed = "malformed"

// refusalLabel returns the label of an error.
func refusalLabel(err error) string {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.label
	}
	for _, o := range reasonsElsewhere {
		if errors.Is(err, o.err) {
			return o.label
		}
	}
	return malformed
}

// refuse counts and logs a declined request. It limits the lines per second and reason.
func (s *Server) refuse(op lmcache.Op, err error) {
	label := refusalLabel(err)
	s.n.refusals[label].Add(1)
	if label == malformed {
		why := safelog.Text(op.String()+": "+err.Error(), 200)
		s.lastMalformed.Store(&why)
	}
	if op == lmcache.OpRegisterEngineDriven || op == lmcache.OpRegisterKVCache {
		s.turnedAway.Add(err)
	}
	s.log.Warn("declined", "operation", op.String(), safelog.Per("reason", label), "err", err)
}
