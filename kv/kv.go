// SPDX-License-Identifier: Apache-2.0

// Package kv is Kvasir's vocabulary: chunk hashes and shards as in LMCache, the
// name of an object (Key), the shape and byte length of a chunk, and the namespace that keeps
// bytes of different meaning apart. It does no I/O.
package kv

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
)

// Rank names one KV shard of a chunk, packed as LMCache 0.5.6 packs it:
//
//	world size << 24 | global rank << 16 | local world size << 8 | local rank
//
// LMCache always sets the local pair equal to the global one.
type Rank uint32

// MaxWorldSize is the largest number of shards that a Rank can name. Messages and registrations with a larger world size are refused.
const MaxWorldSize = 255

// NewRank packs shard worker of worldSize shards. It reports false when the pair
// does not fit the byte fields or worker is outside [0, worldSize).
func NewRank(worldSize, worker int) (Rank, bool) {
	if worldSize < 1 || worldSize > MaxWorldSize || worker < 0 || worker >= worldSize {
		return 0, false
	}
	w, r := Rank(worldSize), Rank(worker)
	return w<<24 | r<<16 | w<<8 | r, true
}

// MaxSaltLength is the length of the longest salt that LMCache accepts, in characters. A longer one is ErrSalt.
const MaxSaltLength = 128

// ErrSalt means that a salt is too long or contains one of @ / \ NUL.
var ErrSalt = errors.New("kv: salt longer than 128 characters, with one of @ / \\ NUL, or not UTF-8")

// CheckSalt returns ErrSalt for a salt that must not be in a key.
func CheckSalt(salt string) error {
	if len(salt) > MaxSaltLength && len([]rune(salt)) > MaxSaltLength || strings.ContainsAny(salt, "@/\\\x00") {
		return ErrSalt
	}
	return nil
}

// Namespace is a digest of everything, besides tokens, shard and group, that
// decides what an object's bytes mean: model, salt and layout fingerprint.
type Namespace [16]byte

// NamespaceOf returns the digest of model, salt and a layout's fingerprint. Each part is preceded by its length, so different triples have
// different encodings.
func NamespaceOf(model, salt, fingerprint string) Namespace {
	b := make([]byte, 0, 64+len(model)+len(salt)+len(fingerprint))
	b = appendString(b, "kvasir namespace 1")
	b = appendString(b, model)
	b = appendString(b, salt)
	b = appendString(b, fingerprint)
	sum := sum256(b)
	return Namespace(sum[:16])
}

func (n Namespace) String() string { return hex.EncodeToString(n[:]) }

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}
