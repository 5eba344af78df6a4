// SPDX-License-Identifier: Apache-2.0

package kv

import (
	"encoding/binary"
	"encoding/hex"

	"github.com/zeebo/blake3"
)

// Hash identifies a chunk: a 32-byte BLAKE3 digest that covers every token from
// the start of the prompt to the chunk's end.
type Hash [32]byte

func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// Seed is the chain's start: BLAKE3 over eight zero bytes and the token 0, as in
// lmcache 0.5.6 (TokenHasher, algorithm "blake3").
var Seed = Hash(sum256(make([]byte, 12)))

// MaxChunkTokens bounds the chunk size, in tokens; servers and pools refuse a larger one. The largest seen in use is 1,024.
const MaxChunkTokens = 1 << 16

func sum256(b []byte) [32]byte { return blake3.Sum256(b) }

// Chain computes chunk hashes one after another. A Chain owns one buffer of
// 32 + 4*chunkTokens bytes and does not allocate after New. Not safe for
// concurrent use.
type Chain struct {
	buf []byte // previous hash (32 bytes), then one chunk's tokens, big-endian
}

// NewChain returns a Chain for chunks of chunkTokens tokens.
func NewChain(chunkTokens int) *Chain {
	return &Chain{buf: make([]byte, 32+4*chunkTokens)}
}

// ChunkTokens is the number of tokens per chunk.
func (c *Chain) ChunkTokens() int { return (len(c.buf) - 32) / 4 }

// Tokens returns the buffer that Next hashes: 4 bytes per token, big-endian.
// Fill all of it before each Next.
func (c *Chain) Tokens() []byte { return c.buf[32:] }

// Next returns the hash of the chunk in Tokens that follows a chunk with hash
// prev (Seed for the first): BLAKE3(prev | token as uint32 big-endian ...).
func (c *Chain) Next(prev Hash) Hash {
	copy(c.buf, prev[:])
	return Hash(sum256(c.buf))
}

// ChunkHashes returns the hash of each complete chunk of tokens.
func ChunkHashes(tokens []uint32, chunkTokens int) []Hash {
	c := NewChain(chunkTokens)
	out := make([]Hash, 0, len(tokens)/chunkTokens)
	prev := Seed
	for ; len(tokens) >= chunkTokens; tokens = tokens[chunkTokens:] {
		buf := c.Tokens()
		for i, t := range tokens[:chunkTokens] {
			binary.BigEndian.PutUint32(buf[4*i:], t)
		}
		prev = c.Next(prev)
		out = append(out, prev)
	}
	return out
}

// SaltedHash returns a hash of a chunk that is different for each salt, since h itself covers only tokens. Without a salt it is h, else
// BLAKE3 of the salt's length (4 bytes, big-endian), the salt and h.
func SaltedHash(salt string, h Hash) Hash {
	if salt == "" {
		return h
	}
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(salt)+len(h)), uint32(len(salt)))
	return sum256(append(append(b, salt...), h[:]...))
}
