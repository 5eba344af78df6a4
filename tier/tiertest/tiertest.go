// SPDX-License-Identifier: Apache-2.0

// Package tiertest checks what every tier.Tier must do, and makes tiers fail on purpose.
package tiertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Object returns the bytes of a test object, and their Meta.
func Object(seed, n int) ([]byte, tier.Meta) {
	b := bytes.Repeat([]byte{byte(seed), byte(seed >> 8), 0xa5}, n/3+1)[:n]
	return b, tier.Meta{Len: int64(n), Sum: xxh3.Hash(b)}
}

// Key returns the name of a test object.
func Key(seed int) kv.Key {
	return kv.Key{Namespace: kv.Namespace{1}, Chunk: kv.Hash{byte(seed), byte(seed >> 8), 1}, Rank: kv.Rank(seed), Group: 2}
}

// Run checks a Tier. open must return an empty Tier; Run closes it.
func Run(t *testing.T, open func(t *testing.T) tier.Tier) {
	for name, check := range map[string]func(t *testing.T, x tier.Tier){
		"what is not there": absent, "what is there": present, "names differ in every field": named, "written twice": twice,
		"deleted": deleted, "another length": length, "context": ended, "at once": concurrent, "listed": listed, "nothing asked": nothing,
		"removed by a condition": removed, "swept after clears": swept,
		"a clear of all": cleared(true), "a clear of the model": cleared(false),
	} {
		t.Run(name, func(t *testing.T) {
			x := open(t)
			defer func() {
				if err := x.Close(); err != nil {
					t.Error(err)
				}
			}()
			check(t, x)
		})
	}
}

func write(t *testing.T, x tier.Tier, k kv.Key, seed, n int) ([]byte, tier.Meta) {
	t.Helper()
	b, meta := Object(seed, n)
	src := bytes.Clone(b)
	if err := x.Write(t.Context(), k, meta, src); err != nil {
		t.Fatal(err)
	}
	clear(src) // a Tier must not use src after Write
	return b, meta
}

// same reports whether got is the written meta. A tier's own time to live may add an End to an object without one.
func same(got, meta tier.Meta) bool {
	if meta.End == 0 {
		got.End = 0
	}
	return got == meta
}

func expect(t *testing.T, x tier.Tier, k kv.Key, want []byte, meta tier.Meta) {
	t.Helper()
	dst := make([]byte, len(want))
	got, err := x.Read(t.Context(), k, dst)
	if err != nil || !same(got, meta) || !bytes.Equal(dst, want) {
		t.Errorf("Read: %+v, %v, equal bytes: %v; want %+v", got, err, bytes.Equal(dst, want), meta)
	}
	clear(dst)
	got, sum, err := tier.ReadSummed(t.Context(), x, k, dst)
	if err != nil || !same(got, meta) || sum != xxh3.Hash(want) || !bytes.Equal(dst, want) {
		t.Errorf("ReadSummed: %+v, checksum %x, %v, equal bytes: %v; want %+v", got, sum, err, bytes.Equal(dst, want), meta)
	}
}

func absent(t *testing.T, x tier.Tier) {
	metas := []tier.Meta{{Len: 7, Sum: 7}, {Len: 7, Sum: 7}}
	if err := x.Stat(t.Context(), []kv.Key{Key(1), Key(2)}, metas); err != nil || metas[0] != (tier.Meta{}) || metas[1] != (tier.Meta{}) {
		t.Errorf("Stat: %v, %v", metas, err)
	}
	if _, err := x.Read(t.Context(), Key(1), make([]byte, 10)); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("Read: %v", err)
	}
	if err := x.Delete(t.Context(), []kv.Key{Key(1), Key(2)}); err != nil {
		t.Errorf("Delete: %v", err)
	}
}

func present(t *testing.T, x tier.Tier) {
	sizes := []int{1, 100, 4096, 1 << 20}
	keys := []kv.Key{Key(0), Key(100), Key(1), Key(2), Key(101), Key(3)} // two of them are missing
	want := make([]tier.Meta, len(keys))
	for i, at := range []int{0, 2, 3, 5} {
		_, want[at] = write(t, x, keys[at], i, sizes[i])
	}
	metas := make([]tier.Meta, len(keys))
	metas[1].Len = 5
	if err := x.Stat(t.Context(), keys, metas); err != nil {
		t.Fatal(err)
	}
	for i := range keys {
		if metas[i] != want[i] {
			t.Errorf("Stat of key %d: %+v, want %+v", i, metas[i], want[i])
		}
	}
	for i, at := range []int{0, 2, 3, 5} {
		b, meta := Object(i, sizes[i])
		expect(t, x, keys[at], b, meta)
	}
}

func named(t *testing.T, x tier.Tier) {
	base := Key(1)
	keys := []kv.Key{base, base, base, base, base}
	keys[1].Namespace[15]++
	keys[2].Chunk[31]++
	keys[3].Rank++
	keys[4].Group++
	for i, k := range keys {
		write(t, x, k, i, 50+i)
	}
	for i, k := range keys {
		b, meta := Object(i, 50+i)
		expect(t, x, k, b, meta)
	}
}

func twice(t *testing.T, x tier.Tier) {
	write(t, x, Key(1), 1, 500)
	b, meta := write(t, x, Key(1), 1, 500)
	expect(t, x, Key(1), b, meta)
}

func deleted(t *testing.T, x tier.Tier) {
	write(t, x, Key(1), 1, 500)
	b, meta := write(t, x, Key(2), 2, 500)
	if err := x.Delete(t.Context(), []kv.Key{Key(1), Key(9)}); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Read(t.Context(), Key(1), make([]byte, 500)); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("Read of a deleted object: %v", err)
	}
	expect(t, x, Key(2), b, meta)
}

func length(t *testing.T, x tier.Tier) {
	write(t, x, Key(1), 1, 500)
	for _, n := range []int{499, 501, 1} {
		dst := make([]byte, n)
		_, err := x.Read(t.Context(), Key(1), dst)
		if _, ok := errors.AsType[*tier.CorruptError](err); !ok {
			t.Errorf("Read of 500 bytes into %d: %v", n, err)
		}
	}
}

// ended checks that a call ends with its context, and that the tier does not write to the memory
// of a Read that has returned.
func ended(t *testing.T, x tier.Tier) {
	const n = 1 << 20
	write(t, x, Key(1), 1, n)
	for wait := time.Duration(0); wait < 5*time.Millisecond; wait += 500 * time.Microsecond {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(wait, cancel)
		dst := make([]byte, n)
		began := time.Now()
		_, _ = x.Read(ctx, Key(1), dst) // it may have been in time
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("Read took %v after its context ended", took)
		}
		poison := bytes.Repeat([]byte{0xee}, n)
		copy(dst, poison)
		time.Sleep(2 * time.Millisecond)
		if !bytes.Equal(dst, poison) {
			t.Fatal("something wrote to the memory of a Read that had returned")
		}
		timer.Stop()
		cancel()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := x.Read(ctx, Key(1), make([]byte, n)); err == nil {
		t.Error("Read with a context that has ended succeeds")
	}
}

func concurrent(t *testing.T, x tier.Tier) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				k := Key(j % 5) // all goroutines use the same objects
				b, meta := Object(j%5, 3000)
				if err := x.Write(t.Context(), k, meta, b); err != nil {
					t.Error(err)
				}
				if i == 0 && j%7 == 0 {
					_ = x.Delete(t.Context(), []kv.Key{k})
				}
				dst := make([]byte, 3000)
				if got, err := x.Read(t.Context(), k, dst); err == nil && (!same(got, meta) || !bytes.Equal(dst, b)) {
					t.Errorf("half an object: %+v", got)
				} else if err != nil && !errors.Is(err, tier.ErrMissing) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func listed(t *testing.T, x tier.Tier) {
	l, ok := x.(tier.Lister)
	if !ok {
		t.Skip("it does not list")
	}
	want := map[kv.Key]tier.Meta{}
	for i := range 20 {
		_, want[Key(i)] = write(t, x, Key(i), i, 100+i)
	}
	got := map[kv.Key]tier.Meta{}
	if err := l.List(t.Context(), func(k kv.Key, m tier.Meta) bool { got[k] = m; return true }); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("List: %d objects, want %d", len(got), len(want))
	}
	n := 0
	if err := l.List(t.Context(), func(kv.Key, tier.Meta) bool { n++; return n < 3 }); err != nil || n != 3 {
		t.Errorf("List that is to end after 3: %d, %v", n, err)
	}
}

func nothing(t *testing.T, x tier.Tier) {
	if err := errors.Join(x.Stat(t.Context(), nil, nil), x.Delete(t.Context(), nil)); err != nil {
		t.Error(err)
	}
}
