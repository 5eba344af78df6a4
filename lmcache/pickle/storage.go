// SPDX-License-Identifier: Apache-2.0

package pickle

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
)

// storageHead is the first three pickles of a legacy torch.save stream: the magic number, version 1001, and a map of protocol_version,
// little_endian and type_sizes.
const storageHead = "\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + "\x80\x02M\xe9\x03." +
	"\x80\x02}q\x00(X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\r\x00\x00\x00little_endianq\x02\x88" +
	"X\n\x00\x00\x00type_sizesq\x03}q\x04(X\x05\x00\x00\x00shortq\x05K\x02X\x03\x00\x00\x00intq\x06K\x04X\x04\x00\x00\x00longq\x07K\x04uu."

// The parts of the persistent id around its class, key and element count; then the list of keys.
const (
	idHead  = "\x80\x02(X\x07\x00\x00\x00storageq\x00c"
	idClass = "\nq\x01X"                       // then 4 B length, key
	idKey   = "q\x02X\x03\x00\x00\x00cpuq\x03" // then an integer
	idEnd   = "Ntq\x04Q." + "\x80\x02]q\x00X"  // then 4 B length, key
	keysEnd = "q\x01a."                        // then 8 B count, elements
	maxKey  = 64                               // bytes of the key; a storage with a longer one is refused
)

var errStorage = errors.New("not a storage that torch.save wrote")

// readStorage splits a saved storage into class, element count and elements. count occurs at two places of the stream, which must be equal.
func readStorage(b []byte) (class string, count uint64, data []byte, err error) {
	r := &reader{b: b}
	r.literal(storageHead + idHead)
	end := bytes.Index(b[r.at:min(len(b), r.at+128)], []byte(idClass))
	if r.err != nil || end < 0 {
		return "", 0, nil, errStorage
	}
	class = string(r.take(uint64(end)))
	r.literal(idClass)
	key := r.take(min(r.uint(4), maxKey+1))
	r.literal(idKey)
	count = uint64(r.int())
	r.literal(idEnd)
	again := r.take(min(r.uint(4), maxKey+1))
	r.literal(keysEnd)
	n := r.uint(8)
	if r.err != nil || len(key) > maxKey || !bytes.Equal(key, again) || n != count {
		return "", 0, nil, errStorage
	}
	return class, count, b[r.at:], nil
}

func (r *reader) literal(s string) {
	if got := r.take(uint64(len(s))); string(got) != s {
		_ = r.fail("a fixed part")
	}
}

// A Layout is the shape and type that all tensors of a written list have.
type Layout struct {
	DType string
	Shape []int

	elements, size int
	class          string
}

// NewLayout returns the Layout of a dtype and shape. It reports false if Read would not read such tensors, or if they have 4 GiB or more.
func NewLayout(dtype string, shape []int) (*Layout, bool) {
	l := &Layout{DType: dtype, Shape: shape, elements: 1}
	for class, s := range storages {
		if s.dtype == dtype && dtype != "" {
			l.class, l.size = class, s.size
		}
	}
	if n := newTypes[dtype]; n != 0 {
		l.class, l.size = "torch.storage\nUntypedStorage", n
	}
	if l.class == "" || len(shape) == 0 || len(shape) > maxDims {
		return nil, false
	}
	for _, n := range shape {
		if n < 1 || n > math.MaxUint32/l.size/l.elements {
			return nil, false
		}
		l.elements *= n
	}
	return l, true
}

// Bytes returns the length of one tensor's elements.
func (l *Layout) Bytes() int { return l.elements * l.size }

// Overhead bounds the bytes that a list, and each of its tensors, takes in addition to the elements.
const Overhead = 1024

// Append appends the pickle of a list of n tensors. fill must write the elements of tensor i into dst, which is Bytes() long.
func (l *Layout) Append(b []byte, n int, fill func(i int, dst []byte)) []byte {
	b = append(b, opProto, 4, opEmptyList, opMark)
	for i := range n {
		b = l.appendTensor(b, func(dst []byte) { fill(i, dst) })
	}
	return append(b, opAppends, opStop)
}

func (l *Layout) appendTensor(b []byte, fill func(dst []byte)) []byte {
	build := rebuild2
	untyped := newTypes[l.DType] != 0
	if untyped {
		build = rebuild3
	}
	b = append(appendGlobal(b, build), opMark)
	b = append(appendGlobal(b, loadBytes), opBytes8)
	at := len(b)
	b = append(b, make([]byte, 8)...)
	b = l.appendStorage(b, fill)
	binary.LittleEndian.PutUint64(b[at:], uint64(len(b)-at-8))
	b = append(b, opTuple1, opReduce, opInt1, 0)
	b = append(b, opMark)
	for _, n := range l.Shape {
		b = appendLong(b, n)
	}
	b = append(b, opTuple, opMark)
	stride := l.elements
	for _, n := range l.Shape {
		stride /= n
		b = appendLong(b, stride)
	}
	b = append(b, opTuple, opFalse)
	b = append(appendGlobal(b, orderedDict), opTuple0, opReduce)
	if untyped {
		b = appendGlobal(b, name{"torch", l.DType})
	}
	return append(b, opTuple, opReduce)
}

func (l *Layout) appendStorage(b []byte, fill func(dst []byte)) []byte {
	const key = "0"
	count := l.elements
	if newTypes[l.DType] != 0 {
		count *= l.size // in bytes
	}
	b = append(append(append(b, storageHead+idHead...), l.class...), idClass...)
	b = append(append(binary.LittleEndian.AppendUint32(b, uint32(len(key))), key...), idKey...)
	b = append(appendLong(b, count), idEnd...)
	b = append(append(binary.LittleEndian.AppendUint32(b, uint32(len(key))), key...), keysEnd...)
	b = binary.LittleEndian.AppendUint64(b, uint64(count))
	at := len(b)
	if n := at + l.Bytes(); n <= cap(b) {
		b = b[:n]
	} else {
		b = append(b, make([]byte, l.Bytes())...)
	}
	fill(b[at:])
	return b
}

func appendGlobal(b []byte, v name) []byte {
	for _, s := range []string{v.module, v.attr} {
		b = append(append(b, opUnicode, byte(len(s))), s...)
	}
	return append(b, opGlobal)
}

// appendLong appends an integer of up to 63 bits.
func appendLong(b []byte, n int) []byte {
	if n <= math.MaxInt32 {
		return binary.LittleEndian.AppendUint32(append(b, opInt4), uint32(n))
	}
	return binary.LittleEndian.AppendUint64(append(b, opLong, 8), uint64(n))
}
