// SPDX-License-Identifier: Apache-2.0

package event

import (
	"encoding/binary"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// decoder reads values one after the other. After the first error it reads nothing more.
type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf(format, args...)
	}
}

// read reads the next value with f.
func read[T any](d *decoder, f func([]byte) (T, []byte, error)) (v T) {
	if d.err != nil {
		return v
	}
	v, rest, err := f(d.b)
	if err != nil {
		d.err = err
		return v
	}
	d.b = rest
	return v
}

// array reads an array's header. It refuses more elements than there are bytes left, since each has at least one byte.
func (d *decoder) array() int {
	n := read(d, msgp.ReadArrayHeaderBytes)
	if d.err == nil && uint64(n) > uint64(len(d.b)) {
		d.fail("an array of %d elements, of which only %d bytes came", n, len(d.b))
	}
	if d.err != nil {
		return 0
	}
	return int(n)
}

func (d *decoder) skip() {
	if d.err == nil {
		d.b, d.err = msgp.Skip(d.b)
	}
}

// isNil reads a nil if the next value is one.
func (d *decoder) isNil() bool {
	if d.err != nil || msgp.NextType(d.b) != msgp.NilType {
		return false
	}
	d.b = d.b[1:]
	return true
}

// number reads a float or an integer.
func (d *decoder) number() float64 {
	if d.err != nil {
		return 0
	}
	switch msgp.NextType(d.b) {
	case msgp.Float64Type:
		return read(d, msgp.ReadFloat64Bytes)
	case msgp.Float32Type:
		return float64(read(d, msgp.ReadFloat32Bytes))
	case msgp.UintType:
		return float64(read(d, msgp.ReadUint64Bytes))
	}
	return float64(read(d, msgp.ReadInt64Bytes))
}

// integer reads an integer of 0 to limit.
func (d *decoder) integer(limit int64) int64 {
	v := read(d, msgp.ReadInt64Bytes)
	if v < 0 || v > limit {
		d.fail("%d is outside 0 to %d", v, limit)
	}
	return v
}

// unsigned reads an integer of either sign and returns its 64 bits.
func (d *decoder) unsigned() uint64 {
	if d.err == nil && msgp.NextType(d.b) == msgp.UintType {
		return read(d, msgp.ReadUint64Bytes)
	}
	return uint64(read(d, msgp.ReadInt64Bytes))
}

// text reads a string or nil.
func (d *decoder) text() string {
	if d.isNil() {
		return ""
	}
	return d.string()
}

func (d *decoder) string() string {
	b := read(d, msgp.ReadStringZC)
	if !utf8.Valid(b) {
		d.fail("a text is not UTF-8")
	}
	return string(b)
}

func (d *decoder) hash() []byte {
	if d.err == nil && msgp.NextType(d.b) == msgp.BinType {
		return read(d, msgp.ReadBytesZC)
	}
	return binary.BigEndian.AppendUint64(nil, d.unsigned())
}

func (d *decoder) hashes() (out [][]byte) {
	for range d.array() {
		if d.err != nil {
			return nil
		}
		out = append(out, d.hash())
	}
	return out
}

func (d *decoder) tokens() []int64 {
	n := d.array()
	if n > maxTokens {
		d.fail("an event of %d tokens, at most %d are possible", n, maxTokens)
		return nil
	}
	out := make([]int64, 0, n)
	for range n {
		if d.err != nil {
			return nil
		}
		out = append(out, read(d, msgp.ReadInt64Bytes))
	}
	return out
}

// extra reads extra_keys, where the entry of the first block has the salt.
func (d *decoder) extra(ev *Event) {
	if d.isNil() {
		return
	}
	for i := range d.array() {
		if d.err != nil {
			return
		}
		if d.isNil() {
			continue
		}
		for j := range d.array() {
			if d.err != nil {
				return
			}
			if msgp.NextType(d.b) != msgp.StrType {
				d.skip()
				continue
			}
			s := d.string()
			if i == 0 && (j > 0 || s != ev.LoRA) {
				ev.Salt = s
			}
		}
	}
}

// required are the fields that an event must have, in the order of the array encoding.
var required = map[Kind][]string{
	Stored:  {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"},
	Removed: {"block_hashes", "medium"},
}

func kindOf(name string) Kind {
	for k, n := range names {
		if n == name && n != "" {
			return Kind(k)
		}
	}
	return 0
}

func (d *decoder) event() (ev Event) {
	ev.Group = -1
	if d.err == nil && msgp.NextType(d.b) == msgp.ArrayType {
		return d.arrayEvent()
	}
	d.typeOf(&ev)
	need := required[ev.Kind]
	seen := 0
	for range read(d, msgp.ReadMapHeaderBytes) {
		if d.err != nil {
			return ev
		}
		name := string(read(d, msgp.ReadStringZC))
		for i, n := range need {
			if n == name {
				seen |= 1 << i
			}
		}
		d.field(&ev, name)
	}
	if d.err == nil && seen != 1<<len(need)-1 {
		d.fail("a %s lacks a field of %v", ev.Kind, need)
	}
	return ev
}

// typeOf sets ev.Kind from the type field of a map. It reads ahead, since that field need not come first.
func (d *decoder) typeOf(ev *Event) {
	ahead := *d
	for range read(&ahead, msgp.ReadMapHeaderBytes) {
		name := read(&ahead, msgp.ReadStringZC)
		if ahead.err != nil {
			break
		}
		if string(name) == "type" {
			ev.Kind = kindOf(string(read(&ahead, msgp.ReadStringZC)))
			continue
		}
		ahead.skip()
	}
	if d.err = ahead.err; ev.Kind == 0 {
		d.fail("the type of an event is none of BlockStored, BlockRemoved and AllBlocksCleared")
	}
}

// arrayEvent reads an event in the array form of an older release. It refuses an event that lacks a field which every release sent.
func (d *decoder) arrayEvent() (ev Event) {
	ev.Group = -1
	n := d.array()
	if n == 0 {
		d.fail("an event is an empty list and so has no type")
		return ev
	}
	ev.Kind = kindOf(string(read(d, msgp.ReadStringZC)))
	order := required[ev.Kind]
	need := len(order)
	switch ev.Kind {
	case Stored:
		order = append(order[:need:need], "extra_keys", "group_idx")
		need-- // the first releases had no lora_name
	case Removed:
		order = append(order[:need:need], "group_idx")
	case Cleared:
	default:
		d.fail("the type of an event is none of BlockStored, BlockRemoved and AllBlocksCleared")
	}
	if n-1 < need {
		d.fail("a %s event of %d fields, at least %d are needed", ev.Kind, n-1, need)
	}
	for i := range n - 1 {
		if d.err != nil {
			return ev
		}
		name := ""
		if i < len(order) {
			name = order[i]
		}
		d.field(&ev, name)
	}
	return ev
}

// field reads one value; unknown fields are skipped.
func (d *decoder) field(ev *Event, name string) {
	stored := ev.Kind == Stored
	switch {
	case ev.Kind == Cleared:
		d.skip()
	case name == "block_hashes":
		ev.Hashes = d.hashes()
	case name == "medium":
		ev.Medium = d.text()
	case name == "group_idx":
		if !d.isNil() {
			ev.Group = int(d.integer(math.MaxInt32))
		}
	case stored && name == "parent_block_hash":
		if !d.isNil() {
			ev.Parent = d.hash()
		}
	case stored && name == "token_ids":
		ev.Tokens = d.tokens()
	case stored && name == "block_size":
		ev.BlockTokens = int(d.integer(math.MaxInt32))
	case stored && name == "lora_name":
		ev.LoRA = d.text()
	case stored && name == "extra_keys":
		d.extra(ev)
	default:
		d.skip()
	}
}
