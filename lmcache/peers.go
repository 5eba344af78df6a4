// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// MaxObjectKeys bounds the keys that one peer-to-peer operation may name. An operation with more is an error.
const MaxObjectKeys = 1 << 16

// ObjectKey is LMCache's name of one object: a chunk of one shard and object group. Model
// and Salt alias the frame that it was decoded from.
type ObjectKey struct {
	Chunk kv.Hash
	Model []byte
	Rank  kv.Rank
	Group uint32
	Salt  []byte
}

// Append appends the key as a msgpack map, fields in declaration order.
func (k *ObjectKey) Append(b []byte) []byte {
	b = msgp.AppendMapHeader(b, 5)
	b = msgp.AppendBytes(msgp.AppendString(b, "chunk_hash"), k.Chunk[:])
	b = msgp.AppendStringFromBytes(msgp.AppendString(b, "model_name"), k.Model)
	b = appendInt(msgp.AppendString(b, "kv_rank"), int64(k.Rank))
	b = appendInt(msgp.AppendString(b, "object_group_id"), int64(k.Group))
	return msgp.AppendStringFromBytes(msgp.AppendString(b, "cache_salt"), k.Salt)
}

// decodeObjectKeys reads a list of ObjectKey, the first payload of the peer-to-peer operations. A key takes 88 bytes of memory, and more
// than 88 in the message.
func decodeObjectKeys(frame []byte) ([]ObjectKey, error) {
	n, _, err := readArray(frame)
	if err != nil {
		return nil, err
	}
	if n > MaxObjectKeys {
		return nil, fmt.Errorf("lmcache: %d object keys, more than %d", n, MaxObjectKeys)
	}
	var keys []ObjectKey // grows with what is there: a count may promise more
	rest, err := readList(frame, func(_ int, b []byte) ([]byte, error) {
		var k ObjectKey
		rest, err := k.decode(b)
		keys = append(keys, k)
		return rest, err
	})
	return keys, noRest(rest, err)
}

func (k *ObjectKey) decode(b []byte) ([]byte, error) {
	hashed, ranked := false, false
	rest, err := readMap(b, func(name, b []byte) (rest []byte, err error) {
		var n int64
		switch string(name) {
		case "chunk_hash":
			var hash []byte
			if hash, rest, err = msgp.ReadBytesZC(b); err == nil && len(hash) != len(k.Chunk) {
				err = fmt.Errorf("lmcache: a chunk hash of %d bytes, %d are needed", len(hash), len(k.Chunk))
			}
			copy(k.Chunk[:], hash)
			hashed = true
		case "model_name":
			if k.Model, rest, err = msgp.ReadStringZC(b); err == nil && len(k.Model) > maxModelBytes {
				err = fmt.Errorf("lmcache: model_name is longer than %d bytes", maxModelBytes)
			}
		case "kv_rank":
			n, rest, err = readUint32(b)
			k.Rank, ranked = kv.Rank(n), true
		case "object_group_id":
			n, rest, err = readUint32(b)
			k.Group = uint32(n)
		case "cache_salt":
			k.Salt, rest, err = msgp.ReadStringZC(b)
		default:
			return b, nil
		}
		return rest, err
	})
	switch {
	case err != nil:
		return rest, err
	case !hashed || !ranked || k.Model == nil:
		return rest, fmt.Errorf("%w: an object key needs chunk_hash, model_name and kv_rank", ErrMissing)
	}
	return rest, kv.CheckSalt(string(k.Salt))
}

func readUint32(b []byte) (int64, []byte, error) {
	n, rest, err := readInt(b)
	if err == nil && (n < 0 || n > 1<<32-1) {
		err = fmt.Errorf("lmcache: %d does not fit into 32 bits", n)
	}
	return n, rest, err
}

// PeerPlace is where a peer finds an object: Offset bytes from the pool's start, Size bytes long. For an object that the pool does not
// have, Offset is -1 and Size 0.
type PeerPlace struct{ Offset, Size int64 }

// NotHeld is the PeerPlace of an object that the pool does not have.
var NotHeld = PeerPlace{Offset: -1}

// AppendPeerPlaces appends the result of p2p_query_lookup_results, one place for each key
// of the lookup.
func AppendPeerPlaces(b []byte, places []PeerPlace) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(places)))
	for _, p := range places {
		b = msgp.AppendMapHeader(b, 2)
		b = appendInt(msgp.AppendString(b, "offset"), p.Offset)
		b = appendInt(msgp.AppendString(b, "size"), p.Size)
	}
	return b
}
