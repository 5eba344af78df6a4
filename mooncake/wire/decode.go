// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// decoder reads msgpack as msgspec does: types must match exactly, and unknown keys are ignored. Each method returns the bytes that
// follow the value it has read.
type decoder struct {
	ids  int  // how many more block ids the message may have
	flat bool // the ids of a request came as one list, without groups
}

func bad(err error) error { return fmt.Errorf("%w: %w", ErrMessage, err) }

// object reads a map and calls field for each entry. field returns the bytes that follow the entry's value.
func (d *decoder) object(b []byte, field func(name string, v []byte) ([]byte, error)) ([]byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return nil, bad(err)
	}
	for range n {
		var name string
		if name, b, err = d.text(b); err != nil {
			return nil, err
		}
		if b, err = field(name, b); err != nil {
			return nil, fmt.Errorf("%w at `%.64s`", err, name)
		}
	}
	return b, nil
}

// message reads a map that must take up all of b.
func (d *decoder) message(b []byte, field func(name string, v []byte) ([]byte, error)) error {
	rest, err := d.object(b, field)
	if err == nil && len(rest) != 0 {
		err = fmt.Errorf("%w: %d bytes after the map", ErrMessage, len(rest))
	}
	return err
}

func (d *decoder) skip(b []byte) ([]byte, error) {
	rest, err := msgp.Skip(b)
	if err != nil {
		return nil, bad(err)
	}
	return rest, nil
}

func (d *decoder) text(b []byte) (string, []byte, error) {
	s, rest, err := msgp.ReadStringZC(b)
	if err != nil {
		return "", nil, bad(err)
	}
	if !utf8.Valid(s) {
		return "", nil, fmt.Errorf("%w: text is not UTF-8", ErrMessage)
	}
	return string(s), rest, nil
}

// maxName bounds the names of requests, transfers, layers and hosts, in bytes, because they are remembered and logged. A message with a
// longer name is refused.
const maxName = 1 << 10

// name reads a string of at most maxName bytes.
func (d *decoder) name(b []byte) (string, []byte, error) {
	s, rest, err := d.text(b)
	if err == nil && len(s) > maxName {
		return "", nil, fmt.Errorf("%w: a name of %d bytes, at most %d", ErrMessage, len(s), maxName)
	}
	return s, rest, err
}

func (d *decoder) unsigned(b []byte) (uint64, []byte, error) {
	if t := msgp.NextType(b); t != msgp.IntType && t != msgp.UintType {
		return 0, nil, fmt.Errorf("%w: expected an integer, got %s", ErrMessage, t)
	}
	v, rest, err := msgp.ReadUint64Bytes(b)
	if err != nil {
		return 0, nil, bad(err)
	}
	return v, rest, nil
}

func (d *decoder) signed(b []byte) (int, []byte, error) {
	return d.integer(b, math.MinInt, math.MaxInt)
}

func (d *decoder) integer(b []byte, low, high int) (int, []byte, error) {
	if t := msgp.NextType(b); t != msgp.IntType && t != msgp.UintType {
		return 0, nil, fmt.Errorf("%w: expected an integer, got %s", ErrMessage, t)
	}
	v, rest, err := msgp.ReadIntBytes(b)
	if err != nil {
		return 0, nil, bad(err)
	}
	if v < low || v > high {
		return 0, nil, fmt.Errorf("%w: %d is outside %d to %d", ErrMessage, v, low, high)
	}
	return v, rest, nil
}

// blockID reads one block id and counts it against the limit of the message.
func (d *decoder) blockID(b []byte) (int, []byte, error) {
	if d.ids--; d.ids < 0 {
		return 0, nil, fmt.Errorf("%w: more than %d block ids", ErrMessage, maxMessageIDs)
	}
	return d.integer(b, 0, math.MaxUint32)
}

// numbers reads a list of small numbers: the groups that share a region.
func (d *decoder) numbers(b []byte) ([]int, []byte, error) {
	l, rest, err := list(b, 1<<10, d.blockID)
	if l == nil && err == nil {
		l = []int{}
	}
	return l, rest, err
}

func (d *decoder) optionalStrings(b []byte) ([]string, []byte, error) {
	if msgp.IsNil(b) {
		return nil, b[1:], nil
	}
	l, rest, err := list(b, maxMessageTransfers, d.text)
	if l == nil && err == nil {
		l = []string{}
	}
	return l, rest, err
}

// readWanted reads {request id: [transfer id, ids]}. ids is one list per group; before 0.20 it is one list.
func (d *decoder) readWanted(b []byte) (map[string]Wanted, []byte, error) {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return nil, nil, bad(err)
	}
	if n > maxMessageTransfers {
		return nil, nil, fmt.Errorf("%w: %d requests in one pull, at most %d", ErrMessage, n, maxMessageTransfers)
	}
	all := make(map[string]Wanted)
	for range n {
		var id string
		var w Wanted
		if id, b, err = d.name(b); err != nil {
			return nil, nil, err
		}
		if w, b, err = d.wantedOne(b); err != nil {
			return nil, nil, fmt.Errorf("%w of request `%.64s`", err, id)
		}
		all[id] = w
	}
	return all, b, nil
}

func (d *decoder) wantedOne(b []byte) (w Wanted, rest []byte, err error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return w, nil, bad(err)
	}
	if n != 2 {
		return w, nil, fmt.Errorf("%w: %d elements instead of a transfer id and block ids", ErrMessage, n)
	}
	if w.TransferID, b, err = d.name(b); err != nil {
		return w, nil, err
	}
	if flat(b) {
		d.flat = true
		var ids []int
		ids, rest, err = list(b, maxMessageIDs, d.blockID)
		w.Blocks = [][]int{ids}
		return w, rest, err
	}
	w.Blocks, rest, err = list(b, 1<<10, func(b []byte) ([]int, []byte, error) {
		return list(b, maxMessageIDs, d.blockID)
	})
	return w, rest, err
}

// flat reports whether b begins with a list whose first element is a number: block ids without groups.
func flat(b []byte) bool {
	n, rest, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil || n == 0 {
		return false
	}
	t := msgp.NextType(rest)
	return t == msgp.IntType || t == msgp.UintType
}

// list reads an array of at most limit elements. Each element takes at least a byte, so its first allocation is bounded by the bytes
// that came.
func list[T any](b []byte, limit int, elem func([]byte) (T, []byte, error)) ([]T, []byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, nil, bad(err)
	}
	if uint64(n) > uint64(min(limit, len(b))) {
		return nil, nil, fmt.Errorf("%w: list of %d elements in %d bytes, at most %d", ErrMessage, n, len(b), limit)
	}
	if n == 0 {
		return nil, b, nil
	}
	l := make([]T, 0, n)
	for range n {
		var v T
		if v, b, err = elem(b); err != nil {
			return nil, nil, err
		}
		l = append(l, v)
	}
	return l, b, nil
}
