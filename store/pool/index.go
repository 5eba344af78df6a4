// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

// The index is a shared-memory file beside the pool segment, with the segment's name and IndexSuffix. It outlives the process, so that a
// later process knows which slots have committed chunks and which slots a worker may still write. All numbers are little-endian.
//
//	header, one page            record i, at 4096 + 128*i
//	  0  8  "KVASIRIX"            0  8  state word, written atomically:
//	  8  4  version, 1                    bits 0-7 state, 8-31 holds, 32-63 generation
//	 12  4  record bytes, 128     8  8  offset in the pool, bytes
//	 16  8  pool bytes           16  8  length, bytes
//	 24  8  alignment, bytes     24 32  chunk hash
//	 32  8  records              56 16  namespace digest
//	 40  8  pool inode           72  4  kv rank
//	 48  8  tokens per chunk     76  4  object group
//	 56  4  CRC-32C of 0 to 55   80  8  name of the transfer that wrote it
//	                             88  4  its number
//	 64  8  process id           92  4  CRC-32C of bytes 8 to 91
//	 72  8  started, unix ns     96  8  use stamp: a larger one was used later; 0: the object ends with its server
//	 80  8  records ever used   104  8  xxh3 of the chunk
//	 88 32  former chunk sizes  112  8  2^32 + the generation that the xxh3 is of; else there is none.
//	                                    Bits 33-63: the place below where the object is, too; 0 for none
//	120  8  bytes of the pool   120  8  first start that found it held, ns of CLOCK_MONOTONIC; 0 for none
//	128  8  use stamp of the last clear: a record with none that is larger is from before it; 0 for none
//	136  8  pool bytes since it was resized; 0: those at 16
//
// The order of writes makes it safe to kill the server at any moment. When a pool is made, the header is written last; an index whose magic
// is zero is of a pool that was never finished. The bytes of a record are written while its state word says free. One atomic store of the
// word then makes it staged, resident, condemned or free again. Nothing is promised to a peer before that store. States: 0 free; 1 staged,
// reserved and not committed; 2 resident; 3 condemned, the key is gone and the memory waits for its holds to end.
const (
	IndexSuffix = ".kvasir"

	indexMagic   = "KVASIRIX"
	indexVersion = 1
	headerBytes  = 4096
	recordBytes  = 128
	maxRecords   = 1 << 24
	firstRecords = 512 // have memory from the start
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var (
	// ErrIndex means that a file is not a pool index, or a damaged one.
	ErrIndex = errors.New("pool: not a pool index, or a damaged one")
	// ErrChanged means that the existing pool has another alignment, chunk size or version than was asked for.
	ErrChanged = errors.New("pool: the existing pool has other settings or another version")
)

// Offsets of the header's words that change.
const (
	headerPid     = 64
	headerStarted = 72
	headerUsed    = 80

	headerProvided = 120
	headerCleared  = 128
	headerResized  = 136
)

func writeHeader(s *shm.Segment, o Options, records int64, inode uint64) {
	h := s.Bytes(0, headerBytes)
	le := binary.LittleEndian
	crashPoint()
	le.PutUint32(h[8:], indexVersion)
	crashPoint()
	le.PutUint32(h[12:], recordBytes)
	crashPoint()
	le.PutUint64(h[16:], uint64(o.Bytes))
	crashPoint()
	le.PutUint64(h[24:], uint64(o.Align))
	crashPoint()
	le.PutUint64(h[32:], uint64(records))
	crashPoint()
	le.PutUint64(h[40:], inode)
	crashPoint()
	le.PutUint64(h[48:], uint64(o.ChunkTokens))
	var sealed [56]byte
	copy(sealed[:], h)
	copy(sealed[:], indexMagic)
	crashPoint()
	le.PutUint32(h[56:], crc32.Checksum(sealed[:], castagnoli))
	crashPoint()
	setFormer(s, o.former)
	crashPoint()
	claim(s)
	crashPoint()
	s.Word(0).Store(le.Uint64([]byte(indexMagic)))
	crashPoint()
}

// claim records in the index that this process serves the pool, and since when.
func claim(s *shm.Segment) {
	crashPoint()
	s.Word(headerPid).Store(uint64(os.Getpid()))
	crashPoint()
	s.Word(headerStarted).Store(uint64(time.Now().UnixNano()))
}

// header has the fields of an index header.
type header struct {
	opts    Options
	records int64
	inode   uint64
	pid     int
}

// errUnfinished means that the server that made the index was killed before it had made the pool.
var errUnfinished = errors.New("pool: index without a header")

// readHeader returns an index's header. Errors: errUnfinished, ErrIndex,
// ErrChanged for another version.
func readHeader(s *shm.Segment) (h header, err error) {
	if s.Len() < headerBytes {
		return h, fmt.Errorf("%w: %d bytes, its header alone has %d", ErrIndex, s.Len(), headerBytes)
	}
	b := s.Bytes(0, headerBytes)
	le := binary.LittleEndian
	h = header{
		opts:    Options{Bytes: int64(le.Uint64(b[16:])), Align: int64(le.Uint64(b[24:])), ChunkTokens: int(le.Uint64(b[48:]))},
		records: int64(le.Uint64(b[32:])), inode: le.Uint64(b[40:]), pid: int(s.Word(headerPid).Load()),
	}
	made := h.records
	switch {
	case s.Word(0).Load() == 0:
		return h, errUnfinished
	case string(b[:8]) != indexMagic:
		return h, fmt.Errorf("%w: it does not begin with %s", ErrIndex, indexMagic)
	case le.Uint32(b[8:]) != indexVersion || le.Uint32(b[12:]) != recordBytes:
		return h, fmt.Errorf("%w: its index has version %d, this server writes %d", ErrChanged, le.Uint32(b[8:]), indexVersion)
	case le.Uint32(b[56:]) != crc32.Checksum(b[:56], castagnoli) || s.Len() < headerBytes+made*recordBytes:
		return h, fmt.Errorf("%w: its header has a wrong checksum, or the file is too short", ErrIndex)
	}
	h.records = min((s.Len()-headerBytes)/recordBytes, maxRecords) // a pool that grew has more records than it was made with
	if resized := int64(s.Word(headerResized).Load()); resized != 0 {
		h.opts.Bytes = resized
	}
	if h.opts.Bytes <= 0 || h.opts.Bytes > MaxBytes || h.opts.Align <= 0 {
		return h, fmt.Errorf("%w: its header has a pool of %d bytes aligned to %d, which is impossible", ErrIndex, h.opts.Bytes, h.opts.Align)
	}
	return h, nil
}

// record is a view of one index record.
type record struct {
	b    []byte
	word *atomic.Uint64
}

func (p *Pool) record(s Slot) record {
	off := headerBytes + int64(s)*recordBytes
	return record{b: p.index.Bytes(off, recordBytes), word: p.index.Word(off)}
}

// write fills a free record: the object k has the n bytes at offset `off` of the segment, and the transfer `by` writes it. setState
// publishes the record.
func (r record) write(k *kv.Key, off, n int64, by Writer) {
	le := binary.LittleEndian
	crashPoint()
	le.PutUint64(r.b[8:], uint64(off))
	crashPoint()
	le.PutUint64(r.b[16:], uint64(n))
	crashPoint()
	copy(r.b[24:], k.Chunk[:])
	crashPoint()
	copy(r.b[56:], k.Namespace[:])
	crashPoint()
	le.PutUint32(r.b[72:], uint32(k.Rank))
	crashPoint()
	le.PutUint32(r.b[76:], k.Group)
	crashPoint()
	le.PutUint64(r.b[80:], by.Name)
	crashPoint()
	le.PutUint32(r.b[88:], by.Number)
	crashPoint()
	le.PutUint32(r.b[92:], crc32.Checksum(r.b[8:92], castagnoli))
	crashPoint()
	r.resetHeld()
}

func (r record) key() (k kv.Key) {
	le := binary.LittleEndian
	k.Chunk = kv.Hash(r.b[24:56])
	k.Namespace = kv.Namespace(r.b[56:72])
	k.Rank = kv.Rank(le.Uint32(r.b[72:]))
	k.Group = le.Uint32(r.b[76:])
	return k
}

// heldFor returns how long ago a starting server first found the slot held by a worker of an earlier server. If none has, it records the
// present time. So a quarantine ends even if the server restarts often. `now` is the time since boot, which all processes share; a pool
// does not outlive a boot.
func (r record) heldFor(now time.Duration) time.Duration {
	le := binary.LittleEndian
	if at := le.Uint64(r.b[120:]); at > 0 && at <= uint64(now) {
		return now - time.Duration(at)
	}
	crashPoint()
	le.PutUint64(r.b[120:], uint64(now))
	crashPoint()
	return 0
}

// resetHeld clears that time, because another worker may touch the slot from now on.
func (r record) resetHeld() { clear(r.b[120:128]) }

// intact reports whether the record's bytes are those that write wrote.
func (r record) intact() bool {
	return binary.LittleEndian.Uint32(r.b[92:]) == crc32.Checksum(r.b[8:92], castagnoli)
}

func (r record) stamp() uint64     { return binary.LittleEndian.Uint64(r.b[96:]) }
func (r record) setStamp(v uint64) { binary.LittleEndian.PutUint64(r.b[96:], v) }

// sum returns the checksum of the object of this generation. It reports false if there is none.
func (r record) sum() (uint64, bool) {
	le := binary.LittleEndian
	return le.Uint64(r.b[104:]), le.Uint64(r.b[112:])&(1<<belowShift-1) == sumMark|uint64(r.generation())
}

// below returns the mark of the tier that also has the object, 0 for none.
func (r record) below() uint32 {
	if _, ok := r.sum(); !ok {
		return 0
	}
	return uint32(binary.LittleEndian.Uint64(r.b[112:]) >> belowShift)
}

const (
	sumMark    = 1 << 32
	belowShift = 33
)

func (r record) writer() Writer {
	return Writer{binary.LittleEndian.Uint64(r.b[80:]), binary.LittleEndian.Uint32(r.b[88:])}
}

func (r record) offset() int64 { return int64(binary.LittleEndian.Uint64(r.b[8:])) }
func (r record) length() int64 { return int64(binary.LittleEndian.Uint64(r.b[16:])) }

func (r record) state() State       { return State(r.word.Load() & 0xff) }
func (r record) holds() int         { return int(r.word.Load() >> 8 & 0xffffff) }
func (r record) generation() uint32 { return uint32(r.word.Load() >> 32) }

// put stores the state word: one transition of the slot.
func (r record) put(word uint64) {
	crashPoint()
	r.word.Store(word)
	crashPoint()
}

func (r record) setState(s State) {
	r.put(r.word.Load()&^0xff | uint64(s))
}

func (r record) setHolds(n int) {
	r.put(r.word.Load()&^0xffffff00 | uint64(n)<<8)
}

// set stores state and holds together.
func (r record) set(s State, holds int) {
	r.put(uint64(r.generation())<<32 | uint64(holds)<<8 | uint64(s))
}

// begin starts a new generation of the slot, in state s.
func (r record) begin(s State, holds int) {
	r.put(uint64(r.generation()+1)<<32 | uint64(holds)<<8 | uint64(s))
}
