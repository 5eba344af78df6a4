// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func hashOf(b []byte) uint64 { return xxh3.Hash(b) }

// atLeast returns b with so many bytes.
func atLeast(b []byte, n int) []byte {
	return append(bytes.Clone(b), make([]byte, max(0, n-len(b)))...)
}

// A header of a record that was read can be written with the same bytes.
func FuzzRecord(f *testing.F) {
	b := make([]byte, headBytes)
	putRecord(b, 7, &record{tiertest.Key(3), 5, 70_000, 9, false, 0, 0})
	f.Add(b, uint64(7), int64(5*block))
	f.Add([]byte{}, uint64(0), int64(0))
	f.Fuzz(func(t *testing.T, b []byte, id uint64, at int64) {
		b = atLeast(b, headBytes)
		le.PutUint32(b[124:], crc(b[:124])) // an attacker can compute the checksum, too
		r, err := getRecord(b, id, at)
		if err != nil {
			return
		}
		again := make([]byte, headBytes)
		putRecord(again, id, &r)
		if got, err := getRecord(again, id, at); err != nil || got != r || r.len < 1 || r.end() > at+maxSegment {
			t.Fatalf("%+v, %v, want %+v", got, err, r)
		}
	})
}

// The records of an index that was read lie in the segment that it names, whatever its bytes are.
func FuzzIndex(f *testing.F) {
	records := []record{{tiertest.Key(1), 1, 5000, 1, false, 0, 0}, {tiertest.Key(2), 4, 1, 2, true, 9, 7}}
	index := make([]byte, block)
	t := putIndex(index, trailer{seq: 3, id: 4, end: 6 * block, bytes: 8 * block}, records)
	tail := make([]byte, block)
	putTrailer(tail, t)
	f.Add(tail[:64], index[:160])
	f.Fuzz(func(t *testing.T, tail, index []byte) {
		tail = atLeast(tail, block)
		copy(tail, indexMagic)
		le.PutUint32(tail[8:], version)
		le.PutUint32(tail[28:], crc(index))
		le.PutUint32(tail[crcAt:], crc(tail[:crcAt]))
		tr, err := getTrailer(tail)
		if err != nil {
			return
		}
		if tr.entries*entryBytes > len(index) {
			if _, err := getIndex(nil, index, tr); err == nil {
				t.Fatal("an index that is cut is read")
			}
			return
		}
		tr.crc = crc(index[:tr.entries*entryBytes])
		records, err := getIndex(nil, index, tr)
		for _, r := range records {
			if err != nil || r.len < 1 || r.block < 1 || r.end() > tr.end || tr.end > tr.bytes {
				t.Fatalf("%+v in %+v, %v", r, tr, err)
			}
		}
	})
}

// A directory whose files have any bytes opens or is refused, and takes objects if it
// opens.
func FuzzDirectory(f *testing.F) {
	m := newMemFiles(1, 1<<30)
	d := openMem(f, Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}, 4*minSegment, newClock(), m)
	for i := range 3 {
		b, meta := object(i, 5000, 0)
		if err := d.Write(f.Context(), tiertest.Key(i), meta, b); err != nil {
			f.Fatal(err)
		}
	}
	if err := d.Close(); err != nil {
		f.Fatal(err)
	}
	var name string
	for n, file := range m.names {
		if _, _, ok := parseSegment(n); ok {
			name = n
			f.Add(uint8(0), uint16(len(file.data)-block), file.data[len(file.data)-block:][:64])
			f.Add(uint8(0), uint16(block), file.data[block:][:headBytes])
		}
	}
	f.Add(uint8(1), uint16(block), m.names[checkName].data[block:][:256])
	f.Add(uint8(2), uint16(0), make([]byte, 32))
	f.Add(uint8(3), uint16(0), m.names[markName].data[:64])
	f.Fuzz(func(t *testing.T, which uint8, off uint16, b []byte) {
		c := m.kill()
		m.dead = false
		target := []string{name, checkName, goneName, markName}[which%4]
		file := c.names[target]
		if file == nil {
			file = &memFile{d: c, name: target}
			c.names[target] = file
		}
		file.data = resize(file.data, max(int64(len(file.data)), blocksOf(int64(int(off)+len(b)))*block))
		copy(file.data[off:], b)
		for _, at := range []int{int(off) / block * block, len(file.data) - block} { // an attacker can compute checksums, too
			if at >= 0 && at+block <= len(file.data) && which&4 != 0 {
				le.PutUint32(file.data[at+crcAt:], crc(file.data[at:at+crcAt]))
			}
		}
		o := Options{Dirs: []Dir{{"mem", 4 * minSegment}}, SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}
		d, err := openWith(o, func(string) (files, error) { return c, nil }, time.Now)
		if err != nil {
			return
		}
		<-d.Opened()
		for i := range 3 {
			want, meta := tiertest.Object(i, 5000)
			dst := shm.MakeAligned(5000, block)
			if got, err := d.Read(t.Context(), tiertest.Key(i), dst); err == nil && (got != meta || !bytes.Equal(dst, want)) {
				t.Fatalf("object %d: wrong bytes", i)
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
