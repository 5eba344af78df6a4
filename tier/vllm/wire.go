// SPDX-License-Identifier: Apache-2.0

// Package vllm has the protocol of the tier socket between engines of vLLM with tiered offloading and a Kvasir node: the
// messages, the engine's side in Go, and the module that vLLM loads (Shim).
//
// The socket is a UNIX stream socket. A frame is its length without these four bytes (u32), its type (u8) and its body; numbers
// are little-endian. An engine sends Hello once, with the descriptor of its region; Welcome comes with the descriptor of the
// pool's memory. From then on the engine itself copies rows between the two: a Found or Places frame lends it places in the pool,
// and a Release or Commit frame, or the end of the connection, gives them back.
// docs/formats/vllm-tier.md shows the bytes.
package vllm

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/kv"
)

// Protocol is the version of the messages. Both sides must have the same.
const Protocol = 1

// The types of frames.
const (
	TypeHello   = 0x01 // engine: JSON of a Hello; with the descriptor of the region, or without
	TypeWelcome = 0x02 // node: JSON of a Welcome; with the descriptor of the pool
	TypeRefused = 0x03 // node: the reason in words; the connection ends
	TypeLookup  = 0x04 // engine: Ask
	TypeFound   = 0x05 // node: u64 id + n x (u64 offset + u32 bytes), in the order of the keys; offset NoPlace: not there
	TypeRelease = 0x06 // engine: n x (u64 id of a lookup + u32 objects that were loaded)
	TypeStore   = 0x07 // engine: Ask
	TypePlaces  = 0x08 // node: as TypeFound; NoPlace: the pool has the row already, or there is no room
	TypeCommit  = 0x09 // engine: u64 id of a store + u8, 1: all rows are written; 0: drop all rows
)

// Limits of the messages. A frame beyond the first four is ErrMalformed, a Hello beyond the other three is refused with ErrHello.
const (
	MaxFrame     = 1 << 20 // bytes of a frame
	MaxHello     = 1 << 18 // bytes of a Hello; most of them are its namespace, with the names of all layers
	MaxKeys      = 1 << 14 // keys of one Ask
	MaxRequest   = 512     // bytes of a request's id
	MaxEngineID  = 128     // bytes of an engine's id
	MaxGroups    = 256     // KV cache groups of an engine
	MaxModelName = 1024    // bytes of a model's name

	headerBytes = 5  // length + type
	placeBytes  = 12 // offset + bytes
	groupBytes  = 4  // of a key, at its end
)

// NoPlace is the offset of an object that has no place.
const NoPlace = ^uint64(0)

// ErrMalformed means that a frame does not fit its type.
var ErrMalformed = errors.New("vllm: malformed frame")

// Key is vLLM's name of a row: the hash of the row's last block, which covers all tokens before it, and the row's group.
type Key struct {
	Hash  kv.Hash // hashes of fewer bytes are filled up with zeros
	Group uint32
}

// Ask is a lookup, or a store, of some rows of a request.
type Ask struct {
	ID      uint64 // chosen by the engine; used once
	Tenant  []byte
	Request []byte
	Keys    []Key
}

// Place is where an object is in the pool.
type Place struct {
	Offset uint64
	Bytes  uint32
}

// Released ends the loan of a lookup's places.
type Released struct {
	ID     uint64
	Loaded uint32 // objects that were copied to the region
}

// Hello describes an engine.
type Hello struct {
	Protocol    int    `json:"protocol"`
	VLLM        string `json:"vllm"`
	EngineID    string `json:"engine_id"`
	Model       string `json:"model"`
	Namespace   string `json:"namespace"`    // everything that decides what the bytes of a row mean
	Canonical   bool   `json:"canonical"`    // rows of different lengths begin with the same bytes
	RowBytes    int64  `json:"row_bytes"`    // of one row: a chunk of all ranks
	Rows        int64  `json:"rows"`         // number of rows of the region
	Groups      int    `json:"groups"`       // KV cache groups
	ChunkTokens int    `json:"chunk_tokens"` // tokens of a row
}

// Welcome is the node's answer.
type Welcome struct {
	Protocol  int    `json:"protocol"`
	Version   string `json:"version"`
	PoolBytes int64  `json:"pool_bytes"`
}

// Append appends the body of a Welcome frame.
func (w *Welcome) Append(dst []byte) []byte { return appendJSON(dst, w) }

// Append appends the body of a Hello frame.
func (h *Hello) Append(dst []byte) []byte { return appendJSON(dst, h) }

func appendJSON(dst []byte, v any) []byte {
	b, _ := json.Marshal(v) // numbers and strings cannot fail
	return append(dst, b...)
}

// ErrHello means that a node cannot serve the engine that a Hello describes.
var ErrHello = errors.New("vllm: the engine cannot be served")

// RegionName returns the name of an engine's region under /dev/shm. It fails for an id that cannot be part of a file name.
func RegionName(engineID string) (string, error) {
	bad := func(r rune) bool { return r == '/' || r < 0x20 || r == 0x7f || r == utf8.RuneError }
	if engineID == "" || len(engineID) > MaxEngineID || engineID == "." || strings.Contains(engineID, "..") || strings.ContainsFunc(engineID, bad) {
		return "", fmt.Errorf("%w: the engine id %q cannot be part of a file name: use 1 to %d bytes without /, .. and control characters", ErrHello, engineID[:min(len(engineID), MaxEngineID)], MaxEngineID)
	}
	return "vllm_offload_" + engineID + ".mmap", nil
}

// DecodeHello reads the body of a Hello frame and checks it.
func DecodeHello(b []byte) (h Hello, err error) {
	if len(b) > MaxHello {
		return h, fmt.Errorf("%w: a Hello of %d bytes, at most %d", ErrMalformed, len(b), MaxHello)
	}
	if err := json.Unmarshal(b, &h); err != nil {
		return h, fmt.Errorf("%w: Hello: %w", ErrMalformed, err)
	}
	return h, h.Validate()
}

// Validate returns an error that says why an engine cannot be served.
func (h *Hello) Validate() error {
	if h.Protocol != Protocol {
		return fmt.Errorf("%w: the engine's Python module speaks protocol %d, this server %d: write the module anew (kvasir vllm-tier)", ErrHello, h.Protocol, Protocol)
	}
	if _, err := RegionName(h.EngineID); err != nil {
		return err
	}
	switch {
	case h.Model == "" || len(h.Model) > MaxModelName || h.Namespace == "":
		return fmt.Errorf("%w: its namespace is empty, or its model name does not have 1 to %d bytes", ErrHello, MaxModelName)
	case h.RowBytes < 1 || h.RowBytes >= 1<<32 || h.RowBytes > kv.MaxChunkBytes:
		return fmt.Errorf("%w: rows of %d bytes, 1 to %d are possible", ErrHello, h.RowBytes, int64(min(1<<32-1, kv.MaxChunkBytes)))
	case h.Rows < 1 || h.Rows > 1<<40/h.RowBytes+1<<20:
		return fmt.Errorf("%w: %d rows of %d bytes, 1 to %d rows are possible", ErrHello, h.Rows, h.RowBytes, 1<<40/h.RowBytes+1<<20)
	case h.Groups < 1 || h.Groups > MaxGroups:
		return fmt.Errorf("%w: %d KV cache groups, 1 to %d are possible", ErrHello, h.Groups, MaxGroups)
	case h.ChunkTokens < 1 || h.ChunkTokens > kv.MaxChunkTokens:
		return fmt.Errorf("%w: rows of %d tokens, 1 to %d are possible", ErrHello, h.ChunkTokens, kv.MaxChunkTokens)
	}
	return nil
}

// Fingerprint returns a text that is equal for two engines exactly when the bytes of their rows of a group mean the same. Rows of a
// canonical layout may have different lengths.
func (h *Hello) Fingerprint(group uint32) string {
	if h.Canonical {
		return fmt.Sprintf("vllm tier, group %d, %s", group, h.Namespace)
	}
	return fmt.Sprintf("vllm tier, group %d, rows of %d, %s", group, h.RowBytes, h.Namespace)
}

// AppendFrame appends a frame.
func AppendFrame(dst []byte, kind byte, body []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(1+len(body)))
	return append(append(dst, kind), body...)
}

// AppendAsk appends the body of a Lookup or Store frame. All hashes have hashBytes bytes.
func AppendAsk(dst []byte, a *Ask, hashBytes int) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, a.ID)
	dst = append(append(dst, byte(len(a.Tenant))), a.Tenant...)
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(a.Request)))
	dst = append(append(dst, a.Request...), byte(hashBytes+groupBytes))
	for i := range a.Keys {
		dst = append(dst, a.Keys[i].Hash[:hashBytes]...)
		dst = binary.BigEndian.AppendUint32(dst, a.Keys[i].Group) // big-endian, as in vLLM
	}
	return dst
}

// DecodeAsk reads the body of a Lookup or Store frame: u64 id + u8 length and tenant + u16 length and request + u8 length of a
// key + keys, each a hash and its group (u32, big-endian). Tenant and request are slices of b. The keys are appended to into[:0].
func DecodeAsk(b []byte, into []Key) (a Ask, err error) {
	wrong := func(what string) (Ask, error) { return Ask{ID: a.ID}, fmt.Errorf("%w: %s", ErrMalformed, what) }
	if len(b) < 8+1 {
		return wrong("a Lookup or Store without an id")
	}
	a.ID = binary.LittleEndian.Uint64(b)
	n := int(b[8])
	if b = b[9:]; len(b) < n+2 {
		return wrong("a Lookup or Store ends within its tenant")
	}
	a.Tenant, b = b[:n], b[n:]
	n = int(binary.LittleEndian.Uint16(b))
	if b = b[2:]; n > MaxRequest || len(b) < n+1 {
		return wrong(fmt.Sprintf("a Lookup or Store ends within its request's id of %d bytes, or it is longer than %d", n, MaxRequest))
	}
	a.Request, b = b[:n], b[n:]
	size := int(b[0])
	b = b[1:]
	if size <= groupBytes || size > len(kv.Hash{})+groupBytes || len(b)%size != 0 {
		return wrong(fmt.Sprintf("%d bytes of keys are not whole keys of %d bytes, or a key does not have %d to %d bytes", len(b), size, groupBytes+1, len(kv.Hash{})+groupBytes))
	}
	if len(b)/size > MaxKeys {
		return wrong(fmt.Sprintf("a Lookup or Store of %d keys, at most %d are possible", len(b)/size, MaxKeys))
	}
	a.Keys = into[:0]
	for ; len(b) > 0; b = b[size:] {
		k := Key{Group: binary.BigEndian.Uint32(b[size-groupBytes:])}
		copy(k.Hash[:], b[:size-groupBytes])
		a.Keys = append(a.Keys, k)
	}
	return a, nil
}

// AppendPlaces appends the body of a Found or Places frame.
func AppendPlaces(dst []byte, id uint64, places []Place) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, id)
	for _, p := range places {
		dst = binary.LittleEndian.AppendUint64(dst, p.Offset)
		dst = binary.LittleEndian.AppendUint32(dst, p.Bytes)
	}
	return dst
}

// DecodePlaces reads the body of a Found or Places frame.
func DecodePlaces(b []byte) (id uint64, places []Place, err error) {
	if len(b) < 8 || (len(b)-8)%placeBytes != 0 || (len(b)-8)/placeBytes > MaxKeys {
		return 0, nil, fmt.Errorf("%w: %d bytes of places: an id and at most %d places of %d bytes are possible", ErrMalformed, len(b), MaxKeys, placeBytes)
	}
	id, b = binary.LittleEndian.Uint64(b), b[8:]
	places = make([]Place, 0, len(b)/placeBytes)
	for ; len(b) > 0; b = b[placeBytes:] {
		places = append(places, Place{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])})
	}
	return id, places, nil
}

// AppendReleased appends to the body of a Release frame.
func AppendReleased(dst []byte, r Released) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(dst, r.ID), r.Loaded)
}

// DecodeReleased reads the body of a Release frame.
func DecodeReleased(b []byte) (out []Released, err error) {
	if len(b)%placeBytes != 0 {
		return nil, fmt.Errorf("%w: a Release of %d bytes, which is not a multiple of %d", ErrMalformed, len(b), placeBytes)
	}
	for ; len(b) > 0; b = b[placeBytes:] {
		out = append(out, Released{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])})
	}
	return out, nil
}

// AppendCommit appends the body of a Commit frame.
func AppendCommit(dst []byte, id uint64, ok bool) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, id)
	if ok {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// DecodeCommit reads the body of a Commit frame.
func DecodeCommit(b []byte) (id uint64, ok bool, err error) {
	if len(b) != 9 || b[8] > 1 {
		return 0, false, fmt.Errorf("%w: a Commit of %d bytes, 9 are needed, or its last byte is neither 0 nor 1", ErrMalformed, len(b))
	}
	return binary.LittleEndian.Uint64(b), b[8] == 1, nil
}
