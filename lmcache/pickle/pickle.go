// SPDX-License-Identifier: Apache-2.0

// Package pickle reads and writes one Python object: a list of CPU tensors, as
// LMCache clients without shared memory send and expect it.
//
// It is no unpickler. [Read] follows the one structure that pickle.dumps makes of such a list. It refuses everything else at the byte where
// it differs. It knows five global names, only to compare them; it calls nothing and builds nothing but slices of its input.
//
//	list     = PROTO EMPTY_LIST { MARK {tensor} APPENDS | tensor APPEND } STOP
//	tensor   = _rebuild_tensor_v2 MARK storage 0 size stride False odict TUPLE REDUCE
//	         | _rebuild_tensor_v3 MARK storage 0 size stride False odict dtype TUPLE REDUCE
//	storage  = _load_from_bytes BINBYTES TUPLE1 REDUCE
//	odict    = OrderedDict EMPTY_TUPLE REDUCE
//
// with a MEMOIZE after any of them, a BINGET in place of a name that was read before, and a FRAME before any opcode. The bytes of a storage
// are a legacy torch.save stream:
//
//	137 B  three pickles: magic number, version, sizes of C types
//	       pickle of the persistent id: class, key, "cpu", element count
//	       pickle of the list of keys
//	8 B    element count, little-endian
//	       elements
//
// Source: CPython's protocol 4 pickler, torch 2.13 (_utils, storage, serialization),
// lmcache 0.5.6; recorded in internal/testkit/testdata/lmcache-mp.
package pickle

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
)

// ErrFormat means that bytes are not a list of CPU tensors as pickle.dumps writes it. The error names the byte, and what was expected and
// found there.
var ErrFormat = errors.New("pickle: not a list of CPU tensors")

// Tensor is one tensor: contiguous, in row-major order.
type Tensor struct {
	DType string // torch's name without "torch."
	Shape []int
	Data  []byte // elements, little-endian; part of the bytes that were read
}

// maxDims bounds the dimensions of a tensor. A tensor with more is ErrFormat.
const maxDims = 8

// The opcodes of protocol 4 that occur.
const (
	opProto     = 0x80 // 1 B version
	opFrame     = 0x95 // 8 B length
	opEmptyList = ']'
	opMark      = '('
	opMemoize   = 0x94
	opBinGet    = 'h'  // 1 B index
	opLongGet   = 'j'  // 4 B index
	opUnicode   = 0x8c // 1 B length, text
	opGlobal    = 0x93 // of two texts
	opBytes8    = 0x8e // 8 B length, bytes
	opBytes     = 'B'  // 4 B length, bytes
	opShort     = 'C'  // 1 B length, bytes
	opTuple0    = ')'
	opTuple1    = 0x85
	opTuple2    = 0x86
	opTuple3    = 0x87
	opTuple     = 't'
	opReduce    = 'R'
	opInt1      = 'K'  // 1 B
	opInt2      = 'M'  // 2 B
	opInt4      = 'J'  // 4 B, signed
	opLong      = 0x8a // 1 B length, two's complement
	opFalse     = 0x89
	opAppend    = 'a'
	opAppends   = 'e'
	opStop      = '.'
)

// name is a string (then attr is empty), or the global that two strings name.
type name struct{ module, attr string }

func text(s string) name { return name{module: s} }

var (
	rebuild2    = name{"torch._utils", "_rebuild_tensor_v2"}
	rebuild3    = name{"torch._utils", "_rebuild_tensor_v3"}
	loadBytes   = name{"torch.storage", "_load_from_bytes"}
	orderedDict = name{"collections", "OrderedDict"}
)

// storages are the torch storage classes, with the dtype and the size of their elements.
var storages = map[string]struct {
	dtype string
	size  int
}{
	"torch\nHalfStorage": {"float16", 2}, "torch\nBFloat16Storage": {"bfloat16", 2},
	"torch\nFloatStorage": {"float32", 4}, "torch\nDoubleStorage": {"float64", 8},
	"torch\nByteStorage": {"uint8", 1}, "torch\nCharStorage": {"int8", 1}, "torch\nShortStorage": {"int16", 2},
	"torch\nIntStorage": {"int32", 4}, "torch\nLongStorage": {"int64", 8}, "torch\nBoolStorage": {"bool", 1},
	"torch.storage\nUntypedStorage": {"", 1}, // the dtype is given beside it
}

// newTypes are the dtypes that have no storage class of their own, and the size of their elements.
var newTypes = map[string]int{
	"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}

// Read returns the tensors of b. More than `most` of them are an error. Their Data are parts of b. The error wraps ErrFormat.
func Read(b []byte, most int) ([]Tensor, error) {
	r := &reader{b: b}
	var out []Tensor
	if v := r.op(); v != opProto || r.byte() < 4 {
		return nil, r.fail("protocol 4 or 5")
	}
	r.expectOp(opEmptyList)
	r.memoize(name{})
	for r.err == nil {
		switch op := r.peek(); op {
		case opStop:
			r.op()
			if len(r.b) != r.at {
				return nil, r.fail("the end")
			}
			return out, r.err
		case opMark:
			r.op()
			for r.err == nil && r.peek() != opAppends {
				if len(out) >= most {
					return nil, fmt.Errorf("%w: more than %d tensors", ErrFormat, most)
				}
				out = append(out, r.tensor())
			}
			r.expectOp(opAppends)
		default:
			if len(out) >= most {
				return nil, fmt.Errorf("%w: more than %d tensors", ErrFormat, most)
			}
			out = append(out, r.tensor())
			r.expectOp(opAppend)
		}
	}
	return nil, r.err
}

// reader reads opcodes. After the first mismatch err is set, and every method returns zero at once.
type reader struct {
	b    []byte
	at   int
	memo []name // the zero name for values to which no later opcode refers
	err  error
}

func (r *reader) fail(want string) error {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s is wanted at byte %d of %d, there is %.8x", ErrFormat, want, r.at, len(r.b), r.b[min(r.at, len(r.b)):])
	}
	return r.err
}

// take returns the next n bytes.
func (r *reader) take(n uint64) []byte {
	if r.err != nil {
		return nil
	}
	if n > uint64(len(r.b)-r.at) {
		_ = r.fail(strconv.FormatUint(n, 10) + " bytes")
		return nil
	}
	out := r.b[r.at : r.at+int(n) : r.at+int(n)]
	r.at += int(n)
	return out
}

func (r *reader) byte() byte {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

// uint reads n bytes, little-endian.
func (r *reader) uint(n int) uint64 {
	var v [8]byte
	copy(v[:], r.take(uint64(n)))
	return binary.LittleEndian.Uint64(v[:])
}

// peek returns the next opcode after any frame headers, without reading it; 0 at the end.
func (r *reader) peek() byte {
	for r.err == nil && r.at < len(r.b) && r.b[r.at] == opFrame {
		r.at++
		if n := r.uint(8); r.err == nil && n > uint64(len(r.b)-r.at) {
			_ = r.fail("a frame of " + strconv.FormatUint(n, 10) + " bytes")
		}
	}
	if r.err != nil || r.at >= len(r.b) {
		_ = r.fail("an opcode")
		return 0
	}
	return r.b[r.at]
}

func (r *reader) op() byte {
	op := r.peek()
	if r.err == nil {
		r.at++
	}
	return op
}

func (r *reader) expectOp(op byte) {
	if r.peek() != op {
		_ = r.fail("opcode " + strconv.QuoteRune(rune(op)))
		return
	}
	r.at++
}

// memoize adds v to the memo if the next opcode is MEMOIZE.
func (r *reader) memoize(v name) {
	if r.err == nil && r.at < len(r.b) && r.peek() == opMemoize {
		r.at++
		r.memo = append(r.memo, v)
	}
}

// get returns a name from the memo if the next opcode refers to one.
func (r *reader) get() (name, bool) {
	var i uint64
	switch r.peek() {
	case opBinGet:
		r.at++
		i = r.uint(1)
	case opLongGet:
		r.at++
		i = r.uint(4)
	default:
		return name{}, false
	}
	if r.err != nil || i >= uint64(len(r.memo)) || r.memo[i] == (name{}) {
		_ = r.fail("a name seen before")
		return name{}, false
	}
	return r.memo[i], true
}

// text reads a string of at most 255 bytes, or a reference to a name in the memo.
func (r *reader) text() name {
	if v, ok := r.get(); ok || r.err != nil {
		return v
	}
	if r.peek() != opUnicode {
		_ = r.fail("a name")
		return name{}
	}
	r.at++
	v := text(string(r.take(r.uint(1))))
	r.memoize(v)
	return v
}

// global reads the global that two strings name, or a reference to a global in the memo.
func (r *reader) global() name {
	module := r.text()
	if module.attr != "" || r.err != nil {
		return module // a whole global, from the memo
	}
	attr := r.text()
	if attr.attr != "" || attr.module == "" {
		_ = r.fail("a name")
	}
	r.expectOp(opGlobal)
	v := name{module.module, attr.module}
	r.memoize(v)
	return v
}

func (r *reader) call(want name) {
	if got := r.global(); got != want {
		_ = r.fail(want.module + "." + want.attr)
	}
}

// result reads the REDUCE at the end of a call.
func (r *reader) result() {
	r.expectOp(opReduce)
	r.memoize(name{})
}

func (r *reader) int() int {
	switch r.op() {
	case opInt1:
		return int(r.uint(1))
	case opInt2:
		return int(r.uint(2))
	case opInt4:
		if v := r.uint(4); v <= math.MaxInt32 {
			return int(v)
		}
	case opLong:
		if n := r.uint(1); n <= 8 {
			if v := r.uint(int(n)); v <= math.MaxInt64 {
				return int(v)
			}
		}
	}
	_ = r.fail("an integer")
	return 0
}

// ints reads a tuple of at most maxDims integers.
func (r *reader) ints() (out []int) {
	marked := r.peek() == opMark
	if marked {
		r.at++
	}
	for r.err == nil {
		var end int
		switch r.peek() {
		case opTuple:
			end = len(out)
		case opTuple1:
			end = 1
		case opTuple2:
			end = 2
		case opTuple3:
			end = 3
		default:
			if len(out) == maxDims {
				_ = r.fail("at most " + strconv.Itoa(maxDims) + " dimensions")
			}
			out = append(out, r.int())
			continue
		}
		if marked != (r.b[r.at] == opTuple) || end != len(out) || end == 0 {
			_ = r.fail("a tuple")
		}
		r.at++
		r.memoize(name{})
		return out
	}
	return nil
}

func (r *reader) bytes() []byte {
	var n uint64
	switch r.op() {
	case opShort:
		n = r.uint(1)
	case opBytes:
		n = r.uint(4)
	case opBytes8:
		n = r.uint(8)
	default:
		_ = r.fail("bytes")
	}
	out := r.take(n)
	r.memoize(name{})
	return out
}

// tensor reads one tensor.
func (r *reader) tensor() (t Tensor) {
	build := r.global()
	if build != rebuild2 && build != rebuild3 {
		_ = r.fail(rebuild2.module + "." + rebuild2.attr)
	}
	r.expectOp(opMark)
	r.call(loadBytes)
	from := r.at
	data := r.bytes()
	r.expectOp(opTuple1)
	r.memoize(name{})
	r.result()
	if r.int() != 0 {
		_ = r.fail("offset 0")
	}
	t.Shape = r.ints()
	strides := r.ints()
	r.expectOp(opFalse)
	r.call(orderedDict)
	r.expectOp(opTuple0)
	r.result()
	if build == rebuild3 {
		dtype := r.global()
		t.DType = dtype.attr
		if dtype.module != "torch" || newTypes[dtype.attr] == 0 {
			_ = r.fail("a dtype")
		}
	}
	r.expectOp(opTuple)
	r.memoize(name{})
	r.result()
	if r.err == nil {
		if err := t.fill(data, strides); err != nil {
			r.err = fmt.Errorf("%w: storage at byte %d: %w", ErrFormat, from, err)
		}
	}
	return t
}

// fill sets t.Data to the elements in a saved storage.
func (t *Tensor) fill(saved []byte, strides []int) error {
	class, count, data, err := readStorage(saved)
	if err != nil {
		return err
	}
	s, ok := storages[class]
	if !ok || (s.dtype == "") != (t.DType != "") {
		return fmt.Errorf("a storage of class %q, which is unknown or not of the tensor's dtype", class)
	}
	size := s.size
	if s.dtype == "" {
		size = newTypes[t.DType]
	} else {
		t.DType = s.dtype
	}
	if uint64(len(data)) != count*uint64(s.size) || count > math.MaxInt64/8 {
		return fmt.Errorf("%d bytes for %d elements of %d bytes each", len(data), count, s.size)
	}
	if len(strides) != len(t.Shape) {
		return fmt.Errorf("%d dimensions, %d strides", len(t.Shape), len(strides))
	}
	elements := 1
	for i := len(t.Shape) - 1; i >= 0; i-- {
		n := t.Shape[i]
		if n < 1 || strides[i] != elements && n > 1 || n > len(data)/elements {
			return fmt.Errorf("shape %v with strides %v is not contiguous, or not of %d bytes", t.Shape, strides, len(data))
		}
		elements *= n
	}
	if elements*size != len(data) {
		return fmt.Errorf("shape %v %s has another size than %d bytes", t.Shape, t.DType, len(data))
	}
	t.Data = data
	return nil
}
