// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/kv"
)

// Limits on a key's fields. A key beyond one of the last three is ErrKey.
const (
	MaxKVReaders    = 128     // LMCache clamps num_kv_readers to 1..128
	maxModelBytes   = 1024    // bytes of model_name
	MaxRequestBytes = 1024    // bytes of request_id
	MaxTokens       = 1 << 24 // tokens of token_ids or token_bytes
)

// Key is LMCache's IPCCacheServerKey as a client builds it. Tokens is the whole
// prompt from token 0; the call concerns tokens [Start, End).
type Key struct {
	Model     string
	WorldSize int // number of KV shards per chunk
	Worker    int // number of the shard, or AllWorkers
	Tokens    []uint32
	Start     int // multiple of the chunk size
	End       int // exclusive; multiple of the chunk size except for lookup
	RequestID string
	Salt      string
	Readers   int  // num_kv_readers: how many pins a lookup takes on each object
	Packed    bool // tokens are sent as token_bytes, for servers of 0.5.7; else as token_ids
	SkipLoad  bool // the lookup must find nothing: request_configs has lmcache.skip_load
}

// AllWorkers is the Worker of a scheduler's key: all shards (nil on the wire).
const AllWorkers = -1

// Append appends the key as a msgpack map, fields in declaration order.
func (k *Key) Append(b []byte) []byte {
	b = msgp.AppendMapHeader(b, 10)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), k.Model)
	b = appendInt(msgp.AppendString(b, "world_size"), k.WorldSize)
	b = msgp.AppendString(b, "worker_id")
	if k.Worker == AllWorkers {
		b = msgp.AppendNil(b)
	} else {
		b = appendInt(b, k.Worker)
	}
	if k.Packed {
		b = AppendPackedTokens(msgp.AppendString(b, "token_bytes"), k.Tokens)
	} else {
		b = AppendTokens(msgp.AppendString(b, "token_ids"), k.Tokens)
	}
	b = appendInt(msgp.AppendString(b, "start"), k.Start)
	b = appendInt(msgp.AppendString(b, "end"), k.End)
	b = msgp.AppendString(msgp.AppendString(b, "request_id"), k.RequestID)
	b = msgp.AppendString(msgp.AppendString(b, "cache_salt"), k.Salt)
	if b = msgp.AppendString(b, "request_configs"); k.SkipLoad {
		b = msgp.AppendBool(msgp.AppendString(msgp.AppendMapHeader(b, 1), "lmcache.skip_load"), true)
	} else {
		b = msgp.AppendNil(b)
	}
	return appendInt(msgp.AppendString(b, "num_kv_readers"), k.Readers)
}

// KeyView is a decoded key. Its byte slices alias the frame. Hashes belongs to the KeyView; the next decode overwrites it.
type KeyView struct {
	Model     []byte
	WorldSize int
	Worker    int // or AllWorkers
	NumTokens int
	Chunks    int       // complete chunks of the token list
	Hashes    []kv.Hash // of the leading chunks: those that the Memo remembers, and those computed by Memo.Hash
	Start     int       // in a lookup and a free_lookup_locks it may be above End; -1 stands for any negative number
	End       int
	Packed    bool // the tokens came as token_bytes, as 0.5.7 sends them
	RequestID []byte
	Salt      []byte
	Readers   int  // num_kv_readers, or ReadersUnsaid
	SkipSave  bool // request_configs has lmcache.skip_save: the server must store nothing of the request
	SkipLoad  bool // request_configs has lmcache.skip_load: the server must find nothing for the request
	Tags      []Tag

	TTL    time.Duration // request_configs has lmcache.ttl: how long the objects that the request stores are served; 0: no limit
	BadTTL bool          // request_configs has an lmcache.ttl that is no time from MinTTL to MaxTTL; TTL is 0

	unasked  bool   // the caller needs no hash
	unhashed []byte // the encoded tokens after Hashes
	ends     []int  // where each chunk of Hashes ends in tokens
	tokens   []byte // all encoded tokens, and what follows them
}

// Tag is an entry lmcache.tag.NAME of request_configs, whose value is a string.
type Tag struct{ Name, Value []byte }

// MaxTags bounds the tags of a request, and MaxTagBytes the name and the value of a tag. Tags beyond these limits are skipped.
const (
	MaxTags     = 8
	MaxTagBytes = 64
)

// MinTTL and MaxTTL bound the value of lmcache.ttl. For another value KeyView.TTL is 0 and BadTTL is true.
const (
	MinTTL = time.Millisecond
	MaxTTL = 10 * 365 * 24 * time.Hour
)

// ReadersUnsaid is KeyView.Readers for a key without num_kv_readers. Clients before 0.5.5 send such keys.
const ReadersUnsaid = -1

// ReadersOf returns how many pins per object a lookup takes, or a free_lookup_locks releases. Clients before 0.5.5 send the size of their
// tensor parallelism (tensorParallel) instead. That size is the number of pins if the ranks of one shard share its objects: with a single
// plane (MLA), or when there are fewer shards than ranks. Otherwise the number is 1.
func (k *KeyView) ReadersOf(tensorParallel int64, singlePlane bool) int {
	if k.Readers != ReadersUnsaid {
		return k.Readers
	}
	if singlePlane || tensorParallel > int64(k.WorldSize) {
		return int(min(max(tensorParallel, 1), MaxKVReaders))
	}
	return 1
}

// ErrKey means that the fields of a key contradict each other or exceed a limit.
var ErrKey = errors.New("lmcache: bad key")

// key fields seen, as bits
const (
	seenModel = 1 << iota
	seenWorld
	seenWorker
	seenTokens
	seenStart
	seenEnd
	seenRequest
	seenAll = 1<<iota - 1
)

// DecodeKey reads a key frame into k. It checks the whole token list, and hashes only the leading
// chunks that the Memo remembers. Hash computes the other hashes that a caller needs.
func (m *Memo) DecodeKey(frame []byte, k *KeyView) error { return m.decodeKey(frame, k, true) }

// decodeKey is DecodeKey. Without hashed, the caller needs no hashes, and packed tokens are not compared with those that the Memo
// remembers. Msgpack integers are compared in any case: a comparison also checks them, and costs less than reading each.
func (m *Memo) decodeKey(frame []byte, k *KeyView, hashed bool) error {
	*k = KeyView{Hashes: k.Hashes[:0], ends: k.ends[:0], Tags: k.Tags[:0], Worker: AllWorkers, Readers: ReadersUnsaid, unasked: !hashed}
	n, b, err := msgp.ReadMapHeaderBytes(frame)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrKey, err)
	}
	seen := 0
	for range n {
		var name []byte
		if name, b, err = msgp.ReadMapKeyZC(b); err != nil {
			return fmt.Errorf("%w: %w", ErrKey, err)
		}
		var bit int
		if b, bit, err = m.decodeKeyField(name, b, k); err != nil {
			return fmt.Errorf("%w: %s: %w", ErrKey, name, err)
		}
		seen |= bit
	}
	if len(b) != 0 {
		return fmt.Errorf("%w: %w", ErrKey, ErrTrailing)
	}
	if seen != seenAll {
		return fmt.Errorf("%w: %w (a 1 in %07b is a field that is there, from the right: model_name, world_size, worker_id, token_ids or token_bytes, start, end, request_id)", ErrKey, ErrMissing, seen)
	}
	return k.check()
}

func (m *Memo) decodeKeyField(name, b []byte, k *KeyView) (rest []byte, bit int, err error) {
	switch string(name) {
	case "model_name":
		k.Model, rest, err = msgp.ReadStringZC(b)
		bit = seenModel
	case "world_size":
		k.WorldSize, rest, err = readCount(b, kv.MaxWorldSize)
		bit = seenWorld
	case "worker_id":
		bit = seenWorker
		if msgp.NextType(b) == msgp.NilType {
			return b[1:], bit, nil
		}
		k.Worker, rest, err = readCount(b, kv.MaxWorldSize)
	case "token_ids":
		bit = seenTokens
		if k.Packed { // the key has token_bytes and token_ids, which mean the same tokens
			rest, err = msgp.Skip(b)
			break
		}
		rest, err = m.readKeyTokens(b, k)
	case "token_bytes":
		rest, err = m.readPackedTokens(b, k)
		bit = seenTokens
	case "start":
		var n int64
		if n, rest, err = readInt(b); n > MaxTokens {
			err = fmt.Errorf("lmcache: %d is above %d", n, MaxTokens)
		}
		k.Start = int(max(n, -1))
		bit = seenStart
	case "end":
		k.End, rest, err = readCount(b, MaxTokens)
		bit = seenEnd
	case "request_id":
		k.RequestID, rest, err = msgp.ReadStringZC(b)
		bit = seenRequest
	case "cache_salt":
		k.Salt, rest, err = msgp.ReadStringZC(b)
	case "num_kv_readers":
		var n int64
		n, rest, err = readInt(b)
		k.Readers = int(min(max(n, 0), MaxKVReaders))
	case "request_configs":
		rest, err = readRequestConfigs(b, k)
	default: // fields of later releases
		rest, err = msgp.Skip(b)
	}
	return rest, bit, err
}

// tagPrefix is the beginning of a tag's key in request_configs (lmcache 0.5.6, utils.py).
const tagPrefix = "lmcache.tag."

// readRequestConfigs reads the settings of a request: lmcache.skip_save, lmcache.skip_load, lmcache.ttl and tags. It skips all other
// entries, of any type.
func readRequestConfigs(b []byte, k *KeyView) ([]byte, error) {
	rest, err := msgp.Skip(b)
	if err != nil || msgp.NextType(b) != msgp.MapType {
		return rest, err
	}
	_, _ = readMap(b, func(name, b []byte) ([]byte, error) {
		t := msgp.NextType(b)
		if tag, ok := bytes.CutPrefix(name, []byte(tagPrefix)); ok && t == msgp.StrType && len(k.Tags) < MaxTags {
			v, rest, err := msgp.ReadStringZC(b)
			if err == nil && len(tag) <= MaxTagBytes && len(v) <= MaxTagBytes {
				k.Tags = append(k.Tags, Tag{tag, v})
			}
			return rest, err
		}
		skip := &k.SkipSave
		switch string(name) {
		case "lmcache.skip_save":
		case "lmcache.skip_load":
			skip = &k.SkipLoad
		case "lmcache.ttl":
			k.TTL, k.BadTTL = readTTL(b)
			return b, nil
		default:
			return b, nil
		}
		if t != msgp.BoolType && t != msgp.IntType && t != msgp.UintType {
			return b, nil
		}
		v, rest, err := readBool(b)
		*skip = err == nil && v
		return rest, err
	})
	return rest, nil
}

// maxTTLText bounds the length of a TTL that is sent as a string, in bytes. A longer one is a bad TTL: readTTL ignores it and says so.
const maxTTLText = 32

// readTTL reads a TTL in seconds: a number, or a number in a string. nil means no TTL. bad is true for any other type, and for a value
// outside MinTTL to MaxTTL.
func readTTL(b []byte) (ttl time.Duration, bad bool) {
	var seconds float64
	var err error
	switch msgp.NextType(b) {
	case msgp.NilType:
		return 0, false
	case msgp.IntType, msgp.UintType:
		var n int64
		n, _, err = readInt(b)
		seconds = float64(n)
	case msgp.Float64Type, msgp.Float32Type:
		seconds, _, err = msgp.ReadFloat64Bytes(b)
	case msgp.StrType:
		var text []byte
		if text, _, err = msgp.ReadStringZC(b); err == nil && len(text) <= maxTTLText {
			seconds, err = strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
		}
	default:
		return 0, true
	}
	if err != nil || !(seconds >= MinTTL.Seconds() && seconds <= MaxTTL.Seconds()) { // NaN is neither
		return 0, true
	}
	return time.Duration(seconds * float64(time.Second)), false
}

func (k *KeyView) check() error {
	switch {
	case k.WorldSize < 1:
		return fmt.Errorf("%w: world_size %d is below 1", ErrKey, k.WorldSize)
	case k.Worker >= k.WorldSize:
		return fmt.Errorf("%w: worker_id %d is not below world_size %d", ErrKey, k.Worker, k.WorldSize)
	case len(k.Model) > maxModelBytes || len(k.RequestID) > MaxRequestBytes || k.NumTokens > MaxTokens:
		return fmt.Errorf("%w: model_name is longer than %d bytes, request_id than %d bytes or token_ids than %d tokens", ErrKey, maxModelBytes, MaxRequestBytes, MaxTokens)
	case !utf8.Valid(k.Model) || !utf8.Valid(k.RequestID) || !utf8.Valid(k.Salt): // LMCache requires this, too; and events carry these texts
		return fmt.Errorf("%w: model_name, request_id or cache_salt is not UTF-8", ErrKey)
	}
	if len(k.Salt) > 0 {
		if err := kv.CheckSalt(string(k.Salt)); err != nil {
			return fmt.Errorf("%w: %w", ErrKey, err)
		}
	}
	return nil
}

// ErrRange means that [start, end) is not made of whole chunks of the prompt.
var ErrRange = errors.New("lmcache: range is not made of whole chunks of the prompt")

// ChunkRange returns the key's [Start, End) in chunks of chunkTokens. Both must be
// multiples of the chunk size and inside the prompt, else the error wraps
// ErrRange.
func (k *KeyView) ChunkRange(chunkTokens int) (from, to int, err error) {
	if k.Start < 0 || k.Start > k.End {
		return 0, 0, fmt.Errorf("%w: start %d is below 0 or above end %d", ErrKey, k.Start, k.End)
	}
	if k.Start%chunkTokens != 0 || k.End%chunkTokens != 0 || k.End > k.NumTokens {
		return 0, 0, fmt.Errorf("%w: [%d, %d) of %d tokens, in chunks of %d tokens", ErrRange, k.Start, k.End, k.NumTokens, chunkTokens)
	}
	return k.Start / chunkTokens, k.End / chunkTokens, nil
}
