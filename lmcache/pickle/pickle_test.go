// SPDX-License-Identifier: Apache-2.0

package pickle_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache/pickle"
)

// dumps are pickles that torch 2.13 made, with what they hold, and pickles of
// other things.
type dumps struct {
	Cases []struct {
		Name    string
		Hex     testkit.Hex
		Tensors []struct {
			DType string
			Shape []int
			Data  testkit.Hex
		}
	}
	Refused []struct {
		Name string
		Hex  testkit.Hex
	}
}

func readDumps(t testing.TB) *dumps {
	t.Helper()
	var d dumps
	testkit.ReadVector(t, "pickle/torch.json", &d)
	return &d
}

// recorded are the pickles that a real LMCache client and server exchanged.
func recorded(t testing.TB) (out [][]byte) {
	t.Helper()
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/engine_driven_pickle.json", &rec)
	for _, step := range rec.Steps {
		for _, f := range step.Frames {
			last := f.Hex[len(f.Hex)-1]
			if len(last) < 1024 {
				continue
			}
			if data, _, err := msgp.ReadBytesZC(last); err == nil { // commit_store's data
				out = append(out, data)
				continue
			}
			n, b, err := msgp.ReadMapHeaderBytes(last) // prepare_retrieve's result
			for ; err == nil && n > 0; n-- {
				var key, data []byte
				if key, b, err = msgp.ReadStringZC(b); err == nil && string(key) == "data" {
					if data, _, err = msgp.ReadBytesZC(b); err == nil {
						out = append(out, data)
					}
					break
				}
				b, err = msgp.Skip(b)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	return out
}

// Everything that a real client and server sent is read, and what we write of it
// reads the same.
func TestRecorded(t *testing.T) {
	list := recorded(t)
	for i, b := range list {
		got, err := pickle.Read(b, 3)
		if err != nil || len(got) < 2 {
			t.Fatalf("%d: %d tensors, %v", i, len(got), err)
		}
		for _, x := range got {
			if x.DType != "float16" || !slices.Equal(x.Shape, []int{2, 2, 32, 8}) || len(x.Data) != 2048 {
				t.Fatalf("%d: %s %v, %d bytes", i, x.DType, x.Shape, len(x.Data))
			}
		}
		again(t, got)
	}
	if len(list) != 4 {
		t.Fatalf("%d pickles", len(list))
	}
	t.Logf("%d cases", len(list))
}

// again writes tensors of one layout and reads them back.
func again(t *testing.T, list []pickle.Tensor) {
	t.Helper()
	if len(list) == 0 {
		return
	}
	l, ok := pickle.NewLayout(list[0].DType, list[0].Shape)
	if !ok {
		t.Fatalf("no layout for %s %v", list[0].DType, list[0].Shape)
	}
	b := l.Append(nil, len(list), func(i int, dst []byte) {
		if len(dst) != len(list[i].Data) || copy(dst, list[i].Data) != l.Bytes() {
			t.Fatalf("%d bytes for %d", len(dst), len(list[i].Data))
		}
	})
	if most := len(list)*(l.Bytes()+pickle.Overhead) + pickle.Overhead; len(b) > most {
		t.Fatalf("%d bytes, at most %d are said", len(b), most)
	}
	got, err := pickle.Read(b, len(list))
	if err != nil || fmt.Sprint(got) != fmt.Sprint(list) {
		t.Fatalf("%v, %v; want %v", got, err, list)
	}
}

// Types, shapes and lengths that the recordings lack.
func TestTorch(t *testing.T) {
	d := readDumps(t)
	for _, c := range d.Cases {
		got, err := pickle.Read(c.Hex, len(c.Tensors))
		if err != nil || len(got) != len(c.Tensors) {
			t.Errorf("%s: %d tensors, %v", c.Name, len(got), err)
			continue
		}
		for i, want := range c.Tensors {
			if x := got[i]; x.DType != want.DType || !slices.Equal(x.Shape, want.Shape) || !bytes.Equal(x.Data, want.Data) {
				t.Errorf("%s, %d: %s %v %x; want %s %v %x", c.Name, i, x.DType, x.Shape, x.Data, want.DType, want.Shape, want.Data)
			}
		}
		again(t, got)
		if len(got) > 0 {
			if _, err := pickle.Read(c.Hex, len(got)-1); !errors.Is(err, pickle.ErrFormat) {
				t.Errorf("%s: more tensors than asked for: %v", c.Name, err)
			}
		}
	}
	for _, c := range d.Refused {
		if got, err := pickle.Read(c.Hex, 100); !errors.Is(err, pickle.ErrFormat) || got != nil {
			t.Errorf("%s is read: %v, %v", c.Name, got, err)
		}
	}
	if len(d.Cases) == 0 || len(d.Refused) == 0 {
		t.Fatal("no cases")
	}
	t.Logf("%d cases, %d refused", len(d.Cases), len(d.Refused))
}

// A list cut anywhere, with a byte added or a byte changed, is never read as
// other data: it is refused, or the change was in the data or in what says
// nothing (a frame's length, a key).
func TestDamage(t *testing.T) {
	b := recorded(t)[3]
	want, err := pickle.Read(b, 3)
	if err != nil {
		t.Fatal(err)
	}
	for n := range b {
		if got, err := pickle.Read(b[:n], 3); !errors.Is(err, pickle.ErrFormat) || got != nil {
			t.Fatalf("%d of %d bytes are read: %v", n, len(b), err)
		}
	}
	if _, err := pickle.Read(append(bytes.Clone(b), '.'), 3); !errors.Is(err, pickle.ErrFormat) {
		t.Fatalf("a byte more: %v", err)
	}
	read := 0
	for i := range b {
		c := bytes.Clone(b)
		c[i] ^= 0x41
		got, err := pickle.Read(c, 3)
		if err != nil {
			continue
		}
		read++
		if len(got) != len(want) || got[0].DType != "float16" || !slices.Equal(got[0].Shape, want[0].Shape) || len(got[0].Data) != 2048 {
			t.Fatalf("byte %d: %v", i, got)
		}
	}
	if data := 2048 * len(want); read < data || read > data+64 {
		t.Fatalf("%d of %d changed bytes go unnoticed, %d are data", read, len(b), data)
	}
}

func TestNewLayout(t *testing.T) {
	f := func(dtype string, want bool, shape ...int) {
		t.Helper()
		l, ok := pickle.NewLayout(dtype, shape)
		if ok != want || (l != nil) != want {
			t.Errorf("%s %v: %v", dtype, shape, ok)
		}
	}
	f("float16", true, 2, 80, 256, 8192)
	f("float8_e4m3fn", true, 1<<16, 1<<15)
	f("float16", false, 1<<16, 1<<15, 1)
	f("float16", false, 1<<62, 1<<62)
	f("float16", false)
	f("float16", false, 2, 0)
	f("float16", false, 2, -1)
	f("float16", false, 1, 1, 1, 1, 1, 1, 1, 1, 1)
	f("complex64", false, 2)
	f("", false, 2)
	f("torch.float16", false, 2)
}

// A list is read whole or refused, its tensors are parts of the input, and
// writing them again gives the same.
func FuzzRead(f *testing.F) {
	d := readDumps(f)
	for _, c := range d.Cases {
		if len(c.Hex) < 4096 {
			f.Add([]byte(c.Hex))
		}
	}
	for _, c := range d.Refused {
		f.Add([]byte(c.Hex))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := pickle.Read(b, 8)
		if err != nil {
			if !errors.Is(err, pickle.ErrFormat) || got != nil || len(err.Error()) > 400 {
				t.Fatalf("%v, %v", got, err)
			}
			return
		}
		total := 0
		for _, x := range got {
			total += len(x.Data)
			if len(x.Data) == 0 || len(x.Shape) == 0 || strings.ContainsAny(x.DType, ". \n") {
				t.Fatalf("%+v", x)
			}
			again(t, []pickle.Tensor{x})
		}
		if len(got) > 8 || total > len(b) {
			t.Fatalf("%d tensors, %d bytes of %d", len(got), total, len(b))
		}
	})
}

func BenchmarkRead(b *testing.B) {
	l, _ := pickle.NewLayout("float16", []int{2, 32, 256, 1024})
	data := l.Append(nil, 4, func(int, []byte) {})
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := pickle.Read(data, 4); err != nil {
			b.Fatal(err)
		}
	}
}
