// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

// A sealed object is a header and the pieces of the object, each encrypted with AES-256-GCM and followed by its tag. Numbers are
// little-endian. docs/formats/sealed.md has the diagram.
//
//	 0  8  "KVSEALED"
//	 8  1  version, 1
//	 9  1  a piece has 1 << this many bytes before it is encrypted, 16; the last one has fewer
//	10  2  0
//	12  4  end of its life, seconds since 1970; 0: none
//	16  8  id of the key
//	24 32  salt, random
//	56  8  bytes of the object
//	64     pieces, each with a tag of 16 bytes
//
// The key of an object is HKDF-SHA256 of the master key with the salt. Its nonces count the pieces: 1 byte, which is 1 for the
// last piece, 7 zero bytes, 4 bytes of the piece's number, big-endian. The additional data of each piece are the header, the
// xxh3 of the object, and the name: 16 bytes namespace, 32 chunk, 4 rank, 4 group. The namespace is that of the generation, so
// an object that was written before a clear cannot be opened afterwards.
const (
	magic       = "KVSEALED"
	version     = 1
	pieceShift  = 16
	pieceBytes  = 1 << pieceShift
	headerBytes = 64
	tagBytes    = 16
	saltBytes   = 32
	idBytes     = 8
	nameBytes   = 56
	maxObject   = 1 << 40 // bytes; a header with more is damaged
)

var (
	errDamaged = errors.New("seal: the object is damaged, or was encrypted with another key, or for another object or generation")
	errNewer   = errors.New("seal: a later release wrote this object")
	errKeyID   = errors.New("seal: another key encrypted this object")
)

// header precedes the pieces of an object.
type header struct {
	end  uint32
	id   [idBytes]byte
	salt [saltBytes]byte
	size int64 // of the object
}

func (h *header) put(b []byte) {
	clear(b[:headerBytes])
	copy(b, magic)
	b[8], b[9] = version, pieceShift
	binary.LittleEndian.PutUint32(b[12:], h.end)
	copy(b[16:], h.id[:])
	copy(b[24:], h.salt[:])
	binary.LittleEndian.PutUint64(b[56:], uint64(h.size))
}

// parseHeader parses a header. Errors: errDamaged, errNewer.
func parseHeader(b []byte) (h header, err error) {
	if len(b) < headerBytes || string(b[:8]) != magic {
		return h, errDamaged
	}
	if b[8] > version {
		return h, errNewer
	}
	size := binary.LittleEndian.Uint64(b[56:])
	if b[8] != version || b[9] != pieceShift || b[10]|b[11] != 0 || size < 1 || size > maxObject {
		return h, errDamaged
	}
	h.end, h.size = binary.LittleEndian.Uint32(b[12:]), int64(size)
	copy(h.id[:], b[16:])
	copy(h.salt[:], b[24:])
	return h, nil
}

// piecesOf returns the number of pieces of an object.
func piecesOf(size int64) int64 { return (size + pieceBytes - 1) >> pieceShift }

// sealedBytes returns the length of a sealed object whose content has `size` bytes.
func sealedBytes(size int64) int64 { return headerBytes + size + tagBytes*piecesOf(size) }

// plainBytes returns the length of the content of a sealed object of n bytes; 0 if n is impossible.
func plainBytes(n int64) int64 {
	n -= headerBytes
	if n <= tagBytes || n > 2*maxObject {
		return 0
	}
	size := n - tagBytes*((n+pieceBytes+tagBytes-1)/(pieceBytes+tagBytes))
	if size < 1 || size > maxObject || sealedBytes(size) != n+headerBytes {
		return 0
	}
	return size
}

// box encrypts or decrypts the pieces of one object.
type box struct {
	aead cipher.AEAD
	data [headerBytes + 8 + nameBytes]byte // additional data
}

// newBox returns the box of an object whose header is at the beginning of head.
func (k *key) newBox(head []byte, salt *[saltBytes]byte, sum uint64, name *kv.Key) *box {
	secret, err := hkdf.Key(sha256.New, k.master[:], salt[:], "kvasir tier object 1", 32)
	if err != nil {
		panic("BUG: seal: " + err.Error())
	}
	block, err := aes.NewCipher(secret)
	if err != nil {
		panic("BUG: seal: " + err.Error())
	}
	b := &box{}
	if b.aead, err = cipher.NewGCM(block); err != nil {
		panic("BUG: seal: " + err.Error())
	}
	copy(b.data[:], head[:headerBytes])
	binary.LittleEndian.PutUint64(b.data[headerBytes:], sum)
	putName(b.data[headerBytes+8:], name)
	return b
}

func putName(b []byte, k *kv.Key) {
	copy(b, k.Namespace[:])
	copy(b[16:], k.Chunk[:])
	binary.LittleEndian.PutUint32(b[48:], uint32(k.Rank))
	binary.LittleEndian.PutUint32(b[52:], k.Group)
}

func nonceOf(i, pieces int64) (n [12]byte) {
	if i == pieces-1 {
		n[0] = 1
	}
	if i > math.MaxUint32 {
		panic("BUG: seal: more pieces than nonces")
	}
	binary.BigEndian.PutUint32(n[8:], uint32(i))
	return n
}

// span returns where piece i begins in an object of size bytes and in its sealed bytes, and the piece's length.
func span(i, size int64) (plain, sealed, n int64) {
	plain = i << pieceShift
	return plain, headerBytes + plain + tagBytes*i, min(pieceBytes, size-plain)
}

// newHeader returns a header for an object to be encrypted, with a new random salt.
func (k *key) newHeader(size int64, end uint32) (h header) {
	h.end, h.id, h.size = end, k.id, size
	_, _ = rand.Read(h.salt[:]) // never fails
	return h
}

// open decrypts src into dst. With an error the bytes of dst mean nothing. Errors: errDamaged, shm.ErrFault.
func (k *key) open(dst, src []byte, h *header, name *kv.Key, sum uint64) error {
	if h.size != int64(len(dst)) || sealedBytes(h.size) != int64(len(src)) {
		return errDamaged
	}
	b, pieces := k.newBox(src, &h.salt, sum, name), piecesOf(h.size)
	return spread(pieces, func(i int64) error {
		to, at, n := span(i, h.size)
		nonce := nonceOf(i, pieces)
		if _, err := b.aead.Open(dst[to:to], nonce[:], src[at:at+n+tagBytes], b.data[:]); err != nil {
			return errDamaged
		}
		return nil
	})
}

// check is open without memory for the decrypted object.
func (k *key) check(src []byte, h *header, name *kv.Key, sum uint64) error {
	if sealedBytes(h.size) != int64(len(src)) {
		return errDamaged
	}
	b, pieces := k.newBox(src, &h.salt, sum, name), piecesOf(h.size)
	var piece [pieceBytes]byte
	for i := range pieces {
		_, at, n := span(i, h.size)
		nonce := nonceOf(i, pieces)
		if _, err := b.aead.Open(piece[:0], nonce[:], src[at:at+n+tagBytes], b.data[:]); err != nil {
			return errDamaged
		}
	}
	return nil
}

// fewPieces is the number of pieces for which one more goroutine is worth its cost.
const fewPieces = 4

// spread calls f with 0 to n-1, on up to maxWidth goroutines, until one call fails.
func spread(n int64, f func(i int64) error) error {
	width := min(int64(runtime.GOMAXPROCS(0)), maxWidth, n/fewPieces)
	if width <= 1 {
		for i := range n {
			if err := f(i); err != nil {
				return err
			}
		}
		return nil
	}
	var next atomic.Int64
	var failed atomic.Pointer[error]
	work := func() {
		err := shm.Guard(func() { // a Guard covers only its own goroutine
			for i := next.Add(1) - 1; i < n && failed.Load() == nil; i = next.Add(1) - 1 {
				if err := f(i); err != nil {
					failed.Store(&err)
				}
			}
		})
		if err != nil {
			failed.Store(&err)
		}
	}
	var wg sync.WaitGroup
	for range width - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// maxWidth bounds the goroutines that encrypt or decrypt one object.
const maxWidth = 4
