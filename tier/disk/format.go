// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// All numbers are little-endian; every structure begins at a multiple of 4,096 bytes.
//
// Segment: one block of header, records, the index, one block of trailer. The file ends
// there. Without a trailer it is unfinished, and its records are read one by one.
//
//	segment header             record header              trailer, part of a checkpoint
//	 0  8  "KVSEGMNT"           0  8  "KVRECORD"           0  8  "KVINDEXT"
//	 8  4  version, 1           8  4  version, 1           8  4  version, 1
//	12  4  sequence number     12  4  end of its life     12  4  entries
//	16  8  segment's id        16  8  segment's id        16  8  segment's id
//	24  8  day, since 1970     24  8  place in the file   24  4  sequence number
//	32  8  bytes of that day   32  8  payload's bytes     28  4  CRC-32C of the entries
//	40  8  bytes ever written  40  8  payload's xxh3      32  8  where the records end
//	60  4  CRC-32C of 0..59    48 16  namespace           40  8  bytes of the file
//	                           64 32  chunk               60  4  CRC-32C of 0..59
//	                           96  4  rank
//	index entry               100  4  group
//	 0 16  namespace          104  2  key that encrypted it
//	16 32  chunk              124  4  CRC-32C of 0..123
//	48  4  rank               128     what is left of the
//	52  4  group                      payload after its last
//	56  4  place, in blocks           whole block
//	60  4  payload's bytes   4096     the payload's whole blocks
//	64  8  payload's xxh3
//	72  1  1: read since it was written
//	74  2  key that encrypted it
//	76  4  end of its life, seconds since 1970; 0: none
//
// The namespace covers model, salt and layout. A rest that is too long for the header's
// block has a block of its own at the end. A segment's id is random, so bytes of a payload
// that look like a record do not have it.
//
// Checkpoint: a block of marker, then for each segment the block of its trailer and its
// index, without deleted objects. Marker of the directory: one block.
//
//	marker: 0 8 "KVDISKID" or "KVCHECKP", 8 4 version, 16 8 id of the directory, 24 to 47 as in a segment's header,
//	60 4 CRC-32C of 0..59
//
// The marker of a directory with encrypted objects has version 2: older builds, which would take them for damaged, do not open
// it. The key of an object is the short name that package seal gives it, 0 for a plain one; the xxh3 of an encrypted object is
// masked, and says nothing of the payload.
//
// Journal of deleted records: entries of 16 bytes, 8 segment's id, 4 place in blocks,
// 4 CRC-32C of the 12.
const (
	version       = 1
	sealedVersion = 2 // of a directory's marker

	block        = 4096
	headBytes    = 128 // of a record, before the payload's rest
	crcAt        = 60  // in the other structures
	entryBytes   = 80
	goneBytes    = 16
	maxSegment   = 4 << 30
	minSegment   = 64 << 10
	segmentMagic = "KVSEGMNT"
	recordMagic  = "KVRECORD"
	indexMagic   = "KVINDEXT"
	dirMagic     = "KVDISKID"
	checkMagic   = "KVCHECKP"
)

var (
	le         = binary.LittleEndian
	castagnoli = crc32.MakeTable(crc32.Castagnoli)

	errDamaged = errors.New("disk: the stored bytes are damaged")
)

func crc(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// blocksOf returns how many blocks n bytes take.
func blocksOf(n int64) int64 { return (n + block - 1) / block }

// parts divides a payload: whole blocks, the rest, and whether the rest has a block of
// its own.
func parts(n int64) (body, rest int64, extra bool) {
	return n / block * block, n % block, n%block > block-headBytes
}

// recordBytes is what a payload of n bytes takes in a segment.
func recordBytes(n int64) int64 {
	body, _, extra := parts(n)
	if extra {
		body += block
	}
	return block + body
}

// indexBytes is what the index of n records and the trailer take.
func indexBytes(n int) int64 { return blocksOf(int64(n)*entryBytes)*block + block }

// record is an object in a segment.
type record struct {
	key   kv.Key
	block uint32 // its place
	len   uint32
	sum   uint64
	hot   bool   // it was read since it was written
	over  uint32 // end of its life, seconds since 1970; 0: none
	seal  uint16 // key that encrypted it; 0: it is plain
}

func (r *record) meta() tier.Meta {
	return tier.Meta{Len: int64(r.len), Sum: r.sum, End: r.over, Seal: r.seal}
}

// ended reports whether the object's time to live is over.
func (r *record) ended(now time.Time) bool { return tier.Meta{End: r.over}.Over(now) }

func (r *record) end() int64 { return int64(r.block)*block + recordBytes(int64(r.len)) }

func putKey(b []byte, k *kv.Key) {
	copy(b, k.Namespace[:])
	copy(b[16:], k.Chunk[:])
	le.PutUint32(b[48:], uint32(k.Rank))
	le.PutUint32(b[52:], k.Group)
}

func getKey(b []byte) (k kv.Key) {
	copy(k.Namespace[:], b)
	copy(k.Chunk[:], b[16:])
	k.Rank, k.Group = kv.Rank(le.Uint32(b[48:])), le.Uint32(b[52:])
	return k
}

// putRecord writes the header of a record of a segment into the first bytes of b.
func putRecord(b []byte, id uint64, r *record) {
	clear(b[:headBytes])
	copy(b, recordMagic)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], r.over)
	le.PutUint64(b[16:], id)
	le.PutUint64(b[24:], uint64(r.block)*block)
	le.PutUint64(b[32:], uint64(r.len))
	le.PutUint64(b[40:], r.sum)
	putKey(b[48:], &r.key)
	le.PutUint16(b[104:], r.seal)
	le.PutUint32(b[124:], crc(b[:124]))
}

// getRecord reads the header of the record at a place of a segment. Error: errDamaged
// if there is no record.
func getRecord(b []byte, id uint64, place int64) (r record, err error) {
	n := le.Uint64(b[32:])
	if string(b[:8]) != recordMagic || le.Uint32(b[8:]) != version || le.Uint32(b[124:]) != crc(b[:124]) ||
		le.Uint64(b[16:]) != id || le.Uint64(b[24:]) != uint64(place) || n < 1 || n > maxSegment-2*block || place < block || place > maxSegment {
		return record{}, errDamaged
	}
	return record{key: getKey(b[48:]), block: uint32(place / block), len: uint32(n), sum: le.Uint64(b[40:]), over: le.Uint32(b[12:]), seal: le.Uint16(b[104:])}, nil
}

// sealBlock ends a structure with its checksum.
func sealBlock(b []byte, magic string) { sealBlockAs(b, magic, version) }

func sealBlockAs(b []byte, magic string, version uint32) {
	copy(b, magic)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[crcAt:], crc(b[:crcAt]))
}

// checkBlock checks magic, checksum and version of a structure. Errors: errDamaged,
// ErrNewer.
func checkBlock(b []byte, magic string) error {
	if string(b[:8]) != magic || le.Uint32(b[crcAt:]) != crc(b[:crcAt]) {
		return errDamaged
	}
	known := uint32(version)
	if magic == dirMagic {
		known = sealedVersion
	}
	if v := le.Uint32(b[8:]); v < version || v > known {
		return fmt.Errorf("%w: version %d, this build knows %d", ErrNewer, v, known)
	}
	return nil
}

// wear counts the bytes that were written to a directory.
type wear struct{ day, today, all int64 } // the last of the days since 1970, bytes of that day, bytes ever

func putWear(b []byte, w wear) {
	le.PutUint64(b[24:], uint64(w.day))
	le.PutUint64(b[32:], uint64(w.today))
	le.PutUint64(b[40:], uint64(w.all))
}

func getWear(b []byte) (wear, error) {
	w := wear{int64(le.Uint64(b[24:])), int64(le.Uint64(b[32:])), int64(le.Uint64(b[40:]))}
	if w.day < 0 || w.today < 0 || w.all < w.today {
		return wear{}, errDamaged
	}
	return w, nil
}

// head is a segment's header.
type head struct {
	seq uint32
	id  uint64
	wear
}

func putHead(b []byte, h head) {
	clear(b[:block])
	le.PutUint32(b[12:], h.seq)
	le.PutUint64(b[16:], h.id)
	putWear(b, h.wear)
	sealBlock(b, segmentMagic)
}

func getHead(b []byte) (h head, err error) {
	if err := checkBlock(b, segmentMagic); err != nil {
		return head{}, err
	}
	w, err := getWear(b)
	return head{le.Uint32(b[12:]), le.Uint64(b[16:]), w}, err
}

// trailer describes the index of a segment.
type trailer struct {
	seq        uint32
	id         uint64
	entries    int
	crc        uint32
	end, bytes int64 // of the records; of the file
}

// putIndex writes an index to b, which is zero, and returns its trailer.
func putIndex(b []byte, t trailer, records []record) trailer {
	for i := range records {
		r, e := &records[i], b[i*entryBytes:]
		putKey(e, &r.key)
		le.PutUint32(e[56:], r.block)
		le.PutUint32(e[60:], r.len)
		le.PutUint64(e[64:], r.sum)
		if r.hot {
			e[72] = 1
		}
		le.PutUint16(e[74:], r.seal)
		le.PutUint32(e[76:], r.over)
	}
	t.entries = len(records)
	t.crc = crc(b[:t.entries*entryBytes])
	return t
}

func putTrailer(b []byte, t trailer) {
	clear(b[:block])
	le.PutUint32(b[12:], uint32(t.entries))
	le.PutUint64(b[16:], t.id)
	le.PutUint32(b[24:], t.seq)
	le.PutUint32(b[28:], t.crc)
	le.PutUint64(b[32:], uint64(t.end))
	le.PutUint64(b[40:], uint64(t.bytes))
	sealBlock(b, indexMagic)
}

func getTrailer(b []byte) (t trailer, err error) {
	if err := checkBlock(b, indexMagic); err != nil {
		return trailer{}, err
	}
	t = trailer{le.Uint32(b[24:]), le.Uint64(b[16:]), int(le.Uint32(b[12:])), le.Uint32(b[28:]), int64(le.Uint64(b[32:])), int64(le.Uint64(b[40:]))}
	if t.end < block || t.end > maxSegment || t.end%block != 0 || int64(t.entries) > t.end/block || t.bytes < t.end+indexBytes(t.entries) {
		return trailer{}, errDamaged
	}
	return t, nil
}

// getIndex reads the index that t describes, into the empty slice records if its capacity suffices. Error: errDamaged.
func getIndex(records []record, b []byte, t trailer) ([]record, error) {
	if len(b) < t.entries*entryBytes || crc(b[:t.entries*entryBytes]) != t.crc {
		return nil, errDamaged
	}
	records = slices.Grow(records, t.entries)[:t.entries]
	for i := range records {
		e, r := b[i*entryBytes:], &records[i]
		*r = record{getKey(e), le.Uint32(e[56:]), le.Uint32(e[60:]), le.Uint64(e[64:]), e[72]&1 != 0, le.Uint32(e[76:]), le.Uint16(e[74:])}
		if r.block < 1 || r.len < 1 || r.end() > t.end {
			return nil, errDamaged
		}
	}
	return records, nil
}

func putMark(b []byte, magic string, id uint64, w wear) { putMarkAs(b, magic, version, id, w) }

func putMarkAs(b []byte, magic string, version uint32, id uint64, w wear) {
	clear(b[:block])
	le.PutUint64(b[16:], id)
	putWear(b, w)
	sealBlockAs(b, magic, version)
}

func getMark(b []byte, magic string) (id uint64, err error) {
	if len(b) < block {
		return 0, errDamaged
	}
	return le.Uint64(b[16:]), checkBlock(b, magic)
}

// randomID returns an unpredictable number.
func randomID() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return le.Uint64(b[:])
}

// place is where a deleted record lies.
type place struct {
	id    uint64 // of the segment
	block uint32
}

func putGone(b []byte, p place) {
	le.PutUint64(b, p.id)
	le.PutUint32(b[8:], p.block)
	le.PutUint32(b[12:], crc(b[:12]))
}

// getGone calls f with the places in a journal. It leaves out damaged entries.
func getGone(b []byte, f func(place)) {
	for ; len(b) >= goneBytes; b = b[goneBytes:] {
		if le.Uint32(b[12:]) == crc(b[:12]) {
			f(place{le.Uint64(b), le.Uint32(b[8:])})
		}
	}
}

const suffix = ".seg"

func segmentName(seq uint32, id uint64) string { return fmt.Sprintf("%08x-%016x%s", seq, id, suffix) }

func parseSegment(name string) (seq uint32, id uint64, ok bool) {
	const form = "01234567-0123456789abcdef" + suffix
	if len(name) != len(form) || name[8] != '-' || !strings.HasSuffix(name, suffix) || strings.ToLower(name) != name {
		return 0, 0, false
	}
	s, err := strconv.ParseUint(name[:8], 16, 32)
	if err != nil {
		return 0, 0, false
	}
	id, err = strconv.ParseUint(name[9:25], 16, 64)
	return uint32(s), id, err == nil
}
