// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"errors"
	"fmt"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// Request is one operation as a server sees it: a pointer to EngineDriven,
// KVCache or one of the Request types below.
type Request interface{ Op() Op }

// KeyRange is the beginning of each request about a worker's chunks: [key, instance_id].
type KeyRange struct {
	Key        *KeyView // its Hashes are those of [0, To)
	InstanceID int64
	From, To   int // the key's [Start, End) in chunks
}

// The requests about a worker's chunks.
type (
	PrepareStoreRequest struct {
		KeyRange
		Skipped [][]int // by object group, chunks of the range that are not stored; nil: none. Since 0.5.7
	}
	CommitStoreRequest struct {
		KeyRange
		Data []byte // an envelope, or pickled tensors before 0.5.7; empty when the worker wrote into the pool. Aliases the frame
	}
	PrepareRetrieveRequest struct{ KeyRange }
	CommitRetrieveRequest  struct{ KeyRange }

	// StoreRequest asks the server to copy blocks out of the memory that a worker lends. The event handle that follows in the message has a
	// meaning only for devices and is not read.
	StoreRequest struct {
		KeyRange
		Blocks [][]int // engine block ids by KV group
	}
	// RetrieveRequest asks the server to copy chunks into blocks.
	RetrieveRequest struct {
		KeyRange
		Blocks     [][]int
		SkipTokens int64 // leading tokens of the range that the copy must not overwrite; not checked, any number
	}
)

// The requests that a scheduler sends.
type (
	// LookupRequest asks for the longest stored prefix. Key has only the hashes of remembered chunks: Memo.Hash computes more.
	LookupRequest struct {
		Key            *KeyView
		TensorParallel int64 // see KeyView.ReadersOf
		From           int   // leading chunks that the engine has itself; at most To
		To             int   // number of whole chunks in the range that the client asks for
	}
	// PrefetchStatusRequest asks for the result of a lookup. With Wait the server answers when the lookup ends, or after Timeout.
	PrefetchStatusRequest struct {
		RequestID []byte
		Wait      bool
		Timeout   time.Duration // of Wait; at most maxTimeout, 0 for a number that is not above 0
	}
	// FreeLookupLocksRequest releases the pins of a range of chunks. The key's range ends at a block of the engine; a chunk that it covers
	// only in part, at its end, is not in From to To. A key with packed tokens has no Hashes, because the server's session knows its pins.
	FreeLookupLocksRequest struct {
		Key            *KeyView
		TensorParallel int64
		From, To       int         // chunks
		Abandoned      []ChunkSpan // chunks that earlier lookups of the request found and the engine gave up. Since 0.5.7
	}
	EndSessionRequest struct{ RequestID []byte }
)

// ChunkSpan is the chunks From up to, but without, To.
type ChunkSpan struct{ From, To int }

// The other requests.
type (
	// UnregisterRequest ends a registration of either transfer mode.
	UnregisterRequest struct {
		InstanceID int64
		op         Op
	}
	// PingRequest is a heartbeat. Bare: it has no payload, as from clients before 0.5.0. OfWorker: it names a worker's instance. Schedulers
	// send nil, which is neither.
	PingRequest struct {
		InstanceID int64
		OfWorker   bool
		Bare       bool
	}
	ClearRequest        struct{ Force bool }
	GetChunkSizeRequest struct{}
	// NegotiateRequest asks for a chunk size that is a multiple of Alignment. Alignment is not checked: it may be any number.
	NegotiateRequest       struct{ Alignment int64 }
	GetExperimentalRequest struct{}
	NoopRequest            struct{}

	// ReportBlockAllocationRequest reports the blocks of requests. Its records are not read: the server does not need them, and a list that
	// is short in the message can be long in memory.
	ReportBlockAllocationRequest struct{}

	// P2PLookupRequest and P2PUnlockRequest name objects by their keys, which alias the frames.
	P2PLookupRequest struct{ Keys []ObjectKey }
	P2PUnlockRequest struct{ Keys []ObjectKey }
	P2PResultRequest struct{ Task int64 }

	// SubscribeRequest asks for the KV events after Cursor, at most MaxEvents in each batch.
	SubscribeRequest struct {
		InstanceID int64
		Model      []byte
		Cursor     uint64
		MaxEvents  int
	}

	// OtherRequest is an operation that the server never serves. Its payloads are not read.
	OtherRequest struct{ op Op }
)

func (*EngineDriven) Op() Op                 { return OpRegisterEngineDriven }
func (*KVCache) Op() Op                      { return OpRegisterKVCache }
func (*PrepareStoreRequest) Op() Op          { return OpPrepareStore }
func (*CommitStoreRequest) Op() Op           { return OpCommitStore }
func (*PrepareRetrieveRequest) Op() Op       { return OpPrepareRetrieve }
func (*CommitRetrieveRequest) Op() Op        { return OpCommitRetrieve }
func (*StoreRequest) Op() Op                 { return OpStore }
func (*RetrieveRequest) Op() Op              { return OpRetrieve }
func (*LookupRequest) Op() Op                { return OpLookup }
func (*FreeLookupLocksRequest) Op() Op       { return OpFreeLookupLocks }
func (*EndSessionRequest) Op() Op            { return OpEndSession }
func (r *UnregisterRequest) Op() Op          { return r.op }
func (*PingRequest) Op() Op                  { return OpPing }
func (*ClearRequest) Op() Op                 { return OpClear }
func (*GetChunkSizeRequest) Op() Op          { return OpGetChunkSize }
func (*NegotiateRequest) Op() Op             { return OpNegotiateChunkSize }
func (*GetExperimentalRequest) Op() Op       { return OpGetExperimental }
func (*NoopRequest) Op() Op                  { return OpNoop }
func (*ReportBlockAllocationRequest) Op() Op { return OpReportBlockAllocation }
func (*P2PLookupRequest) Op() Op             { return OpP2PLookupAndLock }
func (*P2PUnlockRequest) Op() Op             { return OpP2PUnlockObjects }
func (*P2PResultRequest) Op() Op             { return OpP2PQueryLookupResults }
func (*SubscribeRequest) Op() Op             { return OpSubscribeKVEvents }
func (r *OtherRequest) Op() Op               { return r.op }

// Op returns wait_prefetch_status or query_prefetch_status.
func (r *PrefetchStatusRequest) Op() Op {
	if r.Wait {
		return OpWaitPrefetchStatus
	}
	return OpQueryPrefetchStatus
}

// Decoder decodes one request after the other. The result of Decode is valid until the next call of Decode, and only while the frames are.
type Decoder struct {
	key             KeyView
	prepareStore    PrepareStoreRequest
	commitStore     CommitStoreRequest
	prepareRetrieve PrepareRetrieveRequest
	commitRetrieve  CommitRetrieveRequest
	lookup          LookupRequest
	status          PrefetchStatusRequest
	free            FreeLookupLocksRequest
	end             EndSessionRequest
	ping            PingRequest
}

// Decode decodes the payloads p of an operation that a client of one of the generations `of` sent. It hashes keys with memo. The error for
// a malformed request wraps ErrPayloads, ErrKey or ErrRange if one of them is the cause.
func (d *Decoder) Decode(memo *Memo, of Generations, op Op, p [][]byte) (Request, error) {
	if err := of.CheckPayloads(op, len(p)); err != nil {
		return nil, err
	}
	switch op {
	case OpPing:
		return &d.ping, d.ping.decode(p)
	case OpLookup:
		d.lookup = LookupRequest{Key: &d.key}
		err := d.readers(memo, p, &d.lookup.TensorParallel, true)
		if err == nil {
			d.lookup.To = min(d.key.End/memo.chunkTokens, d.key.Chunks)
			d.lookup.From = min(max(d.key.Start, 0)/memo.chunkTokens, d.lookup.To)
		}
		return &d.lookup, err
	case OpQueryPrefetchStatus, OpWaitPrefetchStatus:
		return &d.status, d.status.decode(p)
	case OpFreeLookupLocks:
		d.free = FreeLookupLocksRequest{Key: &d.key}
		err := d.readers(memo, p, &d.free.TensorParallel, false)
		if err == nil && len(p) > 2 {
			d.free.Abandoned, err = decodeSpans(p[2], memo.chunkTokens)
		}
		if err == nil { // the range may end inside a chunk: that chunk still has a reader
			d.free.To = min(d.key.End/memo.chunkTokens, d.key.Chunks)
			d.free.From = min(max(d.key.Start, 0)/memo.chunkTokens, d.free.To)
		}
		return &d.free, err
	case OpEndSession:
		id, err := decodeRequestID(p[0])
		d.end.RequestID = id
		return &d.end, err
	case OpPrepareStore:
		r := &d.prepareStore
		r.Skipped = nil
		err := d.keyRange(memo, p, &r.KeyRange)
		if err == nil && len(p) > 2 {
			r.Skipped, err = decodeSkipped(p[2], r.To-r.From)
		}
		return r, err
	case OpCommitStore:
		err := d.keyRange(memo, p, &d.commitStore.KeyRange)
		if err == nil {
			d.commitStore.Data, err = named("data", decodeBytes, p[2])
		}
		return &d.commitStore, err
	case OpPrepareRetrieve:
		return &d.prepareRetrieve, d.keyRange(memo, p, &d.prepareRetrieve.KeyRange)
	case OpCommitRetrieve:
		return &d.commitRetrieve, d.keyRange(memo, p, &d.commitRetrieve.KeyRange)
	case OpNoop:
		return &NoopRequest{}, nil
	}
	return d.decodeRare(memo, op, p)
}

// decodeRare decodes operations that an engine calls once, and operations with long lists.
func (d *Decoder) decodeRare(memo *Memo, op Op, p [][]byte) (_ Request, err error) {
	switch op {
	case OpStore:
		r := &StoreRequest{}
		if err = d.keyRange(memo, p, &r.KeyRange); err == nil {
			r.Blocks, err = decodeBlockIDs(p[2])
		}
		return r, err
	case OpRetrieve:
		r := &RetrieveRequest{}
		if err = d.keyRange(memo, p, &r.KeyRange); err == nil {
			r.Blocks, err = decodeBlockIDs(p[2])
		}
		if err == nil {
			r.SkipTokens, err = named("skip_first_n_tokens", DecodeInt, p[4])
		}
		return r, err
	case OpRegisterEngineDriven:
		r, err := decodeEngineDriven(p[0])
		return &r, err
	case OpRegisterKVCache:
		r, err := decodeKVCache(p)
		return &r, err
	case OpUnregisterEngineDriven, OpUnregisterKVCache:
		id, err := named("instance_id", DecodeInt, p[0])
		return &UnregisterRequest{id, op}, err
	case OpClear:
		r := &ClearRequest{}
		if len(p) == 1 {
			r.Force, err = named("force", DecodeBool, p[0])
		}
		return r, err
	case OpGetChunkSize:
		return &GetChunkSizeRequest{}, nil
	case OpNegotiateChunkSize:
		n, err := named("required_chunk_alignment", DecodeInt, p[0])
		return &NegotiateRequest{n}, err
	case OpGetExperimental:
		return &GetExperimentalRequest{}, nil
	case OpReportBlockAllocation:
		if msgp.NextType(p[2]) != msgp.ArrayType {
			err = errors.New("report_block_allocation: the third payload is not a list")
		}
		return &ReportBlockAllocationRequest{}, err
	case OpP2PLookupAndLock:
		keys, err := named("keys", decodeObjectKeys, p[0])
		return &P2PLookupRequest{keys}, err
	case OpP2PUnlockObjects:
		keys, err := named("keys", decodeObjectKeys, p[0])
		return &P2PUnlockRequest{keys}, err
	case OpP2PQueryLookupResults:
		id, err := named("task id", DecodeInt, p[0])
		return &P2PResultRequest{id}, err
	case OpSubscribeKVEvents:
		return decodeSubscribe(p)
	}
	return &OtherRequest{op}, nil
}

// keyRange decodes [key, instance_id] and computes the hashes of the chunks up to the key's End.
func (d *Decoder) keyRange(memo *Memo, p [][]byte, r *KeyRange) (err error) {
	*r = KeyRange{Key: &d.key}
	if err = memo.DecodeKey(p[0], r.Key); err != nil {
		return err
	}
	if r.InstanceID, err = named("instance_id", DecodeInt, p[1]); err != nil {
		return err
	}
	if r.From, r.To, err = r.Key.ChunkRange(memo.chunkTokens); err != nil {
		return err
	}
	if r.Key.Worker == AllWorkers {
		return fmt.Errorf("%w: worker_id is nil, the operation needs a worker's id", ErrKey)
	}
	memo.Hash(r.Key, r.To)
	return nil
}

// readers decodes [key, tp_size]. hashed says whether the caller needs hashes, as in Memo.decodeKey.
func (d *Decoder) readers(memo *Memo, p [][]byte, tensorParallel *int64, hashed bool) (err error) {
	if err = memo.decodeKey(p[0], &d.key, hashed); err == nil {
		*tensorParallel, err = named("tp_size", DecodeInt, p[1])
	}
	return err
}

func (r *PingRequest) decode(p [][]byte) (err error) {
	*r = PingRequest{Bare: len(p) == 0}
	switch {
	case r.Bare:
		return nil
	case msgp.NextType(p[0]) == msgp.NilType:
		err = noRest(p[0][1:], nil)
	default:
		r.InstanceID, err = DecodeInt(p[0])
		r.OfWorker = err == nil
	}
	if err != nil {
		return fmt.Errorf("instance_id: %w", err)
	}
	return nil
}

// maxTimeout bounds the time that a server waits at a client's request. A longer time counts as this one.
const maxTimeout = time.Hour

func (r *PrefetchStatusRequest) decode(p [][]byte) (err error) {
	*r = PrefetchStatusRequest{Wait: len(p) == 2}
	if r.RequestID, err = decodeRequestID(p[0]); err != nil || !r.Wait {
		return err
	}
	seconds, err := named("timeout", decodeFloat, p[1])
	if seconds > 0 { // false for NaN
		r.Timeout = time.Duration(min(seconds, maxTimeout.Seconds()) * float64(time.Second))
	}
	return err
}

// maxSpans bounds the extra ranges of a free_lookup_locks. A message with more is an error.
const maxSpans = 1024

// decodeSpans reads extra_ranges: pairs of token positions, which it turns into ranges of chunks. It leaves out empty ranges.
func decodeSpans(frame []byte, chunkTokens int) (spans []ChunkSpan, err error) {
	rest, err := readList(frame, func(i int, b []byte) ([]byte, error) {
		if i >= maxSpans {
			return b, fmt.Errorf("more than %d ranges", maxSpans)
		}
		n, b, err := readArray(b)
		if err == nil && n != 2 {
			err = fmt.Errorf("%d elements, not a start and an end", n)
		}
		if err != nil {
			return b, err
		}
		var from, to int
		if from, b, err = readCount(b, MaxTokens); err == nil {
			to, b, err = readCount(b, MaxTokens)
		}
		if s := (ChunkSpan{from / chunkTokens, to / chunkTokens}); err == nil && s.From < s.To {
			spans = append(spans, s)
		}
		return b, err
	})
	if err = noRest(rest, err); err != nil {
		return nil, fmt.Errorf("extra_ranges: %w", err)
	}
	return spans, nil
}

// ErrSkipped means that skipped_chunks does not fit the range or the registration.
var ErrSkipped = errors.New("lmcache: bad skipped_chunks")

// decodeSkipped reads skipped_chunks: an empty list, or for each object group a list of positions in a range of `chunks` chunks.
func decodeSkipped(frame []byte, chunks int) (skipped [][]int, err error) {
	rest, err := readList(frame, func(i int, b []byte) ([]byte, error) {
		if i >= maxGroups {
			return b, fmt.Errorf("more than %d groups", maxGroups)
		}
		var of []int
		rest, err := intsInto(&of, chunks, b)
		for _, c := range of {
			if c < 0 || c >= chunks {
				err = fmt.Errorf("chunk %d is outside 0 to %d", c, chunks-1)
			}
		}
		skipped = append(skipped, of)
		return rest, err
	})
	if err = noRest(rest, err); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSkipped, err)
	}
	return skipped, nil
}

// named decodes one payload. Its error begins with the payload's name.
func named[T any](name string, decode func([]byte) (T, error), frame []byte) (T, error) {
	v, err := decode(frame)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return v, err
}

func decodeRequestID(frame []byte) ([]byte, error) {
	id, err := decodeString(frame)
	if err == nil && len(id) > MaxRequestBytes {
		err = fmt.Errorf("longer than %d bytes", MaxRequestBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("request_id: %w", err)
	}
	return id, nil
}
