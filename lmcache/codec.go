// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"errors"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// ErrTrailing means that a frame holds more than one msgpack value.
var ErrTrailing = errors.New("lmcache: bytes after the value")

// ErrMissing means that a structure lacks a field that has no default.
var ErrMissing = errors.New("lmcache: a field without a default is missing")

func errOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// readInt reads a msgpack integer of any width, and a bool as 0 or 1. msgspec converts between the two as well, at the top level of a
// frame.
func readInt(b []byte) (int64, []byte, error) {
	switch msgp.NextType(b) {
	case msgp.BoolType:
		v, rest, err := msgp.ReadBoolBytes(b)
		if v {
			return 1, rest, err
		}
		return 0, rest, err
	case msgp.UintType:
		v, rest, err := msgp.ReadUint64Bytes(b)
		if err == nil && v > math.MaxInt64 {
			return 0, b, errors.New("lmcache: integer above 2^63-1")
		}
		return int64(v), rest, err
	}
	return msgp.ReadInt64Bytes(b)
}

// readBool reads a msgpack bool, or an integer as a truth value.
func readBool(b []byte) (bool, []byte, error) {
	v, rest, err := readInt(b)
	return v != 0, rest, err
}

// readCount reads an integer that must lie in [0, limit].
func readCount(b []byte, limit int) (int, []byte, error) {
	v, rest, err := readInt(b)
	if err != nil {
		return 0, b, err
	}
	if v < 0 || v > int64(limit) {
		return 0, b, fmt.Errorf("lmcache: %d is outside 0 to %d", v, limit)
	}
	return int(v), rest, nil
}

// readArray reads an array header and returns the number of elements. It refuses a number above the bytes left in b, so that no allocation
// is sized by a false number.
func readArray(b []byte) (int, []byte, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return 0, b, err
	}
	if uint64(n) > uint64(len(rest)) {
		return 0, b, fmt.Errorf("lmcache: an array of %d elements, of which only %d bytes came", n, len(rest))
	}
	return int(n), rest, nil
}

// readMap calls field for each entry of a map with string keys, with b at the entry's value. field returns the bytes after the value. If it
// returns b itself, readMap skips the value.
func readMap(b []byte, field func(name, b []byte) ([]byte, error)) ([]byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return b, err
	}
	for range n {
		var name []byte
		if name, b, err = msgp.ReadMapKeyZC(b); err != nil {
			return b, err
		}
		rest, err := field(name, b)
		if err != nil {
			return b, fmt.Errorf("%s: %w", name, err)
		}
		if len(rest) == len(b) {
			if rest, err = msgp.Skip(b); err != nil {
				return b, fmt.Errorf("%s: %w", name, err)
			}
		}
		b = rest
	}
	return b, nil
}

// readList calls elem for each element of an array.
func readList(b []byte, elem func(i int, b []byte) ([]byte, error)) ([]byte, error) {
	n, b, err := readArray(b)
	if err != nil {
		return b, err
	}
	for i := range n {
		if b, err = elem(i, b); err != nil {
			return b, fmt.Errorf("element %d: %w", i, err)
		}
	}
	return b, nil
}

// noRest returns err, or ErrTrailing if bytes are left after the value of a frame.
func noRest(rest []byte, err error) error {
	if err == nil && len(rest) != 0 {
		return ErrTrailing
	}
	return err
}

// field readers for structures: each stores the value and returns the rest.

func intInto[T ~int | ~int64](p *T, b []byte) ([]byte, error) {
	v, rest, err := readInt(b)
	*p = T(v)
	return rest, err
}

func stringInto(p *string, b []byte) ([]byte, error) {
	v, rest, err := msgp.ReadStringZC(b)
	*p = string(v)
	return rest, err
}

func boolInto(p *bool, b []byte) ([]byte, error) {
	v, rest, err := readBool(b)
	*p = v
	return rest, err
}

// intsInto reads a list of integers into p. More than `most` of them are an error: an element takes 8 bytes of memory, but may take only
// one byte in the message.
func intsInto[T ~int | ~int64](p *[]T, most int, b []byte) ([]byte, error) {
	n, _, err := readArray(b)
	if err == nil && n > most {
		err = fmt.Errorf("a list of %d elements, at most %d are possible", n, most)
	}
	if err != nil {
		return b, err
	}
	*p = make([]T, n)
	return readList(b, func(i int, b []byte) ([]byte, error) { return intInto(&(*p)[i], b) })
}

// DecodeInt reads a frame that holds one integer (or bool).
func DecodeInt(frame []byte) (int64, error) {
	v, rest, err := readInt(frame)
	return v, noRest(rest, err)
}

// DecodeBool reads a frame that holds one bool (or integer).
func DecodeBool(frame []byte) (bool, error) {
	v, rest, err := readBool(frame)
	return v, noRest(rest, err)
}

// decodeString reads a frame that holds one string. The result aliases frame.
func decodeString(frame []byte) ([]byte, error) {
	v, rest, err := msgp.ReadStringZC(frame)
	return v, noRest(rest, err)
}

// decodeBytes reads a frame that holds one bin value. The result aliases frame.
func decodeBytes(frame []byte) ([]byte, error) {
	v, rest, err := msgp.ReadBytesZC(frame)
	return v, noRest(rest, err)
}

// decodeFloat reads a frame that holds one number.
func decodeFloat(frame []byte) (float64, error) {
	if msgp.NextType(frame) == msgp.Float64Type {
		v, rest, err := msgp.ReadFloat64Bytes(frame)
		return v, noRest(rest, err)
	}
	v, err := DecodeInt(frame)
	return float64(v), err
}

// appendInt appends an integer as msgspec does: the shortest form, unsigned
// unless it is negative.
func appendInt[T ~int | ~int64](b []byte, v T) []byte {
	if v >= 0 {
		return msgp.AppendUint64(b, uint64(v))
	}
	return msgp.AppendInt64(b, int64(v))
}
