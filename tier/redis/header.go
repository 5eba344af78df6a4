// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// In the native layout an object is one value, or several if it is larger than a stripe. All of them are in one slot of a cluster.
//
//	PREFIX{KEY}               header, then the first stripe; KEY as kv.Key.String writes it
//	PREFIX{KEY}:SUM.STRIPE:I  stripe I, from 1; checksum and stripe size hexadecimal. For an encrypted object SUM is its WRITE
//
// The first value is written last. If one of the others is missing, the object counts as missing.
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
//
// header of an encrypted object, which earlier releases do not take for an object:
//
//	0   8  "KVASIR3\n"
//	8   8  length of the encrypted bytes
//	16  8  masked xxh3 of the object
//	24  8  bytes in one stripe, of the last one fewer
//	32  2  short name of the key, not 0
//	34  6  WRITE, a random number: two servers that write one object at once encrypt it differently, and must not mix stripes
//	40  8  xxh3 of bytes 0 to 39, seeded with kv.Key.Digest of the key
const (
	headerMagic       = "KVASIR2\n"
	formerMagic       = "KVASIR1\n"
	sealedMagic       = "KVASIR3\n"
	headerBytes       = 40
	sealedHeaderBytes = 48
	maxStripes        = 1 << 16 // stripes of an object; a larger object is not kept
)

type header struct {
	length, sum, stripe uint64
	seal                uint16 // short name of the key that encrypted the object; 0: not encrypted
	write               uint64 // WRITE of an encrypted object
}

// headerOf returns the header for an object to be written.
func headerOf(m tier.Meta, stripe int64) header {
	h := header{length: uint64(m.Len), sum: m.Sum, stripe: uint64(stripe), seal: m.Seal}
	if h.seal != 0 {
		h.write = rand.Uint64() >> 16
	}
	return h
}

// size returns how many bytes the header has.
func (h header) size() int {
	if h.seal != 0 {
		return sealedHeaderBytes
	}
	return headerBytes
}

// bytes returns the header of the object with that key.
func (h header) bytes(k kv.Key) []byte {
	magic := headerMagic
	if h.seal != 0 {
		magic = sealedMagic
	}
	b := append(make([]byte, 0, sealedHeaderBytes), magic...)
	for _, v := range []uint64{h.length, h.sum, h.stripe} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	if h.seal != 0 {
		b = binary.LittleEndian.AppendUint64(b, uint64(h.seal)|h.write<<16)
	}
	return binary.LittleEndian.AppendUint64(b, xxh3.HashSeed(b, k.Digest()))
}

// headerSize returns how many bytes the header at the beginning of b has.
func headerSize(b []byte) int {
	if strings.HasPrefix(string(b), sealedMagic) {
		return sealedHeaderBytes
	}
	return headerBytes
}

// isLater reports whether a later release wrote the value that begins with b: its magic has a larger number.
func isLater(b []byte) bool {
	const at = len(sealedMagic) - 2
	return len(b) > at+1 && string(b[:at]) == sealedMagic[:at] && b[at] > sealedMagic[at] && b[at] <= '9' && b[at+1] == '\n'
}

// parseHeader parses the header at the beginning of b. It reports false if that is no header for key k.
func parseHeader(b []byte, k kv.Key) (h header, ok bool) {
	n := headerSize(b)
	if len(b) < n {
		return h, false
	}
	seed := k.Digest()
	switch string(b[:8]) {
	case headerMagic, sealedMagic:
	case formerMagic:
		seed = 0
	default:
		return h, false
	}
	if xxh3.HashSeed(b[:n-8], seed) != binary.LittleEndian.Uint64(b[n-8:]) {
		return h, false
	}
	h = header{length: binary.LittleEndian.Uint64(b[8:]), sum: binary.LittleEndian.Uint64(b[16:]), stripe: binary.LittleEndian.Uint64(b[24:])}
	if n == sealedHeaderBytes {
		v := binary.LittleEndian.Uint64(b[32:])
		if h.seal, h.write = uint16(v), v>>16; h.seal == 0 {
			return header{}, false
		}
	}
	ok = h.length > 0 && h.length < 1<<50 && h.stripe > 0 && (h.length-1)/h.stripe < maxStripes
	return h, ok
}

func (h header) meta() tier.Meta {
	return tier.Meta{Len: int64(h.length), Sum: h.sum, Seal: h.seal}
}

// stripes is how many values the object takes.
func (h header) stripes() int { return int((h.length-1)/h.stripe) + 1 }

// span returns the bytes [from, to) of the object that stripe i has.
func (h header) span(i int) (from, to int64) {
	return int64(i) * int64(h.stripe), int64(min(h.length, uint64(i+1)*h.stripe))
}

// stripeBytes is how many bytes stripe i has, without a header.
func (h header) stripeBytes(i int) int64 {
	from, to := h.span(i)
	return to - from
}

// name returns the name of an object's first value.
func (t *Tier) name(k kv.Key) string { return t.o.Prefix + "{" + k.String() + "}" }

// stripeName returns the name of stripe i of an object, from 1.
func stripeName(name string, h header, i int) string {
	of := h.sum
	if h.seal != 0 {
		of = h.write
	}
	return fmt.Sprintf("%s:%016x.%x:%x", name, of, h.stripe, i)
}

// names returns the names of all values of an object.
func names(name string, h header) []string {
	all := []string{name}
	for i := 1; i < h.stripes(); i++ {
		all = append(all, stripeName(name, h, i))
	}
	return all
}

// keyOf returns the key of the object whose first value has this name.
func (t *Tier) keyOf(name string) (kv.Key, bool) {
	inner, ok := strings.CutPrefix(name, t.o.Prefix+"{")
	if !ok {
		return kv.Key{}, false
	}
	inner, ok = strings.CutSuffix(inner, "}")
	k, err := kv.ParseKey(inner)
	return k, ok && err == nil
}
