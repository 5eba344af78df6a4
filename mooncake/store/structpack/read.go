// SPDX-License-Identifier: Apache-2.0

package structpack

import (
	"encoding/binary"
	"fmt"
	"sync"
)

// Reader reads the values of one message in order. After the first malformed value, all methods return zero values, and Err returns the
// error. Strings are copied.
type Reader struct {
	b     []byte
	width uint8
	later bool // the payload may be followed by fields that later releases added
	err   error
}

// types caches parsed literals. Peers choose the literals, so the cache is bounded: at maxTypes it is emptied.
var types struct {
	sync.Mutex
	of map[string]known
}

// known is a type and the hash of its literal.
type known struct {
	t    *Type
	hash uint32
}

const maxTypes = 256

func typeOf(literal []byte) (known, error) {
	types.Lock()
	defer types.Unlock()
	if k, ok := types.of[string(literal)]; ok {
		return k, nil
	}
	t, err := Parse(string(literal))
	if err != nil {
		return known{}, err
	}
	if types.of == nil || len(types.of) >= maxTypes {
		types.of = make(map[string]known)
	}
	k := known{t, Hash(string(literal))}
	types.of[string(literal)] = k
	return k, nil
}

// Open reads everything before the payload, including a length. It takes the payload's type from the message's own literal, whose hash
// must match. It refuses a message without a literal, because its type is unknown.
func Open(b []byte) (*Reader, *Type, error) {
	if len(b) < 5 {
		return nil, nil, fmt.Errorf("%w: a message of %d bytes, at least 5 are needed", ErrMalformed, len(b))
	}
	hash, meta := binary.LittleEndian.Uint32(b), b[4]
	if hash&hasMeta == 0 || meta&hasLiteral == 0 {
		return nil, nil, fmt.Errorf("%w: the message does not name its type", ErrMalformed)
	}
	b = b[5:]
	later := meta & lengthBits
	if later != 0 {
		n := 1 << later // the length must equal that of the whole message
		if n > len(b) {
			return nil, nil, fmt.Errorf("%w: the message ends within its length", ErrMalformed)
		}
		b = b[n:]
	}
	end := 0
	for ; end < len(b) && b[end] != 0; end++ {
		if end == maxLiteral {
			break
		}
	}
	if end == len(b) || b[end] != 0 {
		return nil, nil, fmt.Errorf("%w: the name of the message's type does not end", ErrMalformed)
	}
	k, err := typeOf(b[:end])
	if err != nil {
		return nil, nil, err
	}
	if k.hash != hash&^hasMeta {
		return nil, nil, fmt.Errorf("%w: the hash is not that of the type that the message names", ErrMalformed)
	}
	return &Reader{b: b[end+1:], width: meta >> widthShift & widthBits, later: later != 0}, k.t, nil
}

// HasLater reports whether the message names its length. Then fields that later releases added to its type may follow the payload.
// 0.3.14 is the first release that sends such messages.
func (r *Reader) HasLater() bool { return r.later }

// Err returns an error for the first malformed value, or nil.
func (r *Reader) Err() error { return r.err }

// End returns Err, or an error if bytes are left. With HasLater, bytes may be left.
func (r *Reader) End() error {
	if r.err == nil && len(r.b) > 0 && !r.later {
		r.fail("%d bytes follow the last field", len(r.b))
	}
	return r.err
}

func (r *Reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
	}
	r.b = nil
}

func (r *Reader) take(n int) []byte {
	if r.err != nil || n > len(r.b) {
		r.fail("the message ends early")
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

// U64 reads 8 bytes.
func (r *Reader) U64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// I32 reads 4 bytes.
func (r *Reader) I32() int32 {
	if b := r.take(4); b != nil {
		return int32(binary.LittleEndian.Uint32(b))
	}
	return 0
}

// U8 reads a byte: the index of a variant, or a number.
func (r *Reader) U8() uint8 {
	if b := r.take(1); b != nil {
		return b[0]
	}
	return 0
}

// Bool reads a bool, or the byte that says whether an optional or expected has its value.
func (r *Reader) Bool() bool {
	v := r.U8()
	if v > 1 {
		r.fail("a bool is %d, which is neither 0 nor 1", v)
	}
	return v == 1
}

// Size reads the size of a vector whose elements have at least `least` bytes each. A size for which the rest of the message is too
// short is malformed, so the caller may allocate as many elements as Size returns.
func (r *Reader) Size(least int) int {
	b := r.take(1 << r.width)
	n := uint64(0)
	for i, v := range b {
		n |= uint64(v) << (8 * i)
	}
	if n > uint64(len(r.b)/max(least, 1)) {
		r.fail("a list of %d elements, of which only %d bytes came", n, len(r.b))
		return 0
	}
	return int(n)
}

// Bytes reads a string without copying it: the result is a part of the message.
func (r *Reader) Bytes() []byte { return r.take(r.Size(1)) }

// String reads and copies a string.
func (r *Reader) String() string { return string(r.Bytes()) }

// Skip reads a value of type t and drops it.
func (r *Reader) Skip(t *Type) {
	if r.err != nil {
		return
	}
	switch t.Kind {
	case KindVoid:
	case KindFixed:
		r.take(t.Size)
	case KindString:
		r.Bytes()
	case KindVector:
		n := r.Size(t.Parts[0].least)
		if t.Parts[0].least == 0 {
			n = 0 // elements without bytes: any number of them takes no bytes
		}
		for range n {
			if r.err != nil {
				return
			}
			r.Skip(t.Parts[0])
		}
	case KindOptional:
		if r.Bool() {
			r.Skip(t.Parts[0])
		}
	case KindExpected:
		if r.Bool() {
			r.Skip(t.Parts[0])
		} else {
			r.Skip(t.Parts[1])
		}
	case KindStruct:
		for _, p := range t.Parts {
			r.Skip(p)
		}
	case KindVariant:
		if i := int(r.U8()); i < len(t.Parts) {
			r.Skip(t.Parts[i])
		} else {
			r.fail("a variant has alternative %d of %d", i, len(t.Parts))
		}
	}
}
