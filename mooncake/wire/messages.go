// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Release is the minor version of vLLM whose form a message has: 33 for 0.33. Zero means the newest form when encoding, and any form
// when decoding.
type Release int

// The releases that changed the form of a pull.
const (
	releaseFirst        Release = 16
	releaseBlockLens    Release = 19
	releaseGroups       Release = 20 // one list of block ids per KV cache group
	releaseLayers       Release = 24
	releaseKVBlockLens  Release = 25 // and the groups of regions
	releasePP           Release = 31
	releasePackedRows   Release = 32
	releaseLayoutCache  Release = 33
	latest              Release = releaseLayoutCache
	maxMessageIDs               = 1 << 22 // most block ids in one message; one with more is refused
	maxMessageTransfers         = 1 << 16 // most requests in one message; one with more is refused
	maxMessageRegions           = 1 << 16 // most regions in one message; one with more is refused
)

// BlockSizes reports whether a pull of this release carries the sizes of D's blocks.
func (r Release) BlockSizes() bool { return r.has(releaseBlockLens) }

func (r Release) has(feature Release) bool { return r == 0 || r >= feature }

var (
	// ErrMessage means that a message is not a valid message of the side channel: its structure is wrong, or it exceeds a limit.
	ErrMessage = errors.New("mooncake: bad message")
	errMissing = fmt.Errorf("%w: required field missing", ErrMessage)
)

// Wanted is what a Pull asks for one request.
type Wanted struct {
	TransferID string
	Blocks     [][]int // D's block ids, one list per transferred KV cache group
}

// Pull is D's request to one P worker (MooncakeXferMetadata): where D's memory is, and which blocks P shall fill. On the wire it is one
// msgpack map.
type Pull struct {
	Host    string // of D's transfer engine
	Port    int
	TPSize  int // TP size of D
	TPRank  int
	PPSize  int               // PP size of D; 0 means 1
	Wanted  map[string]Wanted // by D's request id
	Regions []Region          // D's memory; empty when P is expected to know LayoutID

	// LayoutID names Regions, so that later pulls can leave them out; 0 means none.
	LayoutID uint64

	// Release is the newest release whose pulls have only fields that D sent. DecodePull sets it.
	Release Release

	// DeadlineMillis is the number of milliseconds after which a Kvasir D gives the pull up. It has a key that stock peers ignore. 0
	// means a stock D.
	DeadlineMillis int
}

// Status is the state of a pull, as P's reply reports it.
type Status int

// The states of a pull. StatusFinish and StatusError end it.
const (
	StatusFinish     Status = 0
	StatusContinue   Status = 1 // more replies follow
	StatusError      Status = 2 // the whole pull failed
	StatusLayoutMiss Status = 3 // P does not know Pull.LayoutID (0.33)
)

// Reply is P's answer to a Pull (MooncakeXferResponse). A pull gets one or more replies.
type Reply struct {
	Status   Status
	OK       []string // D's request ids whose blocks are filled; nil is left out
	Failed   []string // D's request ids that P does not fill; nil is left out
	Message  string   // why requests failed, for people
	LayoutID uint64   // id of the layout that P has kept; 0 means none

	// Kvasir is true in a reply of a Kvasir P to a Kvasir D, under a key that stock peers ignore. Unknown then lists the requests of
	// the pull whose transfer P does not know yet, and Known those whose transfer P has come to know since.
	Kvasir         bool
	Unknown, Known []string
}

// kvasirKey is the map key of our additions. msgspec ignores unknown keys.
const kvasirKey = "kvasir"

// AppendPull appends the pull in the form of release r. Requests are written in
// the order of their ids.
func AppendPull(b []byte, p *Pull, r Release) []byte {
	type field struct {
		since Release
		name  string
		some  bool // the value is not the default
		put   func()
	}
	n := len(p.Regions)
	layers, groups, shared, rows := false, false, false, false
	indices := false
	for i := range p.Regions {
		g := &p.Regions[i]
		layers = layers || g.Layer != ""
		indices = indices || g.Index != Unsent
		groups = groups || g.Group != Unsent
		shared = shared || g.Shared != nil
		rows = rows || g.RowOffset != Unsent
	}
	uints := func(of func(*Region) uint64) func() {
		return func() {
			b = msgp.AppendArrayHeader(b, uint32(n))
			for i := range p.Regions {
				b = msgp.AppendUint64(b, of(&p.Regions[i]))
			}
		}
	}
	ints := func(of func(*Region) int) func() {
		return func() {
			b = msgp.AppendArrayHeader(b, uint32(n))
			for i := range p.Regions {
				b = appendInt(b, of(&p.Regions[i]))
			}
		}
	}
	fields := []field{
		{0, "remote_hostname", true, func() { b = msgp.AppendString(b, p.Host) }},
		{0, "remote_port", true, func() { b = appendInt(b, p.Port) }},
		{0, "remote_tp_size", true, func() { b = appendInt(b, p.TPSize) }},
		{0, "remote_tp_rank", true, func() { b = appendInt(b, p.TPRank) }},
		{0, "req_blocks", true, func() { b = appendWanted(b, p.Wanted, r) }},
		{0, "kv_caches_base_addr", true, uints(func(g *Region) uint64 { return g.Base })},
		{releaseBlockLens, "block_lens", true, uints(func(g *Region) uint64 { return g.Stride })},
		{releaseKVBlockLens, "kv_block_lens", true, uints(func(g *Region) uint64 { return g.Payload })},
		{releaseLayers, "registered_layer_names", layers, func() {
			b = msgp.AppendArrayHeader(b, uint32(n))
			for i := range p.Regions {
				b = msgp.AppendString(b, p.Regions[i].Layer)
			}
		}},
		{releaseLayers, "registered_layer_indices", indices, ints(func(g *Region) int { return g.Index })},
		{releaseKVBlockLens, "registered_group_indices", groups, ints(func(g *Region) int { return g.Group })},
		{releasePackedRows, "registered_shared_group_ids", shared, func() {
			b = msgp.AppendArrayHeader(b, uint32(n))
			for i := range p.Regions {
				b = appendInts(b, p.Regions[i].Shared)
			}
		}},
		{releasePackedRows, "registered_row_offsets", rows, ints(func(g *Region) int { return g.RowOffset })},
		{releasePP, "remote_pp_size", p.PPSize > 1, func() { b = appendInt(b, p.PPSize) }},
		{releaseLayoutCache, "layout_id", p.LayoutID != 0, func() { b = msgp.AppendUint64(b, p.LayoutID) }},
		{0, kvasirKey, p.DeadlineMillis != 0, func() {
			b = msgp.AppendMapHeader(b, 1)
			b = msgp.AppendString(b, "deadline_ms")
			b = appendInt(b, p.DeadlineMillis)
		}},
	}
	fields = slices.DeleteFunc(fields, func(f field) bool { return !f.some || !r.has(f.since) })
	b = msgp.AppendMapHeader(b, uint32(len(fields)))
	for _, f := range fields {
		b = msgp.AppendString(b, f.name)
		f.put()
	}
	return b
}

func appendWanted(b []byte, wanted map[string]Wanted, r Release) []byte {
	b = msgp.AppendMapHeader(b, uint32(len(wanted)))
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		w := wanted[id]
		b = msgp.AppendString(b, id)
		b = msgp.AppendArrayHeader(b, 2)
		b = msgp.AppendString(b, w.TransferID)
		if !r.has(releaseGroups) {
			b = appendInts(b, slices.Concat(w.Blocks...))
			continue
		}
		b = msgp.AppendArrayHeader(b, uint32(len(w.Blocks)))
		for _, group := range w.Blocks {
			b = appendInts(b, group)
		}
	}
	return b
}

// appendInt appends v in its shortest form, as msgspec does.
func appendInt(b []byte, v int) []byte {
	if v >= 0 {
		return msgp.AppendUint64(b, uint64(v))
	}
	return msgp.AppendInt64(b, int64(v))
}

func appendInts(b []byte, list []int) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for _, v := range list {
		b = appendInt(b, v)
	}
	return b
}

// DecodePull decodes a pull in the form of release r; 0 accepts any release. Fields that an old release does not send get the meaning
// they had there (one group, payloads of whole strides). The error wraps ErrMessage and names the field.
func DecodePull(b []byte, r Release) (*Pull, error) {
	d := decoder{ids: maxMessageIDs}
	var w rawPull
	need := map[string]Release{
		"remote_hostname": 0, "remote_port": 0, "remote_tp_size": 0, "remote_tp_rank": 0, "req_blocks": 0,
		"kv_caches_base_addr": 0, "block_lens": releaseBlockLens, "kv_block_lens": releaseKVBlockLens,
	}
	err := d.message(b, func(name string, v []byte) ([]byte, error) {
		delete(need, name)
		return w.field(&d, name, v)
	})
	if err != nil {
		return nil, err
	}
	for name, since := range need {
		if r != 0 && r >= since || since == 0 {
			return nil, fmt.Errorf("%w `%s`", errMissing, name)
		}
	}
	p, err := w.pull()
	if err == nil {
		p.Release = w.release(d.flat)
	}
	return p, err
}

// rawPull holds the parallel lists of a pull as they are on the wire.
type rawPull struct {
	p                     Pull
	bases, strides, loads []uint64
	layers                []string
	indices, groups, rows []int
	shared                [][]int
}

func (w *rawPull) field(d *decoder, name string, v []byte) (rest []byte, err error) {
	p := &w.p
	switch name {
	case "remote_hostname":
		p.Host, rest, err = d.name(v)
	case "remote_port":
		p.Port, rest, err = d.integer(v, 0, 65535)
	case "remote_tp_size":
		p.TPSize, rest, err = d.integer(v, 1, 1<<16)
	case "remote_tp_rank":
		p.TPRank, rest, err = d.integer(v, 0, 1<<16)
	case "remote_pp_size":
		p.PPSize, rest, err = d.integer(v, 1, 1<<16)
	case "req_blocks":
		p.Wanted, rest, err = d.readWanted(v)
	case "kv_caches_base_addr":
		w.bases, rest, err = list(v, maxMessageRegions, d.unsigned)
	case "block_lens":
		w.strides, rest, err = list(v, maxMessageRegions, d.unsigned)
	case "kv_block_lens":
		w.loads, rest, err = list(v, maxMessageRegions, d.unsigned)
	case "registered_layer_names":
		w.layers, rest, err = list(v, maxMessageRegions, d.name)
	case "registered_layer_indices":
		w.indices, rest, err = list(v, maxMessageRegions, d.signed)
	case "registered_group_indices":
		w.groups, rest, err = list(v, maxMessageRegions, d.signed)
	case "registered_row_offsets":
		w.rows, rest, err = list(v, maxMessageRegions, d.signed)
	case "registered_shared_group_ids":
		w.shared, rest, err = list(v, maxMessageRegions, d.numbers)
	case "layout_id":
		p.LayoutID, rest, err = d.unsigned(v)
	case kvasirKey:
		rest, err = d.object(v, func(name string, v []byte) (rest []byte, err error) {
			if name == "deadline_ms" {
				p.DeadlineMillis, rest, err = d.integer(v, 1, 1<<31-1)
				return rest, err
			}
			return d.skip(v)
		})
	default:
		return d.skip(v)
	}
	return rest, err
}

// release returns the newest release whose pulls would have no further fields. flat means that block ids came without groups.
func (w *rawPull) release(flat bool) Release {
	switch {
	case len(w.bases) == 0:
		return latest // the pull names its layout by id
	case len(w.strides) == 0:
		return releaseBlockLens - 1
	case flat:
		return releaseGroups - 1
	case len(w.layers) == 0:
		return releaseLayers - 1
	case len(w.groups) == 0:
		return releaseKVBlockLens - 1
	}
	return latest
}

func (w *rawPull) pull() (*Pull, error) {
	n := len(w.bases)
	for name, got := range map[string]int{
		"block_lens": len(w.strides), "kv_block_lens": len(w.loads), "registered_layer_names": len(w.layers),
		"registered_layer_indices": len(w.indices), "registered_group_indices": len(w.groups),
		"registered_shared_group_ids": len(w.shared), "registered_row_offsets": len(w.rows),
	} {
		if got != 0 && got != n {
			return nil, fmt.Errorf("%w: %d bases, but %d %s", ErrMessage, n, got, name)
		}
	}
	w.p.PPSize = max(w.p.PPSize, 1)
	w.p.Regions = make([]Region, n)
	for i := range w.p.Regions {
		g := Region{
			Base: w.bases[i], Index: at(w.indices, i, Unsent), Group: at(w.groups, i, Unsent),
			Layer: at(w.layers, i, ""), Shared: at(w.shared, i, nil), RowOffset: at(w.rows, i, Unsent),
		}
		g.Stride = at(w.strides, i, 0)
		g.Payload = at(w.loads, i, g.Stride)
		w.p.Regions[i] = g
	}
	return &w.p, nil
}

// at returns list[i], or `missing` when the list is shorter.
func at[T any](list []T, i int, missing T) T {
	if i < len(list) {
		return list[i]
	}
	return missing
}

// AppendReply appends the reply.
func AppendReply(b []byte, y *Reply) []byte {
	n := uint32(1)
	for _, some := range []bool{y.OK != nil, y.Failed != nil, y.Message != "", y.LayoutID != 0, y.Kvasir} {
		if some {
			n++
		}
	}
	b = msgp.AppendMapHeader(b, n)
	b = msgp.AppendString(b, "status")
	b = appendInt(b, int(y.Status))
	if y.OK != nil {
		b = appendStrings(msgp.AppendString(b, "ok_reqs"), y.OK)
	}
	if y.Failed != nil {
		b = appendStrings(msgp.AppendString(b, "err_reqs"), y.Failed)
	}
	if y.Message != "" {
		b = msgp.AppendString(msgp.AppendString(b, "err_msg"), y.Message)
	}
	if y.LayoutID != 0 {
		b = msgp.AppendUint64(msgp.AppendString(b, "layout_id"), y.LayoutID)
	}
	if y.Kvasir {
		b = msgp.AppendMapHeader(msgp.AppendString(b, kvasirKey), 2)
		b = appendStrings(msgp.AppendString(b, "unknown"), y.Unknown)
		b = appendStrings(msgp.AppendString(b, "known"), y.Known)
	}
	return b
}

func appendStrings(b []byte, list []string) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(list)))
	for _, s := range list {
		b = msgp.AppendString(b, s)
	}
	return b
}

// DecodeReply decodes a reply in the form of release r; 0 accepts any release.
func DecodeReply(b []byte, r Release) (*Reply, error) {
	d := decoder{ids: maxMessageIDs}
	var y Reply
	last, seen := StatusError, false
	if r.has(releaseLayoutCache) {
		last = StatusLayoutMiss
	}
	err := d.message(b, func(name string, v []byte) (rest []byte, err error) {
		switch name {
		case "status":
			seen = true
			var s int
			s, rest, err = d.integer(v, 0, int(last))
			y.Status = Status(s)
		case "ok_reqs":
			y.OK, rest, err = d.optionalStrings(v)
		case "err_reqs":
			y.Failed, rest, err = d.optionalStrings(v)
		case "err_msg":
			if msgp.IsNil(v) {
				return v[1:], nil
			}
			y.Message, rest, err = d.text(v)
		case "layout_id":
			y.LayoutID, rest, err = d.unsigned(v)
		case kvasirKey:
			rest, err = d.replyExtra(v, &y)
		default:
			return d.skip(v)
		}
		return rest, err
	})
	switch {
	case err != nil:
		return nil, err
	case !seen:
		return nil, fmt.Errorf("%w `status`", errMissing)
	}
	return &y, nil
}

func (d *decoder) replyExtra(v []byte, y *Reply) ([]byte, error) {
	y.Kvasir = true
	return d.object(v, func(name string, v []byte) (rest []byte, err error) {
		switch name {
		case "unknown":
			y.Unknown, rest, err = list(v, maxMessageTransfers, d.text)
		case "known":
			y.Known, rest, err = list(v, maxMessageTransfers, d.text)
		default:
			return d.skip(v)
		}
		return rest, err
	})
}
