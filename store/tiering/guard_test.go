// SPDX-License-Identifier: Apache-2.0

package tiering_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/invariant"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
)

// odd is a tier whose reads do as they are told.
type odd struct {
	tier.Tier
	read func(dst []byte) (tier.Meta, error)
}

func (o odd) Read(_ context.Context, _ kv.Key, dst []byte) (tier.Meta, error) { return o.read(dst) }

func guard(read func(dst []byte) (tier.Meta, error)) *tiering.Guard {
	return tiering.NewGuard(odd{tier.NewMemory(1), read}, time.Second, 100, slog.New(slog.DiscardHandler))
}

// TestReadsOfWrongBytesAndPanicsAreErrors shows one of each beside one that is right.
func TestReadsOfWrongBytesAndPanicsAreErrors(t *testing.T) {
	good := []byte("good")
	read := func(with func(dst []byte) (tier.Meta, error)) (uint64, error) {
		return guard(with).Read(t.Context(), kv.Key{}, make([]byte, len(good)))
	}
	sum, err := read(func(dst []byte) (tier.Meta, error) {
		return tier.Meta{Len: int64(copy(dst, good)), Sum: xxh3.Hash(good)}, nil
	})
	if err != nil || sum != xxh3.Hash(good) {
		t.Errorf("right bytes: %x, %v", sum, err)
	}
	_, err = read(func(dst []byte) (tier.Meta, error) {
		return tier.Meta{Len: int64(copy(dst, "evil")), Sum: xxh3.Hash(good)}, nil
	})
	if _, ok := errors.AsType[*tier.CorruptError](err); !ok {
		t.Errorf("other bytes than the checksum's: %v", err)
	}
	if invariant.Enabled {
		return // panics go on
	}
	if _, err := read(func([]byte) (tier.Meta, error) { panic("bug") }); !errors.Is(err, tiering.ErrPanic) {
		t.Errorf("a panic: %v", err)
	}
}

// TestATierDoesNotAnswerWhileSlowCallsGoOn shows many short ones and one long one.
func TestATierDoesNotAnswerWhileSlowCallsGoOn(t *testing.T) {
	for name, c := range map[string]struct{ calls, bytes int }{"many calls": {8, 1}, "many bytes": {1, 100}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := make(chan struct{})
				g := guard(func([]byte) (tier.Meta, error) {
					<-end
					return tier.Meta{}, tier.ErrMissing
				})
				for range c.calls {
					go func() { _, _ = g.Read(t.Context(), kv.Key{}, make([]byte, c.bytes)) }()
				}
				time.Sleep(time.Second / 2)
				if !g.Answers() {
					t.Error("none of them is slow yet")
				}
				time.Sleep(time.Second)
				synctest.Wait()
				if g.Answers() {
					t.Error("all of them are slow")
				}
				close(end)
				synctest.Wait()
				if !g.Answers() {
					t.Error("all of them have ended")
				}
			})
		})
	}
}

// TestStatIsThatOfTheTier asks for two objects, of which one is there.
func TestStatIsThatOfTheTier(t *testing.T) {
	m := tier.NewMemory(100)
	here := kv.Key{Chunk: kv.Hash{1}}
	if err := m.Write(t.Context(), here, tier.Meta{Len: 3, Sum: 7}, []byte("abc")); err != nil {
		t.Fatal(err)
	}
	g := tiering.NewGuard(m, time.Second, 100, slog.New(slog.DiscardHandler))
	metas, err := g.Stat(t.Context(), []kv.Key{here, {Chunk: kv.Hash{2}}})
	if err != nil || len(metas) != 2 || metas[0].Len != 3 || metas[1] != (tier.Meta{}) {
		t.Errorf("%v, %v", metas, err)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// TestWrittenObjectsAreThereAgain shows an object that could not be read: it is not there
// for a while, and is again once it was written, or once the while is over.
func TestWrittenObjectsAreThereAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := tier.NewMemory(1000)
		g := tiering.NewGuard(odd{m, func([]byte) (tier.Meta, error) { return tier.Meta{}, tier.ErrMissing }}, time.Hour, 100, slog.New(slog.DiscardHandler))
		keys := []kv.Key{{Group: 1}, {Group: 2}, {Group: 3}}
		for _, k := range keys {
			if sum, err := g.Write(t.Context(), k, []byte("data"), tier.Meta{NoSum: true}); err != nil || sum != xxh3.Hash([]byte("data")) {
				t.Fatal(sum, err)
			}
		}
		there := func() (n int) {
			metas, err := g.Stat(t.Context(), keys)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range metas {
				n += int(min(1, m.Len))
			}
			return n
		}
		for _, k := range keys[:2] {
			_, _ = g.Read(t.Context(), k, make([]byte, 4))
		}
		if got := there(); got != 1 {
			t.Errorf("%d of 3 are there after two could not be read", got)
		}
		if _, err := g.Write(t.Context(), keys[0], []byte("data"), tier.Meta{NoSum: true}); err != nil {
			t.Fatal(err)
		}
		if got := there(); got != 2 {
			t.Errorf("%d of 3 are there after one was written", got)
		}
		time.Sleep(time.Minute)
		if got := there(); got != 3 {
			t.Errorf("%d of 3 are there a minute later", got)
		}
	})
}
