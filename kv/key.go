// SPDX-License-Identifier: Apache-2.0

package kv

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"
)

// Key names an object, one chunk of one shard and one object group. The name is the same
// in the pool and in every tier. Two objects whose bytes mean different things have
// different keys, because Namespace covers model, salt and layout.
type Key struct {
	Namespace Namespace
	Chunk     Hash
	Rank      Rank
	Group     uint32
}

// ErrKey means that a text is not the name of an object.
var ErrKey = errors.New("kv: not an object's name")

// String returns kv1/NAMESPACE/RANK.GROUP/CHUNK: lower-case hexadecimal digits, 32
// for the namespace, 8 each for rank and group, 64 for the chunk. It suits as a file
// path and as a name in an object store.
func (k Key) String() string {
	return fmt.Sprintf("kv1/%s/%08x.%08x/%s", k.Namespace, uint32(k.Rank), k.Group, k.Chunk)
}

// Digest returns a checksum of the key. Tiers store it beside the checksum of an object's bytes, to notice bytes that are stored under the
// name of another object.
func (k Key) Digest() uint64 {
	var b [16 + 32 + 8]byte
	copy(b[:], k.Namespace[:])
	copy(b[16:], k.Chunk[:])
	binary.LittleEndian.PutUint32(b[48:], uint32(k.Rank))
	binary.LittleEndian.PutUint32(b[52:], k.Group)
	return xxh3.Hash(b[:])
}

// ParseKey parses a text of Key.String, and accepts no other text. The error is ErrKey.
func ParseKey(s string) (k Key, err error) {
	parts := strings.Split(s, "/")
	if len(parts) != 4 || parts[0] != "kv1" || len(parts[2]) != 17 || parts[2][8] != '.' {
		return Key{}, ErrKey
	}
	rank, rankErr := strconv.ParseUint(parts[2][:8], 16, 32)
	group, groupErr := strconv.ParseUint(parts[2][9:], 16, 32)
	k.Rank, k.Group = Rank(rank), uint32(group)
	err = errors.Join(rankErr, groupErr, decodeHex(k.Namespace[:], parts[1]), decodeHex(k.Chunk[:], parts[3]))
	if err != nil || k.String() != s { // refuse a second spelling of the same key
		return Key{}, ErrKey
	}
	return k, nil
}

// decodeHex fills dst from s, which must have two digits for each byte of dst.
func decodeHex(dst []byte, s string) error {
	if hex.DecodedLen(len(s)) != len(dst) || len(s)%2 != 0 {
		return ErrKey
	}
	_, err := hex.Decode(dst, []byte(s))
	return err
}
