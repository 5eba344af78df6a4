// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// KVEventStream is the name in the answer to get_experimental that says that subscribe_kv_events is served.
const KVEventStream = "kv_event_stream"

// MaxKVEvents bounds the events of one batch, as 0.5.6 does. A subscribe_kv_events that asks for more is an error.
const MaxKVEvents = 1024

// What a client sends on a stream, under the uid of its subscription: an empty operation frame, then one of these words.
const (
	StreamAck    = "ack"    // the client has consumed a batch: the server may send the next
	StreamCancel = "cancel" // the client wants no more batches
)

// KVEventBatch is one message of a stream that subscribe_kv_events opened.
type KVEventBatch struct {
	Enabled     bool
	Incarnation uint64 // number of the server's life: another one after each start
	NextCursor  uint64
	Lost        bool // events before these were lost: the client must forget everything that was announced
	Events      []KVEventRecord
}

// KVEventRecord is one event of a batch. The medium in the message is always CPU.
type KVEventRecord struct {
	Seq     uint64
	Removed bool
	Model   string
	Hashes  []kv.Hash // stored: exactly one
	Parent  []byte    // stored: the hash of the chunk before; nil for the first chunk
	Tokens  []byte    // stored: the chunk's tokens as an encoded array; nil: an empty array
}

// Append appends the result frame.
func (e *KVEventBatch) Append(b []byte) []byte {
	b = msgp.AppendMapHeader(b, 5)
	b = msgp.AppendBool(msgp.AppendString(b, "enabled"), e.Enabled)
	b = msgp.AppendUint64(msgp.AppendString(b, "incarnation"), e.Incarnation)
	b = msgp.AppendUint64(msgp.AppendString(b, "next_cursor"), e.NextCursor)
	b = msgp.AppendBool(msgp.AppendString(b, "lost"), e.Lost)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "events"), uint32(len(e.Events)))
	for i := range e.Events {
		b = e.Events[i].append(b)
	}
	return b
}

func (r *KVEventRecord) append(b []byte) []byte {
	b = msgp.AppendMapHeader(b, 7)
	b = msgp.AppendUint64(msgp.AppendString(b, "seq"), r.Seq)
	kind := "stored"
	if r.Removed {
		kind = "removed"
	}
	b = msgp.AppendString(msgp.AppendString(b, "kind"), kind)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "CPU")
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), r.Model)
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(r.Hashes)))
	for i := range r.Hashes {
		b = msgp.AppendBytes(b, r.Hashes[i][:])
	}
	b = msgp.AppendString(b, "parent_block_hash")
	if r.Parent == nil {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendBytes(b, r.Parent)
	}
	b = msgp.AppendString(b, "token_ids")
	if r.Tokens == nil {
		return msgp.AppendArrayHeader(b, 0)
	}
	return append(b, r.Tokens...)
}

// DecodeKVEventBatch reads a result frame. Its byte slices alias the frame.
func DecodeKVEventBatch(frame []byte) (e KVEventBatch, err error) {
	rest, err := readMap(frame, func(name, b []byte) (rest []byte, err error) {
		switch string(name) {
		case "enabled":
			return boolInto(&e.Enabled, b)
		case "incarnation":
			e.Incarnation, rest, err = msgp.ReadUint64Bytes(b)
		case "next_cursor":
			e.NextCursor, rest, err = msgp.ReadUint64Bytes(b)
		case "lost":
			return boolInto(&e.Lost, b)
		case "events":
			return readList(b, func(_ int, b []byte) ([]byte, error) {
				var r KVEventRecord
				rest, err := r.read(b)
				e.Events = append(e.Events, r)
				return rest, err
			})
		default:
			return b, nil
		}
		return rest, err
	})
	return e, noRest(rest, err)
}

func (r *KVEventRecord) read(b []byte) ([]byte, error) {
	return readMap(b, func(name, b []byte) (rest []byte, err error) {
		switch string(name) {
		case "seq":
			r.Seq, rest, err = msgp.ReadUint64Bytes(b)
			return rest, err
		case "kind":
			var kind string
			rest, err = stringInto(&kind, b)
			r.Removed = kind == "removed"
			if err == nil && !r.Removed && kind != "stored" {
				err = fmt.Errorf("lmcache: an event of kind %q, which is neither stored nor removed", kind)
			}
			return rest, err
		case "model_name":
			return stringInto(&r.Model, b)
		case "block_hashes":
			return readList(b, func(_ int, b []byte) ([]byte, error) {
				h, rest, err := msgp.ReadBytesZC(b)
				if err == nil && len(h) != len(kv.Hash{}) {
					err = fmt.Errorf("lmcache: a block hash of %d bytes, %d are needed", len(h), len(kv.Hash{}))
				}
				if err == nil {
					r.Hashes = append(r.Hashes, kv.Hash(h))
				}
				return rest, err
			})
		case "parent_block_hash":
			if msgp.NextType(b) == msgp.NilType {
				return b, nil
			}
			r.Parent, rest, err = msgp.ReadBytesZC(b)
			return rest, err
		case "token_ids":
			if rest, err = msgp.Skip(b); err == nil {
				r.Tokens = b[:len(b)-len(rest)]
			}
			return rest, err
		}
		return b, nil
	})
}

// AppendExperimental appends the result of get_experimental.
func AppendExperimental(b []byte, names ...string) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(names)))
	for _, n := range names {
		b = msgp.AppendString(b, n)
	}
	return b
}

func decodeSubscribe(p [][]byte) (*SubscribeRequest, error) {
	r := &SubscribeRequest{}
	var err error
	if r.InstanceID, err = named("instance_id", DecodeInt, p[0]); err != nil {
		return r, err
	}
	if r.Model, err = named("model_name", decodeString, p[1]); err != nil {
		return r, err
	}
	cursor, err := named("cursor", DecodeInt, p[2])
	if err != nil {
		return r, err
	}
	most, err := named("max_events", DecodeInt, p[3])
	if err != nil {
		return r, err
	}
	if cursor < 0 || most < 1 || most > MaxKVEvents || len(r.Model) > maxModelBytes {
		return r, fmt.Errorf("subscribe_kv_events: cursor %d is below 0, max_events %d is outside 1 to %d, or model_name has %d bytes, more than %d", cursor, most, MaxKVEvents, len(r.Model), maxModelBytes)
	}
	r.Cursor, r.MaxEvents = uint64(cursor), int(most)
	return r, nil
}
