// SPDX-License-Identifier: Apache-2.0

// Package event has the records of vLLM's KV event stream and their msgpack, as vLLM
// 0.32 (maps) and releases before 0.24 (arrays) publish them:
//
//	batch        [ts float64, [event ...], data_parallel_rank or nil, epoch]
//	map event    {"type": "BlockStored", "block_hashes": [...], ...}
//	array event  ["BlockStored", block_hashes, ...]
//	message      topic | sequence, 8 B big-endian | batch
//
// Only Kvasir sends epoch: a number that differs for each life of a publisher. vLLM's readers, and readers that
// follow it, skip elements that they do not know.
package event

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// Kind says what an event reports.
type Kind uint8

// The kinds.
const (
	Stored  Kind = iota + 1 // blocks can be read from Medium
	Removed                 // blocks are no longer in Medium
	Cleared                 // all announced blocks are gone
)

var names = [...]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}

// String returns the kind's name on the wire.
func (k Kind) String() string {
	if int(k) < len(names) && names[k] != "" {
		return names[k]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// The media.
const (
	GPU     = "GPU"
	CPU     = "CPU"     // memory of the host
	Storage = "STORAGE" // disks and servers below the host's memory
)

// Event is one event. Removed uses only Hashes, Medium and Group, Cleared no field.
type Event struct {
	Kind        Kind
	Hashes      [][]byte // of blocks that follow each other in a prompt; an integer hash is its 8 bytes, big-endian
	Parent      []byte   // hash of the block before the first of Hashes; nil if that is the prompt's first block
	Tokens      []int64  // BlockTokens for each hash
	Encoded     []byte   // when encoding: the msgpack array that is sent instead of Tokens
	BlockTokens int
	LoRA        string
	Medium      string

	// Salt is the cache_salt in the extra keys of the first block. When decoding, it is the last
	// string of those keys that is not LoRA's name.
	Salt string

	Group int // index of the KV cache group; -1 if the publisher does not name it
}

// Batch is the content of one message.
type Batch struct {
	Time   float64 // unix seconds
	Events []Event
	Rank   int    // data-parallel rank; -1 for none
	Epoch  uint64 // 0 for none
}

// Encoding says how events are written.
type Encoding struct {
	Arrays    bool // write events as arrays, as vLLM before 0.24 did
	IntHashes bool // write a hash as an integer: its last 8 bytes
}

// Append appends a batch. It writes the salt of a Stored event into the extra keys of the first block.
func (e Encoding) Append(b []byte, batch *Batch) []byte {
	n := uint32(3)
	if batch.Epoch != 0 {
		n = 4
	}
	b = msgp.AppendArrayHeader(b, n)
	b = msgp.AppendFloat64(b, batch.Time)
	b = msgp.AppendArrayHeader(b, uint32(len(batch.Events)))
	for i := range batch.Events {
		b = e.appendEvent(b, &batch.Events[i])
	}
	if batch.Rank < 0 {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint64(b, uint64(batch.Rank))
	}
	if batch.Epoch != 0 {
		b = msgp.AppendUint64(b, batch.Epoch)
	}
	return b
}

func (e Encoding) appendEvent(b []byte, ev *Event) []byte {
	f := fields{b: b, arrays: e.Arrays}
	switch ev.Kind {
	case Stored:
		extra, group := ev.Salt != "" || ev.LoRA != "", ev.Group >= 0
		f.begin(Stored, 7, extra, group)
		e.hashes(&f, ev.Hashes)
		f.name("parent_block_hash")
		if ev.Parent == nil {
			f.b = msgp.AppendNil(f.b)
		} else {
			f.b = e.appendHash(f.b, ev.Parent)
		}
		f.name("token_ids")
		if ev.Encoded != nil {
			f.b = append(f.b, ev.Encoded...)
		} else {
			f.b = AppendTokens(f.b, ev.Tokens)
		}
		f.name("block_size")
		f.b = msgp.AppendUint64(f.b, uint64(ev.BlockTokens))
		f.name("lora_id")
		f.b = msgp.AppendNil(f.b)
		f.text("medium", ev.Medium)
		f.text("lora_name", ev.LoRA)
		if extra {
			f.name("extra_keys")
			f.b = appendExtra(f.b, ev)
		}
		f.group(ev.Group, extra)
	case Removed:
		f.begin(Removed, 2, false, ev.Group >= 0)
		e.hashes(&f, ev.Hashes)
		f.text("medium", ev.Medium)
		f.group(ev.Group, true)
	default:
		f.begin(Cleared, 0, false, false)
	}
	return f.b
}

// appendExtra writes the extra keys, one entry per block: the LoRA name for each block, and the salt for the first.
func appendExtra(b []byte, ev *Event) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(ev.Hashes)))
	for i := range ev.Hashes {
		salted := ev.Salt != "" && i == 0
		switch {
		case ev.LoRA == "" && !salted:
			b = msgp.AppendNil(b)
			continue
		case ev.LoRA != "" && salted:
			b = msgp.AppendArrayHeader(b, 2)
		default:
			b = msgp.AppendArrayHeader(b, 1)
		}
		if ev.LoRA != "" {
			b = msgp.AppendString(b, ev.LoRA)
		}
		if salted {
			b = msgp.AppendString(b, ev.Salt)
		}
	}
	return b
}

func (e Encoding) hashes(f *fields, hashes [][]byte) {
	f.name("block_hashes")
	f.b = msgp.AppendArrayHeader(f.b, uint32(len(hashes)))
	for _, h := range hashes {
		f.b = e.appendHash(f.b, h)
	}
}

func (e Encoding) appendHash(b, h []byte) []byte {
	if e.IntHashes && len(h) >= 8 {
		return msgp.AppendUint64(b, binary.BigEndian.Uint64(h[len(h)-8:]))
	}
	return msgp.AppendBytes(b, h)
}

// AppendTokens appends tokens as a msgpack array of shortest-form integers.
func AppendTokens(b []byte, tokens []int64) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		if t < 0 {
			b = msgp.AppendInt64(b, t)
		} else {
			b = msgp.AppendUint64(b, uint64(t))
		}
	}
	return b
}

// fields writes the fields of one event in either encoding.
type fields struct {
	b      []byte
	arrays bool
}

// begin writes the header and the type of an event with n fields and, if extra or group is set, with these optional fields. In a Stored
// array, group_idx follows the extra keys, or nil in their place.
func (f *fields) begin(k Kind, n uint32, extra, group bool) {
	switch {
	case f.arrays && group && k == Stored:
		n += 2
	case f.arrays && (extra || group):
		n++
	default:
		for _, is := range []bool{extra, group} {
			if is {
				n++
			}
		}
	}
	if f.arrays {
		f.b = msgp.AppendArrayHeader(f.b, n+1)
	} else {
		f.b = msgp.AppendMapHeader(f.b, n+1)
		f.b = msgp.AppendString(f.b, "type")
	}
	f.b = msgp.AppendString(f.b, k.String())
}

func (f *fields) name(s string) {
	if !f.arrays {
		f.b = msgp.AppendString(f.b, s)
	}
}

// text writes a string, or nil for an empty one.
func (f *fields) text(name, s string) {
	f.name(name)
	if s == "" {
		f.b = msgp.AppendNil(f.b)
		return
	}
	f.b = msgp.AppendString(f.b, s)
}

// group writes group_idx, the last field. In an array without extra keys it first writes nil in their place.
func (f *fields) group(i int, extra bool) {
	if i < 0 {
		return
	}
	if f.arrays && !extra {
		f.b = msgp.AppendNil(f.b)
	}
	f.name("group_idx")
	f.b = msgp.AppendUint64(f.b, uint64(i))
}

// Limits on a batch; Decode refuses a larger one with ErrBatch.
const (
	maxEvents = 1 << 16 // events of a batch
	maxTokens = 1 << 24 // tokens of an event
)

// ErrBatch means that a payload is no batch of events.
var ErrBatch = errors.New("event: not a batch of KV events")

// Decode reads a batch in either encoding. Like vLLM's own classes, it refuses the whole batch
// with ErrBatch if one event is bad. The hashes of the batch alias payload.
func Decode(payload []byte) (batch Batch, err error) {
	batch.Rank = -1
	d := decoder{b: payload}
	n := d.array()
	if n < 2 {
		d.fail("the batch has %d elements, at least 2 are needed", n)
	}
	batch.Time = d.number()
	events := d.array()
	if events > maxEvents {
		d.fail("the batch has %d events, at most %d are possible", events, maxEvents)
	}
	for i := 0; i < events && d.err == nil; i++ {
		batch.Events = append(batch.Events, d.event())
	}
	if n > 2 && !d.isNil() {
		batch.Rank = int(d.integer(math.MaxInt32))
	}
	if n > 3 && d.err == nil {
		if t := msgp.NextType(d.b); t == msgp.UintType || t == msgp.IntType {
			batch.Epoch = d.unsigned()
		} else {
			d.skip()
		}
	}
	for i := 4; i < n && d.err == nil; i++ {
		d.skip()
	}
	if d.err == nil && len(d.b) > 0 {
		d.fail("%d bytes follow the batch", len(d.b))
	}
	if d.err != nil {
		return Batch{}, fmt.Errorf("%w: %w", ErrBatch, d.err)
	}
	return batch, nil
}
