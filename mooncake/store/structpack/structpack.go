// SPDX-License-Identifier: Apache-2.0

// Package structpack reads and writes messages of struct_pack, the serialization of
// yalantinglibs that Mooncake Store uses.
//
//	u32 LE  hash of the type; bit 0 set: a meta byte follows
//	[u8     meta: bits 0 and 1: n, the length follows where n > 0; bit 2: the type's literal follows; bits 3 and 4: bytes of each size, 1 << n]
//	[bytes  length of the message in 1 << n bytes]
//	[bytes  literal, ended by a zero byte]
//	payload
//	[bytes  fields that later releases added to the type; only in a message with a length]
//
// A literal is a type in prefix notation, a byte for each part. The hash is the first four bytes
// of its MD5, read big-endian, without bit 0. So a message with a literal can be read
// without knowing its type beforehand.
package structpack

import (
	"crypto/md5"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// ErrMalformed means that a message or a literal does not have the form that struct_pack writes.
var ErrMalformed = errors.New("structpack: malformed")

// Literals of basic types. A type's literal is a concatenation of such parts.
const (
	I32    = "\x01"
	U32    = "\x02"
	I64    = "\x03"
	U64    = "\x04"
	U8     = "\x06"
	Bool   = "\x0b"
	String = "\x80\x0c"
	Void   = "\xfa"
	UUID   = "\xfd\x04\x04\x89\x89\xff" // two U64 in plain memory
)

// Vector returns the literal of a vector.
func Vector(of string) string { return "\x84" + of }

// Optional returns the literal of an optional.
func Optional(of string) string { return "\x85" + of }

// Struct returns the literal of a struct, a pair, or several arguments.
func Struct(fields ...string) string { return "\xfd" + strings.Join(fields, "") + "\xff" }

// Expected returns the literal of a result: a value, or an error, which is an I32.
func Expected(of string) string { return "\x87" + of + I32 }

// Hash returns the hash of a literal; bit 0 is clear.
func Hash(literal string) uint32 {
	sum := md5.Sum([]byte(literal))
	return binary.BigEndian.Uint32(sum[:]) &^ 1
}

const (
	hasMeta    = 1      // bit of the hash
	lengthBits = 3      // bits of the meta byte
	hasLiteral = 1 << 2 // bit of the meta byte
	widthShift = 3
	widthBits  = 3

	maxLiteral = 4096 // bytes; a longer literal is malformed
	maxDepth   = 32   // types in one another; a literal with more is malformed
)

// Kind says what a Type is.
type Kind uint8

// The kinds of types.
const (
	KindVoid     Kind = iota // no bytes
	KindFixed                // a number, a bool or a character of Size bytes
	KindString               // a size, and bytes
	KindVector               // a size, and elements; a map is a vector of pairs
	KindOptional             // 0, or 1 and a value
	KindExpected             // 1 and a value, or 0 and an error
	KindStruct               // its fields
	KindVariant              // the index of an alternative, and its value
)

// Type is a type, as parsed from its literal.
type Type struct {
	Kind  Kind
	Size  int     // of KindFixed: number of bytes
	Parts []*Type // types of: the element, the fields that have bytes, the alternatives, or the value and the error
	least int     // fewest bytes of a value, if sizes take one byte
}

// Parse parses the literal of a type.
func Parse(literal string) (*Type, error) {
	if len(literal) > maxLiteral {
		return nil, fmt.Errorf("%w: a literal of %d bytes is too long", ErrMalformed, len(literal))
	}
	t, rest, err := parse(literal, 0)
	if err == nil && rest != "" {
		err = fmt.Errorf("%w: %d bytes behind the literal's type", ErrMalformed, len(rest))
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

var fixed = [13]int{1: 4, 2: 4, 3: 8, 4: 8, 5: 1, 6: 1, 7: 2, 8: 2, 11: 1, 12: 1}

// aligned reports whether s begins with the two alignment bytes that end a struct in plain memory; they carry no data.
func aligned(s string) bool {
	is := func(b byte) bool { return b == 0x82 || b == 0x83 || b == 0x85 || b == 0x89 }
	return len(s) >= 3 && is(s[0]) && is(s[1]) && s[2] == 0xff
}

// parse parses the type at the start of s and returns the rest of s.
func parse(s string, depth int) (*Type, string, error) {
	if s == "" || depth > maxDepth {
		return malformed("it ends early, or is too deep")
	}
	b, s := s[0], s[1:]
	switch {
	case int(b) < len(fixed) && fixed[b] > 0:
		return &Type{Kind: KindFixed, Size: fixed[b], least: fixed[b]}, s, nil
	case b == 0xfa:
		return &Type{Kind: KindVoid}, s, nil
	case b == 0x80 || b == 0x84 || b == 0x85:
		return parseOne(b, s, depth)
	case b == 0x82 || b == 0x87:
		return parseTwo(b, s, depth)
	case b == 0xfd || b == 0x86:
		return parseList(b, s, depth)
	}
	return malformed(fmt.Sprintf("type %#02x", b))
}

// malformed returns parse's results for a malformed literal.
func malformed(why string) (*Type, string, error) {
	return nil, "", fmt.Errorf("%w: literal: %s", ErrMalformed, why)
}

// parseOne parses the part of a string, a vector or an optional.
func parseOne(b byte, s string, depth int) (*Type, string, error) {
	t, s, err := parse(s, depth+1)
	if err != nil {
		return nil, "", err
	}
	kind := map[byte]Kind{0x80: KindString, 0x84: KindVector, 0x85: KindOptional}[b]
	if kind == KindString && t.Size != 1 {
		return malformed("a string of something else than characters")
	}
	return &Type{Kind: kind, Parts: []*Type{t}, least: 1}, s, nil
}

// parseTwo parses the two parts of a map or of an expected value.
func parseTwo(b byte, s string, depth int) (*Type, string, error) {
	first, s, err := parse(s, depth+1)
	if err != nil {
		return nil, "", err
	}
	second, s, err := parse(s, depth+1)
	if err != nil {
		return nil, "", err
	}
	if b == 0x87 {
		return &Type{Kind: KindExpected, Parts: []*Type{first, second}, least: 1}, s, nil
	}
	pair := &Type{Kind: KindStruct, Parts: []*Type{first, second}, least: first.least + second.least}
	return &Type{Kind: KindVector, Parts: []*Type{pair}, least: 1}, s, nil
}

// parseList parses the parts of a struct or of a variant, up to their end mark.
func parseList(b byte, s string, depth int) (*Type, string, error) {
	isStruct := b == 0xfd
	out := &Type{Kind: KindStruct}
	if !isStruct {
		out.Kind, out.least = KindVariant, 1
	}
	for s != "" {
		if s[0] == 0xff {
			return out, s[1:], nil
		}
		if isStruct && aligned(s) {
			s = s[2:]
			continue
		}
		t, rest, err := parse(s, depth+1)
		if err != nil {
			return nil, "", err
		}
		s = rest
		if isStruct && t.least == 0 {
			continue // a value of this type has no bytes: many of them must cost nothing
		}
		out.Parts = append(out.Parts, t)
		if isStruct {
			out.least += t.least
		}
	}
	return malformed("a struct without an end")
}

// Least returns the fewest bytes that a value of t has.
func (t *Type) Least() int { return t.least }
