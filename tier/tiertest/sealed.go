// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// KeyText returns a key for package seal that depends on seed.
func KeyText(seed byte) string { return hex.EncodeToString(bytes.Repeat([]byte{seed, 0x5a}, 16)) }

// Keys returns keys of these seeds, the one that encrypts first.
func Keys(t testing.TB, seeds ...byte) *seal.Keys {
	t.Helper()
	var lines []string
	for _, s := range seeds {
		lines = append(lines, KeyText(s))
	}
	k, err := seal.OpenKeys(t.Context(), seal.Source{Text: strings.Join(lines, ",")})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Planted returns the bytes of an object that a search in the stored bytes of a tier can find.
func Planted(n int) []byte {
	return bytes.Repeat([]byte("planted prompt, which nobody reads. "), n/36+1)[:n]
}

// Sealed checks that a Tier of package seal over another tier keeps its promises: it passes Run, and objects that were changed, cut,
// exchanged, put back after a clear, or encrypted with another key, are misses. open must return the empty tier below, which the Tier over
// it closes. holds must report whether the bytes on the disk or server of that tier contain some bytes.
func Sealed(t *testing.T, open func(t *testing.T) (place tier.Tier, holds func([]byte) bool)) {
	over := func(t *testing.T, place tier.Tier, keys *seal.Keys) tier.Tier {
		return seal.New(place, keys, seal.Options{Name: "sealed"})
	}
	t.Run("as a tier", func(t *testing.T) {
		Run(t, func(t *testing.T) tier.Tier {
			place, _ := open(t)
			return over(t, place, Keys(t, 1))
		})
	})
	t.Run("without keys", func(t *testing.T) {
		Run(t, func(t *testing.T) tier.Tier {
			place, _ := open(t)
			return over(t, place, nil)
		})
	})
	for name, check := range map[string]func(t *testing.T, s *sealedPlace){
		"nothing is plain": nothingPlain, "changed": changed, "exchanged": exchanged, "put back after a clear": putBack, "keys": wrongKeys, "rotation": rotated, "rotation under load": rotatedUnderLoad, "downgrade": downgraded, "changed in memory": changedInMemory,
	} {
		t.Run(name, func(t *testing.T) {
			place, holds := open(t)
			defer func() {
				if err := place.Close(); err != nil {
					t.Error(err)
				}
			}()
			check(t, &sealedPlace{place, holds})
		})
	}
}

type sealedPlace struct {
	place tier.Tier
	holds func([]byte) bool
}

func (s *sealedPlace) with(keys *seal.Keys) *seal.Tier {
	return seal.New(s.place, keys, seal.Options{Name: "sealed"}).Sealed()
}

// raw returns the stored bytes of an object.
func (s *sealedPlace) raw(t *testing.T, k kv.Key) ([]byte, tier.Meta) {
	t.Helper()
	metas := make([]tier.Meta, 1)
	if err := s.place.Stat(t.Context(), []kv.Key{k}, metas); err != nil || metas[0].Len == 0 {
		t.Fatalf("nothing is there: %v", err)
	}
	b := make([]byte, metas[0].Len)
	m, err := s.place.Read(t.Context(), k, b)
	if err != nil {
		t.Fatal(err)
	}
	return b, m
}

// plant replaces the stored bytes of an object, as an attacker with access to the disk or server can.
func (s *sealedPlace) plant(t *testing.T, k kv.Key, m tier.Meta, b []byte) {
	t.Helper()
	m.Len = int64(len(b))
	for range 2 { // a disk may take an object only at the second offer
		if err := s.place.Delete(t.Context(), []kv.Key{k}); err != nil {
			t.Fatal(err)
		}
		if err := s.place.Write(t.Context(), k, m, b); err != nil && !errors.Is(err, tier.ErrNotKept) {
			t.Fatal(err)
		}
	}
}

// refused checks that an object is a miss, and returns its error.
func refused(t *testing.T, what string, x tier.Tier, k kv.Key, n int) error {
	t.Helper()
	m, _, err := tier.ReadSummed(t.Context(), x, k, make([]byte, n))
	_, corrupt := errors.AsType[*tier.CorruptError](err)
	if !corrupt && !errors.Is(err, tier.ErrMissing) {
		t.Errorf("%s: read: %+v, %v", what, m, err)
	}
	return err
}

const sealedObject = 200_000 // bytes, of four pieces

func nothingPlain(t *testing.T, s *sealedPlace) {
	x := s.with(Keys(t, 1))
	b := Planted(sealedObject)
	sum := xxh3.Hash(b)
	for i := range 3 {
		if err := x.Write(t.Context(), Key(i), tier.Meta{Len: sealedObject, Sum: sum}, b); err != nil {
			t.Fatal(err)
		}
	}
	raw, m := s.raw(t, Key(0))
	if m.Seal == 0 || m.Sum == sum || bytes.Contains(raw, b[:16]) || bytes.Contains(raw, []byte("prompt")) {
		t.Errorf("the place has %+v, the object's checksum is %x", m, sum)
	}
	other, mo := s.raw(t, Key(1))
	if mo.Sum == m.Sum || bytes.Equal(raw[56:], other[56:]) {
		t.Error("two objects of the same bytes look alike")
	}
	var le, be [8]byte
	for i := range 8 {
		le[i], be[7-i] = byte(sum>>(8*i)), byte(sum>>(8*i))
	}
	for what, text := range map[string][]byte{
		"bytes of the object": b[:24], "its end": b[len(b)-24:], "its checksum": le[:], "its checksum, big-endian": be[:], "its checksum, as text": fmt.Appendf(nil, "%016x", sum),
		"the key": bytes.Repeat([]byte{1, 0x5a}, 4), "the key, as text": []byte(KeyText(1)[:16]),
	} {
		if s.holds(text) {
			t.Errorf("the place holds %s", what)
		}
	}
	if !s.holds(raw[len(raw)-16:]) { // otherwise the search does not work at all
		t.Error("the search does not find what is there")
	}
	expect(t, x, Key(2), b, tier.Meta{Len: sealedObject, Sum: sum})
}

func changed(t *testing.T, s *sealedPlace) {
	x := s.with(Keys(t, 1))
	write(t, x, Key(1), 1, sealedObject)
	raw, m := s.raw(t, Key(1))
	for _, at := range []int{0, 7, 8, 9, 10, 12, 16, 24, 40, 55, 56, 60, 64, 100, 64 + 1<<16, 64 + 1<<16 + 15, 64 + 1<<16 + 16, len(raw) - 17, len(raw) - 1} {
		bad := bytes.Clone(raw)
		bad[at] ^= 0x10
		s.plant(t, Key(1), m, bad)
		_ = refused(t, fmt.Sprintf("byte %d", at), x, Key(1), sealedObject)
	}
	other := m
	other.Sum ^= 1
	s.plant(t, Key(1), other, raw)
	_ = refused(t, "its checksum", x, Key(1), sealedObject)
	for _, n := range []int{1, 63, 64, 80, 64 + 1<<16 + 16, len(raw) - 16, len(raw) - 1} {
		s.plant(t, Key(1), m, raw[:n])
		for _, size := range []int{sealedObject, sealedObject - 1, 1 << 16} {
			_ = refused(t, fmt.Sprintf("cut to %d bytes", n), x, Key(1), size)
		}
	}
	half := len(raw) / 2 // pieces in another order
	s.plant(t, Key(1), m, append(append(bytes.Clone(raw[:64]), raw[half:]...), raw[64:half]...))
	_ = refused(t, "another order", x, Key(1), sealedObject)
	if n := x.Stats().Misses["damaged"]; n < 20 {
		t.Errorf("%d damaged objects were counted", n)
	}
	s.plant(t, Key(1), m, raw)
	b, meta := Object(1, sealedObject)
	expect(t, x, Key(1), b, meta)
	// The next write replaces an object that was found to be wrong, even if its header looks like that of a newer build or of another key.
	for _, at := range []int{0, 8, 9, 10, 16, 23, 24, 56} {
		bad := bytes.Clone(raw)
		bad[at] ^= 0x10
		s.plant(t, Key(1), m, bad)
		_ = refused(t, fmt.Sprintf("header byte %d", at), x, Key(1), sealedObject)
		metas := make([]tier.Meta, 1)
		if err := x.Stat(t.Context(), []kv.Key{Key(1)}, metas); err != nil || metas[0].Len != 0 {
			t.Errorf("header byte %d: it is there still: %+v, %v", at, metas[0], err)
		}
		write(t, x, Key(1), 1, sealedObject)
		expect(t, x, Key(1), b, meta)
	}
	raw[100] ^= 1
	s.plant(t, Key(1), m, raw)
	_ = refused(t, "changed again", x, Key(1), sealedObject)
	write(t, x, Key(1), 1, sealedObject)
	expect(t, x, Key(1), b, meta)
}

// changedInMemory checks that an object that differs from its checksum is not stored, and that the next object is.
func changedInMemory(t *testing.T, s *sealedPlace) {
	x := s.with(Keys(t, 1))
	b, m := Object(1, sealedObject)
	bad := bytes.Clone(b)
	bad[150_000] ^= 1
	for range 3 {
		if err := x.Write(t.Context(), Key(1), m, bad); !errors.Is(err, seal.ErrSum) || !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("write: %v", err)
		}
		_ = refused(t, "what was not written", x, Key(1), sealedObject)
	}
	if s.holds([]byte("KVSEALED")) {
		t.Error("the place keeps a part of it")
	}
	write(t, x, Key(1), 1, sealedObject)
	expect(t, x, Key(1), b, m)
}

func exchanged(t *testing.T, s *sealedPlace) {
	x := s.with(Keys(t, 1))
	near := Key(1)
	near.Rank++
	write(t, x, Key(1), 1, 5000)
	write(t, x, Key(2), 2, 5000)
	one, m1 := s.raw(t, Key(1))
	two, m2 := s.raw(t, Key(2))
	s.plant(t, Key(1), m2, two)
	s.plant(t, Key(2), m1, one)
	s.plant(t, near, m1, one)
	for _, k := range []kv.Key{Key(1), Key(2), near} {
		_ = refused(t, "exchanged", x, k, 5000)
	}
	for i := 1; i < 3; i++ {
		b, m := write(t, x, Key(i), i, 5000)
		expect(t, x, Key(i), b, m)
	}
}

func putBack(t *testing.T, s *sealedPlace) {
	x := s.with(Keys(t, 1))
	book, err := generation.Open([]string{filepath.Join(t.TempDir(), generation.FileName)}, Names(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	of := book.Tier(x)
	keep := map[kv.Key]bool{}
	// list returns the new key in the tier below.
	list := func() (found kv.Key) {
		err := s.place.(tier.Lister).List(t.Context(), func(k kv.Key, _ tier.Meta) bool {
			if !keep[k] {
				found = k
			}
			keep[k] = true
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	b, meta := Object(1, 5000)
	if err := of.Write(t.Context(), Key(1), meta, b); err != nil {
		t.Fatal(err)
	}
	before, m := s.raw(t, list())
	commit, err := book.Prepare(nil)
	if err != nil {
		t.Fatal(err)
	}
	commit()
	_ = refused(t, "cleared", of, Key(1), 5000)
	if err := of.Write(t.Context(), Key(1), meta, b); err != nil {
		t.Fatal(err)
	}
	expect(t, of, Key(1), b, meta)
	s.plant(t, list(), m, before) // under the name of the present generation
	_ = refused(t, "put back under its present name", of, Key(1), 5000)
	s.plant(t, Key(1), m, before)
	_ = refused(t, "put back under its former name", of, Key(1), 5000)
}

func wrongKeys(t *testing.T, s *sealedPlace) {
	b, meta := write(t, s.with(Keys(t, 1)), Key(1), 1, 5000)
	other := s.with(Keys(t, 2))
	metas := make([]tier.Meta, 1)
	miss := func(what string, x *seal.Tier, why string) {
		t.Helper()
		before := x.Stats().Misses[why]
		if err := x.Stat(t.Context(), []kv.Key{Key(1)}, metas); err != nil || metas[0] != (tier.Meta{}) {
			t.Errorf("%s: Stat: %+v, %v", what, metas[0], err)
		}
		if err := refused(t, what, x, Key(1), 5000); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("%s: %v", what, err)
		}
		if got := x.Stats().Misses[why]; got < before+2 {
			t.Errorf("%s: counted %v", what, x.Stats().Misses)
		}
	}
	miss("another key", other, "missing_key")
	expect(t, s.with(Keys(t, 1)), Key(1), b, meta) // it stayed
	expect(t, s.with(Keys(t, 2, 1)), Key(1), b, meta)
	// Two keys with the same short name.
	raw, m := s.raw(t, Key(1))
	write(t, other, Key(2), 2, 5000)
	_, m2 := s.raw(t, Key(2))
	m.Seal = m2.Seal
	s.plant(t, Key(1), m, raw)
	if err := refused(t, "the short name of another key", other, Key(1), 5000); !errors.Is(err, tier.ErrMissing) {
		t.Error(err)
	}
}

func downgraded(t *testing.T, s *sealedPlace) {
	keyed, bare := s.with(Keys(t, 1)), s.with(nil)
	b1, m1 := write(t, keyed, Key(1), 1, 5000)
	b2, m2 := write(t, bare, Key(2), 2, 5000)
	metas := make([]tier.Meta, 2)
	for x, there := range map[*seal.Tier][2]bool{keyed: {true, false}, bare: {false, true}} {
		if err := x.Stat(t.Context(), []kv.Key{Key(1), Key(2)}, metas); err != nil || (metas[0].Len > 0) != there[0] || (metas[1].Len > 0) != there[1] {
			t.Errorf("Stat: %+v, %v, want %v", metas, err, there)
		}
	}
	_ = refused(t, "encrypted, without a key", bare, Key(1), 5000)
	_ = refused(t, "plain, with a key", keyed, Key(2), 5000)
	if bare.Stats().Misses["missing_key"] < 2 || keyed.Stats().Misses["plain"] < 2 {
		t.Error(bare.Stats().Misses, keyed.Stats().Misses)
	}
	// A plain object as long as an encrypted one, and the other way round.
	raw, m := s.raw(t, Key(1))
	_ = refused(t, "encrypted bytes as an object", bare, Key(1), len(raw))
	plainLike := Planted(len(raw))
	s.plant(t, Key(3), tier.Meta{Sum: xxh3.Hash(plainLike)}, plainLike)
	_ = refused(t, "plain bytes as an encrypted object", keyed, Key(3), 5000)
	// A plain object never replaces an encrypted one; an encrypted one replaces a plain one.
	if err := bare.Write(t.Context(), Key(1), m1, b1); !errors.Is(err, tier.ErrNotKept) || !errors.Is(err, tier.ErrSealed) {
		t.Errorf("a plain object over an encrypted one: %v", err)
	}
	if now, mn := s.raw(t, Key(1)); !bytes.Equal(now, raw) || mn != m {
		t.Error("the encrypted object changed")
	}
	expect(t, keyed, Key(1), b1, m1)
	expect(t, bare, Key(2), b2, m2)
	write(t, keyed, Key(2), 2, 5000)
	expect(t, keyed, Key(2), b2, m2)
	_ = refused(t, "encrypted now", bare, Key(2), 5000)
}

func rotated(t *testing.T, s *sealedPlace) {
	old, both, last := s.with(Keys(t, 1)), s.with(Keys(t, 2, 1)), s.with(Keys(t, 2))
	for i := range 6 {
		write(t, old, Key(i), i, 3000+i)
	}
	write(t, both, Key(6), 6, 3006)
	write(t, s.with(Keys(t, 3)), Key(7), 7, 3007)
	write(t, s.with(nil), Key(8), 8, 3008)
	mortal, mm := Object(9, 3009)
	mm.End = uint32(time.Now().Add(time.Hour).Unix())
	if err := old.Write(t.Context(), Key(9), mm, mortal); err != nil {
		t.Fatal(err)
	}
	free := func(ctx context.Context, _ int64) error { return ctx.Err() }
	// Ended after three objects, then begun again.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := both.Rekey(ctx, free, func(n seal.RekeyStats) {
		if n.Rewritten == 3 {
			cancel()
		}
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("broken off: %v", err)
	}
	n, err := both.Rekey(t.Context(), free, func(seal.RekeyStats) {})
	if want := Keys(t, 2).IDs()[0]; err != nil || n.Seen != 10 || n.Rewritten != 4 || n.Current != 4 || n.Plain != 1 || n.Unknown != 1 || n.Failed != 0 || n.Key != want {
		t.Errorf("%+v, %v", n, err)
	}
	for i := range 7 {
		b, m := Object(i, 3000+i)
		expect(t, last, Key(i), b, m)
	}
	if got, err := last.Read(t.Context(), Key(9), make([]byte, 3009)); err != nil || got != mm {
		t.Errorf("an object with an end of its life: %+v, %v, want %+v", got, err, mm)
	}
	b, m := Object(7, 3007)
	expect(t, s.with(Keys(t, 3)), Key(7), b, m)
	b, m = Object(8, 3008)
	expect(t, s.with(nil), Key(8), b, m)
	if _, err := s.with(nil).Rekey(t.Context(), free, func(seal.RekeyStats) {}); !errors.Is(err, seal.ErrNoKeys) {
		t.Errorf("without keys: %v", err)
	}
}

// rotatedUnderLoad rotates the key in a file while objects are written, read and deleted: no object may be lost, and no deleted object may
// come back.
func rotatedUnderLoad(t *testing.T, s *sealedPlace) {
	file := filepath.Join(t.TempDir(), "keys")
	put := func(seeds ...byte) {
		t.Helper()
		text := "# keys\n"
		for _, k := range seeds {
			text += KeyText(k) + "\n"
		}
		if err := errors.Join(os.WriteFile(file+".new", []byte(text), 0o600), os.Rename(file+".new", file)); err != nil {
			t.Fatal(err)
		}
	}
	put(1)
	keys, err := seal.OpenKeys(t.Context(), seal.Source{File: file})
	if err != nil {
		t.Fatal(err)
	}
	x := s.with(keys)
	const objects, size = 24, 3000
	for i := range objects {
		write(t, x, Key(i), i, size)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for w := range 3 {
		wg.Go(func() {
			for round := 0; !stop.Load(); round++ {
				i := (round*7 + w) % objects
				b, m := Object(i, size)
				dst := make([]byte, size)
				if got, err := x.Read(t.Context(), Key(i), dst); err != nil || got != m || !bytes.Equal(dst, b) {
					t.Errorf("object %d: %+v, %v", i, got, err)
					return
				}
				own := Key(1000 + w) // of this goroutine
				if err := x.Write(t.Context(), own, m, b); err != nil {
					t.Error(err)
					return
				}
				if err := x.Delete(t.Context(), []kv.Key{own}); err != nil {
					t.Error(err)
					return
				}
				if got, err := x.Read(t.Context(), own, dst); !errors.Is(err, tier.ErrMissing) {
					t.Errorf("a deleted object came back: %+v, %v", got, err)
					return
				}
				time.Sleep(100 * time.Microsecond) // leave the processors to others
			}
		})
	}
	free := func(ctx context.Context, _ int64) error { return ctx.Err() }
	for next := byte(2); next < 5; next++ {
		put([]byte{4, 3, 2, 1}[4-next:]...)
		n, err := x.Rekey(t.Context(), free, func(seal.RekeyStats) {})
		if err != nil || n.Failed > 0 || n.Unknown > 0 || n.Key != Keys(t, next).IDs()[0] || n.Rewritten < objects {
			t.Errorf("%+v, %v", n, err)
		}
	}
	stop.Store(true)
	wg.Wait()
	for i := range objects {
		b, m := Object(i, size)
		expect(t, s.with(Keys(t, 4)), Key(i), b, m)
	}
}
