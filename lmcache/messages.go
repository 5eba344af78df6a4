// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// EngineDriven is LMCache's RegisterEngineDrivenContextPayload: the registration of a worker that copies its own KV.
type EngineDriven struct {
	InstanceID    int64 // random, 63 bits, one per worker process
	Model         string
	WorldSize     int
	BlockSize     int // tokens per engine block
	Layers        int
	Hidden        int
	DType         string
	SinglePlane   bool // use_mla on the wire
	PhysicalSlots int  // token slots per chunk; 0 (nil on the wire): one per token
	Groups        []GroupLayout
	HasGroups     bool // the message has group_layouts, as 0.5.7 sends it; an empty list and a list of one are one group
	Unread        UnreadFields
}

// GroupLayout is EngineDrivenGroupLayout: the shape of the objects of one object group, and how many of them a hit needs.
type GroupLayout struct {
	Layers, Hidden int
	DType          string
	TokensPerBlock int
	WindowTokens   int // number of a chunk's last tokens that an object keeps; 0: all
	Planes         int // 2 for K and V, 1 for one plane; 0: as SinglePlane of the registration says
	WindowChunks   int // number of last chunks that a hit needs; 0: all
	Recurrent      bool
}

// ErrGroups means that group_layouts contradict each other or the registration.
var ErrGroups = errors.New("lmcache: group_layouts do not fit")

// Layouts returns the shapes of the objects of a chunk of chunkTokens tokens, one for each object group.
func (p *EngineDriven) Layouts(chunkTokens int) ([]kv.Layout, error) {
	out := make([]kv.Layout, len(p.Groups))
	for i, g := range p.Groups {
		slots := cmp.Or(g.WindowTokens, chunkTokens)
		switch {
		case slots > chunkTokens:
			return nil, fmt.Errorf("%w: group %d keeps %d tokens of a chunk of %d", ErrGroups, i, slots, chunkTokens)
		case slots < chunkTokens && g.WindowChunks != 1:
			return nil, fmt.Errorf("%w: group %d keeps %d of %d tokens, and a hit needs %d chunks of it; it must be 1", ErrGroups, i, slots, chunkTokens, g.WindowChunks)
		}
		out[i] = kv.Layout{SinglePlane: g.Planes == 1 || g.Planes == 0 && p.SinglePlane, Layers: g.Layers, Slots: slots, Hidden: g.Hidden, DType: g.DType}
		if _, err := out[i].Bytes(); err != nil {
			return nil, fmt.Errorf("%w: group %d: %w", ErrGroups, i, err)
		}
	}
	if len(out) < 2 {
		return []kv.Layout{p.Layout(chunkTokens)}, nil
	}
	return out, nil
}

// Layout returns the shape of one chunk of chunkTokens tokens.
func (p *EngineDriven) Layout(chunkTokens int) kv.Layout {
	slots := p.PhysicalSlots
	if slots == 0 {
		slots = chunkTokens
	}
	return kv.Layout{SinglePlane: p.SinglePlane, Layers: p.Layers, Slots: slots, Hidden: p.Hidden, DType: p.DType}
}

// Append appends the payload frame of register_kv_cache_engine_driven_context.
func (p *EngineDriven) Append(b []byte) []byte {
	fields := uint32(9)
	if p.HasGroups {
		fields++
	}
	b = msgp.AppendMapHeader(b, fields)
	b = appendInt(msgp.AppendString(b, "instance_id"), p.InstanceID)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), p.Model)
	b = appendInt(msgp.AppendString(b, "world_size"), p.WorldSize)
	b = appendInt(msgp.AppendString(b, "block_size"), p.BlockSize)
	b = appendInt(msgp.AppendString(b, "num_layers"), p.Layers)
	b = appendInt(msgp.AppendString(b, "hidden_dim_size"), p.Hidden)
	b = msgp.AppendString(msgp.AppendString(b, "dtype_str"), p.DType)
	b = msgp.AppendBool(msgp.AppendString(b, "use_mla"), p.SinglePlane)
	b = msgp.AppendString(b, "num_physical_slots")
	if p.PhysicalSlots == 0 {
		b = msgp.AppendNil(b)
	} else {
		b = appendInt(b, p.PhysicalSlots)
	}
	if !p.HasGroups {
		return b
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "group_layouts"), uint32(len(p.Groups)))
	for i := range p.Groups {
		g := &p.Groups[i]
		b = msgp.AppendMapHeader(b, 8)
		b = appendInt(msgp.AppendString(b, "num_layers"), g.Layers)
		b = appendInt(msgp.AppendString(b, "hidden_dim_size"), g.Hidden)
		b = msgp.AppendString(msgp.AppendString(b, "dtype_str"), g.DType)
		b = appendInt(msgp.AppendString(b, "tokens_per_block"), g.TokensPerBlock)
		b = appendInt(msgp.AppendString(b, "window_tokens"), g.WindowTokens)
		b = appendInt(msgp.AppendString(b, "kv_size"), g.Planes)
		b = appendInt(msgp.AppendString(b, "window_chunks"), g.WindowChunks)
		b = msgp.AppendBool(msgp.AppendString(b, "recurrent"), g.Recurrent)
	}
	return b
}

// maxObjectGroups bounds the group_layouts of a registration. A registration with more is an error.
const maxObjectGroups = 64

func (p *EngineDriven) decodeGroups(b []byte) ([]byte, error) {
	p.HasGroups = true
	return readList(b, func(i int, b []byte) ([]byte, error) {
		if i >= maxObjectGroups {
			return b, fmt.Errorf("more than %d object groups", maxObjectGroups)
		}
		var g GroupLayout
		seen := 0
		rest, err := readMap(b, func(name, b []byte) (rest []byte, err error) {
			seen++
			switch string(name) {
			case "num_layers":
				g.Layers, rest, err = readCount(b, maxLayers)
				return rest, err
			case "hidden_dim_size":
				return intInto(&g.Hidden, b)
			case "dtype_str":
				return stringInto(&g.DType, b)
			}
			seen--
			switch string(name) {
			case "tokens_per_block":
				return intInto(&g.TokensPerBlock, b)
			case "window_tokens":
				g.WindowTokens, rest, err = readCount(b, kv.MaxChunkTokens)
			case "kv_size":
				g.Planes, rest, err = readCount(b, 2)
			case "window_chunks":
				g.WindowChunks, rest, err = readCount(b, MaxTokens)
			case "recurrent":
				return boolInto(&g.Recurrent, b)
			default:
				p.Unread.add("group_layouts.", name, b)
				return b, nil
			}
			return rest, err
		})
		if err == nil && seen != 3 {
			err = ErrMissing
		}
		if err == nil && len(g.DType) > 64 {
			err = errLongName
		}
		p.Groups = append(p.Groups, g)
		return rest, err
	})
}

// decodeEngineDriven reads the payload frame of register_kv_cache_engine_driven_context. Clients
// before 0.5.5 leave num_physical_slots out.
func decodeEngineDriven(frame []byte) (EngineDriven, error) {
	var p EngineDriven
	seen := 0
	rest, err := readMap(frame, func(name, b []byte) (rest []byte, err error) {
		seen++
		switch string(name) {
		case "instance_id":
			return intInto(&p.InstanceID, b)
		case "model_name":
			return stringInto(&p.Model, b)
		case "world_size":
			return intInto(&p.WorldSize, b)
		case "block_size":
			return intInto(&p.BlockSize, b)
		case "num_layers":
			return intInto(&p.Layers, b)
		case "hidden_dim_size":
			return intInto(&p.Hidden, b)
		case "dtype_str":
			return stringInto(&p.DType, b)
		case "use_mla":
			return boolInto(&p.SinglePlane, b)
		}
		seen--
		if string(name) == "group_layouts" {
			return p.decodeGroups(b)
		}
		if string(name) != "num_physical_slots" {
			p.Unread.add("", name, b)
		} else if msgp.NextType(b) != msgp.NilType {
			return intInto(&p.PhysicalSlots, b)
		}
		return b, nil
	})
	if err = noRest(rest, err); err != nil {
		return p, fmt.Errorf("register_kv_cache_engine_driven_context: %w", err)
	}
	if seen < 8 {
		return p, fmt.Errorf("register_kv_cache_engine_driven_context: %w", ErrMissing)
	}
	if len(p.Model) > maxModelBytes || len(p.DType) > 64 {
		return p, fmt.Errorf("register_kv_cache_engine_driven_context: model_name is longer than %d bytes, or dtype_str than 64", maxModelBytes)
	}
	if !utf8.ValidString(p.Model) { // as in keys
		return p, fmt.Errorf("register_kv_cache_engine_driven_context: model_name is not UTF-8")
	}
	if p.WorldSize < 1 || p.WorldSize > kv.MaxWorldSize {
		return p, fmt.Errorf("register_kv_cache_engine_driven_context: world_size %d is outside 1 to %d", p.WorldSize, kv.MaxWorldSize)
	}
	return p, nil
}

// Pool is LMCache's RegisterEngineDrivenContextResponse: the shared-memory object that has all slots. A client that gets the zero Pool
// sends its objects in messages instead.
type Pool struct {
	ShmName string // under /dev/shm, without a slash
	Bytes   int64

	HasNullBlock bool // the message names NullBlock, the engine's block that has no KV, as in 0.5.7
	NullBlock    int
}

// Append appends the result frame of register_kv_cache_engine_driven_context.
func (p Pool) Append(b []byte) []byte {
	fields := uint32(2)
	if p.HasNullBlock {
		fields++
	}
	b = msgp.AppendMapHeader(b, fields)
	b = msgp.AppendString(msgp.AppendString(b, "shm_name"), p.ShmName)
	b = appendInt(msgp.AppendString(b, "pool_size"), p.Bytes)
	if p.HasNullBlock {
		b = appendInt(msgp.AppendString(b, "null_block_id"), p.NullBlock)
	}
	return b
}

// DecodePool reads the result frame of register_kv_cache_engine_driven_context.
func DecodePool(frame []byte) (p Pool, err error) {
	rest, err := readMap(frame, func(name, b []byte) ([]byte, error) {
		switch string(name) {
		case "shm_name":
			return stringInto(&p.ShmName, b)
		case "pool_size":
			return intInto(&p.Bytes, b)
		case "null_block_id":
			p.HasNullBlock = true
			return intInto(&p.NullBlock, b)
		}
		return b, nil
	})
	return p, noRest(rest, err)
}

// Slots says where some objects are in the pool.
type Slots struct {
	Layouts []kv.Layout // by object group
	Lengths []int64     // bytes per slot, by object group
	Offsets []int64     // bytes from the pool's start, one per slot
	Indices []int       // position of each slot's chunk inside [start, end); a load with one group does not need them
	Groups  []int       // object group of each slot; not needed with one group
}

// hasGroups reports whether there are several object groups. The answer then names the group of each slot.
func (s *Slots) hasGroups() bool { return len(s.Layouts) > 1 }

// Len, Less and Swap sort the slots by group, then by chunk, which is the order that clients expect.
func (s *Slots) Len() int { return len(s.Offsets) }

// Less implements sort.Interface.
func (s *Slots) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(s.Groups[i], s.Groups[j]), cmp.Compare(s.Indices[i], s.Indices[j])) < 0
}

// Swap implements sort.Interface.
func (s *Slots) Swap(i, j int) {
	s.Offsets[i], s.Offsets[j] = s.Offsets[j], s.Offsets[i]
	s.Indices[i], s.Indices[j] = s.Indices[j], s.Indices[i]
	s.Groups[i], s.Groups[j] = s.Groups[j], s.Groups[i]
}

func (s *Slots) append(b []byte) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "slots"), uint32(len(s.Offsets)))
	for i, off := range s.Offsets {
		g := 0
		if s.hasGroups() {
			g = s.Groups[i]
		}
		b = msgp.AppendMapHeader(b, 4)
		b = appendInt(msgp.AppendString(b, "offset"), off)
		b = appendInt(msgp.AppendString(b, "length"), s.Lengths[g])
		shape := s.Layouts[g].Shape()
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "shape"), uint32(len(shape)))
		for _, d := range shape {
			b = appendInt(b, d)
		}
		b = msgp.AppendString(msgp.AppendString(b, "dtype"), s.Layouts[g].DType)
	}
	return b
}

// AppendPrepareStore appends the result frame of prepare_store. If s has no slots, there is nothing to store and the client sends no
// commit. A nil s asks the client to send the objects with its commit.
func AppendPrepareStore(b []byte, s *Slots) []byte {
	b = msgp.AppendString(msgp.AppendMapHeader(b, 1), "context")
	if s == nil {
		return msgp.AppendMapHeader(b, 0)
	}
	if !s.hasGroups() {
		b = s.append(msgp.AppendMapHeader(b, 2))
		return appendInts(msgp.AppendString(b, "chunk_indices"), s.Indices)
	}
	b = s.append(msgp.AppendMapHeader(b, 3))
	b = appendInts(msgp.AppendString(b, "chunk_indices"), s.Indices)
	return appendInts(msgp.AppendString(b, "group_ids"), s.Groups)
}

// AppendPrepareRetrieve appends the result frame of prepare_retrieve; a nil s is
// a miss.
func AppendPrepareRetrieve(b []byte, s *Slots) []byte {
	b = msgp.AppendMapHeader(b, 3)
	b = msgp.AppendBool(msgp.AppendString(b, "success"), s != nil)
	b = msgp.AppendBytes(msgp.AppendString(b, "data"), nil)
	b = msgp.AppendString(b, "context")
	if s == nil {
		return msgp.AppendMapHeader(b, 0)
	}
	if !s.hasGroups() {
		return s.append(msgp.AppendMapHeader(b, 1))
	}
	b = s.append(msgp.AppendMapHeader(b, 3))
	b = appendInts(msgp.AppendString(b, "group_ids"), s.Groups)
	return appendInts(msgp.AppendString(b, "chunk_indices"), s.Indices)
}

// AppendPickled appends the result frame of a prepare_retrieve that is a hit. write appends the pickled tensors, less than 4 GiB.
func AppendPickled(b []byte, write func([]byte) []byte) []byte {
	b = msgp.AppendMapHeader(b, 3)
	b = msgp.AppendBool(msgp.AppendString(b, "success"), true)
	b = append(msgp.AppendString(b, "data"), 0xc6, 0, 0, 0, 0) // bin 32; the length follows
	at := len(b)
	b = write(b)
	binary.BigEndian.PutUint32(b[at-4:], uint32(len(b)-at))
	return msgp.AppendMapHeader(msgp.AppendString(b, "context"), 0)
}

// AppendEnveloped appends the result frame of a prepare_retrieve that is a hit, with an envelope of less than 4 GiB.
func AppendEnveloped(b []byte, layouts []kv.Layout, e *Envelope) []byte {
	b = msgp.AppendMapHeader(b, 3)
	b = msgp.AppendBool(msgp.AppendString(b, "success"), true)
	b = AppendInline(msgp.AppendString(b, "data"), func(b []byte) []byte { return AppendEnvelope(b, layouts, e) })
	return msgp.AppendMapHeader(msgp.AppendString(b, "context"), 0)
}

// SlotAt is one slot as a client receives it, with its place in the pool in bytes.
type SlotAt struct {
	Offset, Length int64
	Shape          []int
	DType          string
}

// PrepareStore is the result of prepare_store. Slots is nil, not empty, when the server wants the objects in the commit message.
type PrepareStore struct {
	Slots   []SlotAt
	Indices []int
	Groups  []int // of each slot; nil with one object group
}

// DecodePrepareStore reads the result frame of prepare_store.
func DecodePrepareStore(frame []byte) (p PrepareStore, err error) {
	rest, err := readMap(frame, func(name, b []byte) ([]byte, error) {
		if string(name) != "context" {
			return b, nil
		}
		return decodeContext(b, &p)
	})
	if err == nil && (len(p.Slots) != len(p.Indices) || p.Groups != nil && len(p.Groups) != len(p.Slots)) {
		err = fmt.Errorf("prepare_store: lists of different length: %d slots, %d chunks, %d groups", len(p.Slots), len(p.Indices), len(p.Groups))
	}
	return p, noRest(rest, err)
}

// PrepareRetrieve is the result of prepare_retrieve.
type PrepareRetrieve struct {
	Success bool
	Data    []byte // an envelope, or pickled tensors before 0.5.7; empty in shared-memory mode
	Slots   []SlotAt
	Indices []int // position in the range (Indices) and object group (Groups) of each slot; both nil with one object group
	Groups  []int
}

// DecodePrepareRetrieve reads the result frame of prepare_retrieve.
func DecodePrepareRetrieve(frame []byte) (p PrepareRetrieve, err error) {
	rest, err := readMap(frame, func(name, b []byte) ([]byte, error) {
		switch string(name) {
		case "success":
			return boolInto(&p.Success, b)
		case "data":
			data, rest, err := msgp.ReadBytesBytes(b, nil)
			p.Data = data
			return rest, err
		case "context":
			var c PrepareStore
			rest, err := decodeContext(b, &c)
			p.Slots, p.Indices, p.Groups = c.Slots, c.Indices, c.Groups
			return rest, err
		}
		return b, nil
	})
	if err == nil && p.Groups != nil && (len(p.Groups) != len(p.Slots) || len(p.Indices) != len(p.Slots)) {
		err = fmt.Errorf("prepare_retrieve: lists of different length: %d slots, %d chunks, %d groups", len(p.Slots), len(p.Indices), len(p.Groups))
	}
	return p, noRest(rest, err)
}

func decodeContext(b []byte, p *PrepareStore) ([]byte, error) {
	return readMap(b, func(name, b []byte) ([]byte, error) {
		switch string(name) {
		case "slots":
			p.Slots = []SlotAt{}
			return readList(b, func(_ int, b []byte) ([]byte, error) {
				var s SlotAt
				rest, err := decodeSlot(b, &s)
				p.Slots = append(p.Slots, s)
				return rest, err
			})
		case "chunk_indices":
			return intsInto(&p.Indices, MaxTokens, b)
		case "group_ids":
			return intsInto(&p.Groups, MaxTokens, b)
		}
		return b, nil
	})
}

func decodeSlot(b []byte, s *SlotAt) ([]byte, error) {
	return readMap(b, func(name, b []byte) ([]byte, error) {
		switch string(name) {
		case "offset":
			return intInto(&s.Offset, b)
		case "length":
			return intInto(&s.Length, b)
		case "shape":
			return intsInto(&s.Shape, maxDims, b)
		case "dtype":
			return stringInto(&s.DType, b)
		}
		return b, nil
	})
}

// BlockAllocation is one record of report_block_allocation.
type BlockAllocation struct {
	RequestID string
	NewBlocks []int
	NewTokens []int
}

// AppendNegative appends the result frame with which a server declines op. The protocol has no error frame, so this is a value that the
// 0.5.6 client survives. ok is false when the right answer has no result frame.
func AppendNegative(b []byte, op Op, reason string) (_ []byte, ok bool) {
	switch op {
	case OpStore, OpRetrieve, OpStoreQ: // no event to wait for, not done
		return Copied{}.Append(b), true
	case OpQueryPrefetchStatus, OpWaitPrefetchStatus, OpQueryLookupHits: // a miss
		return appendInt(b, 0), true
	case OpRegisterEngineDriven: // no shared memory
		return Pool{}.Append(b), true
	case OpPrepareStore: // nothing to store, so no commit follows
		return AppendPrepareStore(b, &Slots{}), true
	case OpPrepareRetrieve:
		return AppendPrepareRetrieve(b, nil), true
	case OpCommitStore, OpCommitRetrieve, OpPing:
		return msgp.AppendBool(b, false), true
	case OpGetExperimental:
		return msgp.AppendArrayHeader(b, 0), true
	case OpP2PLookupAndLock: // the answer about an unknown task
		return appendInt(b, -1), true
	case OpSubscribeKVEvents: // ends the client's use of the stream for good
		b = msgp.AppendMapHeader(b, 5)
		b = msgp.AppendBool(msgp.AppendString(b, "enabled"), false)
		b = appendInt(msgp.AppendString(b, "incarnation"), 0)
		b = appendInt(msgp.AppendString(b, "next_cursor"), 0)
		b = msgp.AppendBool(msgp.AppendString(b, "lost"), false)
		return msgp.AppendArrayHeader(msgp.AppendString(b, "events"), 0), true
	case OpServerModuleCall, OpServerModuleAffinityCall:
		b = msgp.AppendMapHeader(b, 3)
		b = msgp.AppendBool(msgp.AppendString(b, "success"), false)
		b = msgp.AppendBytes(msgp.AppendString(b, "payload"), nil)
		return msgp.AppendString(msgp.AppendString(b, "error"), reason), true
	}
	return b, false
}

// maxReason bounds the reason of AppendFailure in bytes. The rest of a longer one is cut off.
const maxReason = 512

// AppendFailure appends the operation frame of an answer that declines a request whose normal answer has no result. op is the operation
// frame of the request. A client of 0.5.6 fails when the answer names another operation than its request, and logs both names. ok is false
// for earlier clients. They take any answer for success, so they must get no answer.
func AppendFailure(b, op []byte, reason string) (_ []byte, ok bool) {
	name, _, err := msgp.ReadStringZC(op)
	if err != nil {
		return b, false
	}
	reason = strings.ToValidUTF8(reason[:min(len(reason), maxReason)], "")
	return msgp.AppendString(b, string(name)+" failed: "+reason), true
}

// AppendAmbiguous appends a result frame that declines a message with several readings, in a form that the clients of all readings can
// decode. safe is false when no such frame exists. result is false when the right answer has no result frame.
func AppendAmbiguous(b []byte, readings []Reading) (_ []byte, result, safe bool) {
	prepares, others := 0, 0
	for _, r := range readings {
		switch r.Op {
		case OpPrepareStore, OpPrepareRetrieve:
			prepares++
		case OpLookup, OpFreeLookupLocks, OpEndSession, OpQueryPrefetchStatus: // None; of a status it means "ask again"
		default:
			others++
		}
	}
	switch {
	case others > 0 || prepares > 0 && prepares < len(readings):
		return b, false, false
	case prepares == 0:
		return b, false, true
	}
	// A miss, and nothing to store. Fields that a client does not know are ignored.
	b = msgp.AppendMapHeader(b, 3)
	b = msgp.AppendBool(msgp.AppendString(b, "success"), false)
	b = msgp.AppendBytes(msgp.AppendString(b, "data"), nil)
	b = (&Slots{}).append(msgp.AppendMapHeader(msgp.AppendString(b, "context"), 2))
	return msgp.AppendArrayHeader(msgp.AppendString(b, "chunk_indices"), 0), true, true
}

// AppendInt appends one integer: the frame of instance ids, hit counts, sizes.
func AppendInt(b []byte, v int64) []byte { return appendInt(b, v) }

// AppendBool appends one bool.
func AppendBool(b []byte, v bool) []byte { return msgp.AppendBool(b, v) }

// AppendString appends one string.
func AppendString(b []byte, s string) []byte { return msgp.AppendString(b, s) }

// AppendBytes appends one bin value.
func AppendBytes(b, v []byte) []byte { return msgp.AppendBytes(b, v) }

// AppendNil appends nil.
func AppendNil(b []byte) []byte { return msgp.AppendNil(b) }
