// SPDX-License-Identifier: Apache-2.0

package structpack

import (
	"errors"
	"strings"
	"testing"
)

func TestMalformedLiterals(t *testing.T) {
	for _, s := range []string{"", "\x00", "\x84", "\xfd\x04", "\x80\x04", "\x80\xff", "\x04\x04", "\x87\x04", "\xff", strings.Repeat("\x84", 100) + "\x04", strings.Repeat("\x04", 5000)} {
		if _, err := Parse(s); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v", s, err)
		}
	}
	if p, err := Parse(UUID); err != nil || len(p.Parts) != 2 || p.Least() != 16 {
		t.Error(p, err)
	}
}

// Sizes take one, two or four bytes, by the largest of a message.
func TestWidths(t *testing.T) {
	form := FormOf(Vector(String))
	for _, n := range []int{0, 1, 255, 256, 65535, 65536} {
		var w Writer
		w.Begin(form, n)
		w.Strings([]string{strings.Repeat("x", n), "y"})
		r, typ, err := Open(w.B)
		if err != nil || typ.Kind != KindVector {
			t.Fatal(n, err)
		}
		if k := r.Size(1); k != 2 {
			t.Fatal(n, k)
		}
		if s := r.String(); len(s) != n {
			t.Fatal(n, len(s))
		}
		if r.String() != "y" || r.End() != nil {
			t.Fatal(n, r.Err())
		}
	}
}

// A size that the message cannot hold is refused before memory is taken for it.
func TestSizesBeyondTheMessage(t *testing.T) {
	for _, literal := range []string{Vector(U64), String, Vector(Vector(Void)), Vector(Struct()), Vector(String)} {
		var w Writer
		w.Begin(FormOf(literal), 1<<32-1) // sizes of four bytes
		w.Size(1<<32 - 1)
		w.U64(1)
		r, typ, err := Open(w.B)
		if err != nil {
			t.Fatal(err)
		}
		if r.Skip(typ); !errors.Is(r.End(), ErrMalformed) {
			t.Errorf("%q: %v", literal, r.Err())
		}
	}
}

func FuzzSkip(f *testing.F) {
	var w Writer
	w.Begin(FormOf(Struct(Vector(String), Optional(U64), Expected(Bool), UUID)), 1)
	f.Add(append(w.B, 1, 1, 'x', 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, typ, err := Open(b); err == nil {
			r.Skip(typ)
			_ = r.End()
		}
	})
}

// Fields without bytes cost nothing in each of many elements: a literal of 4 KiB has thousands of them.
func TestFieldsWithoutBytesAreLeftOut(t *testing.T) {
	none := strings.Repeat(Void, 1000) + strings.Repeat(Struct(Void), 500)
	typ, err := Parse(Vector(Struct(none, U8, none[:500])))
	if err != nil {
		t.Fatal(err)
	}
	if e := typ.Parts[0]; len(e.Parts) != 1 || e.Parts[0].Size != 1 || e.Least() != 1 {
		t.Errorf("%d fields", len(e.Parts))
	}
}
