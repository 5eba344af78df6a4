// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// In the native layout an object is one value, and others where it is larger than a
// stripe. All of them are in one slot of a cluster.
//
//	PREFIX{KEY}               header, then the first stripe; KEY as kv.Key.String writes it
//	PREFIX{KEY}:SUM.STRIPE:I  stripe I, from 1; checksum and stripe size hexadecimal
//
// The first value is written last: without one of the others the object is not there.
//
// header:
//
//	0   8  "KVASIR2\n"
//	8   8  length of the object, bytes, little-endian as all numbers
//	16  8  its xxh3
//	24  8  bytes in one stripe, of the last one fewer
//	32  8  xxh3 of bytes 0 to 31, seeded with kv.Key.Digest of the key
//
// Earlier releases wrote "KVASIR1\n" and seeded with 0.
const (
	headerMagic = "KVASIR2\n"
	formerMagic = "KVASIR1\n"
	headerBytes = 40
	maxStripes  = 1 << 16
)

type header struct{ length, sum, stripe uint64 }

// bytes returns the header of the object with that key.
func (h header) bytes(k kv.Key) []byte {
	b := make([]byte, 0, headerBytes)
	b = append(b, headerMagic...)
	for _, v := range []uint64{h.length, h.sum, h.stripe} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return binary.LittleEndian.AppendUint64(b, xxh3.HashSeed(b, k.Digest()))
}

// parseHeader reads what bytes writes for that key; false where it is nothing of the kind.
func parseHeader(b []byte, k kv.Key) (h header, ok bool) {
	if len(b) != headerBytes {
		return h, false
	}
	var seed uint64
	switch string(b[:8]) {
	case headerMagic:
		seed = k.Digest()
	case formerMagic:
	default:
		return h, false
	}
	if xxh3.HashSeed(b[:32], seed) != binary.LittleEndian.Uint64(b[32:]) {
		return h, false
	}
	h = header{binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:]), binary.LittleEndian.Uint64(b[24:])}
	ok = h.length > 0 && h.length < 1<<50 && h.stripe > 0 && (h.length-1)/h.stripe < maxStripes
	return h, ok
}

func (h header) meta() tier.Meta { return tier.Meta{Len: int64(h.length), Sum: h.sum} }

// stripes is how many values the object takes.
func (h header) stripes() int { return int((h.length-1)/h.stripe) + 1 }

// span returns which bytes of the object stripe i has.
func (h header) span(i int) (from, to int64) {
	return int64(i) * int64(h.stripe), int64(min(h.length, uint64(i+1)*h.stripe))
}

// size is how many bytes stripe i has, without a header.
func (h header) size(i int) int64 {
	from, to := h.span(i)
	return to - from
}

// name returns the name of an object's first value.
func (t *Tier) name(k kv.Key) string { return t.o.Prefix + "{" + k.String() + "}" }

// stripeName returns the name of stripe i of an object, from 1.
func stripeName(name string, h header, i int) string {
	return fmt.Sprintf("%s:%016x.%x:%x", name, h.sum, h.stripe, i)
}

// names returns all names of an object.
func names(name string, h header) []string {
	all := []string{name}
	for i := 1; i < h.stripes(); i++ {
		all = append(all, stripeName(name, h, i))
	}
	return all
}

// keyOf returns the object of which a name is the first one.
func (t *Tier) keyOf(name string) (kv.Key, bool) {
	inner, ok := strings.CutPrefix(name, t.o.Prefix+"{")
	if !ok {
		return kv.Key{}, false
	}
	inner, ok = strings.CutSuffix(inner, "}")
	k, err := kv.ParseKey(inner)
	return k, ok && err == nil
}
